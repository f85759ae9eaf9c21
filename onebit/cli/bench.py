"""`onebit bench`: the speed of each codec on this machine, and between ranks the seconds of an exchange in each.

This is the small benchmark of an installed package. The large ones, against DDP and DeepSpeed on emulated networks with
their records, are in `scripts/bench.py` of the repository.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .. import comm
from ..comm import CODECS, Codec, Hierarchy, PeerError, Transport, Wire, codec_named, compressed_allreduce, kernels
from ..comm.messages import gather_bytes
from . import UserError
from .numbers import number
from .output import Screen, Table, write_json

BLOCK = 256
_EPILOG = """\
encode, decode: of one row. exchange: mean over all ranks, compressed in both phases, in pieces of --piece elements;
"all-reduce" is the transport's own, in float32. Times are medians of the slowest rank. Benchmarks of whole steps
against DDP and DeepSpeed are in the repository: python scripts/bench.py
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="onebit bench", description=(__doc__ or "").partition("\n")[0], epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--elements", type=number, default=4e6, metavar="N", help="elements in total (default: 4m)")
    parser.add_argument("--piece", type=number, default=float(1 << 20), metavar="N", help="elements per exchange "
                        "(default: 1048576)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, metavar="K", help="take the median of K runs (default: 5)")
    parser.add_argument("--backend", choices=comm.launch.BACKENDS, help="transport (default: as in training)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write numbers to FILE; - is standard output")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: expected at least 1")
    try:
        transport = comm.init(args.backend)
        rows = measure(transport, int(args.elements), int(args.piece), args.repeats)
    except (ValueError, ImportError, PeerError) as error:
        raise UserError(str(error)) from error
    screen = Screen(is_quiet=transport.rank != 0)
    screen.table(_table(rows, int(args.elements), transport.world_size))
    screen.line(kernels.describe())
    if transport.rank == 0:
        write_json(args.json, {"elements": int(args.elements), "ranks": transport.world_size, "rows": rows,
                               "kernels": kernels.describe(), "transport": transport.describe()})  # fmt: skip
    transport.close()
    return 0


Row = dict[str, float | None]


def measure(transport: Transport, elements: int, piece: int, repeats: int) -> dict[str, Row]:
    """By codec: bytes per element, and seconds of encode, decode and exchange (None on one rank). All ranks."""
    device, rows = transport.device, {}
    x = torch.randn(
        elements // BLOCK * BLOCK or BLOCK,
        device=device,
        generator=torch.Generator(device).manual_seed(0),
        dtype=torch.float32,
    )
    for name in CODECS:
        codec = codec_named(name, BLOCK)
        frames = torch.empty(1, codec.frame_bytes(x.numel()), dtype=torch.uint8, device=device)
        out = torch.empty_like(x).view(1, -1)
        row: Row = {"bytes_per_element": frames.numel() / x.numel()}
        # encode overwrites its input with the residual, so each run needs a fresh copy.
        copies = [x.clone().view(1, -1) for _ in range(2)]
        row["encode_s"] = _median(transport, repeats, lambda: codec.encode(copies[0], None, frames, None),  # noqa: B023
                                  before=lambda: copies[0].copy_(x.view(1, -1)))  # noqa: B023  # fmt: skip
        row["decode_s"] = _median(transport, repeats, lambda: codec.decode(frames, out))  # noqa: B023
        row["exchange_s"] = _exchange_s(transport, codec, x, piece, repeats) if transport.world_size > 1 else None
        rows[name] = row
    if transport.world_size > 1:
        reduced = _median(transport, repeats, lambda: transport.all_reduce(x).wait())
        rows["all-reduce"] = {"bytes_per_element": 4.0, "encode_s": None, "decode_s": None, "exchange_s": reduced}
    return rows


def _exchange_s(transport: Transport, codec: Codec, x: torch.Tensor, piece: int, repeats: int) -> float:
    pieces = [part.clone() for part in x.split(max(1, piece))]
    hierarchy = Hierarchy.of(transport)
    quantum = transport.world_size * BLOCK
    padded = [torch.nn.functional.pad(part, (0, -part.numel() % quantum)) for part in pieces]
    wires = [
        Wire.empty(codec, part.numel(), transport.world_size, hierarchy=hierarchy, device=x.device) for part in padded
    ]
    return _median(
        transport, repeats,
        lambda: comm.interleave(
            compressed_allreduce(part, None, codec, transport, wire) for part, wire in zip(padded, wires, strict=True)
        ),
    )  # fmt: skip


def _median(
    transport: Transport, repeats: int, act: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    """Median seconds of the slowest rank, with all ranks starting together; the first run does not count."""
    times = []
    for _ in range(repeats + 1):
        before()
        gather_bytes(transport, b"ready", transport.device)
        began = time.perf_counter()
        act()
        if transport.device.type == "cuda":
            torch.cuda.synchronize(transport.device)
        packed = struct.pack("<d", time.perf_counter() - began)
        every = gather_bytes(transport, packed, transport.device)
        times.append(max(float(struct.unpack("<d", row)[0]) for row in every))
    return statistics.median(times[1:])


def _table(rows: dict[str, Row], elements: int, ranks: int) -> Table:
    def per_element(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e9 * seconds / elements:.3g}"

    shown = [
        [name, f"{8 * (row['bytes_per_element'] or 0):.3g}", *(per_element(row[key]) for key in _TIMES),
         "" if row["exchange_s"] is None else f"{row['exchange_s']:.4g}"]
        for name, row in rows.items()
    ]  # fmt: skip
    title = f"Codecs: {elements / 1e6:.4g} M elements, {ranks} rank{'s' * (ranks > 1)}; nanoseconds per element"
    return Table(title, ("codec", "bits/element", "encode ns", "decode ns", "exchange ns", "exchange s"), shown)


_TIMES = ("encode_s", "decode_s", "exchange_s")
