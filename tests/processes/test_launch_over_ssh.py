"""`onebit launch --hostfile` with an `ssh` that runs everything here: ranks, words, ends and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
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
        self.write("hosts", "worker-0 slots=2\nworker-1 slots=2\n")
        self.write("train.py", SCRIPT)
        self.write("action", "")
        self.write("ssh", SSH)
        (self.folder / "ssh").chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def start(self, *words: str, hostfile: bool = True, **variables: str) -> subprocess.Popen[str]:
        port = str(free_port())
        options = ["--hostfile", "hosts", "--master_addr", "127.0.0.1"] if hostfile else []
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        environment |= {"PYTHONPATH": str(ROOT), "HOME": str(self.folder.parent), **variables}
        environment["PATH"] = f"{self.folder}:{environment['PATH']}"
        return subprocess.Popen(
            [sys.executable, "-m", "onebit", "launch", *options, "--master_port", port, *words],
            cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )  # fmt: skip

    def run(self, *words: str, **options: object) -> tuple[int, str, str]:
        process = self.start(*words, **options)  # type: ignore[arg-type]
        output, errors = process.communicate(timeout=100)
        return process.returncode, output, errors

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
    """Whatever the words: two shells read them on the way."""
    words = ["--lr", "1e-3", "two words", "", "$HOME", "`id`", "it's", 'a "b"', "*", "a\nb", "\\", "ä", "--", "-H"]
    (launch.folder.parent / ".deepspeed_env").write_text("FROM_HOME=it's $HOME\nFROM_BOTH=home\n")
    launch.write(".deepspeed_env", "FROM_BOTH=folder\n")
    code, output, errors = launch.run("--ssh_port", "2222", "train.py", *words, NCCL_DEBUG="INFO", OTHER="1")
    assert code == 0, errors
    ranks = launch.ranks()
    assert [(r["STUB_HOST"], r["RANK"], r["LOCAL_RANK"]) for r in ranks] == [
        ("worker-0", "0", "0"), ("worker-0", "1", "1"), ("worker-1", "2", "0"), ("worker-1", "3", "1"),
    ]  # fmt: skip
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert rank["words"] == words and rank["folder"] == str(launch.folder)
        assert (rank["NCCL_DEBUG"], rank["FROM_HOME"], rank["FROM_BOTH"]) == ("INFO", "it's $HOME", "folder")
        assert "OTHER" not in rank and "CUDA_VISIBLE_DEVICES" not in rank
        assert rank["STUB_OPTIONS"].endswith(" -p 2222")
    assert sorted(output.splitlines()) == [f"[worker-{r // 2}] hello from {r}" for r in range(4)]
    assert all(f"[worker-{r // 2}] trouble at {r}\n" in errors for r in range(4))
    assert not launch.processes()


def test_hosts_with_unlike_slots_and_chosen_gpus(launch: Launch) -> None:
    code, _, errors = launch.run("--exclude", "worker-0:0", "train.py")
    assert code == 0, errors
    assert [(r["STUB_HOST"], r["RANK"], r["LOCAL_RANK"], r.get("CUDA_VISIBLE_DEVICES")) for r in launch.ranks()] == [
        ("worker-0", "0", "0", "1"), ("worker-1", "1", "0", None), ("worker-1", "2", "1", None),
    ]  # fmt: skip


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
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL]
)
def test_a_signal_ends_all_hosts(launch: Launch, number: signal.Signals) -> None:
    """Even one after which the launcher can do nothing: its hosts see their standard input closed."""
    launch.write("action", "wait")
    process = launch.start("train.py")
    launch.await_ranks(4)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), errors
    deadline = time.monotonic() + 20
    while launch.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not launch.processes()


@pytest.mark.thorough
def test_ranks_that_ignore_sigterm_end_in_bounded_time(launch: Launch) -> None:
    launch.write("action", "stubborn")
    process = launch.start("train.py")
    launch.await_ranks(4)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGINT and not launch.processes()
