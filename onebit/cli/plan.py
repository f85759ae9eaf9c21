"""`onebit plan`: what `zero/plan.py` says of a run, as a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..comm import momentum_codecs
from ..zero.plan import DTYPE_BYTES, Run, plans
from .numbers import number, rate
from .output import Screen, Table, write_json

_HEADINGS = (
    "optimizer", "stage", "parameters", "gradients", "state", "bytes/param", "GB per rank", "bits/param", "s/step",
)  # fmt: skip
_ABOUT = """\
What a run will need, before it is started: memory and traffic of every stage and optimizer, and seconds per step.
Counted from the layouts and estimated with costs of one machine, not measured: `onebit doctor` measures.
"""


def table(run: Run) -> Table:
    """The plans of a run: bytes per parameter, bits that a rank sends, and seconds from all to none of them hidden."""
    rows = []
    for made in plans(run):
        rows.append(
            [
                made.optimizer,
                str(made.stage),
                *(f"{x:.2f}" for x in (made.parameters, made.gradients, made.state, made.bytes_per_parameter)),
                f"{made.bytes_per_parameter * run.params / 1e9:.2f}",
                f"{made.bits:.2f}",
                " to ".join(dict.fromkeys(f"{s:.3g}" for s in made.seconds)),
            ]
        )
    hosts = f"{run.hosts} host{'s' * (run.hosts > 1)} of {run.ranks_per_host} rank{'s' * (run.ranks_per_host > 1)}"
    return Table(f"{run.params:.4g} parameters on {hosts}, {run.link_bits_per_s / 1e9:g} Gbit/s", _HEADINGS, rows)


def _parse(argv: Sequence[str]) -> tuple[Run, Path | None]:
    parser = argparse.ArgumentParser(prog="onebit plan", description=_ABOUT)
    add = parser.add_argument
    add("--params", type=number, required=True, help="of the model: 340m, 1.5e9")
    add("--hosts", type=int, required=True)
    add("--ranks-per-host", type=int, default=1)
    add("--dtype", choices=DTYPE_BYTES, default="bf16")
    add("--error-bytes", type=int, choices=(2, 4), default=4, help="of the one-bit optimizers' errors")
    add("--link", type=rate, default=1e9, metavar="RATE", help="of a host: 1gbit, 100mbit (default: 1gbit)")
    add("--codec", choices=momentum_codecs(), default="sign", help="of the momentum, but across hosts")
    add("--compute", type=float, default=0.0, metavar="SECONDS", help="of a step without traffic; hides some of it")
    add("--json", type=Path, metavar="FILE", help="write the numbers there, too; - is standard output")
    args = parser.parse_args(argv)
    try:
        numbers = args.params, args.hosts, args.ranks_per_host, args.dtype, args.error_bytes, args.link, args.compute
        return Run(*numbers, codec=args.codec), args.json
    except ValueError as error:
        parser.error(str(error))


def main(argv: Sequence[str]) -> int:
    run, file = _parse(argv)
    Screen().table(table(run))
    write_json(file, {"run": asdict(run), "plans": [asdict(made) for made in plans(run)]})
    return 0
