"""Train everything by two revisions and compare the bits: the gate of a change that must not change a number.

    python scripts/same_bits.py main~3 --record scripts/records/same_bits_2026-11.md

The base revision is checked out into a folder of its own. Both trees then train the same small runs in turn, every
optimizer in every form over every transport, and each says what its runs ended in: hashes of the losses, of the
parameters and of the optimizer's state on all ranks, bytes sent, seconds per step, peak memory. Hashes and bytes must
be equal; seconds and memory are printed. Exit status 1 where anything differs. The base needs this script, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.command import mpirun
from provenance import ROOT, checkout, record_path
from reports import publish

PLAIN = ("onebit-adam", "onebit-lamb", "zero-one-adam", "adamw", "lamb")
ONE_BIT = PLAIN[:3]
STEPS, LONG_STEPS = 12, 30


@dataclass(frozen=True)
class Start:
    """One start of ranks, which make several runs. launcher: sim (threads), torchrun or mpirun."""

    launcher: str
    ranks: int
    runs: Mapping[str, str]
    levels: int = 1
    timeout_s: float = 600.0


def _runs(optimizers: Iterable[str], *variants: str) -> dict[str, str]:
    return {f"{each} {variant}".strip(): f"--optimizer {each} {variant}" for each in optimizers for variant in variants}


_IN_NODES = "--ranks-per-node 2"
_LOCAL = "--local-step-clipper 4"
_ROUNDS = "--local-steps 4"
STARTS = {
    "threads": Start(
        "sim",
        3,
        _runs(PLAIN, "", "--max-grad-norm 1")
        | _runs(["zero-one-adam"], _LOCAL)
        | _runs(["adamw", "lamb"], _ROUNDS, "--local-steps 5 --differences int8 --outer-lr 0.7 --outer-momentum 0.9"),
    ),
    "threads in two levels": Start(
        "sim",
        4,
        _runs(ONE_BIT, "")
        | _runs(["zero-one-adam"], _LOCAL)
        | _runs(["adamw"], _ROUNDS, f"{_ROUNDS} --accumulate 2 --differences fp32"),
        levels=2,
    ),
    "one rank": Start("sim", 1, _runs(PLAIN, "", "--accumulate 2")),
    "torchrun": Start("torchrun", 3, _runs(PLAIN, "", "--accumulate 2") | _runs(["zero-one-adam"], _LOCAL)),
    "torchrun in two levels": Start("torchrun", 4, _runs(ONE_BIT, ""), levels=2),
    "mpirun": Start("mpirun", 3, _runs(PLAIN, "")),
    "engine, replicated": Start("torchrun", 4, _runs(PLAIN, "--zero 0", "--zero 0 --dtype bf16 --max-grad-norm 1")),
    "engine, inside a node": Start(
        "torchrun",
        4,
        _runs(PLAIN, *(f"--zero {stage} {_IN_NODES} --accumulate 2" for stage in (1, 2, 3)))
        | _runs(["zero-one-adam"], f"--zero 1 {_IN_NODES} {_LOCAL}"),
    ),
    "engine, across nodes": Start(
        "torchrun",
        4,
        _runs(["sharded-onebit-adam"], "--zero 1", "--zero 2 --dtype bf16 --max-grad-norm 1 --accumulate 2")
        | _runs(["onebit-lamb", "zero-one-adam"], "--zero 1 --ranks-per-node 1", "--zero 2 --ranks-per-node 1")
        | _runs(["zero-one-adam"], f"--zero 1 --ranks-per-node 1 {_LOCAL}"),
    ),
    "engine, stages and slices": Start(
        "torchrun",
        4,
        _runs(ONE_BIT, f"--zero 0 {_IN_NODES} --pipe 2", f"--zero 0 {_IN_NODES} --tensor 2")
        | _runs(["onebit-adam"], f"--zero 0 {_IN_NODES} --pipe 2 --activations int8 --schedule zero-bubble")
        | _runs(["adamw", "onebit-adam"], "--zero 1 --pipe 2 --tensor 2"),
    ),
    "25 M parameters": Start("torchrun", 2, _runs(["onebit-adam", "zero-one-adam"], "--size 25m --steps 8")),
}


@dataclass
class Ended:
    """What one run ended in. losses, parameters, state: hashes. peak_bytes: of the start's processes so far."""

    losses: str
    parameters: str
    state: str
    sent_bytes: int
    step_s: float
    peak_bytes: int = field(default=0)

    def differs_in(self, other: Ended) -> list[str]:
        names = ("losses", "parameters", "state", "sent_bytes")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


# ---------------------------------------------------------------- in each revision's own tree


def train_here(name: str, out: Path) -> None:
    """As one rank of a start, or as all threads of one: its runs, and what they ended in, written by rank 0."""
    from onebit import comm

    start = STARTS[name]
    if start.launcher == "sim":
        ended = comm.run_ranks(start.ranks, lambda transport: _train_all(start, _leveled(transport, start)))[0]
    else:
        transport = comm.init("gloo" if start.launcher == "torchrun" else "mpi", levels=start.levels)
        ended = _train_all(start, transport)
        transport.close()
        if transport.rank > 0:
            return
    out.write_text(json.dumps({run: asdict(each) for run, each in ended.items()}))


def _leveled(transport, start: Start):  # type: ignore[no-untyped-def]
    from onebit.comm import hierarchical

    return transport if start.levels == 1 else hierarchical(transport, start.levels)


def _train_all(start: Start, transport) -> dict[str, Ended]:  # type: ignore[no-untyped-def]
    import torch
    from train import run as train

    from onebit.comm.messages import gather_texts

    torch.set_num_threads(1)
    ended = {}
    for run, flags in start.runs.items():
        args = ["--size", "tiny", "--batch-size", "2", "--steps", str(LONG_STEPS if _LOCAL in flags else STEPS)]
        args += ["--freeze-step", "4", "--compression", "always", "--lr", "4e-3", "--progress", "none"]
        training = train.Training(train.parse_args(args + flags.split()), transport, lambda: False)
        rows = _Rows()
        with rows:
            training.run(rows)
        optimizer = training.method.optimizer
        mine = asdict(
            Ended(
                _digest(rows.losses),
                _digest([p for group in optimizer.param_groups for p in group["params"]]),
                _digest(optimizer.state_dict()),
                rows.sent_bytes,
                statistics.median(rows.seconds),
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )
        )
        training.method.close()
        every = [json.loads(text) for text in gather_texts(transport, json.dumps(mine))]
        joint = {name: _digest([each[name] for each in every]) for name in ("losses", "parameters", "state")}
        sums = {"sent_bytes": sum(each["sent_bytes"] for each in every)}
        ended[run] = Ended(**joint, **sums, step_s=mine["step_s"], peak_bytes=max(each["peak_bytes"] for each in every))
    return ended


class _Rows:
    """In the place of train.py's report."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.seconds: list[float] = []
        self.sent_bytes = 0

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def add(self, row) -> None:  # type: ignore[no-untyped-def]
        self.losses += [row.loss, row.val_loss]
        self.seconds.append(row.step_s)
        self.sent_bytes += row.sent_bytes


def _digest(value: object) -> str:
    sha = hashlib.sha256()
    for path, leaf in _leaves(value):
        sha.update(f"{path}={leaf!r};".encode())
    return sha.hexdigest()[:16]


def _leaves(value: object, path: str = "") -> Iterable[tuple[str, object]]:
    """Every number of nested containers with its path; of a tensor, the hash of the elements that this rank holds."""
    import torch

    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for k, each in enumerate(value):
            yield from _leaves(each, f"{path}/{k}")
    elif isinstance(value, torch.Tensor):
        held = value.detach()
        held = getattr(held, "to_local", lambda: held)().cpu()
        flat = held.flatten().clone(memory_format=torch.contiguous_format)  # one element may have any stride
        data = hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()
        yield path, f"{held.dtype} {tuple(held.shape)} {data}"
    else:
        yield path, value


# ---------------------------------------------------------------- both revisions


def command_of(start: Start) -> list[str]:
    if start.launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={start.ranks}"]
    if start.launcher == "mpirun":
        return [*mpirun(start.ranks), sys.executable]
    return [sys.executable]


def run_start(tree: Path, name: str, folder: Path) -> dict[str, Ended]:
    """Let this tree make the runs of a start. Raises RuntimeError with the output where it fails."""
    out = folder / f"{name}.json"
    out.unlink(missing_ok=True)
    command = [*command_of(STARTS[name]), str(tree / "scripts" / "same_bits.py"), "--child", name, "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tree, env=env, capture_output=True, text=True, timeout=STARTS[name].timeout_s, check=False
    )
    if ended.returncode or not out.exists():
        raise RuntimeError(f"{name} in {tree} ended with {ended.returncode}:\n{(ended.stdout + ended.stderr)[-3000:]}")
    return {run: Ended(**each) for run, each in json.loads(out.read_text()).items()}


def report(base: str, found: Mapping[str, Mapping[str, tuple[Ended, Ended]]]) -> str:
    """What was found, as Markdown."""
    runs = [pair for start in found.values() for pair in start.values()]
    unlike = {
        f"{start}: {run}": before.differs_in(after)
        for start, pairs in found.items()
        for run, (before, after) in pairs.items()
        if before.differs_in(after)
    }
    lines = [
        "# Same bits: whole trainings by two revisions",
        "",
        f"Base {_hash(base)}, this tree {_hash('HEAD')}. {len(runs)} runs, {len(unlike)} of them with a difference in "
        "losses, parameters, state or bytes sent.",
        "",
        "Step: median seconds of a step of this tree over the base's, median over the runs. Memory: peak, likewise.",
        "",
        "| start | runs | different | step | memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for start, pairs in found.items():
        step = statistics.median(after.step_s / before.step_s for before, after in pairs.values())
        memory = statistics.median(after.peak_bytes / before.peak_bytes for before, after in pairs.values())
        different = sum(bool(before.differs_in(after)) for before, after in pairs.values())
        lines.append(f"| {start} | {len(pairs)} | {different} | {step:.2f} | {memory:.2f} |")
    lines += ["", *(f"- {name}: {', '.join(what)}" for name, what in unlike.items())]
    return "\n".join(lines).rstrip() + "\n"


def _hash(revision: str) -> str:
    about = "--dirty" if revision == "HEAD" else revision
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", about]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("base", nargs="?", metavar="REVISION", help="what this tree is compared with")
    add("--only", nargs="+", choices=STARTS, default=list(STARTS), metavar="START", help=", ".join(STARTS))
    add("--record", type=record_path, metavar="FILE", help="write the report here")
    add("--child", choices=STARTS, help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if (args.base is None) == (args.child is None):
        parser.error("expected a REVISION to compare this tree with")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.child is not None:
        train_here(args.child, args.out)
        return 0
    from rich.progress import track

    found: dict[str, dict[str, tuple[Ended, Ended]]] = {}
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary, checkout(args.base) as base:
        for k, name in enumerate(track(args.only, "training")):
            trees = [base, ROOT] if k % 2 == 0 else [ROOT, base]
            ended = {tree: run_start(tree, name, Path(temporary)) for tree in trees}
            found[name] = {run: (ended[base][run], ended[ROOT][run]) for run in ended[ROOT] if run in ended[base]}
    text = report(args.base, found)
    publish(args, text)
    return int(any(before.differs_in(after) for pairs in found.values() for before, after in pairs.values()))


if __name__ == "__main__":
    sys.exit(main())
