"""Runs that are killed at random times, and resumed until they are through: `train.py` under torchrun and mpirun.

A run of 120 steps is started; at a random moment one rank, all ranks or the launcher get a SIGKILL or SIGTERM; it is
started again with --resume, and so on. Promised: the launcher ends with a status that is not 0, soon; the next start
goes on; and at the end checkpoints hold the same bits as those of a run that nobody has killed.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from bench.command import mpirun, why_no_mpi
from torch.distributed import checkpoint as dcp

from faults.case import AS_PROMISED, HUNG, REFUSED, SILENT, Case, Outcome, Tools, last_line
from faults.ranks import Rank, call_in_fork, fork_ranks, kill_session, session_pids, start_program

RANKS, STEPS, SAVE_EVERY = 2, 120, 5
_SCRIPT = Path(__file__).resolve().parents[1] / "train.py"
_PATIENCE_S = 120.0
_ENDS_WITHIN_S = 45.0
"""After the kill. torchrun itself gives ranks 30 s to end."""

_COMMON = [
    "--size", "tiny", "--steps", str(STEPS), "--batch-size", "2", "--compression", "always", "--eval-every", "1000",
    "--checkpoint-every", str(SAVE_EVERY), "--resume", "--progress", "none",
]  # fmt: skip
_RUNS = {
    "onebit-adam": ["--optimizer", "onebit-adam", "--freeze-step", "20"],
    "onebit-lamb": ["--optimizer", "onebit-lamb", "--freeze-step", "20"],
    "zero-one-adam": ["--optimizer", "zero-one-adam", "--local-step-clipper", "4"],
    "onebit-adam, sharded across nodes": ["--zero", "1", "--ranks-per-node", "1", "--optimizer", "sharded-onebit-adam"],
    "adamw, ZeRO 3": ["--zero", "3", "--optimizer", "adamw"],
}

Start = Callable[[list[str], "Kill | None"], tuple["int | None", float, str]]
"""Runs train.py with these arguments: its launcher's status (None: it did not end), seconds from kill to end, text."""


@dataclass(frozen=True)
class Kill:
    """number: the signal. whom: "a rank", "all ranks" or "the launcher". delay_s: after `begins` is seen."""

    number: int
    whom: str
    delay_s: float
    begins: Callable[[], bool]
    random: Random

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name} to {self.whom}"

    def strike(self, launcher: int | None, ranks: Sequence[int]) -> float:
        """Wait for the moment, then kill; when that was."""
        end = time.monotonic() + _PATIENCE_S
        while not self.begins() and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(self.delay_s)
        targets = list(ranks)
        if self.whom == "a rank":
            targets = [self.random.choice(targets)] if targets else []
        elif self.whom == "the launcher" and launcher is not None:
            targets = [launcher]
        for pid in targets:
            try:
                os.kill(pid, self.number)
            except ProcessLookupError:
                continue
        return time.monotonic()


def _launched(command: Sequence[str], arguments: list[str], kill: Kill | None) -> tuple[int | None, float, str]:
    """Under torchrun or mpirun."""
    at = [time.monotonic()]

    def meanwhile(launcher: int, folder: Path) -> None:
        if kill is None:
            return
        at[0] = kill.strike(launcher, _Ranks(launcher))
        if kill.whom == "the launcher" and kill.number == signal.SIGKILL:
            kill_session(launcher)  # nobody is left to end the ranks: that is the machine's power switch

    words = [*command, str(_SCRIPT), *_COMMON, *arguments]
    _, status, output = start_program(
        words, 0, patience_s=_PATIENCE_S, meanwhile=meanwhile, env={"OMP_NUM_THREADS": "1"}
    )
    return status, time.monotonic() - at[0], output


class _Ranks(Sequence[int]):
    """The processes of a session that run train.py, but not its launcher; looked up when they are asked for."""

    def __init__(self, session: int):
        self._session = session

    def _now(self) -> list[int]:
        return [pid for pid in session_pids(self._session) if pid != self._session and _is_rank(pid)]

    def __len__(self) -> int:
        return len(self._now())

    def __getitem__(self, k: int) -> int:  # type: ignore[override]
        return self._now()[k]


def _is_rank(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    is_ours = any(word.endswith(b"train.py") for word in words) and not any(
        b"torch.distributed.run" in w for w in words
    )
    return is_ours and any(name.startswith((b"RANK=", b"OMPI_COMM_WORLD_RANK=")) for name in environment)


def _forked(arguments: list[str], kill: Kill | None) -> tuple[int | None, float, str]:
    """In forks of this process, with the environment that torchrun would give."""
    at = [time.monotonic()]

    def work(rank: Rank) -> None:
        torch.set_num_threads(1)
        sys.argv = [str(_SCRIPT), *_COMMON, *arguments]
        runpy.run_path(str(_SCRIPT), run_name="__main__")

    def meanwhile(pids: Mapping[int, int]) -> None:
        if kill is not None:
            at[0] = kill.strike(None, list(pids.values()))

    ends = fork_ranks([work] * RANKS, patience_s=_PATIENCE_S, meanwhile=meanwhile, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    seconds = time.monotonic() - at[0]
    if any(end.what == "running" for end in ends.values()):
        return None, seconds, ""
    codes = [0 if end.what == "raised" and end.text == "SystemExit: 0" else 1 for end in ends.values()]
    return max(codes), seconds, "\n".join(end.text for end in ends.values())


# ---------------------------------------------------------------- a run and its kills


def _killed_again_and_again(
    start: Start, name: str, kills: int, whom: Sequence[str], tools: Tools
) -> Iterator[Outcome]:
    plain, folder = tools.folder / "plain", tools.folder / "killed"
    arguments = [*_RUNS[name], "--checkpoint"]
    status, _, output = start([*arguments, str(plain)], None)
    if status != 0:
        yield Outcome("no fault at all", REFUSED, last_line(output))
        return
    outcomes = []
    for number in range(kills):
        kill = _draw(folder, whom, tools.random)
        status, seconds, output = start([*arguments, str(folder)], kill)
        done = _newest(folder)
        fault = f"kill {number + 1}: {kill}, then at {done or 'the start'}"
        if status is None:
            outcomes.append(Outcome(fault, HUNG, f"the run did not end within {_PATIENCE_S:g} s"))
        elif _refusal(output):
            outcomes.append(Outcome(fault, REFUSED, _refusal(output)))
        elif seconds > _ENDS_WITHIN_S:
            outcomes.append(Outcome(fault, HUNG, f"the run ended {seconds:.0f} s after the kill"))
        else:
            outcomes.append(Outcome(fault, AS_PROMISED, "", seconds))
        if done == f"step_{STEPS:08d}":
            break
    status, _, output = start([*arguments, str(folder)], None)
    if status != 0:
        outcomes.append(Outcome("the last start", REFUSED, last_line(output)))
    elif differs := _first_difference(plain, folder):
        outcomes.append(
            Outcome(f"{len(outcomes)} kills, then the end", SILENT, f"not the bits of the plain run: {differs}")
        )
    yield from outcomes
    shutil.rmtree(folder, ignore_errors=True)


def _draw(folder: Path, whom: Sequence[str], random: Random) -> Kill:
    """Most kills fall between two steps' saves; some into the start of the run."""
    before, began = _newest(folder), time.monotonic()
    early_s = random.uniform(0.5, 8.0) if random.random() < 0.2 else float("inf")

    def begins() -> bool:
        return _newest(folder) != before or time.monotonic() - began > early_s

    number = random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
    return Kill(number, random.choice(whom), random.uniform(0.0, 0.7), begins, random)


def _newest(folder: Path) -> str:
    try:
        return (folder / "latest").read_text().strip()
    except OSError:
        return ""


def _refusal(output: str) -> str:
    """What a resumed run says that cannot go on."""
    lines = [line for line in output.splitlines() if "CheckpointError" in line or "train.py: " in line]
    return next((line[:300] for line in lines if "checkpoint" in line.lower() and "damaged" in line.lower()), "")


def _first_difference(plain: Path, other: Path) -> str:
    """What the newest checkpoints of two runs differ in; empty where nothing. In a fork: reading starts threads."""
    end = call_in_fork(lambda: _compare(plain, other))
    return str(end.value) if end.what == "returned" else end.text


def _compare(plain: Path, other: Path) -> str:
    if _newest(plain) != _newest(other):
        return f"{_newest(other)} instead of {_newest(plain)}"
    ours, theirs = (_tensors(folder / _newest(folder)) for folder in (plain, other))
    if ours.keys() != theirs.keys():
        return f"only one has {sorted(ours.keys() ^ theirs.keys())[:3]}"
    return next((name for name, x in ours.items() if not torch.equal(x, theirs[name])), "")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of either kind, by name."""
    if not (folder / ".metadata").exists():
        contents = {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}
        return dict(_leaves(contents, ""))
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def _leaves(tree: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            yield from _leaves(value, f"{name}/{key}")


# ---------------------------------------------------------------- cases


def cases() -> Iterator[Case]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    launchers: list[tuple[str, Start, list[str], int, Callable[[], str]]] = [
        ("torchrun", partial(_launched, torchrun), ["onebit-adam", "onebit-adam, sharded across nodes"], 5, lambda: ""),
        (
            "mpirun",
            partial(_launched, [*mpirun(RANKS), sys.executable]),
            ["onebit-adam", "zero-one-adam"],
            5,
            why_no_mpi,
        ),
        ("forks with torchrun's environment", _forked, list(_RUNS), 8, lambda: ""),
    ]
    for launcher, start, names, kills, why_not in launchers:
        whom = ["a rank", "a rank", "all ranks"] + ["the launcher"] * ("forks" not in launcher)
        for name in names:
            yield Case(
                f"{name}, {launcher}",
                f"an end with an error within {_ENDS_WITHIN_S:g} s, the next start goes on, at the end the same bits",
                f"SIGKILL or SIGTERM to {', '.join(dict.fromkeys(whom))}, {kills} times, at random; {RANKS} ranks",
                f"exit status, time to the end, all tensors of the checkpoint of step {STEPS}",
                partial(_killed_again_and_again, start, name, kills, whom),
                cost_s=12.0 * kills if "forks" not in launcher else 6.0 * kills,
                why_not=why_not,
            )
