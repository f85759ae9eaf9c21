"""The FlexAttention executor: one compiled kernel on CUDA, which skips the blocks that a layout hides.

The kernel's blocks have 128 tokens (or the layout's size, if it is a multiple of 128). A kernel block that the layout
shows in part is computed whole, and `mask_mod` hides the rest, so a fine layout costs as much as its cover in kernel
blocks. On the CPU torch runs it without a kernel, forward only.
Shape legend: B sequences, H heads, S tokens, N blocks of the layout, M blocks of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...usage.graphs import compiled_apart
from .layouts import Layout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_KERNEL_BLOCK = 128
_Where = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """As `sparse_attention`, which has checked the arguments.

    Raises:
        RuntimeError: Gradients are needed on a device other than CUDA.
    """
    trained = [x for x in (query, key, value, bias) if x is not None and x.requires_grad]
    if query.device.type != "cuda" and trained and torch.is_grad_enabled():
        raise RuntimeError(
            f'FlexAttention has no backward pass on {query.device.type}; use executor="gather", or torch.no_grad()'
        )
    S, size = query.shape[2], kernel_block(layout.block)
    kernel = _kernel(query, key, value, layout, visible, bias, scale)
    missing = -S % size
    if missing:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    mask = block_mask(layout, S, query.device) if visible is None else _block_mask(layout, S, visible, query.device)
    mixed = kernel(
        query,
        key,
        value,
        score_mod=None if bias is None else _added(bias, S),
        block_mask=mask,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(mixed, Tensor)
    return mixed[:, :, :S]


def kernel_block(block: int) -> int:
    """Tokens in a kernel block, for a layout with blocks of `block` tokens."""
    return block if block % _KERNEL_BLOCK == 0 else _KERNEL_BLOCK


@functools.lru_cache(maxsize=64)
def block_mask(layout: Layout, length: int, device: torch.device) -> BlockMask:
    """The layout in kernel blocks, for sequences padded to whole blocks. Cached."""
    with torch.inference_mode(False):  # a table cached in inference must be usable in training
        return _block_mask(layout, length, None, device)


def _block_mask(layout: Layout, length: int, visible: Tensor | None, device: torch.device) -> BlockMask:
    """As `block_mask`; visible: bool [B, S], false for padding."""
    from torch.nn.attention.flex_attention import BlockMask

    size = kernel_block(layout.block)
    some, whole = covers(layout, length, device)
    if visible is not None:  # padding is not in the tables, so mask_mod must be called for every block
        some, whole = some | whole, torch.zeros_like(whole)
    padded, (counts, order) = some.shape[1] * size, _as_lists(some)
    whole_counts, whole_order = _as_lists(whole) if bool(whole.any()) else (None, None)
    return BlockMask.from_kv_blocks(
        counts,
        order,
        whole_counts,
        whole_order,
        BLOCK_SIZE=size,
        mask_mod=_shown(layout, length, visible, device),
        seq_lengths=(padded, padded),
    )


@functools.lru_cache(maxsize=64)
def covers(layout: Layout, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The kernel blocks that the layout shows in part, and those it shows whole: bool [H, M, M] each. Cached."""
    size = kernel_block(layout.block)
    M = -(-length // size)
    first = torch.arange(M, device="cpu")[:, None] * size
    fine = torch.arange(layout.rows, device="cpu")[None] * layout.block
    overlaps_MN = ((fine < (first + size).clamp(max=length)) & (fine + layout.block > first)).float()
    seen = layout.tables.float()
    some = overlaps_MN @ seen @ overlaps_MN.T > 0
    whole = overlaps_MN @ (1 - seen) @ overlaps_MN.T == 0
    if layout.is_causal:
        some, whole = some.tril(), whole.tril(-1)
    if length % size:
        whole[:, -1], whole[:, :, -1] = False, False
    some &= ~whole
    return some.expand(layout.heads, -1, -1).to(device), whole.expand(layout.heads, -1, -1).to(device)


def _as_lists(table_HMM: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each row sees, and an order with these first: int32 [1, H, M] and [1, H, M, M]."""
    order = table_HMM.to(torch.int8).argsort(dim=2, descending=True, stable=True)
    return table_HMM.sum(2, dtype=torch.int32)[None], order.to(torch.int32)[None]


def _shown(layout: Layout, length: int, visible: Tensor | None, device: torch.device) -> _Where:
    """mask_mod: whether a query sees a key. The padding up to whole kernel blocks sees nothing and is not seen."""
    blocks, b, is_causal = layout.blocks_HNN.to(device), layout.block, layout.is_causal
    last = length - 1

    def mask_mod(sequence: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # Clamp indices past the end into the tables: compiled code reads the tables before it applies the mask.
        query, key = q.clamp(max=last), kv.clamp(max=last)
        seen = blocks[head, query // b, key // b] & (q <= last) & (kv <= last)
        if is_causal:
            seen = seen & (q >= kv)
        return seen if visible is None else seen & visible[sequence, key]

    return mask_mod


def _added(bias: Tensor, length: int) -> Callable[..., Tensor]:
    """score_mod: adds the bias to the score; an axis of size one is broadcast."""
    has = [int(size > 1) for size in bias.shape]
    last = length - 1

    def score_mod(score: Tensor, sequence: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        query, key = q.clamp(max=last) * has[2], kv.clamp(max=last) * has[3]
        return score + bias[sequence * has[0], head * has[1], query, key]

    return score_mod


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> Callable[..., Any]:
    """FlexAttention; on CUDA compiled, once for each kind of call.

    Calls are of one kind if torch would compile the same code for them. The shapes are those before padding, because
    `mask_mod` holds the sequence length as a constant.
    """
    if query.device.type != "cuda":
        from torch.nn.attention.flex_attention import flex_attention as flex

        return flex
    given = [(x.shape, x.dtype, x.requires_grad) for x in (query, key, value, bias) if x is not None]
    table = layout.blocks_HNN
    shown = (layout.block, layout.is_causal, table.shape, table.stride(), visible is None)
    return _compiled(query.device, torch.is_grad_enabled(), scale, shown, *given)


@functools.cache
def _compiled(*kind: object) -> Callable[..., Any]:
    """The kernel for one kind of call, compiled at the first.

    Uncompiled, as a ninth variant of the same code would run, it computes everything that the layout hides.
    """
    from torch.nn.attention.flex_attention import flex_attention as flex

    return compiled_apart(flex, dynamic=False)
