"""The values that a frame holds for a row: one bit, four or eight, in blocks with a scale each. Float64 in and out.

A block has 256 elements and never straddles two parameters. `docs/wire-format.md` has the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = Any  # np.ndarray of float64: NumPy's stubs give most arithmetic no dtype
Blocks = Sequence[slice]


def to_bfloat16(x: Array) -> Array:
    """Round float64 to the nearest bfloat16, ties to even (through float32, as the wire's scales are)."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    # Typed numbers: NumPy 1 adds a plain one to a uint64 scalar as floats.
    is_odd = (bits >> np.uint64(16)) & np.uint64(1)
    rounded: Array = (bits + np.uint64(0x7FFF) + is_odd) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def compress(c: Array, blocks: Blocks, scale: str = "rms") -> Array:
    """One bit, C(c): per block the scale, rounded to bfloat16, with the sign of each element."""
    q = np.zeros_like(c)
    for block in blocks:
        part = c[block]
        s = np.sqrt(np.mean(part**2)) if scale == "rms" else np.mean(np.abs(part))
        q[block] = to_bfloat16(s) * np.where(np.signbit(part), -1.0, 1.0)
    return q


def parameter_blocks(sizes: Sequence[int], block: int) -> list[slice]:
    """Blocks over the concatenated parameters; none straddles two of them."""
    blocks, start = [], 0
    for size in sizes:
        blocks += [slice(start + k, start + min(k + block, size)) for k in range(0, size, block)]
        start += size
    return blocks


def scale_above(largest: float) -> float:
    """The least bfloat16 not below `largest`, so that rounding the scale clips no element of a block."""
    bits = np.asarray(largest, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return float(((bits + np.uint64(0xFFFF)) & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32))


def whole_steps(c: Array, blocks: Blocks, most: int) -> Array:
    """Round to whole multiples, at most `most`, of each block's maximum divided by `most`."""
    q = np.zeros_like(c)
    for block in blocks:
        s = scale_above(np.float32(np.abs(c[block]).max()) / np.float32(most))
        if s > 0:
            q[block] = np.clip(np.round(c[block] / s), -most, most) * s
    return q


def eight_bits(c: Array, blocks: Blocks) -> Array:
    """The default code for gradients in the dense steps of 1-bit LAMB and 0/1 Adam."""
    return whole_steps(c, blocks, 127)


def four_bits(c: Array, blocks: Blocks) -> Array:
    """The default code for parameter differences that owners send back."""
    return whole_steps(c, blocks, 7)


def four_log_bits(c: Array, blocks: Blocks, block_size: int = 256) -> Array:
    """A sign and the nearest of s, s/2, ..., s/128, where s is the block's maximum, rounded up.

    The default code for gradients in the dense steps of 1-bit Adam and Muon. Values half way between two become the
    larger one. In a block with a zero, or with padding to block_size, zeros stay zero, and s/64 is the least of the
    others.
    """
    q = np.zeros_like(c)
    for block in blocks:
        has_zero = (c[block] == 0).any() or block.stop - block.start < block_size
        s = scale_above(np.abs(c[block]).max())
        if s > 0:
            levels = s * 2.0 ** -np.arange(7 if has_zero else 8)
            nearest = np.argmin(np.abs(np.abs(c[block])[:, None] - levels), axis=1)
            q[block] = np.sign(c[block]) * levels[nearest]
    return q


def signs(c: Array, blocks: Blocks) -> tuple[Array, Array]:
    """s·sgn(c) with s = mean|c| of the block, the code of sharded momentum; and s at each element."""
    s = np.zeros_like(c)
    for block in blocks:
        s[block] = to_bfloat16(np.mean(np.abs(c[block])))
    return s * np.where(np.signbit(c), -1.0, 1.0), s


def mean_in(bits: Callable[[Array, Blocks], Array], grads: Array, blocks: Blocks) -> Array:
    """The mean over workers after two phases of a compressed all-reduce, without error feedback."""
    return bits(np.mean([bits(g, blocks) for g in grads], axis=0), blocks)
