"""A variance in 8 bits: an unsigned logarithmic code, blocks of 256 elements with one scale each.

A float32 without a sign is 8 bits of exponent and 23 of mantissa: its top 11 bits are a logarithmic code whose steps
are an eighth of a power of two. The code of an element is these 11 bits, counted from 255 below the block's scale:

    base    = 8·E - 255, E: the exponent field of the scale
    value   = the float32 with the bits (code + base)·2^20;  code 0: 0
    scale   = the power of two above the block's largest value, not below 2^-94 and not above infinity

So a code holds three bits of mantissa, over 31 powers of two; decoding needs only a shift. Rules that leave no freedom
to an implementation:

1. code(v) = clamp(((bits(v) + dither) >> 20) - base, 1, 255), and 0 if v is +0.0. The dither has 20 bits. It makes
   the rounding stochastic: the decoded value is v on average. A value that is not 0 never becomes 0, because a division
   by its root would explode. It becomes at least 2^-31.75 of the scale, so that the step of such an element is too
   short.
2. The dither of element i in step t is `dither_of`: a function of the step and of the element's index alone. How
   elements are split among chunks, threads and registers changes no bit.
3. An infinity or a NaN makes the scale infinity. All values of the block are then at least 2^96: its elements stop
   moving.

Shape legend: N elements, J blocks.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

BLOCK = 256
_LEAST_EXPONENT, _LARGEST_EXPONENT = 33, 255
_WORD = 0xFFFFFFFF
T = TypeVar("T", int, Tensor)


class EightBitVariance(NamedTuple):
    """A variance in 8 bits, 1.016 bytes per element, in host memory.

    Attributes:
        codes: Code of each element, uint8 [n].
        scales: Scale of each block of 256, float32 [⌈n/256⌉].
    """

    codes: Tensor
    scales: Tensor


def empty_variance(n: int) -> EightBitVariance:
    """A variance of zeros.

    Args:
        n: Number of elements.
    """
    return EightBitVariance(
        torch.zeros(n, dtype=torch.uint8, device="cpu"), torch.zeros(-(-n // BLOCK), dtype=torch.float32, device="cpu")
    )


def to_eight_bits(v_N: Tensor, to: EightBitVariance, *, seed: int, offset: int = 0) -> None:
    """Round a variance to 8 bits.

    Args:
        v_N: float32 [n], not negative.
        to: Receives codes and scales.
        seed: Seed of the rounding.
        offset: First element of v_N among all that share the seed. Default 0.
    """
    n, J = v_N.numel(), to.scales.numel()
    bits = torch.zeros(J * BLOCK, dtype=torch.int64, device="cpu")
    bits[:n] = v_N.view(torch.int32)
    bits_JB = bits.view(J, BLOCK)
    exponent_J = ((bits_JB.amax(1) >> 23) + 1 if J else bits_JB.sum(1)).clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT)
    to.scales.copy_((exponent_J << 23).to(torch.int32).view(torch.float32))
    near = (bits[:n] + dither_of(n, seed, offset)) >> 20
    base = (8 * exponent_J - 255).repeat_interleave(BLOCK)[:n]
    to.codes.copy_(torch.where(bits[:n] == 0, 0, (near - base).clamp(1, 255)))


def from_eight_bits(v: EightBitVariance) -> Tensor:
    """Decode a variance: float32 [n]."""
    n = v.codes.numel()
    exponent_J = (v.scales.view(torch.int32) >> 23).to(torch.int64)
    base = (8 * exponent_J - 255).repeat_interleave(BLOCK)[:n]
    bits = torch.where(v.codes == 0, 0, (v.codes + base) << 20)
    return bits.to(torch.int32).view(torch.float32)


def seed_of(step: int) -> int:
    """32 hashed bits for a step: those of neighbouring steps are unrelated."""
    return _mix(step & _WORD)


def dither_of(n: int, seed: int, offset: int) -> Tensor:
    """20 random bits for each of n elements, as int64, the lowest four 0.

    Elements i and i + 128 of a block share a hash of i and the seed: one has its lower half, the other its upper.
    """
    index = torch.arange(offset & _WORD, (offset & _WORD) + n, device="cpu")
    half = index & (BLOCK // 2)
    hashed = _mix(((index - half) * 0x9E3779B1 + seed) & _WORD)
    return torch.where(half == 0, hashed & 0xFFFF, hashed >> 16) << 4


def _mix(x: T) -> T:
    """A hash of 32 bits to 32 bits: multiply and shift twice. Of int64 tensors, too: products wrap above these bits."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _WORD
    return x ^ (x >> 15)
