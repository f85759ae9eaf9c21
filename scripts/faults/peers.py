"""Peers that die, stop, lag, skip, repeat or run out of batches: real processes, over Gloo and under mpirun.

One rank, the victim, does something at a known step, and the others are watched. Promised is a PeerError or DesyncError
on every other rank that names the victim and nobody else, within the timeout; and, where the victim is back in time,
the same bits as without the fault.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.command import mpirun, why_no_mpi
from torch.utils.data import DataLoader, Dataset

from faults.case import (
    AS_PROMISED,
    HUNG,
    MISNAMED,
    NAMELESS,
    REFUSED,
    SILENT,
    Case,
    End,
    Outcome,
    Promise,
    Tools,
    judge,
    last_line,
)
from faults.ranks import Rank, fork_ranks, rank_of_program, run_and_tell, start_program
from faults.setups import ENGINES, OVER_MPI, PLAIN, TWO_LEVELS, Run, Setup
from onebit.comm.transports.edge import DIAGNOSIS_S

STEPS = 16
TIMEOUT_S = 5.0
MARGIN_S = 6.0
"""Beyond the timeout an error may come so much later: processes share few cores here."""
_EARLY, _LATE = 2, 11
_COMMAND = Path(__file__).resolve().parents[1] / "faults.py"


@dataclass(frozen=True)
class Mishap:
    """What happens to the victim before a step. is_harmless: it is back in time, and nothing is lost by it.

    act: what it does; the rest of its training follows where it returns. steps: how often it takes that step. ends: it
    has no batches from there on; waits: and asks for a barrier. amid: it acts in the middle of an exchange of that step
    instead. may_hang: it is stopped for good. names_all: errors may tell what each rank does. within_s: from the fault
    to the errors of the others. told: a pattern of the error that it gets itself, if it comes back.
    """

    act: Callable[[], None] = lambda: None
    steps: int = 1
    ends: bool = False
    waits: bool = False
    amid: bool = False
    is_harmless: bool = False
    may_hang: bool = False
    names_all: bool = False
    within_s: float = TIMEOUT_S + MARGIN_S
    told: str = ""


def _signal_self(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _stop_for(seconds: float) -> Callable[[], None]:
    def act() -> None:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    return act


def _raise() -> None:
    raise RuntimeError("an error of its own")


class _Slow(Dataset[int]):
    """Its second sample takes a worker longer than the timeout."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(2 * TIMEOUT_S if index > 1 else 0.0)
        return index


def _die_before_ones_workers() -> None:
    samples = iter(DataLoader(_Slow(), num_workers=2))
    next(samples)
    os.kill(os.getpid(), signal.SIGKILL)


_AT_ONCE_S = 5.0
_LATE_ERROR = r"(?s)too late|given up waiting for this rank"

MISHAPS: dict[str, Mishap] = {
    "killed": Mishap(_signal_self(signal.SIGKILL)),
    "killed amid an exchange": Mishap(_signal_self(signal.SIGKILL), amid=True),
    "killed, and its data workers live on": Mishap(_die_before_ones_workers, within_s=_AT_ONCE_S),
    "ended by SIGTERM": Mishap(_signal_self(signal.SIGTERM)),
    "stopped": Mishap(_signal_self(signal.SIGSTOP), may_hang=True),
    "stopped amid an exchange": Mishap(_signal_self(signal.SIGSTOP), amid=True, may_hang=True),
    "stopped for half the timeout": Mishap(_stop_for(TIMEOUT_S / 2), is_harmless=True),
    "stopped for longer than the timeout": Mishap(_stop_for(TIMEOUT_S + MARGIN_S), told=_LATE_ERROR),
    "raises an error of its own": Mishap(_raise),
    "exits with status 0": Mishap(lambda: sys.exit(0)),
    "exits at once with status 1": Mishap(lambda: os._exit(1)),
    "lags half the timeout": Mishap(lambda: time.sleep(TIMEOUT_S / 2), is_harmless=True),
    "lags longer than the timeout": Mishap(lambda: time.sleep(TIMEOUT_S + MARGIN_S), told=_LATE_ERROR),
    "leaves a step out": Mishap(steps=0, names_all=True),
    "takes a step twice": Mishap(steps=2, names_all=True),
    "has fewer batches, and closes": Mishap(ends=True, names_all=True),
    "has fewer batches, and waits for the others": Mishap(ends=True, waits=True, names_all=True),
}


def work(setup: Setup, mishap: Mishap | None, victim: int, at: int, rank: Rank) -> str:
    """One rank's training, with the mishap on the victim."""
    import torch

    torch.set_num_threads(1)
    run = setup.open(TIMEOUT_S)
    is_victim = mishap is not None and rank.number == victim
    for step in range(STEPS):
        times = 1
        if is_victim and step == at:
            assert mishap is not None
            if mishap.ends:
                break
            times = mishap.steps
            if mishap.amid:
                _act_amid(run, rank, mishap)
            else:
                rank.note_fault()
                mishap.act()
        for _ in range(times):
            run.step(step)
    if is_victim and mishap is not None and mishap.ends:
        rank.note_fault()
        if mishap.waits:
            _wait_for_all(run)
    found = run.fingerprint() if not (is_victim and mishap is not None and mishap.ends) else ""
    run.close()
    return found


def _act_amid(run: Run, rank: Rank, mishap: Mishap) -> None:
    """Act as soon as the next all-to-all of the transport has been launched."""
    transport = run.transport
    names = [name for name in ("all_to_all", "all_reduce") if hasattr(transport, name)]
    for name in names:
        launch = getattr(transport, name)

        def wrapped(*args: object, launch: Callable = launch) -> object:
            work = launch(*args)
            rank.note_fault()
            mishap.act()
            return work

        setattr(transport, name, wrapped)


def _wait_for_all(run: Run) -> None:
    """What a training script does at its end: wait, here with the means of its process group."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


# ---------------------------------------------------------------- over Gloo


def _forked(setup: Setup, mishap: Mishap | None, victim: int, at: int) -> dict[int, End]:
    local = setup.local or setup.ranks
    works = [partial(work, setup, mishap, victim, at)] * setup.ranks
    may_hang = mishap is not None and mishap.may_hang
    return fork_ranks(
        works,
        patience_s=4 * TIMEOUT_S + 20.0 + (TIMEOUT_S + MARGIN_S),
        victims={victim} if mishap else set(),
        grace_s=0.2 if may_hang else 2 * TIMEOUT_S + MARGIN_S,
        env={"LOCAL_WORLD_SIZE": str(local), "TORCH_CPP_LOG_LEVEL": "ERROR"} | setup.env,
    )


def _over_gloo(
    setup: Setup, names: Sequence[str], draws: int, tools: Tools, victims: Sequence[int] = ()
) -> Iterator[Outcome]:
    """Each mishap so many times, each with another victim and step, drawn by lot. victims: among these alone."""
    plain = _forked(setup, None, -1, -1)
    expected = plain[0].value
    if any(end.what != "returned" or end.value != expected for end in plain.values()):
        yield Outcome("no fault at all", REFUSED, f"{plain}")
        return
    places = [(victim, at) for victim in victims or (0, setup.ranks - 1) for at in (_EARLY, _LATE)]
    faults = [(name, *place) for name in names for place in tools.random.sample(places, draws)]
    later_s = DIAGNOSIS_S if setup.is_by_fsdp else 0.0  # torch's own error comes first, by so much later
    for name, victim, at in tools.some(faults, 1):
        ends = _forked(setup, MISHAPS[name], victim, at)
        yield _judge(f"rank {victim} {name}, step {at}", ends, MISHAPS[name], victim, expected, later_s)


def _judge(
    fault: str, ends: dict[int, End], mishap: Mishap, victim: int, expected: object, later_s: float = 0.0
) -> Outcome:
    if mishap.is_harmless:
        return judge(fault, ends, Promise(), is_right=lambda rank, value: value == expected)
    own = ends[victim]
    if own.what == "running" and not mishap.may_hang:
        return Outcome(fault, HUNG, f"the victim, rank {victim}, does not end")
    if mishap.steps > 1:
        return _judge_repeated(fault, ends, victim)
    if mishap.told and own.what == "raised" and not re.search(mishap.told, own.text):
        return Outcome(fault, MISNAMED, f"the victim, rank {victim}, is not told that it is late: {own.text[:300]}")
    also = frozenset(ends) if mishap.names_all else frozenset()
    promise = Promise(r"(Peer|Desync)Error: ", frozenset({victim}), also, mishap.within_s + later_s)
    return judge(fault, ends, promise, victims={victim})


def _judge_repeated(fault: str, ends: dict[int, End], victim: int) -> Outcome:
    """The others cannot know: the second step is their next one. At the end it is alone with its last, and is told."""
    others = {rank: end for rank, end in ends.items() if rank != victim}
    within_s = TIMEOUT_S + MARGIN_S + 10.0  # from the repeated step: some steps follow
    told = judge(fault, ends, Promise("(Peer|Desync)Error: ", frozenset(), frozenset(ends), within_s), victims=others)
    same = len({end.value for end in others.values() if end.what == "returned"}) <= 1
    return told if told.verdict != AS_PROMISED or same else Outcome(fault, SILENT, "the replicas differ")


# ---------------------------------------------------------------- under mpirun


def _over_mpi(name: str, names: list[str], tools: Tools) -> Iterator[Outcome]:
    setup = OVER_MPI[name]
    expected = _started(name, "", -1, -1)[0][0].value
    if expected is None:
        yield Outcome("no fault at all", SILENT, _started(name, "", -1, -1)[2][-300:])
        return
    for mishap_name in names:
        mishap = MISHAPS[mishap_name]
        victim, at = tools.random.choice((0, setup.ranks - 1)), tools.random.choice((_EARLY, _LATE))
        ends, status, output = _started(name, mishap_name, victim, at)
        fault = f"rank {victim} {mishap_name}, step {at}"
        yield _judge_mpi(fault, ends, status, output, mishap, victim, expected)


def _started(name: str, mishap: str, victim: int, at: int) -> tuple[dict[int, End], int | None, str]:
    n = OVER_MPI[name].ranks
    command = [*mpirun(n), sys.executable, str(_COMMAND), "peers", "--setup", name, "--mishap", mishap]
    command += ["--victim", str(victim), "--at", str(at)]
    return start_program(command, n, patience_s=90.0)


def _judge_mpi(
    fault: str, ends: dict[int, End], status: int | None, output: str, mishap: Mishap, victim: int, expected: object
) -> Outcome:
    """mpirun ends all ranks with the first: it may name the victim in their place, and ends with another status."""
    others = {rank: end for rank, end in ends.items() if rank != victim}
    if mishap.is_harmless or mishap.steps > 1 or status is None:
        return _judge(fault, ends, mishap, victim, expected)
    if status == 0 and mishap.ends is False:
        return Outcome(fault, SILENT, "mpirun ended with status 0")
    heard = {rank: end for rank, end in others.items() if end.what != "died"}
    by_launcher = re.search(rf"(?i)\b(rank|process) \[?({victim}\b|.*,{victim}\])", output)
    if not heard and not by_launcher:
        return Outcome(fault, NAMELESS, last_line(output))
    return _judge(fault, heard | {victim: ends[victim]}, mishap, victim, expected) if heard else Outcome(fault)


def main(argv: list[str] | None = None) -> None:
    """A rank that mpirun has started."""
    parser = argparse.ArgumentParser()
    for name in ("setup", "mishap"):
        parser.add_argument(f"--{name}", default="")
    for name in ("victim", "at"):
        parser.add_argument(f"--{name}", type=int, default=-1)
    args = parser.parse_args(argv)
    rank = rank_of_program(int(os.environ["OMPI_COMM_WORLD_RANK"]))
    mishap = MISHAPS.get(args.mishap)
    run_and_tell(rank, partial(work, OVER_MPI[args.setup], mishap, args.victim, args.at))


# ---------------------------------------------------------------- cases

_DIE = [
    "killed", "killed amid an exchange", "ended by SIGTERM", "raises an error of its own", "exits with status 0",
    "exits at once with status 1", "killed, and its data workers live on",
]  # fmt: skip
_OF_THE_HOST = [
    "stopped", "stopped amid an exchange", "killed", "killed, and its data workers live on",
    "raises an error of its own", "lags longer than the timeout",
]  # fmt: skip
_STOP = [
    "stopped", "stopped amid an exchange", "stopped for half the timeout", "stopped for longer than the timeout",
    "lags half the timeout", "lags longer than the timeout",
]  # fmt: skip
_OUT_OF_STEP = [
    "leaves a step out", "takes a step twice", "has fewer batches, and closes",
    "has fewer batches, and waits for the others",
]  # fmt: skip
_GROUPS = {"dies": _DIE, "stops or lags": _STOP, "is out of step": _OUT_OF_STEP}
_SOME = ["killed", "stopped", "raises an error of its own", "lags half the timeout", *_OUT_OF_STEP[::2]]
_UNDER_MPI = [*_SOME, "exits with status 0", "lags longer than the timeout", "takes a step twice"]


def cases() -> Iterator[Case]:
    promised = f"PeerError or DesyncError that names the victim within {TIMEOUT_S:g} s; back in time: the same bits"
    observed = f"errors, end and last parameters of every rank; {MARGIN_S:g} s of tolerance"
    for name, setup in PLAIN.items():
        for group, names in _GROUPS.items():
            draws = 4 if name == "OnebitAdam" else 1
            yield Case(
                f"{name}: a rank {group}", promised, f"{', '.join(names)}; Gloo, {setup.ranks} ranks", observed,
                partial(_over_gloo, setup, names, draws), is_quick=name == "OnebitAdam" and group != "stops or lags",
                cost_s=30.0 * draws,
            )  # fmt: skip
    yield Case(
        "the host of the store", promised, f"{', '.join(_OF_THE_HOST)}; rank 0, Gloo, 3 ranks", observed,
        partial(_over_gloo, PLAIN["OnebitAdam"], _OF_THE_HOST, 1, victims=(0,)), cost_s=60.0,
    )  # fmt: skip
    for name, setup in {"OnebitAdam, two levels": TWO_LEVELS, **ENGINES}.items():
        yield Case(
            name, promised, f"{', '.join(_SOME)}; Gloo, {setup.ranks} ranks", observed,
            partial(_over_gloo, setup, _SOME, 1), cost_s=50.0,
        )  # fmt: skip
    for name in OVER_MPI:
        yield Case(
            f"{name}, under mpirun", f"{promised}; where mpirun ends all ranks, it names the victim",
            f"{', '.join(_UNDER_MPI)}; 3 ranks", observed, partial(_over_mpi, name, _UNDER_MPI),
            cost_s=120.0, why_not=why_no_mpi,
        )  # fmt: skip
