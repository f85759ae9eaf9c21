"""`onebit launch --hostfile` with an `ssh` that runs everything here: ranks, words, ends and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from ranks import free_port

ROOT = Path(__file__).parents[2]

# Like sshd's, its command does not inherit the launcher's environment.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do options="$options $1 $2"; shift 2; done
[ "$1" = away ] && { echo "ssh: connect to host away port 22: No route to host" >&2; exit 255; }
exec env -i PATH="$PATH" HOME="$HOME" STUB_HOST="$1" STUB_OPTIONS="$options" sh -c "$2"
"""

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "STUB_HOST", "STUB_OPTIONS", "CUDA_VISIBLE_DEVICES",
         "NCCL_DEBUG", "FROM_HOME", "FROM_BOTH", "OTHER"]
facts = {name: os.environ[name] for name in names if name in os.environ}
facts |= {"words": sys.argv[1:], "folder": os.getcwd(), "pid": os.getpid()}
Path(f"rank{rank}.part").write_text(json.dumps(facts))
Path(f"rank{rank}.part").rename(f"rank{rank}.json")
os.write(1, f"hello from {rank}\\n".encode())  # a line in one piece
os.write(2, f"trouble at {rank}\\n".encode())
action = Path("action").read_text()
if action == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if action == "fail" and rank == 3:
    while len(list(Path().glob("rank*.json"))) < 4:
        time.sleep(0.05)
    sys.exit(7)
while action:
    time.sleep(0.1)
"""


class Launch:
    """A launch in `folder`, of two hosts with two slots unless told otherwise."""

    def __init__(self, folder: Path):
        self.folder = folder / "a folder"
        self.folder.mkdir()
        self.output, self.errors = folder / "output", folder / "errors"
        self.write("hosts", "worker-0 slots=2\nworker-1 slots=2\n")
        self.write("train.py", SCRIPT)
        self.write("action", "")
        self.write("ssh", SSH)
        (self.folder / "ssh").chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def start(self, *words: str, hostfile: bool = True, **variables: str) -> Any:
        options = ["--hostfile", "hosts", "--master_addr", "127.0.0.1"] if hostfile else []
        variables |= {"PYTHONPATH": str(ROOT), "HOME": str(self.folder.parent)}
        variables["PATH"] = f"{self.folder}:{os.environ['PATH']}"
        command = ("launch", *options, "--master_port", str(free_port()), *words)
        return ranks.start(*command, output=self.output, errors=self.errors, folder=self.folder, **variables)

    def run(self, *words: str, **options: Any) -> tuple[int, str, str]:
        code = self.start(*words, **options).wait(100)
        return code, self.output.read_text(), self.errors.read_text()

    def ranks(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def await_ranks(self, count: int) -> None:
        deadline = time.monotonic() + 80
        while len(self.ranks()) < count:
            assert time.monotonic() < deadline, self.ranks()
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Those that have this launch's folder as their own."""
        links = Path("/proc").glob("[0-9]*/cwd")
        return [int(link.parent.name) for link in links if _target(link) == str(self.folder)]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    for pid in launch.processes():
        os.kill(pid, signal.SIGKILL)


def test_ranks_words_and_variables_arrive(launch: Launch) -> None:
    """Whatever the words: two shells read them on the way. Hosts have unlike slots, and one of them chosen GPUs."""
    words = ["--lr", "1e-3", "two words", "", "$HOME", "`id`", "it's", 'a "b"', "*", "a\nb", "\\", "ä", "--", "-H"]
    (launch.folder.parent / ".deepspeed_env").write_text("FROM_HOME=it's $HOME\nFROM_BOTH=home\n")
    launch.write(".deepspeed_env", "FROM_BOTH=folder\n")
    options = ("--ssh_port", "2222", "--exclude", "worker-0:0", "--local_rank")
    code, output, errors = launch.run(*options, "train.py", *words, NCCL_DEBUG="INFO", OTHER="1")
    assert code == 0, errors
    names = ("STUB_HOST", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert [tuple(map(rank.get, names)) for rank in launch.ranks()] == [
        ("worker-0", "0", "0", "1", "1"), ("worker-1", "1", "0", "2", None), ("worker-1", "2", "1", "2", None),
    ]  # fmt: skip
    for rank in launch.ranks():
        assert rank["WORLD_SIZE"] == "3"
        assert rank["words"] == [f"--local_rank={rank['LOCAL_RANK']}", *words] and rank["folder"] == str(launch.folder)
        assert (rank["NCCL_DEBUG"], rank["FROM_HOME"], rank["FROM_BOTH"]) == ("INFO", "it's $HOME", "folder")
        assert "OTHER" not in rank
        assert rank["STUB_OPTIONS"].endswith(" -p 2222")
    assert sorted(output.splitlines()) == [f"[worker-{(r + 1) // 2}] hello from {r}" for r in range(3)]
    assert all(f"[worker-{(r + 1) // 2}] trouble at {r}\n" in errors for r in range(3))
    assert not launch.processes()


def test_without_a_hostfile_ranks_start_here(launch: Launch) -> None:
    launch.write(".deepspeed_env", "FROM_HOME=1\n")
    code, output, errors = launch.run("--num_gpus", "2", "train.py", "$x y", hostfile=False)
    assert code == 0, errors
    assert [(r["RANK"], r["WORLD_SIZE"], r["words"], r["FROM_HOME"]) for r in launch.ranks()] == [
        ("0", "2", ["$x y"], "1"), ("1", "2", ["$x y"], "1"),
    ]  # fmt: skip
    assert sorted(output.splitlines()) == ["hello from 0", "hello from 1"]
    assert not any("STUB_HOST" in rank for rank in launch.ranks())


def test_the_first_failure_ends_all_with_its_status(launch: Launch) -> None:
    launch.write("action", "fail")
    began = time.monotonic()
    code, _, errors = launch.run("train.py")
    assert code == 7 and "onebit launch: worker-1 ended with status 7; ending the other hosts\n" in errors
    assert not launch.processes() and time.monotonic() - began < 60


def test_a_host_that_cannot_be_reached_is_named_with_what_to_do(launch: Launch) -> None:
    launch.write("hosts", "worker-0 slots=2\naway slots=2\n")
    code, _, errors = launch.run("--ssh", "./ssh -v x", "train.py")
    assert code == 255 and "[away] ssh: connect to host away port 22: No route to host\n" in errors
    assert "onebit launch: away ended with status 255" in errors and "try `./ssh -v x away true`" in errors
    assert not launch.processes() and not launch.ranks()


@pytest.mark.parametrize(
    ("number", "action"),
    [
        (signal.SIGINT, "wait"),
        pytest.param(signal.SIGTERM, "stubborn", marks=pytest.mark.thorough),
        (signal.SIGKILL, "wait"),
    ],
)
def test_a_signal_ends_all_hosts(launch: Launch, number: signal.Signals, action: str) -> None:
    """Even ranks that ignore SIGTERM; even by SIGKILL, after which hosts see their standard input closed."""
    launch.write("action", action)
    process = launch.start("train.py")
    launch.await_ranks(4)
    for k, rank in enumerate(launch.ranks()):
        assert (rank["STUB_HOST"], rank["RANK"], rank["LOCAL_RANK"]) == (f"worker-{k // 2}", str(k), str(k % 2))
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2") and "CUDA_VISIBLE_DEVICES" not in rank
    process.send_signal(number)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.wait(90) == expected, launch.errors.read_text()
    deadline = time.monotonic() + 20
    while launch.processes() and time.monotonic() < deadline and number == signal.SIGKILL:
        time.sleep(0.1)
    assert not launch.processes()
