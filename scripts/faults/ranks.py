"""Ranks as processes that end in every way a process can: forks of one that has imported torch, or mpirun's.

`fork_ranks` runs one function per rank in forked processes (some 20 ms each) and tells how each ended. A rank finalises
as a script's process does (atexit, interpreter, C++ destructors; 0.4 s): what crashes there is seen. `call_in_fork`
spares itself that. `start_program` runs a command instead. What is left after `patience_s` is killed: it counts as
running. Call `gc.freeze()` before: a rank that ends collects what others have imported otherwise, 1.2 s.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch
from bench.command import free_port
from reports import read_lines

from faults.case import End
from onebit.comm import SimTransport, run_ranks

POLL_S = 0.01
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LAUNCHERS = ("OMPI_", "PMI", "PRTE_", "SLURM_", "TORCHELASTIC_", "MASTER_")
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LD_PRELOAD")


class Rank:
    """What a rank's work is given: its number, and where it says what happens. Times are of the machine's clock."""

    def __init__(self, number: int, folder: Path):
        self.number, self._folder = number, folder

    @property
    def output(self) -> Path:
        """What a forked rank writes."""
        return self._folder / f"{self.number}.txt"

    def note_fault(self) -> None:
        """The fault happens now. The earliest note of all ranks counts."""
        self._tell({"fault": time.monotonic()})

    def note_end(self, what: str, text: str = "", value: object = None) -> None:
        self._tell({"what": what, "text": text, "value": value, "time": time.monotonic()})

    def _tell(self, line: dict) -> None:
        with (self._folder / f"{self.number}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


Work = Callable[[Rank], object]


def fork_ranks(
    works: Sequence[Work],
    *,
    patience_s: float,
    finalises: bool = True,
    victims: Set[int] = frozenset(),
    grace_s: float = 5.0,
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[Mapping[int, int]], None] | None = None,
) -> dict[int, End]:
    """Run works[r] as rank r; how each ended. What a work returns goes through JSON.

    victims: ranks that are killed grace_s after all others have ended (stopped ones never end). env: for all ranks, on
    top of RANK and its like. meanwhile: called once with {rank: process id} after the start. finalises: whether ranks
    end as scripts do, or at once.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, port = Path(name), free_port()
        pids = {}
        for rank, work in enumerate(works):
            pids[rank] = _fork(work, Rank(rank, folder), _environment(rank, len(works), port, env or {}), finalises)
        if meanwhile is not None:
            meanwhile(pids)
        statuses = _wait(pids, patience_s, victims, grace_s)
        return _ends(folder, statuses, len(works))


def call_in_fork(work: Callable[[], object], patience_s: float = 60.0) -> End:
    """Run work() in a process of its own."""
    return fork_ranks([lambda _: work()], patience_s=patience_s, finalises=False)[0]


def sim_ranks(
    n: int, work: Callable[[SimTransport, Rank], object], *, timeout_s: float = 20.0, patience_s: float = 60.0
) -> dict[int, End]:
    """work(transport, rank) in n threads of one forked process, over a simulated network; how each rank ended."""

    def run(transport: SimTransport, folder: Path) -> None:
        rank = Rank(transport.rank, folder)
        with contextlib.suppress(Exception):
            run_and_tell(rank, lambda rank: work(transport, rank))

    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        end = call_in_fork(lambda: _run_sim(n, lambda transport: run(transport, folder), timeout_s), patience_s)
        ends = _ends(folder, dict.fromkeys(range(n), 0), n)
        if end.what == "died":
            return dict.fromkeys(ends, end)
        unheard = {rank for rank, ended in ends.items() if ended.what == "died" and ended.number == 0}
        return {rank: replace(ended, what="running") if rank in unheard else ended for rank, ended in ends.items()}


def _run_sim(n: int, work: Callable[[SimTransport], None], timeout_s: float) -> None:
    torch.set_num_threads(1)  # behind a fork torch makes its pool of threads anew: not in three threads at once
    run_ranks(n, work, timeout_s)


def start_program(
    command: Sequence[str],
    n: int,
    *,
    patience_s: float,
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[int, Path], None] | None = None,
) -> tuple[dict[int, End], int | None, str]:
    """Run a launcher's command, whose ranks report through `rank_of_program`: ({rank: End}, its exit status, output).

    None: it was still running. A rank that reported no end has died, or was killed by its launcher. meanwhile: called
    with the launcher's process id and the folder of the reports.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        with (folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=clean_environment() | {"FAULTS_FOLDER": name} | dict(env or {}), start_new_session=True,
            )  # fmt: skip
            try:
                if meanwhile is not None:
                    meanwhile(process.pid, folder)
                status: int | None = process.wait(patience_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                kill_session(process.pid)
                process.wait()
        statuses = {rank: None if status is None else 0 for rank in range(n)}
        return _ends(folder, statuses, n), status, (folder / "output").read_text(errors="replace")


def rank_of_program(number: int) -> Rank:
    """In a process that `start_program` has started."""
    return Rank(number, Path(os.environ["FAULTS_FOLDER"]))


def run_and_tell(rank: Rank, work: Work) -> None:
    """work(rank), with its end noted; an error goes on, as in a script."""
    try:
        value = work(rank)
    except BaseException as error:
        rank.note_end("raised", f"{type(error).__name__}: {error}")
        raise
    rank.note_end("returned", value=value)


def clean_environment() -> dict[str, str]:
    """This process's, without what launchers set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) and k not in _RANK_NAMES}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | kept


def kill_session(session: int) -> None:
    """SIGKILL every process of this session: all that a command has started, stopped ones included."""
    for pid in session_pids(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def session_pids(session: int) -> list[int]:
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            pids.append(int(stat.parent.name))
    return pids


# ---------------------------------------------------------------- a forked rank


def _environment(rank: int, n: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    """As torchrun gives it."""
    ranks = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {name: str(value) for name, value in ranks.items()} | where | dict(extra)


def _fork(work: Work, rank: Rank, env: Mapping[str, str], finalises: bool) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == parent:
            _become_a_script(rank, env)
            run_and_tell(rank, work)
            code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        _report_as_a_script()
    finally:
        if not finalises:
            os._exit(code)
        ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("a rank goes no further")


def _become_a_script(rank: Rank, env: Mapping[str, str]) -> None:
    atexit._clear()  # the parent's
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    sys.excepthook = sys.__excepthook__
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS) or name in _RANK_NAMES]:
        del os.environ[name]
    os.environ.update(env)
    output = os.open(rank.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(output, standard)


def _report_as_a_script() -> None:
    kind, error, where = sys.exc_info()
    assert kind is not None and error is not None
    try:
        sys.excepthook(kind, error, where)
    except BaseException:
        traceback.print_exc()


# ---------------------------------------------------------------- how it ended


def _wait(pids: Mapping[int, int], patience_s: float, victims: Set[int], grace_s: float) -> dict[int, int | None]:
    """{rank: wait status}; None where it had to be killed."""
    statuses: dict[int, int | None] = {}
    end, others = time.monotonic() + patience_s, pids.keys() - victims
    while statuses.keys() < pids.keys() and time.monotonic() < end:
        for rank in pids.keys() - statuses.keys():
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                statuses[rank] = status
                if others <= statuses.keys():
                    end = min(end, time.monotonic() + grace_s)
        time.sleep(POLL_S)
    for rank in pids.keys() - statuses.keys():
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
        statuses[rank] = None
    return statuses


def _ends(folder: Path, statuses: Mapping[int, int | None], n: int) -> dict[int, End]:
    lines = {rank: read_lines(folder / f"{rank}.jsonl") for rank in range(n)}
    faults = [line["fault"] for told in lines.values() for line in told if "fault" in line]
    at = min(faults, default=None)
    return {rank: _end(lines[rank], at, statuses[rank], folder / f"{rank}.txt") for rank in range(n)}


def _end(lines: list[dict], fault: float | None, status: int | None, output: Path) -> End:
    written = output.read_text(errors="replace") if output.exists() else ""
    last = next((line for line in reversed(lines) if "what" in line), None)
    seconds = None if fault is None or last is None else last["time"] - fault
    if status is None:
        return End("running", last["text"] if last else written, seconds=seconds)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return End("died", written, seconds=seconds, number=-code)
    if last is None:
        return End("died", written, number=code)
    return End(last["what"], last["text"], last["value"], seconds)
