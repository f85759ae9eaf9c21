"""One tensor of any shape and floating type as one frame of a codec: what stages and blocks of attention travel as."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Codec


def frame_bytes(codec: Codec, numel: int) -> int:
    """The bytes of a tensor of `numel` elements on the wire, padded to whole blocks."""
    return codec.frame_bytes(padded(codec, numel))


def padded(codec: Codec, numel: int) -> int:
    """`numel` rounded up to whole blocks of the codec."""
    return -(-numel // codec.block) * codec.block


@torch.no_grad()
def encode(codec: Codec, x: Tensor, error: Tensor | None = None) -> Tensor:
    """Encode x + error as a frame, uint8 [frame_bytes]. A block with a NaN or an infinity decodes as NaN.

    Args:
        codec: The codec.
        x: A tensor of any shape and floating type, which is flattened into blocks.
        error: float32 [1, N], x's elements padded to whole blocks; it is replaced by the new residual. None (default)
            without error feedback.
    """
    row_1N = x.new_zeros(1, padded(codec, x.numel()), dtype=torch.float32)
    row_1N[0, : x.numel()].copy_(x.reshape(-1))
    frames_1B = x.new_empty(1, codec.frame_bytes(row_1N.shape[1]), dtype=torch.uint8)
    codec.encode(row_1N, error, frames_1B, None)
    if error is not None:
        error.copy_(row_1N)
    return frames_1B[0]


@torch.no_grad()
def decode_(codec: Codec, frame: Tensor, out: Tensor) -> None:
    """Decode a frame into `out`, rounded to its floating type. `out` has the shape that was encoded."""
    row_1N = out.new_empty(1, padded(codec, out.numel()), dtype=torch.float32)
    codec.decode(frame.unsqueeze(0), row_1N)
    out.copy_(row_1N[0, : out.numel()].view(out.shape))
