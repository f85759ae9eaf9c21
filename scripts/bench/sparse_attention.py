"""Block-sparse attention against dense causal attention: seconds and peak memory against length, both in one run.

    python scripts/bench.py sparse_attention --record scripts/records/sparse_attention_2026-11.md

Forward and backward of one attention, without the layers around it. Dense is torch's scaled_dot_product_attention with
is_causal. A process for each length measures all sides in turn, another for each side its peak memory; a last one
measures the window against dense attention of 4,096 tokens, at growing lengths. The plot lies beside the record.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from provenance import record_path, revision, write_record
from torch import Tensor
from torch.nn import functional as F

from bench.command import words
from bench.timing import Timing
from onebit.zero.sparse_attention import SparsityConfig, build_layout, sparse_attention

DENSE = "dense"
_CAUSAL = "unidirectional"
LAYOUTS = {
    "window": SparsityConfig(mode="local_sliding_window", block=64, num_sliding_window_blocks=3, attention=_CAUSAL),
    "bigbird": SparsityConfig(mode="bigbird", block=64, num_sliding_window_blocks=3, attention=_CAUSAL),
    "fixed": SparsityConfig(mode="fixed", block=16, num_local_blocks=16, attention=_CAUSAL),
}
TARGET = 3.0
AIM = 32_768  # tokens of a window's layout in the time of dense attention's 4,096
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


def in_turn(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each, on the clock and of the processor, after one call to warm up."""
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            found[name]["cpu"].append(time.process_time() - cpu)
            found[name]["wall"].append(time.perf_counter() - wall)
    return found


def peak_bytes(call: Callable[[], object]) -> int:
    """What a call adds to the most memory that this process has ever held."""
    before = _most_bytes()
    call()
    return _most_bytes() - before


def _most_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


# ---------------------------------------------------------------- processes


def work(args: argparse.Namespace) -> None:
    """One process's part, as JSON on standard output."""
    torch.set_num_threads(args.threads)
    shape = args.heads, args.features
    if args.worker == "memory":
        attend(args.side, *shape, 2 * max(config.block for config in LAYOUTS.values()))()  # loads the libraries
        print(json.dumps(peak_bytes(attend(args.side, *shape, args.length))))
    elif args.worker == "time":
        sides = [*([DENSE] if args.length <= args.dense_up_to else []), *LAYOUTS]
        print(json.dumps(in_turn({side: attend(side, *shape, args.length) for side in sides}, args.repeats)))
    else:
        calls = {DENSE: attend(DENSE, *shape, _ASKED)}
        calls |= {str(length): attend("window", *shape, length) for length in args.windows}
        print(json.dumps(in_turn(calls, args.repeats)))


def ask(args: argparse.Namespace, worker: str, *more: str) -> object:
    """What a process of its own says."""
    same = ["--threads", str(args.threads), "--heads", str(args.heads), "--features", str(args.features)]
    same += [
        "--repeats",
        str(args.repeats),
        "--dense-up-to",
        str(args.dense_up_to),
        "--windows",
        *map(str, args.windows),
    ]
    command = words("sparse_attention", "--worker", worker, *same, *more)
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {run.returncode}:\n{run.stderr}")
    found: object = json.loads(run.stdout.splitlines()[-1])
    return found


# ---------------------------------------------------------------- the report


def table(times: Mapping[int, Measured], peaks: Mapping[int, Mapping[str, int]], heads: int) -> list[str]:
    """A row for each length and side."""
    lines = ["| tokens | attention | density | ms | CPU ms | times dense's speed | by CPU time | peak MB |"]
    lines.append("|---:|---|---:|---:|---:|---:|---:|---:|")
    for length, found in times.items():
        for side, seconds in found.items():
            wall, cpu = Timing.of(seconds["wall"]), Timing.of(seconds["cpu"])
            faster, by_cpu = "", ""
            if DENSE in found and side != DENSE:
                faster, by_cpu = (f"{ratio(found, side, clock):.1f}" for clock in ("wall", "cpu"))
            density = 1.0 if side == DENSE else build_layout(LAYOUTS[side], heads, length).density
            shown = "" if side == DENSE else f"{density:.3f}"
            peak = f"{peaks[length][side] / 1e6:.0f}" if side in peaks[length] else ""
            lines.append(f"| {length} | {side} | {shown} | {wall} | {cpu} | {faster} | {by_cpu} | {peak} |")
    return lines


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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for side, colour in zip((DENSE, *LAYOUTS), ("#333333", "#0072b2", "#009e73", "#d55e00"), strict=True):
        timed = [length for length in times if side in times[length]]
        left.plot(timed, [Timing.of(times[n][side]["wall"]).median / 1e3 for n in timed], "o-", c=colour, label=side)
        held = [length for length in peaks if side in peaks[length]]
        right.plot(held, [peaks[n][side] / 1e6 for n in held], "o-", c=colour, label=side)
    for panel, name in ((left, "seconds, forward and backward"), (right, "peak memory of a call, MB")):
        panel.set(xscale="log", yscale="log", xlabel="tokens", title=name)
        panel.set_xticks(list(times), [str(n) for n in times])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    left.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def report(argv: Sequence[str], args: argparse.Namespace, figure: Path | None) -> str:
    times, peaks = {}, {}
    for length in args.lengths:
        times[length] = ask(args, "time", "--length", str(length))
        sides = list(times[length])
        peaks[length] = {s: ask(args, "memory", "--length", str(length), "--side", s) for s in sides}
    windows = ask(args, "windows")
    if figure is not None:
        draw(times, peaks, figure)
    picture = [] if figure is None else [f"![seconds and memory against length]({figure.name})", ""]
    reached = {clock: longest(windows, clock) for clock in ("wall", "cpu")}
    return "\n".join([
        "# Block-sparse attention against dense attention",
        "",
        f"- command: `python scripts/bench.py sparse_attention {shlex.join(argv)}`",
        f"- commit {revision()}, {time.strftime('%Y-%m-%d')}; Python {platform.python_version()}, torch "
        f"{torch.__version__}; {platform.machine()}, {os.cpu_count()} cores, {args.threads} threads",
        f"- one sequence, {args.heads} heads of {args.features}, float32, unidirectional; forward and backward; "
        f"{args.repeats} calls in turn, median (quartiles)",
        "- peak MB: what one call adds to its process",
        "",
        *table(times, peaks, args.heads),
        "",
        *picture,
        f"In the time that dense attention takes for {_ASKED:,} tokens, a window's layout takes {reached['wall']:,} "
        f"({reached['cpu']:,} by CPU time), of {', '.join(f'{n:,}' for n in args.windows)} tried.",
        "",
    ])  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py sparse_attention", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768], help="tokens")
    add("--dense-up-to", type=int, default=8192, metavar="TOKENS", help="dense attention is not measured above")
    windows = [16384, 24576, 32768, 40960, 49152, 65536]
    add("--windows", type=int, nargs="+", default=windows, help="lengths tried against dense attention's 4,096")
    add("--heads", type=int, default=4)
    add("--features", type=int, default=64, help="of a head")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--repeats", type=int, default=7)
    add("--record", type=record_path, metavar="FILE", help="write the text there, and the plot beside it")
    add("--worker", choices=("time", "memory", "windows"), help=argparse.SUPPRESS)
    add("--length", type=int, help=argparse.SUPPRESS)
    add("--side", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        work(args)
        return
    text = report(argv, args, None if args.record is None else args.record.with_suffix(".png"))
    print(text)
    if args.record is not None:
        write_record(args.record, text)
