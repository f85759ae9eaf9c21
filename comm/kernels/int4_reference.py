"""The int4 frame in pure torch: its specification; `reference.py` specifies the others.

Frame of a row of N = J·block elements:

    offset 0      N/2 bytes   q of each element, two's complement; element 2i in the low half of byte i, 2i+1 above
    offset N/2    J·2 bytes   scale s of each block, bfloat16, little-endian
    then          zero bytes up to a multiple of 16

Rules, each operation in float32, rounded once; those of the int8 frame (`kernels/reference.py`) with 7 for 127:
1. c = x + error; padding is +0.0. s = max|c| / 7, a division, rounded *up* to the next bfloat16.
2. q = clamp(round(c / s), -7, 7), a division, ties to even; by 1 instead of s if s = 0. The nibble -8 is never sent.
3. A block with a NaN or an infinity, or so large that 8·s is one, travels as scale 0x7FC0 and zero bytes, and leaves
   residual 0. So a frame is finite if 8·s is finite for all its scales: no nibble decodes to more than that.
4. The residual is c - q·s, where q keeps the sign of a zero: c = -0.0 leaves +0.0.
5. A decoded value is q·s; means, sums, updates of parameters and steps of masters as for the other frames.

Shape legend: K rows, N elements of a row, B bytes of its frame, J blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .arguments import check_shape
from .operands import MasterStep, ParamUpdate


def int4_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32, in place; error float32/bfloat16, read."""
    K, N = x_KN.shape
    J = N // block
    check_shape(frames_KB, K, N // 2 + 2 * J)
    q_KN, bits_KJ = reference.quantise_(x_KN, error_KN, counts_KJ, block=block, top=7)
    nibbles = q_KN.view(torch.uint8).view(K, N // 2, 2) & 0xF
    frames_KB[:, : N // 2] = nibbles[..., 0] | (nibbles[..., 1] << 4)
    reference.write_scales(frames_KB, N // 2, bits_KJ)


def int4_decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """out ← keep·out + weight·values; out float32 [K, N]."""
    reference.weigh_into_(out_KN, _values(frames_KB, out_KN.shape[1], block), weight, keep)


def int4_decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """out ← mean over the K frames; out float32 [N]."""
    reference.mean_into_(out_N, frames_KB, lambda frame_1B: _values(frame_1B, out_N.shape[0], block)[0])


def int4_apply(frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None:
    """p ← keep·p + weight·value, parameters in place, with the values of frames of rows of n elements."""
    reference.update_with(_values(frames_KB, n, block), update)


def int4_step_masters(step: MasterStep, *, block: int) -> None:
    """Masters ← those after the step; frame ← frame of what their replicas lack."""
    int4_encode(reference.step_masters_(step), None, step.frame_1B, step.counts_J.unsqueeze(0), block=block)


def int4_scales(frames_KB: Tensor, n: int, *, block: int) -> Tensor:
    """The bfloat16 scales [K, J] of int4 frames of n elements (a copy)."""
    return reference.scales_at(frames_KB, n // 2, n // block)


def _values(frames_KB: Tensor, n: int, block: int) -> Tensor:
    K, s_KJ = len(frames_KB), int4_scales(frames_KB, n, block=block)
    packed = frames_KB[:, : n // 2].view(torch.int8)
    # Shifts of int8 keep the sign: the low half goes up to the top first.
    q_KN = torch.stack((packed << 4 >> 4, packed >> 4), dim=-1).view(*s_KJ.shape, block)
    return q_KN.to(torch.float32).mul_(s_KJ.to(torch.float32).unsqueeze(-1)).view(K, n)
