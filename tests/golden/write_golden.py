"""Rewrites the golden frames: python tests/golden/write_golden.py. Its diff is a change of the wire format."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from onebit.comm import Codec, Int4Codec, Int8Codec, Log4Codec, SignCodec

PATH = Path(__file__).with_name("frames.json")


def inputs(n: int) -> torch.Tensor:
    """n float32 without a random generator: exact hundredths, both signs, and a -0.0 in front."""
    x = ((torch.arange(n, dtype=torch.int64) * 7919 % 1009 - 504).to(torch.float32)) / 128
    if n:
        x[0] = -0.0
    return x


def frames() -> dict[str, str]:
    """Name -> hex of the frame, for a full row, a ragged row, and a row with a non-finite block."""
    codecs: dict[str, Codec] = {
        "sign block=64 scale=rms": SignCodec(block=64, kernel="reference"),
        "sign block=256 scale=rms": SignCodec(kernel="reference"),
        "sign block=256 scale=mean_abs": SignCodec(scale="mean_abs", kernel="reference"),
        "int8 block=64": Int8Codec(block=64, kernel="reference"),
        "int4 block=64": Int4Codec(block=64, kernel="reference"),
        "log4 block=64": Log4Codec(block=64),
    }
    return {f"{name} {row}": hexed for name, codec in codecs.items() for row, hexed in frames_of(codec).items()}


def frames_of(codec: Codec) -> dict[str, str]:
    block = codec.block
    ragged = torch.tensor([[block, 1, 0, block - 3]], dtype=torch.int32)
    bad = inputs(4 * block)
    bad[block + 5] = float("nan")
    out = {}
    for name, x, counts in (
        ("full", inputs(4 * block), None),
        ("ragged", inputs(4 * block), ragged),
        ("nan", bad, None),
    ):
        frame = torch.zeros(1, codec.frame_bytes(4 * block), dtype=torch.uint8)
        codec.encode(x.clone().view(1, -1), None, frame, counts)
        out[name] = bytes(frame[0].tolist()).hex()
    return out


if __name__ == "__main__":
    PATH.write_text(json.dumps(frames(), indent=1) + "\n")
