"""`onebit doctor`: lists what is installed, measures the network, and predicts whether one bit pays on it."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ... import comm
from ...comm import PeerError, Transport
from .. import UserError
from ..numbers import model_size, number, seconds
from ..output import Screen, Table, write_json
from . import installation, installed, links, samples
from .contenders import Method, methods_for
from .prediction import Prediction, Verdict, verdict

_ABOUT = """\
Lists what is installed here. Started on two or more ranks, it also measures the network between them and predicts a
training step: it times steps of a few matrices for every optimizer, on the network at hand, and extrapolates to a model
of the size you name. It writes no file except that of --json.

  onebit doctor
  torchrun --nnodes 2 --nproc-per-node 8 --master-addr HOST --no-python onebit doctor --params 340m --compute 0.4
  onebit emulate --hosts 4 --rate 1gbit -- onebit doctor --model gpt2-medium --compute 0.4
"""
_EPILOG = """\
Exit status: 0 success; 1 the ranks did not reach each other, or the environment contradicts itself; 2 wrong arguments.
A verdict against one bit is not an error. The doctor cannot time your script: give it --compute, the seconds of a step
without any traffic, which your script measures best on one rank.
"""


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="onebit doctor", description=_ABOUT, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--params", type=number, metavar="N", help="parameters of the model: 340m, 1.5e9")
    size.add_argument("--model", type=model_size, metavar="NAME", help="take those of a known model: gpt2-medium")
    add = parser.add_argument
    add("--compute", type=seconds, metavar="SECONDS", help="seconds of a step on one rank, without traffic (default: "
        "0, the table then shows traffic and update alone)")  # fmt: skip
    add("--methods", nargs="+", metavar="NAME", help="show only these rows of the table, by the beginnings of their "
        "names, and the first dense one (default: all)")  # fmt: skip
    add("--warmup-codec", choices=comm.CODECS, help="codec of gradients in warm-ups (default: each optimizer's)")
    add("--backend", choices=comm.launch.BACKENDS, help="transport (default: as in training)")
    add("--timeout", type=seconds, default=60.0, metavar="SECONDS", help="longest wait for other ranks (default: 60)")
    add("--json", type=Path, metavar="FILE", help="also write the results to FILE; - is standard output")
    args = parser.parse_args(argv)
    args.params = args.params or args.model
    if args.compute is not None and args.params is None:
        parser.error("--compute needs the size of a model: add --params 340m or --model gpt2-medium")
    return args


def main(argv: Sequence[str]) -> int:
    args, logger = _parse(argv), logging.getLogger("onebit")
    level = logger.level
    logger.setLevel(logging.WARNING)  # the tables show what the parts would log
    try:
        return _examine(args)
    finally:
        logger.setLevel(level)


def _examine(args: argparse.Namespace) -> int:
    try:
        facts, package = installed.facts(os.environ), installation.examine(os.environ)
        transport = comm.init(args.backend, timeout_s=args.timeout)
    except (ValueError, ImportError, PeerError) as error:
        raise UserError(str(error)) from error
    screen = Screen(is_quiet=transport.rank != 0)
    facts |= package.facts
    found: dict[str, object] = {"facts": facts, "transport": transport.describe(), "ranks": transport.world_size}
    found["problems"] = package.problems
    rows = [[what, value] for what, value in (facts | {"transport": transport.describe()}).items()]
    screen.table(Table("This machine", ("", ""), rows, 2))
    for problem in package.problems:
        screen.line(f"Look at this: {problem}.")
    try:
        if transport.world_size > 1:
            found |= _on_the_network(args, transport, screen)
        else:
            screen.line(
                "One rank: there is no network to measure. Start it on two or more, by torchrun, mpirun or srun; or "
                "emulate a slow network:\n  onebit emulate --hosts 4 --rate 1gbit -- onebit doctor --params 340m "
                "--compute 0.4"
            )
    except PeerError as error:
        raise UserError(str(error)) from error
    if transport.rank == 0:
        write_json(args.json, found)
    transport.close()
    return 0


def _on_the_network(args: argparse.Namespace, transport: Transport, screen: Screen) -> dict[str, object]:
    nodes = links.find_nodes(transport)
    measured = links.measure(transport, nodes, screen.status)
    slow = links.slow(measured, nodes)
    screen.status("")
    if len(nodes) > 1:
        screen.table(_links_table(measured, nodes))
        screen.line(slow or "All links are equally fast.")
    found: dict[str, object] = {
        "nodes": [asdict(node) for node in nodes], "links": [asdict(link) for link in measured], "slow": slow,
    }  # fmt: skip
    if args.params is None:
        screen.line("Add --params 340m --compute SECONDS to predict a training step here.")
        return found
    compute_s, methods = args.compute or 0.0, _choose(methods_for(transport, args.warmup_codec), args.methods)
    shapes = samples.model_shapes(args.params)
    slowest = min((link.bytes_per_s for link in measured), default=1e9)
    taken = samples.take_samples(methods, shapes, transport, slowest, screen.status)
    screen.status("")
    predicted = samples.predictions(methods, taken, shapes, compute_s)
    verdict = _verdict(methods, predicted, compute_s)
    elements = sum(samples.numels_of(shapes))
    screen.table(_steps_table(predicted, methods, elements, compute_s, transport.world_size))
    _explain(args, methods, compute_s, screen)
    if verdict is not None:
        screen.line(f"\nVerdict: {verdict.text}.")
    return found | {
        "params": elements,
        "compute_s": compute_s,
        "predicted": {name: asdict(step) for name, step in predicted.items()},
        "samples": {name: [asdict(one) for one in each] for name, each in taken.items()},
        "verdict": None if verdict is None else asdict(verdict),
    }


def _choose(methods: Sequence[Method], names: Sequence[str] | None) -> Sequence[Method]:
    """The methods whose names begin with one of these, and the first dense one."""
    if names is None:
        return methods
    for name in names:
        if not any(m.name.lower().startswith(name.lower()) for m in methods):
            raise UserError(f"--methods {name}: expected beginnings of {', '.join(m.name for m in methods)}")
    baseline = next(m for m in methods if m.is_dense)
    return [m for m in methods if m is baseline or any(m.name.lower().startswith(name.lower()) for name in names)]


def _links_table(measured: Sequence[links.Link], nodes: Sequence[links.Node]) -> Table:
    rows = [
        [nodes[link.a].name, nodes[link.b].name, f"{8e-9 * link.bytes_per_s:.3g}", f"{1e3 * link.latency_s:.2f}"]
        for link in measured
    ]
    return Table("Links between nodes, both directions at once", ("from", "to", "Gbit/s", "latency ms"), rows, 2)


def _steps_table(
    predicted: Mapping[str, Prediction], methods: Sequence[Method], elements: int, compute_s: float, ranks: int
) -> Table:
    baseline = predicted[next(m.name for m in methods if m.is_dense)].hidden
    rows = [
        [name, f"{step.hidden:.3g}", f"{step.behind:.3g}", f"{baseline / step.hidden:.2f} ×"]
        for name, step in predicted.items()
    ]
    title = f"Predicted seconds per step: {elements / 1e6:.4g} M parameters on {ranks} ranks, {compute_s:g} s computing"
    return Table(title, ("", "s/step", "s/step, nothing hidden", "times as fast"), rows)


def _explain(args: argparse.Namespace, methods: Sequence[Method], compute_s: float, screen: Screen) -> None:
    if args.compute is None:
        screen.line("Without --compute a step is only its traffic and its update: the largest possible gain.")
    if not any(m.needs_group for m in methods):
        screen.line("Over MPI there is no DDP and no PowerSGD: dense float32 is AdamW after onebit's own averaging.")
    screen.line(
        "s/step: backward hides the traffic under way, as on an accelerator. Nothing hidden: ranks have no processor "
        f"to spare. Warm-up: {args.warmup_codec or 'log4'}"
        f"{', also' if args.warmup_codec else '; int8'} for ZeroOneAdam and OnebitLamb."
    )


def _verdict(methods: Sequence[Method], predicted: Mapping[str, Prediction], compute_s: float) -> Verdict | None:
    dense = {m.name: predicted[m.name].hidden for m in methods if m.is_dense}
    ours = {m.name: predicted[m.name].hidden for m in methods if m.is_ours}
    return verdict(dense, ours, compute_s) if ours else None
