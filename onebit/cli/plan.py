"""`onebit plan`: the estimates of `zero/plan.py` for a run, as a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ..comm import CODECS, momentum_codecs
from ..zero.inference.plan import WEIGHT_BYTES, ServeRun, TokenPlan, stage_plan, token_plan
from ..zero.offload.encode_plan import EncodeRun, chosen_place, encode_plans
from ..zero.offload.plan import FLOPS, OffloadRun
from ..zero.offload.plan import chosen as chosen_mode
from ..zero.offload.plan import plans as offload_plans
from ..zero.plan import Run, plans
from ..zero.sequence.plan import CODECS as SEQUENCE_CODECS
from ..zero.sequence.plan import SequenceRun
from ..zero.sequence.plan import chosen as chosen_layout
from ..zero.sequence.plan import plans as sequence_plans
from .numbers import amount, number, rate
from .output import Screen, Table, write_json

_HEADINGS = (
    "optimizer", "stage", "parameters", "gradients", "state", "bytes/param", "GB per rank", "bits/param", "in warm-up",
    "over the run", "s/step",
)  # fmt: skip
_ABOUT = """\
Estimates a run before it starts: memory and traffic of every stage and optimizer, and seconds per step. Bytes follow
from the layouts, seconds from costs of one machine; nothing is measured. `onebit doctor` measures.
"""
_STAGE_0 = """\
One-bit optimizers and local steps at stage 0: used directly, over onebit.comm.init(). The engine's stage 0 multiplies
their traffic by the ranks of a host: use stage 1 there."""


_MANY = 512
_CONNECTIONS = """\
Gloo and MPI connect each rank to all others: {ranks} open files, as far as the system allows (ulimit -Hn)."""


def table(run: Run) -> Table:
    """The plans of a run: bytes per parameter, bits that a rank sends, and seconds with all or no traffic hidden."""
    rows = []
    for made in plans(run):
        rows.append(
            [
                made.optimizer,
                str(made.stage),
                *(f"{x:.2f}" for x in (made.parameters, made.gradients, made.state, made.bytes_per_parameter)),
                f"{made.bytes_per_parameter * run.params / 1e9:.2f}",
                *(f"{bits:.2f}" for bits in (made.bits, made.warmup_bits, made.run_bits)),
                " to ".join(dict.fromkeys(f"{s:.3g}" for s in made.seconds)),
            ]
        )
    hosts = f"{run.hosts} host{'s' * (run.hosts > 1)} of {run.ranks_per_host} rank{'s' * (run.ranks_per_host > 1)}"
    about = f"{run.params:.4g} parameters on {hosts}, {run.link_bits_per_s / 1e9:g} Gbit/s, {run.steps} steps"
    return Table(about, _HEADINGS, rows)


def serving_table(run: ServeRun, ranks: int) -> Table:
    """The cost of a token on 1, 2, 4, ... ranks by rows and by layers, which is better, and whether splitting pays."""
    counts = [1 << k for k in range(ranks.bit_length()) if 1 << k < ranks] + [ranks]
    rows, alone = [], token_plan(run, 1)
    for count in counts:
        made = serving_plans(run, count)
        for plan in made:
            pays = "" if count == 1 else "yes" if plan.seconds < alone.seconds else "no"
            better = "better" if len(made) > 1 and plan == min(made, key=lambda one: one.seconds) else ""
            cells = plan.held_bytes / 1e9, plan.sent_bytes / 1e6, 1e3 * plan.reading_s, 1e3 * plan.sending_s
            by = "" if count == 1 else plan.by
            numbers = *(f"{x:.3g}" for x in cells), f"{run.rows / plan.seconds:.3g}"
            rows.append([str(plan.ranks), by, *numbers, better, pays])
    heading = "ranks", "by", "GB of weights", "MB sent/token", "ms reading", "ms sending", "tokens/s", "way", "pays"
    what = f"{run.params:.4g} parameters in {run.dtype}, {run.layers} layers of {run.width}, rows {run.rows}"
    return Table(f"{what}: a token over {run.link_bits_per_s / 1e9:g} Gbit/s", heading, rows)


def serving_plans(run: ServeRun, ranks: int) -> list[TokenPlan]:
    """The ways to divide a model among this many ranks."""
    return [token_plan(run, ranks)] + ([stage_plan(run, ranks)] if 1 < ranks <= run.layers else [])


def offload_table(run: OffloadRun) -> Table:
    """Bytes, seconds and the largest model of each mode of offload; "best" marks the choice of `chosen`."""
    best, rows = chosen_mode(run), []
    for made in offload_plans(run):
        places = (f"{x / 1e9:.4g}" for x in (made.device_bytes, made.host_bytes, made.disk_bytes))
        seconds = " to ".join(dict.fromkeys(f"{s:.3g}" for s in made.seconds))
        fits = "no" if not made.fits else "best" if made == best else "yes"
        rows.append([made.mode, made.to, *places, seconds, made.bound, fits, f"{made.largest_params / 1e9:.3g}"])
    heading = "mode", "to", "GB device", "GB host", "GB disk", "s/step", "bound by", "fits", "largest, 1e9"
    frozen = "" if run.trained is None else f", {run.trained:.4g} of them trained"
    frozen += "" if run.ratio == 1.0 else f", {run.ratio:g} of the state away in mode state"
    what = f"{run.params:.4g} parameters in {run.dtype}{frozen}"
    about = f"{what}, AdamW, {run.tokens:g} tokens a step; activations on top"
    return Table(about, heading, rows)


def encode_table(asked: EncodeRun) -> Table:
    """Bytes and seconds of each stage and place of the state; "best" marks the choice of `chosen_place`."""
    best, rows = chosen_place(asked), []
    for made in encode_plans(asked):
        cells = *(x / 1e9 for x in (made.device_bytes, made.host_bytes, made.disk_bytes)), *made.times.values()
        seconds = " to ".join(dict.fromkeys(f"{s:.3g}" for s in made.seconds))
        fits = "no" if not made.fits else "best" if made == best else "yes"
        rows.append([str(made.stage), made.place, *(f"{x:.3g}" for x in cells), seconds, made.bound, fits])
    heading = (
        "stage", "state", "GB device", "GB host", "GB disk", "s compute", "s PCIe", "s memory", "s network", "s disk",
        "s/step", "bound by", "fits",
    )  # fmt: skip
    run = asked.run
    what = f"{run.params:.4g} parameters in {run.dtype}, OneBitAdam, {run.hosts} x {run.ranks_per_host} ranks"
    return Table(f"{what}, {run.link_bits_per_s / 1e9:g} Gbit/s; activations on top", heading, rows)


def sequence_table(run: SequenceRun) -> Table:
    """Bytes, seconds and memory of a sequence on one rank, and of each layout over all; "best" is `chosen_layout`'s."""
    made, rows = sequence_plans(run), []
    for plan in made:
        seconds = " to ".join(dict.fromkeys(f"{s:.3g}" for s in plan.seconds))
        cells = plan.sent_bytes / 1e6, plan.compute_s, plan.traffic_s
        gigabytes = f"{plan.activation_bytes / 1e9:.3g}"
        best = "best" if plan == chosen_layout(made) else ""
        rows.append([str(plan.ranks), str(plan.ulysses_degree), *(f"{x:.3g}" for x in cells), seconds, gigabytes, best])
    heading = "ranks", "ulysses_degree", "MB sent/host", "s compute", "s traffic", "s/step", "GB activations", ""
    sees = "causal" if run.window is None else f"windows of {run.window}"
    what = f"{run.params:.4g} parameters in {run.dtype}, one sequence of {run.tokens:,} tokens, {sees}"
    what += "" if run.codec is None else f", keys and values in {run.codec}"
    return Table(
        f"{what}, {run.hosts} x {run.ranks_per_host} ranks, {run.link_bits_per_s / 1e9:g} Gbit/s", heading, rows
    )


def attention_shape(text: str) -> tuple[int, int, int, int]:
    """For argparse: layers, width, heads and key-value heads of "32x4096x32x8"."""
    parts = text.split("x")
    if len(parts) not in (3, 4) or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected layers, width, heads and, if fewer, key-value heads, as 32x4096x32x8, got {text!r}"
        )
    layers, width, heads, groups = map(int, [*parts, parts[2]][:4])
    return layers, width, heads, groups


def shape(text: str) -> tuple[int, int]:
    """For argparse: layers and width of "12x768"."""
    layers, _, width = text.partition("x")
    if not (layers.isdigit() and width.isdigit() and int(layers) > 0 < int(width)):
        raise argparse.ArgumentTypeError(f"expected layers and width as 12x768, got {text!r}")
    return int(layers), int(width)


# ---------------------------------------------------------------- what is asked


class Answer(NamedTuple):
    """A run, its plans as a table and for --json, and notes below the table."""

    run: Any
    table: Table
    plans: Iterable[Any]
    notes: Sequence[str] = ()


def answer(args: argparse.Namespace) -> Answer:
    """The plans that the options ask for. Raises ValueError if they are out of range or contradict each other."""
    Run(args.params, args.hosts, args.ranks_per_host)  # checks the numbers that all kinds have
    is_one = args.hosts == args.ranks_per_host == 1
    is_offload = args.device_gb is not None or args.host_gb is not None
    if (args.serve is not None) + (args.sequence is not None) + is_offload > 1:
        raise ValueError(
            "expected one of --serve, --sequence and offload (--device-gb, --host-gb); plan each by itself"
        )
    for kind, is_asked, names in (
        ("serving: add --serve", args.serve is not None, ("rows", "memory")),
        ("a split sequence: add --sequence", args.sequence is not None, ("window", "kv")),
        ("offload: add --device-gb or --host-gb", is_offload, ("trained", "ratio")),
    ):
        if not is_asked and any(getattr(args, name) is not None for name in names):
            raise ValueError(f"{' and '.join(f'--{name}' for name in names)} belong to {kind}")
    if is_offload:
        return _offload(args) if is_one else _encode(args)
    if args.sequence is not None:
        return _sequence(args)
    return _train(args) if args.serve is None else _serve(args)


def _train(args: argparse.Namespace) -> Answer:
    numbers = args.params, args.hosts, args.ranks_per_host, args.dtype, args.error_bytes, args.link, args.compute
    named = {"codec": args.codec, "warmup_codec": args.warmup_codec, "local_steps": args.local_steps}
    run = Run(*numbers, **named, steps=args.steps)
    notes = [_STAGE_0] if min(run.hosts, run.ranks_per_host) > 1 else []
    if run.world_size >= _MANY:
        notes.append(_CONNECTIONS.format(ranks=run.world_size))
    return Answer(run, table(run), plans(run), notes)


def _serve(args: argparse.Namespace) -> Answer:
    layers, width = args.serve
    memory, rows = 20.0 if args.memory is None else args.memory, 1 if args.rows is None else args.rows
    speeds = {"link_bits_per_s": args.link, "memory_bytes_per_s": memory * 1e9, "flops_per_s": args.tflops * 1e12}
    run = ServeRun(args.params, layers, width, args.dtype, rows, **speeds)
    ranks = args.hosts * args.ranks_per_host
    return Answer(run, serving_table(run, ranks), [plan for n in sorted({1, ranks}) for plan in serving_plans(run, n)])


def _offload(args: argparse.Namespace) -> Answer:
    host = 128.0 if args.host_gb is None else args.host_gb
    run = OffloadRun(
        args.params,
        device_bytes=(args.device_gb or 0.0) * 1e9,
        host_bytes=host * 1e9,
        disk_bytes=args.disk_gb * 1e9,
        dtype=args.dtype,
        tokens=args.tokens,
        largest=args.largest,
        trained=args.trained,
        ratio=1.0 if args.ratio is None else args.ratio,
        modules=args.modules,
        pcie_per_s=args.pcie * 1e9,
        disk_per_s=args.disk * 1e9,
        memory_per_s=args.host_memory * 1e9,
        flops_per_s=args.tflops * 1e12,
    )
    return Answer(run, offload_table(run), offload_plans(run))


def _encode(args: argparse.Namespace) -> Answer:
    if args.trained is not None or args.ratio is not None or not args.device_gb:
        raise ValueError(
            "with several ranks, all parameters are trained, and their one-bit state is in one place: give "
            "--device-gb, and leave out --ratio and --trained"
        )
    compute_s = args.compute or FLOPS * args.params * args.tokens / (args.tflops * 1e12)
    numbers = args.params, args.hosts, args.ranks_per_host, args.dtype, args.error_bytes, args.link, compute_s
    run = EncodeRun(
        Run(*numbers, codec=args.codec, warmup_codec=args.warmup_codec),
        device_bytes=args.device_gb * 1e9,
        host_bytes=(128.0 if args.host_gb is None else args.host_gb) * 1e9,
        largest=args.largest,
        pcie_per_s=args.pcie * 1e9,
        device_memory_per_s=args.device_memory * 1e9,
        host_memory_per_s=args.host_memory * 1e9,
        disk_bytes=args.disk_gb * 1e9,
        disk_per_s=args.disk * 1e9,
    )
    return Answer(run, encode_table(run), encode_plans(run))


def _sequence(args: argparse.Namespace) -> Answer:
    layers, width, heads, groups = args.sequence
    run = SequenceRun(
        args.params,
        int(args.tokens),
        layers,
        width,
        heads,
        groups,
        hosts=args.hosts,
        ranks_per_host=args.ranks_per_host,
        window=args.window,
        dtype=args.dtype,
        codec=args.kv,
        link_bits_per_s=args.link,
        flops_per_s=args.tflops * 1e12,
    )
    return Answer(run, sequence_table(run), sequence_plans(run))


# ---------------------------------------------------------------- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="onebit plan", description=_ABOUT)
    add = parser.add_argument
    add("--params", type=number, required=True, help="parameters of the model: 340m, 1.5e9")
    add("--hosts", type=int, required=True, help="number of hosts")
    add("--ranks-per-host", type=int, default=1, help="ranks on each host (default: 1)")
    add("--dtype", choices=tuple(WEIGHT_BYTES), default="bf16", help="dtype of parameters; int8 and int4 only with "
        "--serve (default: bf16)")  # fmt: skip
    add("--error-bytes", type=int, choices=(2, 4), default=4, help="bytes per element of the residuals (default: 4)")
    add("--link", type=rate, default=1e9, metavar="RATE", help="rate of a host's link: 1gbit, 100mbit (default: 1gbit)")
    add("--codec", choices=momentum_codecs(), default="sign", help="codec of the momentum, except in layouts that are "
        "sharded across hosts (default: sign)")  # fmt: skip
    add("--warmup-codec", choices=CODECS, help="codec of gradients in warm-up and refreshes (default: each "
        "optimizer's)")  # fmt: skip
    add("--steps", type=int, default=1000, help="steps of the run, over which bits are averaged (default: 1000)")
    add("--local-steps", type=int, default=32, metavar="H", help="steps between two rounds of LocalSteps (default: 32)")
    add("--compute", type=amount, default=0.0, metavar="SECONDS", help="seconds of a step without traffic, which hide "
        "a part of the traffic (default: 0)")  # fmt: skip
    add("--serve", type=shape, metavar="LAYERSxWIDTH", help="plan init_inference instead: the cost of a token")
    add("--rows", type=int, help="with --serve: prompts answered at once (default: 1)")
    add("--memory", type=amount, metavar="GB/s", help="with --serve: bandwidth of memory (default: 20)")
    add("--sequence", type=attention_shape, metavar="LAYERSxWIDTHxHEADS[xGROUPS]", help="plan sequence_parallel: one "
        "sequence of --tokens over all ranks, each of --tflops")  # fmt: skip
    add("--kv", choices=SEQUENCE_CODECS, help="with --sequence: format in which keys and values travel "
        "(default: --dtype)")  # fmt: skip
    add("--window", type=int, metavar="TOKENS", help="with --sequence: tokens that a token sees (default: all)")
    add("--json", type=Path, metavar="FILE", help="also write the numbers to FILE; - is standard output")
    _add_offload(parser)
    return parser


def _add_offload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "offload",
        "plan offload, with --device-gb or --host-gb: on one GPU, or one host without; with several ranks, compare "
        "where the state is encoded",
    )
    add = group.add_argument
    add("--device-gb", type=amount, help="memory of the GPU; 0: no GPU")
    add("--host-gb", type=amount, help="host memory that may be used (default: 128)")
    add("--disk-gb", type=amount, default=0.0, help="space on a local disk (default: 0)")
    add("--pcie", type=amount, default=25.0, metavar="GB/s", help="bandwidth of PCIe in one direction (default: 25)")
    add("--disk", type=amount, default=5.0, metavar="GB/s", help="bandwidth of the disk (default: 5)")
    add("--device-memory", type=amount, default=1000.0, metavar="GB/s", help="bandwidth of GPU memory (default: 1000)")
    add("--host-memory", type=amount, default=100.0, metavar="GB/s", help="bandwidth of host memory (default: 100)")
    add("--tflops", type=amount, default=100.0, help="speed that the device reaches (default: 100)")
    add("--tokens", type=number, default=4096.0, help="tokens of a step (default: 4096)")
    add("--largest", type=number, default=0.0, help="elements of the largest parameter (default: 0)")
    add("--modules", type=int, default=0, help="modules that own parameters; counts their Python objects (default: 0)")
    add("--ratio", type=amount, help="mode state: share of parameters with their state in the store (default: 1)")
    add("--trained", type=number, help="trained parameters, if the rest is frozen (default: all)")


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        found = answer(args)
    except ValueError as error:
        parser.error(str(error))
    screen = Screen()
    screen.table(found.table)
    for note in found.notes:
        screen.line(note)
    write_json(args.json, {"run": asdict(found.run), "plans": [asdict(made) for made in found.plans]})
    return 0
