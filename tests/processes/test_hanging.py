"""A call to a store that hangs ends in time, and its thread does not end the process with SIGABRT afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks

HOST = """
import time
from datetime import timedelta
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=30), wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""

RANK = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist
from onebit.comm.transports import hanging

hanging._LINGER_S = 0.0  # as on a machine that is too busy for the thread to come back within it
port, host = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=30), wait_for_workers=False)
connected = hanging.connections(port, set())
os.kill(host, signal.SIGSTOP)
try:
    hanging.call_within(0.3, lambda: store.get("nothing"), port, connected)
except TimeoutError as error:
    print(error)
raise SystemExit(3)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The port of a store, and its process."""
    script, said = tmp_path / "host.py", tmp_path / "port"
    script.write_text(HOST)
    process = ranks.start(str(script), output=said)
    while not said.read_text().endswith("\n"):
        assert process.poll() is None, said.read_text()
        time.sleep(0.02)
    yield said.read_text().strip(), process.pid
    process.kill()
    process.wait()


def ended(folder: Path, program: str, *words: str) -> tuple[int, str, str]:
    """Its status, output and errors."""
    script, output, errors = (folder / name for name in ("program.py", "output", "errors"))
    script.write_text(program)
    status = ranks.start(str(script), *words, output=output, errors=errors).wait(60)
    return status, output.read_text(), errors.read_text()


@pytest.mark.parametrize("life", range(3))  # without the wait for the thread 3 of 4 ended with SIGABRT
def test_a_process_ends_as_its_script_does_though_a_store_hangs(
    tmp_path: Path, host: tuple[str, int], life: int
) -> None:
    port, pid = host
    status, said, errors = ended(tmp_path, RANK, port, str(pid))
    assert (status, said) == (3, "no answer for 0.3 s\n"), errors


SLOW = """
import sys, time
from onebit.comm.transports import hanging

def late() -> None:
    time.sleep(1.5)
    sys.stdout.write("came back\\n")
    sys.stdout.flush()

hanging._LINGER_S = 0.0
try:
    hanging.call_within(0.1, late, None)
except TimeoutError:
    print("no answer", flush=True)
"""


def test_a_process_waits_at_its_end_for_a_call_that_comes_back_late(tmp_path: Path) -> None:
    """Whether or not this torch aborts a process whose thread comes back while Python ends."""
    assert ended(tmp_path, SLOW) == (0, "no answer\ncame back\n", "")
