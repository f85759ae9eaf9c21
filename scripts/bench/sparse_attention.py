"""Block-sparse attention against dense causal attention: seconds and peak memory against length, both in one run.

    python scripts/bench.py sparse_attention --record scripts/records/sparse_attention_2026-11.md

Forward and backward of one attention, without the layers around it. Dense is torch's scaled_dot_product_attention with
is_causal. A process for each length measures all sides in turn, another for each side its peak memory; a last one
measures the window against dense attention of 4,096 tokens, at growing lengths. The plot lies beside the record.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reports import panels_of, publish, table
from torch import Tensor
from torch.nn import functional as F

from bench.command import apart
from bench.record import here, parser_of
from bench.timing import Timing, in_turn
from onebit.zero.sparse_attention import SparsityConfig, build_layout, sparse_attention

DENSE = "dense"
_CAUSAL = "unidirectional"
LAYOUTS = {
    "window": SparsityConfig(mode="local_sliding_window", block=64, num_sliding_window_blocks=3, attention=_CAUSAL),
    "bigbird": SparsityConfig(mode="bigbird", block=64, num_sliding_window_blocks=3, attention=_CAUSAL),
    "fixed": SparsityConfig(mode="fixed", block=16, num_local_blocks=16, attention=_CAUSAL),
}
_ASKED = 4096
Measured = Mapping[str, Mapping[str, Sequence[float]]]


def attend(side: str, heads: int, features: int, length: int) -> Callable[[], object]:
    """Forward and backward of one sequence."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, length, features, generator=generator) for _ in range(4)]
    q, k, v = (x.requires_grad_() for x in made[:3])
    layout = None if side == DENSE else build_layout(LAYOUTS[side], heads, length)

    def call() -> tuple[Tensor, ...]:
        if layout is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = sparse_attention(q, k, v, layout)
        return torch.autograd.grad(out, (q, k, v), made[3])

    return call


def clocks(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def timed(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, tuple[float, ...]]]:
    """Seconds of each in turn, by both clocks."""
    found = in_turn(calls, repeats, clocks)
    return {name: dict(zip(("wall", "cpu"), zip(*pairs, strict=True), strict=True)) for name, pairs in found.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """What a call adds to the most memory that this process has ever held."""
    before = _most_bytes()
    call()
    return _most_bytes() - before


def _most_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


# ---------------------------------------------------------------- processes


def work(args: argparse.Namespace) -> object:
    """What one process measures: "time" of all sides, "memory" of one, or "windows"."""
    torch.set_num_threads(args.threads)
    shape = args.heads, args.features
    if args.what == "memory":
        attend(args.side, *shape, 2 * max(config.block for config in LAYOUTS.values()))()  # loads the libraries
        return peak_bytes(attend(args.side, *shape, args.length))
    if args.what == "time":
        sides = [*([DENSE] if args.length <= args.dense_up_to else []), *LAYOUTS]
        return timed({side: attend(side, *shape, args.length) for side in sides}, args.repeats)
    calls = {DENSE: attend(DENSE, *shape, _ASKED)}
    calls |= {str(length): attend("window", *shape, length) for length in args.windows}
    return timed(calls, args.repeats)


def ask(args: argparse.Namespace, what: str, length: int = 0, side: str = "") -> Any:
    """`work` in a process of its own."""
    asked = argparse.Namespace(**vars(args), what=what, length=length, side=side)
    return apart(work, asked, env={"OMP_NUM_THREADS": str(args.threads)})


# ---------------------------------------------------------------- the report


HEADS = ("tokens", "attention", "density", "ms", "CPU ms", "times dense's speed", "by CPU time", "peak MB")


def rows_of(
    times: Mapping[int, Measured], peaks: Mapping[int, Mapping[str, int]], heads: int
) -> Iterator[list[object]]:
    """A row for each length and side."""
    for length, found in times.items():
        for side, seconds in found.items():
            faster = ["", ""]
            if DENSE in found and side != DENSE:
                faster = [f"{ratio(found, side, clock):.1f}" for clock in ("wall", "cpu")]
            shown = "" if side == DENSE else f"{build_layout(LAYOUTS[side], heads, length).density:.3f}"
            peak = f"{peaks[length][side] / 1e6:.0f}" if side in peaks[length] else ""
            yield [length, side, shown, Timing.of(seconds["wall"]), Timing.of(seconds["cpu"]), *faster, peak]


def ratio(found: Measured, side: str, clock: str = "wall") -> float:
    """How many times as fast as dense attention, by medians."""
    return Timing.of(found[DENSE][clock]).median / Timing.of(found[side][clock]).median


def longest(found: Measured, clock: str) -> int:
    """Tokens with a window's layout in the time that dense attention takes for 4,096, of those tried."""
    limit = Timing.of(found[DENSE][clock]).median
    fits = [int(name) for name in found if name != DENSE and Timing.of(found[name][clock]).median <= limit]
    return max(fits, default=0)


def draw(times: Mapping[int, Measured], peaks: Mapping[int, Mapping[str, int]], file: Path) -> None:
    """Two panels: seconds, and peak memory, against tokens."""
    titles = ("seconds, forward and backward", "peak memory of a call, MB")
    with panels_of(file, titles, (5, 4), xscale="log", yscale="log", xlabel="tokens") as (left, right):
        for side, colour in zip((DENSE, *LAYOUTS), ("#333333", "#0072b2", "#009e73", "#d55e00"), strict=True):
            at = [length for length in times if side in times[length]]
            left.plot(at, [Timing.of(times[n][side]["wall"]).median / 1e3 for n in at], "o-", c=colour, label=side)
            held = [length for length in peaks if side in peaks[length]]
            right.plot(held, [peaks[n][side] / 1e6 for n in held], "o-", c=colour, label=side)


def report(
    args: argparse.Namespace, times: Mapping[int, Measured], peaks: Mapping[int, Mapping[str, int]], windows: Measured
) -> str:
    reached = {clock: longest(windows, clock) for clock in ("wall", "cpu")}
    return f"""# Block-sparse attention against dense attention

{here()}

One sequence, {args.heads} heads of {args.features}, float32, unidirectional; forward and backward, {args.threads}
threads; {args.repeats} calls in turn, median (quartiles). Peak MB: what one call adds to its process.

{table(HEADS, rows_of(times, peaks, args.heads))}

In the time that dense attention takes for {_ASKED:,} tokens, a window's layout takes {reached["wall"]:,}
({reached["cpu"]:,} by CPU time), of {", ".join(f"{n:,}" for n in args.windows)} tried.
"""


def main(argv: Sequence[str]) -> None:
    parser = parser_of("sparse_attention", __doc__)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768], help="tokens")
    add("--dense-up-to", type=int, default=8192, metavar="TOKENS", help="dense attention is not measured above")
    windows = [16384, 24576, 32768, 40960, 49152, 65536]
    add("--windows", type=int, nargs="+", default=windows, help="lengths tried against dense attention's 4,096")
    add("--heads", type=int, default=4)
    add("--features", type=int, default=64, help="of a head")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    times, peaks = {}, {}
    for length in args.lengths:
        times[length] = ask(args, "time", length)
        peaks[length] = {side: ask(args, "memory", length, side) for side in times[length]}
    text = report(args, times, peaks, ask(args, "windows"))
    publish(args, text, shows="seconds and memory against length", draw=partial(draw, times, peaks))
