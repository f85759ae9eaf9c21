"""Rewrites the golden frames: python tests/golden/write_golden.py. The diff is a change of the wire format: review it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from onebit.comm import SignCodec

PATH = Path(__file__).with_name("sign_frames.json")


def inputs(n: int) -> torch.Tensor:
    """n float32 without a random generator: exact hundredths, both signs, and a -0.0 in front."""
    x = ((torch.arange(n, dtype=torch.int64) * 7919 % 1009 - 504).to(torch.float32)) / 128
    if n:
        x[0] = -0.0
    return x


def frames() -> dict[str, str]:
    """Name -> hex of the frame, for a full row, a ragged row, and a row with a non-finite block."""
    out = {}
    for block, scale in ((64, "rms"), (256, "rms"), (256, "mean_abs")):
        codec = SignCodec(block=block, scale=scale, kernel="reference")
        counts = torch.full((1, 4), block, dtype=torch.int32)
        ragged = torch.tensor([[block, 1, 0, block - 3]], dtype=torch.int32)
        bad = inputs(4 * block)
        bad[block + 5] = float("nan")
        for name, x, n in (
            ("full", inputs(4 * block), counts),
            ("ragged", inputs(4 * block), ragged),
            ("nan", bad, None),
        ):
            frame = torch.zeros(1, codec.frame_bytes(4 * block), dtype=torch.uint8)
            codec.encode(x.clone().view(1, -1), None, frame, n)
            out[f"{name} block={block} scale={scale}"] = bytes(frame[0].tolist()).hex()
    return out


if __name__ == "__main__":
    PATH.write_text(json.dumps(frames(), indent=1) + "\n")
