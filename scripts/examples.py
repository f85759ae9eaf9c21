"""Run each program in `examples/` by its framework's AdamW and by onebit, and compare: docs/frameworks.md shows it.

    python scripts/examples.py                          # all of them, into a table on the terminal
    python scripts/examples.py trainer --seeds 3 --write

As many ranks on loopback as a program's docstring says. Each optimizer and seed is a run of its own; the first seed's
run by onebit is then taken up again from its own checkpoint, and must end in the same bits. `examples/README.md` says
what a program must take and write. Rows of programs that are not named stay as they are in the record.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from provenance import check_record, refuse_dirty_tree, revision
from reports import table

HERE = Path(__file__).parent
PROGRAMS = HERE / "examples"
PAGE, RECORD = HERE.parent / "docs" / "frameworks.md", HERE / "records" / "frameworks.json"
BEGIN, END = "<!-- examples.py --write: from here -->", "<!-- to here -->"
LIBRARIES = ("torch", "transformers", "accelerate", "lightning")
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Row:
    """What one program showed. adamw, onebit: the final loss of each seed's run. gap: see `gap_of`."""

    title: str
    lines: int
    adamw: list[float]
    onebit: list[float]
    bits_per_parameter: float
    resumes: bool
    seconds: dict[str, float]
    about: str

    def cells(self, name: str) -> list[str]:
        gap, spread = gap_of(self.adamw, self.onebit)
        return [
            f"[{self.title}](../scripts/examples/{name}.py)",
            "yes",
            str(self.lines),
            f"{statistics.fmean(self.adamw):.4f}",
            f"{statistics.fmean(self.onebit):.4f}",
            f"{gap:+.1f} %",
            f"{spread:.1f} %",
            f"{self.bits_per_parameter:.2f}",
            "same bits" if self.resumes else "other bits",
        ]


HEADINGS = (
    "entry point", "works", "lines added", "loss, AdamW", "loss, onebit", "gap", "AdamW's seeds", "bits", "resumed",
)  # fmt: skip


def names() -> list[str]:
    """The programs, by name."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "protocol")


def read_docstring(name: str) -> tuple[str, int]:
    """(title, how many lines the change adds): the first words of a program's docstring, and its diff's + lines."""
    text = ast.get_docstring(ast.parse((PROGRAMS / f"{name}.py").read_text())) or ""
    diff = re.search(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    if ":" not in text.partition("\n")[0] or diff is None:
        raise ValueError(f"{name}.py: its docstring must begin with 'Title: ...' and show the change as a diff block")
    return text.partition(":")[0], sum(line.startswith("+") for line in diff[1].splitlines())


def gap_of(adamw: Sequence[float], onebit: Sequence[float]) -> tuple[float, float]:
    """(mean loss of onebit against AdamW's, how far AdamW's own seeds lie apart), in percent of AdamW's mean."""
    mean = statistics.fmean(adamw)
    return 100 * (statistics.fmean(onebit) / mean - 1), 100 * (max(adamw) - min(adamw)) / mean


def final_loss(losses: Sequence[float]) -> float:
    """The mean over the last tenth of the steps."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def run(name: str, folder: Path, *options: str) -> dict:
    """One run on two ranks: the JSON that it wrote. Raises RuntimeError with its output where it failed."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    ranks = re.search(r"--nproc-per-node (\d+)", (PROGRAMS / f"{name}.py").read_text())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", ranks[1] if ranks else "2"]
    call = [*torchrun, str(PROGRAMS / f"{name}.py"), "--folder", str(folder / "checkpoints"), "--out", str(out)]
    ended = subprocess.run(
        [*call, *options],
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if ended.returncode or not out.exists():
        raise RuntimeError(f"{name} {' '.join(options)} ended with {ended.returncode}\n{ended.stdout[-4000:]}")
    return json.loads(out.read_text())


def measure(name: str, args: argparse.Namespace) -> Row:
    """All runs of one program."""
    title, lines = read_docstring(name)
    steps = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    losses: dict[str, list[float]] = {"adamw": [], "onebit": []}
    bits, seconds, resumes = 0.0, {}, False
    for optimizer, of_seeds in losses.items():
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory(prefix="examples-") as folder:
                options = ["--optimizer", optimizer, "--seed", str(seed), *steps]
                said = run(name, Path(folder), *options)
                of_seeds.append(final_loss(said["losses"]))
                seconds[optimizer] = said["seconds"]
                if optimizer == "onebit" and seed == 0:
                    bits = said["bits_per_parameter"]
                    resumes = run(name, Path(folder), *options, "--resume")["sha256"] == said["sha256"]
                print(f"{name}, {optimizer}, seed {seed}: loss {of_seeds[-1]:.4f}", flush=True)
    return Row(title, lines, losses["adamw"], losses["onebit"], bits, resumes, seconds, about(args))


def about(args: argparse.Namespace) -> str:
    """The conditions, in a line."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if is_installed(name)]
    return (
        f"{args.steps} steps, {args.warmup} of them warm-up; {datetime.now(timezone.utc).date()}, "
        f"revision {revision()}, Python {platform.python_version()}, {', '.join(versions)}, "
        f"{len(os.sched_getaffinity(0))} cores, {'a' if torch.cuda.is_available() else 'no'} GPU"
    )


def is_installed(library: str) -> bool:
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ---------------------------------------------------------------- what is said


def markdown(rows: dict[str, Row]) -> str:
    """What docs/frameworks.md shows."""
    conditions: dict[str, list[str]] = {}
    for name, row in sorted(rows.items()):
        conditions.setdefault(row.about, []).append(name)
    lines = table(HEADINGS, (row.cells(name) for name, row in sorted(rows.items())), names=len(HEADINGS))
    return "\n".join([lines, "", *(f"{', '.join(who)}: {said}." for said, who in conditions.items())])


def write(rows: dict[str, Row]) -> None:
    """Into docs/frameworks.md, between its marks, and into the record. Raises DirtyTreeError."""
    refuse_dirty_tree(RECORD)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{markdown(rows)}\n\n{END}{rest.partition(END)[2]}")
    RECORD.write_text(json.dumps({name: asdict(row) for name, row in sorted(rows.items())}, indent=1) + "\n")


def read_record() -> dict[str, Row]:
    """The rows of the record; none where there is no record yet."""
    return {name: Row(**row) for name, row in json.loads(RECORD.read_text()).items()} if RECORD.exists() else {}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the examples and compare their losses.")
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; default: all")
    add("--steps", type=int, default=300)
    add("--warmup", type=int, default=100, help="steps before one bit")
    add("--seeds", type=int, default=3)
    add("--write", action="store_true", help="put the rows into docs/frameworks.md and scripts/records")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(names()):
        parser.error(f"there is no examples/{', '.join(sorted(unknown))}.py")
    if args.write:
        check_record(parser, RECORD)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rows = {name: measure(name, args) for name in args.names or names()}
    print(markdown(rows))
    if args.write:
        write(read_record() | rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
