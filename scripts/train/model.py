"""A small GPT over bytes: pre-norm blocks, learned positions, the output projection tied to the embedding.

Plain torch, in the sizes that the experiments here need. `build_model("tiny", seed=0)` gives the same bits everywhere.
Shape legend: B sequences, T bytes of each, D features, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onebit.comm import Codec
from onebit.zero.sequence import SequenceRanks, ring_attention
from onebit.zero.sequence.stages import Split

VOCABULARY = 256


@dataclass(frozen=True)
class ModelSize:
    """The shape of a GPT; its parameters are about 12·layers·width²."""

    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": ModelSize(layers=2, width=64, heads=2, context=64),  # 0.12 M
    "small": ModelSize(layers=5, width=128, heads=4, context=128),  # 1.03 M
    "10m": ModelSize(layers=6, width=384, heads=6, context=128),  # 10.8 M
    "25m": ModelSize(layers=8, width=512, heads=8, context=256),  # 25.4 M
    "25m-short": ModelSize(layers=8, width=512, heads=8, context=128),  # 25.4 M; half the work per sequence
    "125m": ModelSize(layers=18, width=768, heads=12, context=512),  # 128.0 M; for a GPU
}


Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes new keys and values [B, H, T, d]; gives all so far."""


class Cache(Protocol):
    """Keeps keys and values of every layer: `onebit.zero.inference`'s, or transformers'."""

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]: ...


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool) -> Tensor:
    """Dense attention; a mask says all there is to say of who sees whom."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal and attn_mask is None)


class SplitText:
    """The piece of each text that a rank computes. All ranks of the sequence have the same texts."""

    def __init__(self, ranks: SequenceRanks, codec: Codec | None):
        self.ranks, self._codec, self._pieces = ranks, codec, ranks.pieces(0)

    def cut(self, x_BT: Tensor) -> Tensor:
        return self.ranks.pieces(x_BT.shape[1]).cut(x_BT, self.ranks.rank)

    def begin(self, text_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The piece of a text, and its places [T]."""
        self._pieces = self.ranks.pieces(text_BT.shape[1])
        return self.cut(text_BT), self._pieces.positions(self.ranks.rank, text_BT.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, self.ranks, self._pieces, codec=self._codec)


class Block(nn.Module):
    """x ← x + attention(norm(x)), then x ← x + mlp(norm(x)).

    The rows of qkv are q, k and v of the first head, then of the next: ranks that cut them compute whole heads each
    (`layouts.py`). There are as many heads as come out of it. core_attention: of queries, keys and values
    [B, H, T, d]; `onebit.zero.sparse_attention` puts another in its place.
    """

    is_causal = True

    def __init__(self, size: ModelSize):
        super().__init__()
        D = size.width
        self.heads, self.head_width = size.heads, D // size.heads
        self.core_attention: Callable[..., Tensor] = partial(attend, is_causal=self.is_causal)
        self.attention_norm = nn.LayerNorm(D, bias=False)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.attention_out = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.LayerNorm(D, bias=False)
        self.mlp_in = nn.Linear(D, 4 * D, bias=False)
        self.mlp_out = nn.Linear(4 * D, D, bias=False)

    def forward(self, x_BTD: Tensor, keep: Keep | None = None, mask_B1TS: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD), keep, mask_B1TS)
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD))))

    def compute_pieces(self, split: Split) -> None:
        """For a pipeline of `model_layers.py`: from now on x is of a rank's piece of every text."""
        self.core_attention = partial(split.attend, is_causal=self.is_causal)

    def _attend(self, x_BTD: Tensor, keep: Keep | None = None, mask_B1TS: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x_BTD)
        q, k, v = qkv.unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        if keep is not None:
            k, v = keep(k, v)
        mixed_BHTd = self.core_attention(q, k, v, **({} if mask_B1TS is None else {"attn_mask": mask_B1TS}))
        return self.attention_out(mixed_BHTd.transpose(1, 2).flatten(2))


def _keeping(cache: Cache | None, layer: int) -> Keep | None:
    return None if cache is None else lambda k, v: cache.update(k, v, layer)


class GPT(nn.Module):
    """Predicts each next byte of a text."""

    _tp_plan: ClassVar[dict[str, str]] = {  # by transformers' words; `layouts.py` divides norms, too
        "blocks.*.qkv": "colwise",
        "blocks.*.attention_out": "rowwise",
        "blocks.*.mlp_in": "colwise",
        "blocks.*.mlp_out": "rowwise",
    }

    def __init__(self, size: ModelSize):
        super().__init__()
        self.context, self.heads = size.context, size.heads
        self.split: SplitText | None = None
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)

    def forward(
        self,
        text_BT: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Logits [B, T, 256] for the byte after each byte; text: int64, T ≤ context.

        The rest is for decoding, by transformers' names: a mask [B, 1, T, S] that is added, places [B, T], and what
        keeps keys and values of the S bytes so far. After `split_sequences` a rank computes the logits of its piece.
        """
        if self.split is not None:
            text_BT, position_ids = self.split.begin(text_BT)
        if position_ids is None:
            x_BTD = self.bytes(text_BT) + self.positions.weight[: text_BT.shape[1]]
        else:
            x_BTD = self.bytes(text_BT) + self.positions(position_ids)
        for number, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, _keeping(past_key_values, number), attention_mask)
        return F.linear(self.norm(x_BTD), self.bytes.weight)

    def split_sequences(self, ranks: SequenceRanks, codec: Codec | None) -> None:
        """`onebit.zero.sequence_parallel`'s: from now on each rank computes a piece of every text."""
        self.split = SplitText(ranks, codec)
        for block in self.blocks:
            block.core_attention = self.split.attend

    def get_output_embeddings(self) -> nn.Module:
        """The module whose matrix makes the outputs; transformers' word for it."""
        return self.bytes

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of windows [B, T+1], int64: T bytes read, the T after them predicted."""
        return next_byte_loss(self(windows[:, :-1]), windows)


def next_byte_loss(logits_BTV: Tensor, windows: Tensor, split: SplitText | None = None) -> Tensor:
    """Mean cross-entropy, in float32, of the logits for windows[:, :-1] against the bytes that came next.

    split: the logits are of a rank's piece; then the mean of the ranks' losses is that of the whole.
    """
    targets = windows[:, 1:]
    its = targets if split is None else split.cut(targets)
    loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), its.flatten())
    return loss if split is None else loss * (its.numel() * split.ranks.transport.world_size / targets.numel())


class WithLoss(nn.Module):
    """A GPT with its loss as forward(), which is what wrappers and engines call."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        return self.model.loss(windows)


def build_model(size: str | ModelSize, seed: int) -> GPT:
    """A model with GPT-2's initialisation: a function of (size, seed) that leaves torch's global generator alone."""
    shape = size if isinstance(size, ModelSize) else SIZES[size]
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / (2 * shape.layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=residual_std if is_residual else 0.02, generator=generator)
        else:
            nn.init.ones_(parameter)
    return model


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups for an optimizer: the matrices decay, the norms' scales do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
