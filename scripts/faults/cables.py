"""Cables that are cut, restored, slow, lossy or deaf: ranks on emulated hosts, one network namespace each.

`onebit emulate` lays the hosts; the ranks are forks of this process that enter them. The victim itself asks the switch
to cut its cable, so that the moment is known. Promised is a PeerError on every rank within the timeout, which names the
rank behind the cable; where the cable is back in time, or only slow, the same bits.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from faults.case import AS_PROMISED, REFUSED, Case, End, Outcome, Promise, Tools, judge
from faults.peers import MARGIN_S, TIMEOUT_S
from faults.ranks import Rank, fork_ranks
from faults.setups import PLAIN, Setup
from onebit.cli.cluster import BRIDGE, INTERFACE, MASTER_PORT, NEW_NETWORK, SEARCH_PATH, SWITCH, Cluster, available

HOSTS, STEPS, AT = 3, 16, 6


@dataclass(frozen=True)
class Net:
    """The hosts' networks, as descriptors to enter them; the switch's is the last."""

    descriptors: Sequence[int]

    def enter(self, host: int) -> None:
        """This process, which must have no other threads, goes on in that network."""
        if ctypes.CDLL(None, use_errno=True).setns(self.descriptors[host], NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"entering the network of host {host}")

    def do(self, host: int, *commands: str) -> None:
        """Run commands of iproute2 on a host; -1: on the switch."""
        for command in commands:
            subprocess.run(
                command.split(), check=True, env={"PATH": SEARCH_PATH}, preexec_fn=lambda: self.enter(host),
                capture_output=True,
            )  # fmt: skip


@contextmanager
def _networks(cluster: Cluster) -> Iterator[Net]:
    """Whoever listens at a machine's socket lives in its network: the kernel tells who that is."""
    descriptors = []
    for machine in [*cluster.names, SWITCH]:
        with cluster._connect(machine) as connection:
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            descriptors.append(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
    try:
        yield Net(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


# ---------------------------------------------------------------- what happens to a cable


def _cut(net: Net, host: int) -> None:
    """Frames vanish in the switch; nobody is told."""
    net.do(-1, f"ip link set p{host} nomaster")


def _mend(net: Net, host: int) -> None:
    net.do(-1, f"ip link set p{host} up", f"ip link set p{host} master {BRIDGE}")
    net.do(host, f"tc qdisc replace dev {INTERFACE} root pfifo limit 10000")
    net.do(-1, f"tc qdisc replace dev p{host} root pfifo limit 10000")


def _pull(net: Net, host: int) -> None:
    """The host sees that its carrier is gone."""
    net.do(-1, f"ip link set p{host} down")


def _mute(net: Net, host: int) -> None:
    """The host hears, and is not heard."""
    net.do(host, f"tc qdisc replace dev {INTERFACE} root tbf rate 1kbit burst 10 limit 10")


def _deafen(net: Net, host: int) -> None:
    """The host is heard, and does not hear."""
    net.do(-1, f"tc qdisc replace dev p{host} root tbf rate 1kbit burst 10 limit 10")


def _shape(queue: str) -> Callable[[Net, int], None]:
    def act(net: Net, host: int) -> None:
        net.do(host, f"tc qdisc replace dev {INTERFACE} root {queue}")
        net.do(-1, f"tc qdisc replace dev p{host} root {queue}")

    return act


def _cut_for(seconds: float, times: int = 1, pause_s: float = 0.0) -> Callable[[Net, int], None]:
    """Mended by a process of its own, while training goes on."""

    def act(net: Net, host: int) -> None:
        if os.fork() == 0:
            for _ in range(times):
                _cut(net, host)
                time.sleep(seconds)
                _mend(net, host)
                time.sleep(pause_s)
            os._exit(0)
        time.sleep(0.1)

    return act


@dataclass(frozen=True)
class Trouble:
    """act(net, host): what happens to the host's cable before step `AT`. is_harmless: the same bits are promised.

    before: it happens before the ranks find each other instead.
    """

    act: Callable[[Net, int], None]
    is_harmless: bool = False
    before: bool = False


TROUBLES: dict[str, Trouble] = {
    "cut": Trouble(_cut),
    "pulled out": Trouble(_pull),
    "mute": Trouble(_mute),
    "deaf": Trouble(_deafen),
    "cut before the start": Trouble(_cut, before=True),
    "cut for a third of the timeout": Trouble(_cut_for(TIMEOUT_S / 3), is_harmless=True),
    "cut for longer than the timeout": Trouble(_cut_for(TIMEOUT_S + MARGIN_S)),
    "flapping, 0.2 s in every 0.6 s, 8 times": Trouble(_cut_for(0.2, 8, 0.4), is_harmless=True),
    "slow, 1 Mbit/s": Trouble(_shape("tbf rate 1mbit burst 3000 limit 60000"), is_harmless=True),
    "slow, 200 kbit/s": Trouble(_shape("tbf rate 200kbit burst 3000 limit 60000"), is_harmless=True),
    "lossy, a queue of two packets": Trouble(_shape("tbf rate 2mbit burst 3000 limit 4600"), is_harmless=True),
    "slower than the timeout, 400 bit/s": Trouble(_shape("tbf rate 400bit burst 1600 limit 60000")),
}


def work(net: Net, setup: Setup, trouble: Trouble | None, victim: int, rank: Rank) -> str:
    import torch

    torch.set_num_threads(1)
    is_victim = trouble is not None and rank.number == victim
    if is_victim and trouble is not None and trouble.before:
        rank.note_fault()
        trouble.act(net, victim)
    net.enter(rank.number)
    run = setup.open(TIMEOUT_S)
    for step in range(STEPS):
        if is_victim and trouble is not None and step == AT and not trouble.before:
            rank.note_fault()
            trouble.act(net, victim)
        run.step(step)
    found = run.fingerprint()
    run.close()
    return found


# ---------------------------------------------------------------- cases


_ports = itertools.count(MASTER_PORT)  # what a start leaves behind must not meet the next one


def _on_hosts(net: Net, setup: Setup, trouble: Trouble | None, victim: int) -> dict[int, End]:
    env = {
        "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(next(_ports)), "GLOO_SOCKET_IFNAME": INTERFACE,
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    works = [partial(work, net, setup, trouble, victim)] * HOSTS
    return fork_ranks(works, patience_s=4 * TIMEOUT_S + 4 * MARGIN_S + 20.0, env=env)


def _troubled(setup: Setup, names: Sequence[str], victims: Sequence[int], tools: Tools) -> Iterator[Outcome]:
    with Cluster(HOSTS) as cluster, _networks(cluster) as net:
        plain = _on_hosts(net, setup, None, -1)
        expected = plain[0].value
        if any(end.what != "returned" or end.value != expected for end in plain.values()):
            yield Outcome("no fault at all", REFUSED, f"{plain}")
            return
        for name in names:
            for victim in victims:
                ends = _on_hosts(net, setup, TROUBLES[name], victim)
                yield _judge(f"the cable of rank {victim} {name}", ends, TROUBLES[name], victim, expected)
                _mend(net, victim)


def _judge(fault: str, ends: dict[int, End], trouble: Trouble, victim: int, expected: object) -> Outcome:
    if trouble.is_harmless:
        return judge(fault, ends, Promise(), is_right=lambda rank, value: value == expected)
    if all(end.what == "returned" and end.value == expected for end in ends.values()):
        return Outcome(
            fault, AS_PROMISED, "nothing was lost"
        )  # Gloo's own collectives wait as long as bytes trickle in
    kind, latest = r"Error: " if trouble.before else r"PeerError: ", TIMEOUT_S + MARGIN_S
    others = judge(fault, ends, Promise(kind, frozenset({victim}), frozenset(), latest), victims={victim})
    # Who sits behind the cable misses somebody, and cannot know whether they or it are cut off.
    alone = judge(fault, {victim: ends[victim]}, Promise(kind, frozenset(), frozenset(range(HOSTS)), latest))
    return others if alone.verdict == "as promised" or others.verdict != "as promised" else alone


def why_no_hosts() -> str:
    if os.geteuid() != 0:
        return "ranks enter the networks of emulated hosts as root only"
    return available() or ""


def cases() -> Iterator[Case]:
    gone = [name for name, trouble in TROUBLES.items() if not trouble.is_harmless]
    back = [name for name, trouble in TROUBLES.items() if trouble.is_harmless]
    table = {"OnebitAdam": (0, 1, 2), "ShardedOnebitAdam": (0, 2), "AdamW": (1,)}
    for name, victims in table.items():
        yield Case(
            f"{name}: cables that are gone",
            f"PeerError on every rank within {TIMEOUT_S:g} s that names the rank behind the cable",
            f"{', '.join(gone)}; {HOSTS} emulated hosts, before step {AT}",
            f"errors and ends of every rank; {MARGIN_S:g} s of tolerance",
            partial(_troubled, PLAIN[name], gone, victims),
            cost_s=9.0 * len(gone) * len(victims),
            why_not=why_no_hosts,
        )
        yield Case(
            f"{name}: cables that are back in time, or slow",
            "the same bits as without the fault",
            f"{', '.join(back)}; {HOSTS} emulated hosts, from step {AT} on",
            "parameters of all ranks after 16 steps",
            partial(_troubled, PLAIN[name], back, victims),
            cost_s=9.0 * len(back) * len(victims),
            why_not=why_no_hosts,
        )
