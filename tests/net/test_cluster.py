"""Emulated hosts: what their links carry, what the counters say, which ranks start, and that nothing is left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ranks
from ranks import python_of_forks

from onebit.cli import main as onebit_command
from onebit.cli.cluster import Cluster, available, parse_rate, sent_on_wire
from onebit.cli.cluster.machine import KEEPER

TIMEOUT_S = 100.0
PAYLOAD_BYTES = 6_000_000
NAMESPACES = ("net", "mnt", "pid", "uts", "ipc")

# Rank 1 sends to rank 0, which says how many bits a second arrived.
SEND = f"""
import os, socket, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 5000)
if rank == 0:
    connection, _ = socket.create_server(address).accept()
    left, began = {PAYLOAD_BYTES}, time.monotonic()
    while left > 0:
        left -= len(connection.recv(1 << 16))
    print({PAYLOAD_BYTES} * 8 / (time.monotonic() - began))
elif rank == 1:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.sendall(bytes({PAYLOAD_BYTES}))
    connection.recv(1)
"""

NAME_RANK = """
import os, socket
name = socket.gethostname()
ranks = [os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
print(name, socket.gethostbyname(name), os.listdir("/dev/shm"), *ranks)
"""

# Both all-reduce 250,000 float32 numbers: 1 MB each way between two ranks, whatever the algorithm.
REDUCED_BYTES = 1_000_000
GLOO = f"""
import os, torch, torch.distributed as dist
from onebit.cli.cluster import sent_on_wire
dist.init_process_group("gloo")
ranks = torch.full(({REDUCED_BYTES // 4},), dist.get_rank() + 1.0)
dist.barrier()
before = sent_on_wire()
dist.all_reduce(ranks)
dist.barrier()
print('result', dist.get_world_size(), ranks.mean().item(), sent_on_wire() - before)
dist.destroy_process_group()
"""
MPI = f"""
import numpy
from mpi4py import MPI
from onebit.cli.cluster import sent_on_wire
world = MPI.COMM_WORLD
ranks = numpy.full({REDUCED_BYTES // 4}, world.rank + 1.0, numpy.float32)
before = sent_on_wire()
world.Allreduce(MPI.IN_PLACE, ranks)
world.Barrier()
if world.rank == 0:
    print('result', world.size, ranks.mean(), sent_on_wire() - before)
"""


def run_script(*arguments: object) -> subprocess.CompletedProcess:
    command = [python_of_forks(), "-m", "onebit", "emulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)


def eventually(holds: Callable[[], object], within_s: float = 8.0) -> bool:
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def cluster(emulated_hosts: None) -> Iterator[Cluster]:
    with Cluster(hosts=3, rate="100mbit") as three_hosts:
        yield three_hosts


@pytest.mark.net
def test_link_carries_its_rate_and_counters_agree(cluster: Cluster) -> None:
    for rate in ("100mbit", "200mbit"):
        cluster.shape(rate)
        run = cluster.run([sys.executable, "-c", SEND], launcher="none", timeout_s=TIMEOUT_S, capture=True)
        assert run.status == 0
        assert 0.85 < float(run.output) / parse_rate(rate) < 1.05
        receiver, sender, idle = run.traffic
        assert PAYLOAD_BYTES < sender.sent_bytes < 1.06 * PAYLOAD_BYTES  # 66 bytes of headers for 1448 of payload
        assert sender.sent_bytes - sender.drops * 1514 <= receiver.received_bytes <= sender.sent_bytes
        assert receiver.sent_bytes < 0.05 * PAYLOAD_BYTES  # acknowledgements
        assert idle.sent_bytes == idle.packets == idle.drops == 0


@pytest.mark.net
def test_unshaped_link_is_faster_and_still_counts(cluster: Cluster) -> None:
    cluster.shape("none")
    run = cluster.run([sys.executable, "-c", SEND], launcher="none", timeout_s=TIMEOUT_S, capture=True)
    assert float(run.output) > 4e8
    # Without a queue that paces it, TCP may lose packets to a busy receiver and send them again (2 % were seen); both
    # counters see those. The card's counts headers once per 64 KiB, the queue's once per packet.
    sender = run.traffic[1]
    assert PAYLOAD_BYTES < sender.tx_bytes < 1.1 * PAYLOAD_BYTES
    assert sender.tx_bytes < sender.sent_bytes < 1.06 * sender.tx_bytes


@pytest.mark.net
def test_plain_launcher_starts_every_rank_in_its_own_host(cluster: Cluster, capfd: pytest.CaptureFixture) -> None:
    run = cluster.run([sys.executable, "-c", NAME_RANK], launcher="none", ranks_per_host=2, timeout_s=TIMEOUT_S)
    lines = capfd.readouterr().out.splitlines()
    expected = {"ob0 10.77.0.1 [] 0 6 0 2"}
    for rank in range(1, 6):
        host, local_rank = divmod(rank, 2)
        expected.add(f"[ob{host} rank {rank}] ob{host} 10.77.0.{host + 1} [] {rank} 6 {local_rank} 2")
    assert run.status == 0
    assert set(lines) == expected


@pytest.mark.net
@pytest.mark.parametrize(("launcher", "program", "needs"), [("torchrun", GLOO, "torch"), ("mpirun", MPI, "mpi4py")])
def test_launcher_meets_across_the_wire(
    emulated_hosts: None, tmp_path: Path, launcher: str, program: str, needs: str
) -> None:
    pytest.importorskip(needs)
    stats = tmp_path / "stats.json"
    options = ["--hosts", 2, "--rate", "1gbit", "--launcher", launcher, "--timeout", TIMEOUT_S, "--stats", stats]
    done = run_script(*options, "--", "python", "-c", program)
    assert done.returncode == 0, done.stderr
    # Libraries write of their own among the lines and into them, as Gloo does when it connects.
    result = re.search(r"result (\d+) (\S+) (\d+)\b", done.stdout)
    assert result, done.stdout
    assert (result[1], float(result[2])) == ("2", 3.0)
    assert int(result[3]) > REDUCED_BYTES
    traffic = json.loads(stats.read_text())["traffic"]
    assert [t["host"] for t in traffic] == ["ob0", "ob1"]
    assert all(t["sent_bytes"] > REDUCED_BYTES for t in traffic)
    assert traffic[0]["address"] in done.stderr


@pytest.mark.net
def test_first_failure_ends_the_others_and_is_the_exit_status(cluster: Cluster) -> None:
    command = ["sh", "-c", 'test "$RANK" = 1 && exit 7; sleep 60']
    run = cluster.run(command, launcher="none", timeout_s=TIMEOUT_S)
    assert run.status == 7
    assert run.seconds < 10


@pytest.mark.net
def test_failure_of_all_hosts_at_once_is_the_exit_status(cluster: Cluster) -> None:
    assert {cluster.run(["false"], launcher="none").status for _ in range(30)} == {1}


@pytest.mark.net
def test_timeout_ends_even_what_hides(cluster: Cluster) -> None:
    marker = f"6{uuid.uuid4().int % 10**9}"
    command = ["sh", "-c", f"trap '' TERM; setsid sleep {marker} & wait"]
    run = cluster.run(command, launcher="none", timeout_s=0.5)
    assert run.status == 124
    assert not processes_with(marker)


@pytest.mark.net
def test_two_clusters_do_not_meet(cluster: Cluster) -> None:
    with Cluster(hosts=2, rate="none") as other:
        before = cluster.traffic()
        run = other.run([sys.executable, "-c", SEND], launcher="none", timeout_s=TIMEOUT_S, capture=True)
        assert run.traffic[1].sent_bytes > PAYLOAD_BYTES
        assert cluster.traffic() == before


def processes_with(words: str) -> list[str]:
    """Processes, zombies aside, whose command line holds `words`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if words in command_line:
            found.append(command_line)
    return found


def namespaces_of(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES}


def users_of(namespaces: set[str]) -> list[str]:
    """Processes in any of these namespaces."""
    users = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if namespaces & namespaces_of(int(path.name)):
                users.append(path.name)
        except OSError:
            continue
    return users


def left_of(marker: str, directory: str, namespaces: set[str]) -> list[str]:
    """Whatever there still is of a cluster: processes and its directory."""
    directories = [directory] if Path(directory).exists() else []
    return [*processes_with(marker), *processes_with(directory), *users_of(namespaces), *directories]


def visible_state() -> tuple[set[str], set[str], set[str]]:
    """What this machine's own namespaces show: interfaces, mounts, named namespaces."""
    named = Path("/run/netns")
    return (
        set(os.listdir("/sys/class/net")),
        set(Path("/proc/self/mounts").read_text().splitlines()),
        set(os.listdir(named)) if named.exists() else set(),
    )


@pytest.mark.net
@pytest.mark.parametrize("ending", [None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left(emulated_hosts: None, tmp_path: Path, ending: signal.Signals | None) -> None:
    before = visible_state()
    marker = f"{3 if ending is None else 600}.{uuid.uuid4().int % 10**9:09d}"
    words = ("emulate", "--hosts", "2", "--launcher", "none", "--", "sleep", marker)
    script = ranks.start(*words, output=tmp_path / "said")
    assert eventually(lambda: len(processes_with(f"sleep {marker}")) == 2, within_s=60.0)
    (directory,) = {path for path in processes_of_keeper(script.pid)}
    sleeper = next(p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_command(p, ["sleep", marker]))
    namespaces = namespaces_of(sleeper) - namespaces_of(os.getpid())
    assert len(namespaces) == 5 and users_of(namespaces)
    with contextlib.ExitStack() as opened:
        # The kernel gives a freed namespace's number to the next one, perhaps another test's: keep these taken.
        for kind in NAMESPACES:
            opened.enter_context(open(f"/proc/{sleeper}/ns/{kind}"))
        if ending is not None:
            script.send_signal(ending)
        status = script.wait(TIMEOUT_S)
        assert status == {None: 0, signal.SIGKILL: -signal.SIGKILL}.get(ending, 128 + (ending or 0))
        eventually(lambda: not left_of(marker, directory, namespaces), within_s=30.0)
        assert left_of(marker, directory, namespaces) == []
    assert visible_state() == before


def is_command(pid: int, argv: list[str]) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b"".join(word.encode() + b"\0" for word in argv)
    except OSError:
        return False


def processes_of_keeper(script: int) -> set[str]:
    """The directories of the clusters that the script `script` keeps."""
    children = Path(f"/proc/{script}/task/{script}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in children]
    return {words[words.index(KEEPER) + 1] for words in commands}


@pytest.mark.net
def test_check_says_yes(emulated_hosts: None) -> None:
    assert run_script("--check").returncode == 0


def test_outside_a_host_there_is_no_counter() -> None:
    assert sent_on_wire() is None


@pytest.mark.parametrize(
    ("text", "bits_per_s"), [("100mbit", 10**8), ("2.5gbit", 2.5e9), ("1Gbit", 10**9), ("none", None)]
)
def test_rate_is_read_as_tc_reads_it(text: str, bits_per_s: float | None) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hosts", 65, "--", "true"], "between 1 and 64"),
        (["--hosts", 0, "--", "true"], "between 1 and 64"),
        (["--rate", "100MB", "--", "true"], "write it as tc does"),
        (["--rate", "1bit", "--", "true"], "outside 100kbit to 100gbit"),
        (["--ranks-per-host", 0, "--", "true"], "at least 1"),
        (["--timeout", 0, "--", "true"], "more than 0 seconds"),
        (["--timeout", "nan", "--", "true"], "more than 0 seconds"),
        (["--timeout", "inf", "--", "true"], "at most 1e+06"),
        (["--stats", "/nowhere/x.json", "--", "true"], "no such folder"),
        (["--hosts", 2], "no command"),
        (["--", "no-such-program"], "no such command"),
        (["python", "x.py"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_named(arguments: list[object], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = onebit_command(["emulate", *map(str, arguments)])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_missing_iproute2_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebit.cli.cluster.hosts.SEARCH_PATH", "/nowhere")
    assert "apt-get install iproute2" in str(available())
