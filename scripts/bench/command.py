"""How a benchmark has a function of its module called in other processes: each is `bench.py call` with what it needs.

The caller starts the command of `calling`, once or as ranks, and reads what the call returned from a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
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


def on_loopback(
    work: Callable[[Namespace], object],
    args: Namespace,
    ranks: int,
    python: Sequence[str] = (sys.executable,),
    timeout_s: float = 600.0,
) -> Any:
    """Call `work(args)` on ranks that torchrun starts on this machine; what one of them returned.

    python: the words that start Python. Raises SystemExit with what they said if the ranks fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launch = [*python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*launch, *calling(work, args, out)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
        if ended.returncode:
            raise SystemExit(f"{ended.stderr[-4000:]}\n{work.__module__}: the ranks ended with {ended.returncode}")
        return json.loads(out.read_text())


def free_port() -> int:
    """A port nobody listens on, below those that the system hands out: it gives one of these to the next who asks."""
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
