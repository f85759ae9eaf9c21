"""Attention in which each query block sees only some key blocks: one function, two executors, and a module.

    layout = build_layout(SparsityConfig(mode="bigbird", block=64), heads=8, length=4096)
    mixed = sparse_attention(query, key, value, layout, padding=is_token)

`gather.py` runs everywhere, `flex.py` compiles FlexAttention for CUDA. `replace.py` puts the module into models.
Shape legend: B sequences, H query heads, G key heads, S tokens, N blocks, b tokens of a block, D features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import SparsityConfig
from .flex import flex_attention
from .gather import GatherCall, gather_attention
from .layouts import Layout, build_layout
from .plan import plan

EXECUTORS = ("auto", "flex", "gather")


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout | SparsityConfig,
    *,
    padding: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    executor: str = "auto",
) -> Tensor:
    """Attention over the blocks that a layout shows: softmax(scale · query keyᵀ + bias) value.

    Works on this rank's tensors alone; nothing is sent. A query that sees no key gives zeros.

    Args:
        query: [B, H, S, D], floating point.
        key: [B, G, S, D], of the same type, where G divides H (grouped-query heads).
        value: The same shape and type as `key`.
        layout: A layout of H heads that just covers S tokens, or the configuration to build it from.
        padding: bool or integer [B, S], true for tokens; padding is seen by no query. None (default) without padding.
        bias: Added to the scores: floating point, of a shape that broadcasts to [B, H, S, S]. It may be trained. None
            (default) without one.
        scale: The factor of the scores; None (default) for 1/√D.
        dropout: The share of the weights that are dropped, 0 by default.
        executor: "gather" works on any device; "flex" is FlexAttention, compiled on CUDA, elsewhere forward only, and
            without dropout; "auto" (default) is flex on CUDA without dropout, otherwise gather.

    Returns:
        A tensor of query's shape and type.

    Raises:
        ValueError: Shapes do not fit each other or the layout, or the executor cannot do this.
        TypeError: A tensor has the wrong type.
        RuntimeError: Gradients with executor "flex" outside CUDA.
    """
    made = build_layout(layout, query.shape[1], query.shape[2]) if isinstance(layout, SparsityConfig) else layout
    _check_tensors(query, key, value)
    _check_layout(made, query)
    visible = None if padding is None else _as_padding(padding, query)
    bias = None if bias is None else _as_bias(bias, query)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if not 0 <= dropout < 1:
        raise ValueError(f"expected dropout in [0, 1), got {dropout}")
    if chosen_executor(executor, query.device, dropout) == "flex":
        return flex_attention(query, key, value, made, visible, bias, scale)
    return _gathered(query, key, value, made, visible, bias, scale, dropout)


def chosen_executor(executor: str, device: torch.device, dropout: float) -> str:
    """The executor to use, "flex" or "gather".

    Raises:
        ValueError: There is no such executor, or it has no dropout.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"expected executor to be one of {', '.join(EXECUTORS)}, got {executor!r}")
    if executor == "flex" and dropout > 0:
        raise ValueError('executor "flex" has no dropout; set dropout to 0, or use executor="gather"')
    if executor != "auto":
        return executor
    return "flex" if device.type == "cuda" and dropout == 0 else "gather"


def _gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    (B, _, S, _), G, b = query.shape, key.shape[1], layout.block
    missing = layout.rows * b - S
    if missing and visible is None and not layout.is_causal:
        visible = torch.ones(B, S, dtype=torch.bool, device=query.device)
    if missing:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
        visible = None if visible is None else F.pad(visible, (0, missing))
        bias = None if bias is None else _pad_bias(bias, S, missing)
    blocks = [x.unflatten(2, (layout.rows, b)).contiguous() for x in (query, key, value)]
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else 0
    seen = None if visible is None else visible.unflatten(1, (layout.rows, b))
    call = GatherCall(plan(layout, B, G, query.device), layout.is_causal, scale, seen, dropout, seed)
    mixed = gather_attention(blocks[0], blocks[1], blocks[2], bias, call)
    return mixed.flatten(2, 3)[:, :, :S]


def _pad_bias(bias: Tensor, S: int, missing: int) -> Tensor:
    queries, keys = (missing if size == S and S > 1 else 0 for size in bias.shape[2:])
    return F.pad(bias, (0, keys, 0, queries))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"expected query, key and value of shape [sequences, heads, tokens, features], got {shapes}")
    if key.shape != value.shape or query.shape[0] != key.shape[0] or query.shape[2:] != key.shape[2:]:
        raise ValueError(f"expected key and value with query's sequences, tokens and features, got {shapes}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"expected a number of key heads that divides the query heads, got {shapes}")
    if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
        raise TypeError(
            f"expected query, key and value of one floating-point type, got {query.dtype}, {key.dtype}, {value.dtype}"
        )


def _check_layout(layout: Layout, query: Tensor) -> None:
    (_, H, S, _), rows, b = query.shape, layout.rows, layout.block
    if layout.heads != H:
        raise ValueError(
            f"the layout has {layout.heads} heads, query has {H}; build it with heads={H}, or use layout.of_heads()"
        )
    if not (rows - 1) * b < S <= rows * b:
        raise ValueError(
            f"the layout has {rows} blocks of {b} tokens, for lengths {(rows - 1) * b + 1} to {rows * b}; query has "
            f"{S} tokens: build it with length={S}"
        )


def _as_padding(padding: Tensor, query: Tensor) -> Tensor:
    B, S = query.shape[0], query.shape[2]
    if padding.shape != (B, S):
        raise ValueError(f"expected padding of shape [{B}, {S}], one for each token, got {tuple(padding.shape)}")
    if padding.is_floating_point():
        raise TypeError(
            f"expected padding to be true (or 1) for tokens and false for padding, got {padding.dtype}; pass values to "
            "add to the scores as bias="
        )
    return padding.to(query.device).bool()


def _as_bias(bias: Tensor, query: Tensor) -> Tensor:
    B, H, S, _ = query.shape
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(shape) > 4 or any(size not in (1, most) for size, most in zip(shape, (B, H, S, S), strict=True)):
        raise ValueError(f"expected bias of a shape that broadcasts to {[B, H, S, S]}, got {tuple(bias.shape)}")
    if not bias.is_floating_point():
        raise TypeError(f"expected bias in floating point, got {bias.dtype}; pass a padding mask as padding=")
    return bias.view(shape)


class SparseSelfAttention(nn.Module):
    """Self-attention over a configuration's layout, which is built for each sequence length when it first occurs.

    Args:
        config: The configuration, with `attention` set (see `SparsityConfig.of_model`).
        heads: The query heads of the whole model.
        dropout: The share of the weights that are dropped in training, 0 by default.
        executor: "auto" (default), "flex" or "gather", as in `sparse_attention`.

    Attributes:
        first_head: The first of this rank's heads, if tensor-parallel ranks divide them; set by `place_heads`.

    Raises:
        ValueError: There is no such executor.
    """

    def __init__(self, config: SparsityConfig, heads: int, *, dropout: float = 0.0, executor: str = "auto"):
        super().__init__()
        if executor not in EXECUTORS:
            raise ValueError(f"expected executor to be one of {', '.join(EXECUTORS)}, got {executor!r}")
        self.config, self.heads, self.dropout, self.executor = config, heads, dropout, executor
        self.first_head: int | None = None

    def layout(self, heads: int, length: int) -> Layout:
        """The layout for this rank's `heads` heads and sequences of `length` tokens.

        Raises:
            ValueError: These are only some of the model's heads, and `first_head` is not set.
        """
        if heads != self.heads and self.first_head is None:
            raise ValueError(
                f"the layout has {self.heads} heads, query has {heads}; if ranks divide the heads, call place_heads() "
                "(initialize() does it for onebit.tensor)"
            )
        return build_layout(self.config, self.heads, length).of_heads(self.first_head or 0, heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        padding: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """As `sparse_attention`. Fewer queries than keys are the last ones of the sequence, as with a cache of keys."""
        dropout = self.dropout if self.training else 0.0
        if query.shape[2] != key.shape[2]:
            return self._decode(query, key, value, padding, bias, scale, dropout)
        layout = self.layout(query.shape[1], query.shape[2])
        return sparse_attention(
            query,
            key,
            value,
            layout,
            padding=padding,
            bias=bias,
            scale=scale,
            dropout=dropout,
            executor=self.executor,
        )

    def _decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        bias: Tensor | None,
        scale: float | None,
        dropout: float,
    ) -> Tensor:
        """Attention of the last few queries: dense, with the layout's last rows as mask, since these cost little."""
        last, length = query.shape[2], key.shape[2]
        if last > length:
            raise ValueError(f"expected at most as many queries as keys, got {last} and {length}")
        layout, tokens = self.layout(query.shape[1], length), torch.arange(length, device="cpu")
        rows = tokens[length - last :]
        seen = layout.blocks_HNN[:, rows // layout.block][:, :, tokens // layout.block]
        mask = (seen & (rows[:, None] >= tokens) if layout.is_causal else seen)[None].to(query.device)
        if padding is not None:
            mask = mask & padding.to(query.device).bool()[:, None, None]
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        if bias is not None:
            added = added + bias
        is_grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=dropout, scale=scale, enable_gqa=is_grouped
        )
