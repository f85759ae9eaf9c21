"""Pictures of a layout, as text or PNG, and how far a token sees through several layers of it."""

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
    """How far tokens see through a number of layers. Counts whole blocks.

    Attributes:
        layers: The number of layers.
        share: The share of all earlier blocks that a block sees, on average; of all blocks if bidirectional.
        farthest: The distance in tokens from the last block to the farthest block that it sees.
    """

    layers: int
    share: float
    farthest: int


def reach(layout: Layout, layers: int, head: int | None = None) -> list[Reach]:
    """How far tokens see through 1, 2, ..., `layers` layers of one layout.

    Args:
        layout: The layout of every layer.
        layers: The number of layers.
        head: The head to follow; None (default): a token passes on what any head shows it.

    Returns:
        One `Reach` for each number of layers.
    """
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
    """Draw one head as text: a row for each query block, and a column for each key block.

    Args:
        layout: The layout.
        head: The head to draw, 0 by default.
        width: The most characters in a row, 64 by default; longer layouts get several blocks per character.

    Returns:
        Lines of █ for blocks that are seen, · for hidden ones, and ▒ for several blocks of both.
    """
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
    """Save heads side by side as a PNG: blue for blocks that are seen, grey between the heads.

    Args:
        layout: The layout.
        path: The file to write.
        heads: The heads to draw; None (default) for all.
    """
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
    """A PNG of palette indices, uint8 [height, width]."""
    height, width = pixels.shape
    rows = b"".join(b"\0" + bytes(row) for row in pixels.tolist())  # each row begins with its filter type: none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits per pixel, palette colours
    chunks = ((b"IHDR", header), (b"PLTE", _PALETTE), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
