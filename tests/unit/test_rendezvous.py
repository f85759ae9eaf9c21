"""Where the ranks of a new group find each other: who is told what, and processes that are started anew."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import socket
import threading
import time
import unittest.mock
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest
import torch.distributed

from onebit.comm import PeerError, torch_versions
from onebit.comm.transports import rendezvous
from onebit.comm.transports.arrivals import Arrival, comes
from onebit.comm.transports.edge import STORE_S
from onebit.comm.transports.hanging import call_within
from onebit.comm.transports.rendezvous import Rendezvous
from onebit.comm.transports.torch_distributed import TorchTransport


@pytest.mark.slow
def test_a_second_rank_0_waits_for_the_name_of_the_first() -> None:
    """The first listens before it puts itself on the list."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    first = Arrival(0, 2, "elsewhere", 1)
    late = threading.Timer(0.3, lambda: store.append("onebit/arrivals", comes("first", first)))
    late.start()
    with pytest.raises(ValueError, match=r"process 1 on elsewhere and process .* are both rank 0"):
        Rendezvous(Arrival.here(0, 2), ("127.0.0.1", store.port), 5.0)
    late.join()


@pytest.mark.slow
def test_rank_0_names_a_host_that_has_no_address() -> None:
    with pytest.raises(ValueError, match=r"cannot listen at node1\.invalid:29500: .*; set MASTER_ADDR to a name"):
        Rendezvous(Arrival.here(0, 2), ("node1.invalid", 29500), 0.5)


class Agent:
    """A launcher's, whose store outlives the processes that come to it."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._pool = pool

    def come(
        self, rank: int, size: int, pid: int, timeout_s: float = 30.0, delay_s: float = 0.0
    ) -> Future[torch.distributed.Store]:
        """A rank comes as process `pid`."""

        def meet() -> torch.distributed.Store:
            time.sleep(delay_s)
            me = Arrival(rank, size, "a", pid)
            return Rendezvous(me, ("127.0.0.1", self.store.port), timeout_s, is_hosted=True).meet()

        return self._pool.submit(meet)


@pytest.fixture
def agent() -> Iterator[Agent]:
    with ThreadPoolExecutor(8) as pool:
        yield Agent(pool)


def end_of(future: Future[torch.distributed.Store]) -> str:
    """What a rank has raised, without its number; "met"."""
    error = future.exception(30)
    return "met" if error is None else f"{type(error).__name__}: {str(error).partition(': ')[2]}"


def names(met: list[Future[torch.distributed.Store]]) -> list[str]:
    return [future.result(30).get("name").decode() for future in met]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "error"), [((3, 4, 3), ValueError), ((3, None, 3), PeerError)])
def test_who_reads_the_list_last_raises_what_all_raise(sizes: tuple[int | None, ...], error: type[Exception]) -> None:
    """Ranks 1 and 2 have raised before rank 0 looks; or rank 2 has, and rank 1 comes when all is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = probe.getsockname()
    host = Rendezvous(Arrival(0, 3, "a", 10), place, 0.5)

    def said(rank: int, size: int, timeout_s: float = 0.5) -> str:
        with pytest.raises(error) as raised:
            Rendezvous(Arrival(rank, size, "a", 10 + rank), place, timeout_s).meet()
        return str(raised.value).removeprefix(f"rank {rank} of {size}: ")

    with ThreadPoolExecutor() as pool:
        each = {rank: pool.submit(said, rank, size) for rank, size in enumerate(sizes) if rank and size}
        told = {future.result(30) for future in each.values()}
    with pytest.raises(error) as raised:
        host.meet()
    told.add(str(raised.value).removeprefix("rank 0 of 3: "))
    if None in sizes:
        told.add(said(1, 3))
    assert len(told) == 1, told


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5])
def test_processes_that_an_agent_starts_anew_meet_each_other_alone(agent: Agent, size: int) -> None:
    """Once all had met; once one had not come, and the others waited in vain; once some were killed as they waited."""
    for start in range(2):
        met = [agent.come(rank, size, 100 * start + rank) for rank in range(size)]
        met[0].result(30).set("name", f"start {start}")
        assert names(met) == [f"start {start}"] * size
    if size == 1:
        return
    vain = [agent.come(rank, size, 200 + rank, 2.0) for rank in range(1, size)]
    for future in vain:
        with pytest.raises(PeerError) as missing:
            future.result(30)
        assert missing.value.ranks == (0,)
    met = [agent.come(rank, size, 300 + rank) for rank in reversed(range(size))]
    met[0].result(30).set("name", "start 3")
    assert names(met) == ["start 3"] * size


@pytest.mark.slow
def test_a_process_waits_for_those_that_live(agent: Agent) -> None:
    """Rank 0 of the start before came, and was killed as it waited: rank 1 waits for the one that comes now."""
    agent.store.append("onebit/arrivals", comes("killed", Arrival(0, 2, "a", 10)))
    here = agent.come(1, 2, 21)
    time.sleep(0.3)
    assert not here.done()
    anew = agent.come(0, 2, 20)
    anew.result(30).set("name", "both")
    assert names([here]) == ["both"]


@pytest.mark.slow
def test_a_process_waits_in_vain_for_one_that_was_killed(agent: Agent) -> None:
    agent.store.append("onebit/arrivals", comes("killed", Arrival(0, 2, "a", 10)))
    error = agent.come(1, 2, 21, 1.0).exception(30)
    assert isinstance(error, PeerError) and error.ranks == (0,)
    assert "all 2 ranks came in 1 s, but not all answer any more: 0 1 on a (process 10 21). Missing: rank 0" in str(
        error
    )


@pytest.mark.slow
def test_a_process_may_have_the_number_of_one_before_it(agent: Agent) -> None:
    """A container that is started anew has the same name, and its processes have the same numbers."""
    for start in range(3):
        met = [agent.come(rank, 2, 7 + rank) for rank in range(2)]
        assert not met[0].result(30).check(["name"])
        met[0].result(30).set("name", f"start {start}")
        assert names(met) == [f"start {start}"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("come", "said"),
    [
        (((0, 3), (1, 3), (1, 3)), "ValueError: process 101 on a and process 102 on a are both rank 1; start each"),
        (((0, 3), (1, 3), (2, 4)), "ValueError: WORLD_SIZE differs: 3 for rank"),
    ],
)
def test_processes_of_an_agent_that_contradict_each_other_are_told_alike(
    agent: Agent, come: tuple[tuple[int, int], ...], said: str
) -> None:
    ends = [agent.come(rank, size, 100 + k, 5.0, 0.1 * k) for k, (rank, size) in enumerate(come)]
    told = [end_of(end) for end in ends]
    assert told[0].startswith(said) and len(set(told)) == 1, told


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_all_meet_or_all_are_told_alike(agent: Agent, seed: int) -> None:
    """However they come, and however soon their time is up: in five starts, one after the other."""
    draw = random.Random(seed)
    for start in range(5):
        size = draw.randint(2, 4)
        come = [
            agent.come(
                rank, size, 10 * (start + 1) + rank, draw.choice((0.5, 2.0)), draw.choice((0.0, draw.random() / 2))
            )
            for rank in range(size)
        ]
        told = [end_of(end) for end in come]
        assert told.count("met") in (0, size), told
        for said in told:  # who comes when they have given up is told of itself alone
            came = re.search(r"\(process ([\d ]+)\)", said)
            for pid in came[1].split() if came else ():
                assert told[int(pid) % 10] == said, told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failed", "missing"), [((0, 1), "None is missing;"), ((1,), "Missing: rank 0; look at the logs")]
)
def test_ranks_that_fail_to_connect_look_at_the_network(agent: Agent, failed: tuple[int, ...], missing: str) -> None:
    """Something is between their hosts. One of them may still try to connect."""

    def fail(rank: int) -> PeerError | None:
        me = Arrival(rank, 2, "a", 10 + rank)
        here = Rendezvous(me, ("127.0.0.1", agent.store.port), 5.0, is_hosted=True)
        here.meet()
        return here.explain("no route") if rank in failed else None

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(fail, range(2)))
    for rank in failed:
        error = errors[rank]
        assert error is not None and set(error.ranks) == {0, 1} - set(failed)
        assert f"rank {rank} of 2: not all ranks connect to each other (no route); all came, 0 1 on a " in str(error)
        assert missing in str(error) and "GLOO_SOCKET_IFNAME" in str(error)


@pytest.mark.slow
def test_a_note_of_the_start_before_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group that the script has made, in torch's own place in the store: who fails would blame the wrong rank."""
    torch_versions.require("a store that tells its prefix", at_least=(2, 8))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=agent, rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    assert group is not None
    try:
        store = torch_versions.group_store(group)
        store.set("onebit/notes/0", "of the start before")
        waits = threading.Thread(target=store.wait, args=(["released"],))  # and holds the group's own connection
        waits.start()
        began = time.monotonic()
        TorchTransport()
        assert time.monotonic() - began < STORE_S
        torch_versions.own_connection(group).set("released", "")
        waits.join()
        assert not store.check(["onebit/notes/0"])
    finally:
        torch.distributed.destroy_process_group()


def _host(link: Connection) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    link.send(store.port)
    link.recv()


@pytest.mark.slow
@pytest.mark.parametrize(("fate", "why"), [(signal.SIGKILL, "process has ended"), (signal.SIGSTOP, "no answer for")])
def test_a_store_that_ends_or_hangs_is_told(fate: signal.Signals, why: str) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    host = context.Process(target=_host, args=(there,))
    host.start()
    assert host.pid is not None
    try:
        waits = Rendezvous(Arrival(1, 2, "a", 10), ("127.0.0.1", here.recv()), 2.0)
        os.kill(host.pid, fate)
        if fate == signal.SIGKILL:
            host.join()
        began = time.monotonic()
        with unittest.mock.patch.object(rendezvous, "STORE_S", 0.5), pytest.raises(PeerError, match=why) as raised:
            waits.meet()
        assert raised.value.ranks == (0,) and time.monotonic() - began < 5
    finally:
        host.kill()
        host.join()


def test_an_error_in_a_call_to_the_store_keeps_nothing_of_its_callers() -> None:
    """Without a collection of cycles: a rank that met a store on its end kept its last engine, and 20 sockets."""

    class Held:
        pass

    def fails() -> None:
        raise OSError("of the store")

    def caller() -> weakref.ref[Held]:
        held = Held()
        with suppress(OSError):
            call_within(5.0, fails, None)
        return weakref.ref(held)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
