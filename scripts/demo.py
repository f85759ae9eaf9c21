"""What `make demo` shows: what a slow network costs AdamW and OnebitAdam, and what each learns in as many steps.

Seconds and bytes are measured on four emulated hosts where this machine can (`onebit emulate`); elsewhere the ranks
meet on loopback, and the table says so. All steps of AdamW cost the same there, so it takes a few of them. Losses need
no network: they are of simulated ranks (`study/run.py`), for several seeds and with two values of β2, since a few
hundred steps tell no smaller difference than AdamW's own seeds have, and a baseline deserves its better β2.
Everything it shows is in runs/demo afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import reports
import rich.table
import torch
from bench.command import mpirun, why_no_mpi
from provenance import check_record, refuse_dirty_tree, revision
from rich.console import Console
from study import main as study
from study.figure import draw
from study.run import Job
from train.corpus import first_difference, read_corpus
from train.report import read_csv

from onebit.cli import cluster

HERE = Path(__file__).parent
RESULTS, RECORD = HERE.parent / "docs" / "results.md", HERE / "records" / "demo.json"
BEGIN, END = "<!-- demo.py --write: from here -->", "<!-- to here -->"

ON_THE_NETWORK = {"adamw": "AdamW, dense", "onebit-adam": "OnebitAdam"}
DENSE_STEPS = 25
LOSSES = {
    "adamw": "AdamW, β2 = .999",
    "adamw, beta2 0.95": "AdamW, β2 = .95",
    "onebit-adam": "OnebitAdam, β2 = .999",
    "onebit-adam, beta2 0.95": "OnebitAdam, β2 = .95",
}
TASKS = {"small": "demo-lm", "tiny": "byte-lm"}


@dataclass(frozen=True)
class Traffic:
    """One run over the network. Seconds per step: mean over all steps, and medians once the traffic is at its least."""

    bytes_per_parameter: float
    last_bits: float
    wire_bytes_per_parameter: float | None
    step_s: float
    last_phase_step_s: float
    last_phase_comm_s: float

    @classmethod
    def read(cls, folder: Path, name: str) -> Traffic:
        summary = json.loads((folder / f"{name}.json").read_text())
        rows = read_csv(folder / f"{name}.csv")
        usual = statistics.mode(row["phase"] for row in rows[-max(1, len(rows) // 4) :])
        last_phase = [row for row in rows if row["phase"] == usual]
        per_step = summary["parameters"] * summary["steps_here"]
        return cls(
            bytes_per_parameter=summary["bytes_per_parameter_and_step"],
            last_bits=statistics.median(float(row["bits_per_parameter"]) for row in last_phase),
            wire_bytes_per_parameter=None if summary["wire_bytes"] is None else summary["wire_bytes"] / per_step,
            step_s=summary["step_s"]["mean"],
            last_phase_step_s=statistics.median(float(row["step_s"]) for row in last_phase),
            last_phase_comm_s=statistics.median(float(row["comm_ms"]) / 1e3 for row in last_phase),
        )


@dataclass(frozen=True)
class Outcome:
    """What a demo found. traffic: by optimizer; losses: by method of study/run.py, one for each seed."""

    about: str
    network: str
    steps: int
    traffic: dict[str, Traffic]
    losses: dict[str, list[float]]


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of which is a label; for a terminal and for Markdown."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> rich.table.Table:
        table = rich.table.Table(min_width=72)
        for k, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if k else "left", no_wrap=not k)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        return reports.table(self.headings, self.rows, names=len(self.headings))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with dense AdamW and with OnebitAdam, and compare.")
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--rate", default="100mbit", help="of each emulated host's link, as tc writes it")
    add("--network", choices=("auto", "emulated", "loopback"), default="auto")
    add("--size", choices=TASKS, default="small")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=4, help="sequences per rank and step")
    add("--lr", type=float, default=1.4e-3, help="dense AdamW's best here of 1, 1.4, 2, 4 and 8e-3")
    add("--seeds", type=int, default=2, help="of the losses; each takes four runs")
    add("--quick", action="store_true", help="a few steps of a tiny model: does it run?")
    add("--out", type=Path, default=Path("runs/demo"))
    add(
        "--write",
        action="store_true",
        help="put the tables into docs/results.md, and the numbers into scripts/records",
    )
    args = parser.parse_args(argv)
    if args.write:
        check_record(parser, RECORD)
    args.freeze_step = "auto"
    if args.quick:
        args.size, args.steps, args.seeds, args.freeze_step = "tiny", 30, 1, "10"
    return args


def training_command(args: argparse.Namespace, optimizer: str) -> list[str]:
    return [
        sys.executable, str(HERE / "train.py"), "--optimizer", optimizer, "--size", args.size,
        "--steps", str(args.steps), "--batch-size", str(args.batch_size), "--lr", str(args.lr),
        "--stop-after", str(min(args.steps, DENSE_STEPS) if optimizer == "adamw" else args.steps),
        "--freeze-step", args.freeze_step, "--compression", "always", "--eval-every", str(args.steps),
        "--progress", "bar" if sys.stdout.isatty() else "lines",
        "--csv", str(args.out / f"{optimizer}.csv"), "--json", str(args.out / f"{optimizer}.json"),
    ]  # fmt: skip


def train_on_emulated_hosts(args: argparse.Namespace) -> int:
    """Both runs, one rank per host. The exit status of the first that fails, or 0."""
    with cluster.Cluster(args.ranks, args.rate) as hosts:
        for optimizer in ON_THE_NETWORK:
            if status := hosts.run(training_command(args, optimizer), launcher="mpirun").status:
                return status
    return 0


def train_on_loopback(args: argparse.Namespace) -> int:
    """Both runs, all ranks on this host. The exit status of the first that fails, or 0."""
    if why := why_no_mpi():
        sys.exit(f"demo.py: {why}")
    threads = max(1, len(os.sched_getaffinity(0)) // args.ranks)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    for optimizer in ON_THE_NETWORK:
        command = [*mpirun(args.ranks), *training_command(args, optimizer)]
        if status := subprocess.run(command, env=environment).returncode:
            return status
    return 0


def choose_network(args: argparse.Namespace) -> tuple[bool, str]:
    """(whether to emulate hosts, what to call the network in the table)."""
    reason = "--network loopback" if args.network == "loopback" else cluster.available()
    if reason is None:
        return (
            True,
            f"{args.ranks} emulated hosts, {args.rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')} each",
        )
    if args.network == "emulated":
        sys.exit(f"demo.py: {reason}")
    return False, f"loopback, no network between the ranks ({reason})"


def describe_text() -> str:
    """Which text is trained on: the pinned one, or what else this Python carries."""
    corpus = read_corpus()
    manifest = HERE / "records" / f"corpus_{platform.python_implementation().lower()}-{corpus.python}.json"
    text = f"the standard library of Python {corpus.python}, {len(corpus.train) / 1e6:.1f} MB"
    if not manifest.exists():
        return f"{text} (no manifest of this version to compare with; sha256 {corpus.sha256[:12]})"
    difference = first_difference(corpus, manifest)
    return f"{text} (as in {manifest.name})" if difference is None else f"{text}; {difference}"


def measure_losses(args: argparse.Namespace) -> dict[str, list[float]]:
    """By method, one for each seed; also draws the curves."""
    file = args.out / "losses.jsonl"
    file.unlink(missing_ok=True)
    jobs = [
        Job(TASKS[args.size], method, args.lr, seed, args.steps, args.ranks, args.batch_size)
        for seed in range(args.seeds)
        for method in LOSSES
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        study.run_missing(jobs, file, pool, "losses")
    results = study.read_results(file)
    draw(list(results.values()), args.out / "loss.png")
    return {method: [results[job].loss for job in jobs if job.method == method] for method in LOSSES}


# ---------------------------------------------------------------- what is said


def traffic_table(traffic: dict[str, Traffic]) -> Table:
    dense, onebit = (traffic[name] for name in ON_THE_NETWORK)
    quantities = {
        "bytes sent per parameter and step": ("bytes_per_parameter", ".3f"),
        "the same, counted by the kernel": ("wire_bytes_per_parameter", ".3f"),
        "bits per parameter, after warm-up": ("last_bits", ".2f"),
        "seconds per step": ("step_s", ".3f"),
        "after warm-up": ("last_phase_step_s", ".3f"),
        "of these waiting for the network": ("last_phase_comm_s", ".3f"),
    }
    rows = []
    for label, (name, form) in quantities.items():
        a, b = getattr(dense, name), getattr(onebit, name)
        if a is not None and b is not None:
            rows.append([label, f"{a:{form}}", f"{b:{form}}", f"{a / b:.1f} ×" if b else ""])
    return Table(["", *ON_THE_NETWORK.values(), "ratio"], rows)


def loss_table(losses: dict[str, list[float]]) -> Table:
    """With each method's mean against the better of the dense baselines."""
    means = {method: statistics.fmean(values) for method, values in losses.items()}
    baseline = min(mean for method, mean in means.items() if method.startswith("adamw"))
    rows = []
    for method, values in losses.items():
        gap = f"{100 * (means[method] / baseline - 1):+.1f} %"
        rows.append([LOSSES[method], *(f"{loss:.3f}" for loss in [*values, means[method]]), gap])
    seeds = (f"seed {seed}" for seed in range(len(losses["adamw"])))
    return Table(["", *seeds, "mean", "against AdamW's better"], rows)


def noise(losses: dict[str, list[float]]) -> str:
    """How far apart AdamW's own runs are, in a sentence."""
    if len(losses["adamw"]) == 1:
        return "One seed: nothing tells how much of a difference is noise (--seeds 2)."
    spread = max(max(v) / min(v) - 1 for method, v in losses.items() if method.startswith("adamw"))
    return f"AdamW's own seeds differ by {100 * spread:.1f} %: a smaller difference means nothing."


def markdown(outcome: Outcome) -> str:
    """What docs/results.md shows."""
    return f"""\
{outcome.about}

Traffic and time, {outcome.network}:

{traffic_table(outcome.traffic).markdown()}

Validation loss after {outcome.steps} steps, nats per byte, simulated ranks:

{loss_table(outcome.losses).markdown()}

{noise(outcome.losses)}
"""


def write(outcome: Outcome) -> None:
    """Into docs/results.md, between its marks, and into the record. Raises DirtyTreeError, as `refuse_dirty_tree`."""
    refuse_dirty_tree(RECORD)
    before, _, rest = RESULTS.read_text().partition(BEGIN)
    RESULTS.write_text(f"{before}{BEGIN}\n\n{markdown(outcome)}\n{END}{rest.partition(END)[2]}")
    RECORD.write_text(json.dumps(asdict(outcome), indent=1) + "\n")


def read_record() -> Outcome:
    data = json.loads(RECORD.read_text())
    return Outcome(**data | {"traffic": {name: Traffic(**run) for name, run in data["traffic"].items()}})


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    console = Console()
    is_emulated, network = choose_network(args)
    console.print(
        f"Model: {args.size}, {args.steps} steps. Text: {describe_text()}.\nNetwork: {network}.", highlight=False
    )
    status = (train_on_emulated_hosts if is_emulated else train_on_loopback)(args)
    if status:
        return status
    outcome = Outcome(
        about=f"`{shlex.join(['python', 'scripts/demo.py', *sys.argv[1:]])}`, {datetime.now(timezone.utc).date()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, revision {revision()}, "
        f"{len(os.sched_getaffinity(0))} cores, no GPU.",
        network=network,
        steps=args.steps,
        traffic={name: Traffic.read(args.out, name) for name in ON_THE_NETWORK},
        losses=measure_losses(args),
    )
    console.print(f"\nTraffic and time, {network}", highlight=False)
    console.print(traffic_table(outcome.traffic).rich())
    console.print(f"Validation loss after {args.steps} steps, nats per byte, simulated ranks", highlight=False)
    console.print(loss_table(outcome.losses).rich())
    console.print(noise(outcome.losses), highlight=False)
    if args.write:
        write(outcome)
    console.print(f"Curves: {args.out}/loss.png; every step: {args.out}/*.csv; losses: {args.out}/losses.jsonl")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
