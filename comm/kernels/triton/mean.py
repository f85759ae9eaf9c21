"""Kernels: the mean of sign frames, encoded in the same pass, in Triton.

Rule 6 of `reference.py`. Here c is computed; `encode.py` makes the frame. `backend.py` offers this function.

Shape legend: W rows, J blocks, B bytes. In the kernel: P blocks per program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN, check_scale
from ..operands import EncodeOutput
from .codes import Blocks, Outputs
from .encode import Source, launch_encode
from .lanes import EDGE, Frames, frames_of, signed_row


class Received(NamedTuple):
    """The frames whose mean is taken. share: one over their number."""

    frames: Frames
    share: float


class Words(NamedTuple):
    """The words of a program's blocks in the first frame, and their scales: [P]."""

    words_at: tl.tensor
    scales_at: tl.tensor


def encode_mean(received_WB: Tensor, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frame ← frame of the mean of the W frames + error; residual ← the rest. Reads each frame once."""
    check_scale(scale)
    W, J = EDGE.check_encode_mean(SIGN, received_WB, out, block=block)
    source = Source(locate_words, mean_rows, Received(frames_of(SIGN, received_WB), 1.0 / W))
    launch_encode(source, out, 1, J, inputs=W, frame=SIGN, block=block, scale=scale)


@triton.jit
def locate_words(received: Received, blocks: Blocks, BLOCK: tl.constexpr) -> Words:
    frames = received.frames
    return Words(
        words_at=frames.codes + blocks.j * (BLOCK // 64),
        scales_at=frames.halves + blocks.J * (BLOCK // 16) + blocks.j,
    )


@triton.jit
def mean_rows(
    received: Received,
    words: Words,
    out: Outputs,
    blocks: Blocks,
    at: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """The mean of four rows, those of one word of each of W frames, in the order of the frames."""
    word_at, scale_at = words.words_at + at // 64, words.scales_at
    word = tl.load(word_at, mask=blocks.inside, other=0)
    scale = tl.load(scale_at, mask=blocks.inside, other=0)
    c0 = signed_row(word, scale, blocks.lane, 0)
    c1 = signed_row(word, scale, blocks.lane, 1)
    c2 = signed_row(word, scale, blocks.lane, 2)
    c3 = signed_row(word, scale, blocks.lane, 3)
    for _ in range(1, blocks.inputs):
        word_at += received.frames.codes_stride
        scale_at += received.frames.halves_stride
        word = tl.load(word_at, mask=blocks.inside, other=0)
        scale = tl.load(scale_at, mask=blocks.inside, other=0)
        c0 += signed_row(word, scale, blocks.lane, 0)
        c1 += signed_row(word, scale, blocks.lane, 1)
        c2 += signed_row(word, scale, blocks.lane, 2)
        c3 += signed_row(word, scale, blocks.lane, 3)
    return c0 * received.share, c1 * received.share, c2 * received.share, c3 * received.share
