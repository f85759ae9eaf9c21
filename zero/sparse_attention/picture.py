"""A layout to look at, as text or as a PNG, and how far a token sees through several layers of it."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .layouts import Layout

_SEEN, _PARTLY, _HIDDEN = "█", "▒", "·"
_PALETTE = b"".join(bytes(rgb) for rgb in ((245, 245, 245), (31, 78, 121), (127, 127, 127)))
_GAP, _PIXELS = 2, 512


@dataclass(frozen=True)
class Reach:
    """Through `layers` layers: the share of all earlier tokens that a token sees, and the farthest, both on average.

    share: of all tokens, where the layout is bidirectional. farthest: tokens between a block's first token and the
    farthest that it sees, of the last block; both count whole blocks.
    """

    layers: int
    share: float
    farthest: int


def reach(layout: Layout, layers: int, head: int | None = None) -> list[Reach]:
    """After 1, 2, ... layers; all of one layout. head: None: a token sees what any head shows, and passes it on."""
    table_NN = layout.blocks_HNN.any(0) if head is None else layout.blocks_HNN[head]
    N = layout.rows
    possible = N * (N + 1) / 2 if layout.is_causal else N * N
    seen_NN, found = table_NN, []
    distances = (torch.arange(N, device="cpu")[:, None] - torch.arange(N, device="cpu")).abs()
    for k in range(1, layers + 1):
        blocks = int((distances[-1] * seen_NN[-1]).max())
        found.append(Reach(k, float(seen_NN.sum()) / possible, blocks * layout.block))
        seen_NN = (seen_NN.float() @ table_NN.float()) > 0
    return found


def draw(layout: Layout, head: int = 0, width: int = 64) -> str:
    """One head as text: a row for each query block, a column for each key block; several blocks each above `width`."""
    table_NN = layout.blocks_HNN[head]
    each = -(-layout.rows // width)
    M = -(-layout.rows // each)
    padded = torch.zeros(M * each, M * each, dtype=torch.float32, device="cpu")
    padded[: layout.rows, : layout.rows] = table_NN.float()
    counts = padded.view(M, each, M, each).sum((1, 3))
    whole = each * each
    lines = []
    for row in counts.tolist():
        lines.append("".join(_SEEN if n == whole else _PARTLY if n else _HIDDEN for n in row))
    return "\n".join(lines)


def save_picture(layout: Layout, path: Path, heads: Sequence[int] | None = None) -> None:
    """Some heads side by side as a PNG: blue where keys are seen, grey between the heads. Default: all."""
    shown = list(range(layout.heads)) if heads is None else list(heads)
    scale = max(1, _PIXELS // layout.rows)
    parts = []
    for k, head in enumerate(shown):
        pixels = layout.blocks_HNN[head].to(torch.uint8)
        pixels = pixels.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        gap = torch.full((len(pixels), _GAP * scale), 2, dtype=torch.uint8, device="cpu")
        parts += [gap, pixels] if k else [pixels]
    path.write_bytes(_png(torch.cat(parts, 1)))


def _png(pixels: Tensor) -> bytes:
    """An image of colours of the palette, uint8 [height, width]."""
    height, width = pixels.shape
    rows = b"".join(b"\0" + bytes(row) for row in pixels.tolist())  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits per pixel, of a palette
    chunks = ((b"IHDR", header), (b"PLTE", _PALETTE), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
