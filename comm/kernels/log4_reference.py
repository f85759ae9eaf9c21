"""The log4 frame in pure torch: its specification. A sign and one of eight powers of two below the block's largest.

Frame of a row of N = J·block elements:

    offset 0      N/2 bytes   code of each element; element 2i in the low half of byte i, 2i+1 above
    offset N/2    J·2 bytes   scale s of each block, bfloat16, little-endian; -s if the block contains a zero
    then          zero bytes up to a multiple of 16

Rules, each operation in float32, rounded once:
1. c = x + error; padding is +0.0. s = max|c|, rounded *up* to the next bfloat16. In a block of zeros all bytes are 0.
2. A code is k + 8·(c < 0), k in 0..7, and is decoded as ±s·2^-k. k is the least with |c| >= 0.75·s·2^-k, or 7: the
   nearest of the eight; half way between two, the larger.
3. In a block that contains a zero (padding counts), code 7 is 0.0, and every other k is at most 6: an element without
   a gradient on any rank must not move.
4. A block with a NaN or an infinity, or so large that s is one, travels as scale 0x7FC0 and zero bytes, and leaves
   residual 0.
5. The residual is c less the decoded value, and 0 for padding.

Shape legend: K rows, N elements of a row, B bytes of its frame, J blocks of a row.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import reference
from .arguments import check_shape

_NAN_BF16 = 0x7FC0
_LEVELS = 8
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float but its sign


def log4_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32, in place; error float32/bfloat16, read."""
    K, N = x_KN.shape
    J = N // block
    check_shape(frames_KB, K, N // 2 + 2 * J)
    if error_KN is not None:
        x_KN.add_(error_KN)
    c_KJn = x_KN.view(K, J, block)
    padding = None
    if counts_KJ is not None:
        padding = torch.arange(block, device=x_KN.device) >= counts_KJ.unsqueeze(-1)
        c_KJn.masked_fill_(padding, 0.0)
    magnitude_KJn = c_KJn.view(torch.int32) & _MAGNITUDE
    largest_KJ = magnitude_KJn.amax(-1).view(torch.float32)  # a NaN is the largest
    s_KJ = reference.round_up_to_bfloat16(largest_KJ)
    bad_KJ = ~(largest_KJ.isfinite() & s_KJ.isfinite())
    if c_KJn.is_cuda or bool(bad_KJ.any()):
        c_KJn.masked_fill_(bad_KJ.unsqueeze(-1), 0.0)
    s_KJ1 = s_KJ.to(torch.float32).masked_fill(bad_KJ, 0.0).unsqueeze(-1)
    has_zero_KJ = (magnitude_KJn.amin(-1) == 0) & (s_KJ > 0)
    codes = _codes_of(c_KJn, s_KJ1, has_zero_KJ.unsqueeze(-1)).view(-1).view(torch.int16).view(K, N // 2)
    frames_KB[:, : N // 2] = (
        codes.bitwise_or_(codes >> 4).bitwise_and_(0xFF).to(torch.uint8)
    )  # two codes of a byte each in one
    signed_KJ = torch.where(has_zero_KJ, -s_KJ, s_KJ).view(torch.int16)
    bits_KJ = torch.where(bad_KJ, _NAN_BF16, signed_KJ).to(torch.int16)
    frames_KB[:, N // 2 : N // 2 + 2 * J] = bits_KJ.contiguous().view(-1).view(torch.uint8).view(K, 2 * J)
    frames_KB[:, N // 2 + 2 * J :] = 0
    signed_KJ1 = torch.where(has_zero_KJ.unsqueeze(-1), -s_KJ1, s_KJ1)
    c_KJn.sub_(_values_of(frames_KB[:, : N // 2], signed_KJ1, block))
    if padding is not None:
        c_KJn.masked_fill_(padding, 0.0)


def log4_decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """out ← keep·out + weight·values; out float32 [K, N]."""
    reference.weigh_into_(out_KN, _values(frames_KB, out_KN.shape[1], block), weight, keep)


def log4_decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """out ← mean over the K frames; out float32 [N]."""
    reference.mean_into_(out_N, frames_KB, lambda frame_1B: _values(frame_1B, len(out_N), block)[0])


def _values(frames_KB: Tensor, n: int, block: int) -> Tensor:
    s_KJ1 = reference.scales_at(frames_KB, n // 2, n // block).to(torch.float32).unsqueeze(-1)
    return _values_of(frames_KB[:, : n // 2], s_KJ1, block).view(len(frames_KB), n)


def _codes_of(c_KJn: Tensor, s_KJ1: Tensor, has_zero_KJ1: Tensor) -> Tensor:
    """Rules 2 and 3 for every element, uint8 [K, J, n].

    Positive floats are in the order of their bits, and an octave is 2²³ of these: k is the difference to the bits of
    0.75·s in whole octaves, rounded up. Blocks of tiny numbers are multiplied by 2⁶⁴, which is exact, so that no
    threshold is subnormal.
    """
    up_KJ1 = torch.where(s_KJ1 < 2.0**-60, 2.0**64, 1.0).to(torch.float32)
    bits_KJn = (c_KJn * up_KJ1).add_(0.0).view(torch.int32)  # -0.0 is no negative number
    negative_KJn = (bits_KJn >> 28).bitwise_and_(_LEVELS)
    magnitude_KJn = bits_KJn.bitwise_and_(_MAGNITUDE)
    zero_KJn = magnitude_KJn == 0
    threshold_KJ1 = (s_KJ1 * up_KJ1 * 0.75).view(torch.int32) + 0x7FFFFF
    k_KJn = magnitude_KJn.neg_().add_(threshold_KJ1).bitwise_right_shift_(23).clamp_(min=0)
    k_KJn = torch.minimum(k_KJn, _LEVELS - 1 - has_zero_KJ1.to(torch.int32), out=k_KJn).add_(zero_KJn & has_zero_KJ1)
    return k_KJn.add_(negative_KJn).to(torch.uint8).mul_((s_KJ1 > 0).to(torch.uint8))


def _values_of(codes_KB: Tensor, s_KJ1: Tensor, block: int) -> Tensor:
    """Decode bytes of two codes each with the signed scales of their blocks: float32 [K, J, n]."""
    K, J, _ = s_KJ1.shape
    bytes_KJb = codes_KB.reshape(K, J, block // 2).to(torch.int32)
    bytes_KJb += (s_KJ1 < 0).to(torch.int32) << 8
    pairs = _pairs(codes_KB.device).index_select(0, bytes_KJb.view(-1))
    return pairs.view(torch.float32).view(K, J, block).mul_(s_KJ1.abs())


@functools.lru_cache(maxsize=16)
def _pairs(device: torch.device) -> Tensor:
    """The factors of s that a byte's two codes stand for: two float32 in the memory of one int64, [512].

    Entries from 256 on are for blocks that contain a zero.
    """
    codes = torch.arange(256, device=device).unsqueeze(-1) >> torch.tensor([0, 4], device=device, dtype=torch.int64)
    powers = torch.exp2(-(codes & 7).to(torch.float32))
    signed = torch.where((codes & 8) > 0, -powers, powers)
    with_zero = signed.masked_fill((codes & 7) == 7, 0.0)
    return torch.cat([signed, with_zero]).view(torch.int64).view(-1)
