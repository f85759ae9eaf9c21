"""Where the ranks of a new group find each other: what is on the list, who is told what, and processes started anew."""

from __future__ import annotations

import json
import socket
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple

import pytest
import torch.distributed

from onebit.comm import PeerError
from onebit.comm.transports.rendezvous import Arrival, Rendezvous, contradiction, from_where
from onebit.comm.transports.torch_distributed import TorchTransport


def arrivals(*ranks: int, size: int = 3, host: str = "a") -> list[Arrival]:
    return [Arrival(rank, size, host, 100 + 10 * len(host) + k) for k, rank in enumerate(ranks)]


@pytest.mark.parametrize(
    ("came", "said"),
    [
        (arrivals(), ""),
        (arrivals(0, 2, 1), ""),
        (arrivals(0, 1) * 2, ""),
        (arrivals(0, 1, 1), "process 111 on a and process 112 on a are both rank 1; start each process with a RANK"),
        (arrivals(0) + arrivals(0, host="bb"), "process 110 on a and process 120 on bb are both rank 0"),
        (
            arrivals(0) + arrivals(1, 2, size=4, host="bb"),
            "WORLD_SIZE differs: 3 for rank 0 on a (process 110), 4 for rank 1 2 on bb (process 120 121); start all",
        ),
    ],
)
def test_contradictions_name_processes_and_hosts(came: list[Arrival], said: str) -> None:
    assert contradiction(came)[: len(said)] == said and bool(contradiction(came)) == bool(said)


def test_where_ranks_come_from_is_told_host_by_host() -> None:
    came = arrivals(0, 2) + arrivals(1, host="bb")
    assert from_where(came) == "0 2 on a (process 110 111), 1 on bb (process 120)"


@pytest.mark.slow
def test_a_second_rank_0_waits_for_the_name_of_the_first() -> None:
    """The first listens before it puts itself on the list."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    first = Arrival(0, 2, "elsewhere", 1)
    late = threading.Timer(
        0.3,
        lambda: (
            store.add("onebit/groups/0/elsewhere/1", 1),
            store.append("onebit/arrivals/1", json.dumps(astuple(first)) + "\n"),
        ),
    )
    late.start()
    with pytest.raises(ValueError, match=r"process 1 on elsewhere and process .* are both rank 0"):
        Rendezvous(Arrival.here(0, 2), ("127.0.0.1", store.port), 5.0)
    late.join()


Come = Callable[..., Future[torch.distributed.Store]]


@pytest.fixture
def come() -> Iterator[Come]:
    """A rank comes to the store of a launcher's agent as process `pid`."""
    agent = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with ThreadPoolExecutor(8) as pool:

        def one(rank: int, size: int, pid: int, timeout_s: float = 30.0) -> Future[torch.distributed.Store]:
            place, me = ("127.0.0.1", agent.port), Arrival(rank, size, "a", pid)
            return pool.submit(lambda: Rendezvous(me, place, timeout_s, is_hosted=True).meet())

        yield one


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
def test_processes_that_an_agent_starts_anew_meet_each_other_alone(come: Come, size: int) -> None:
    """Once all had met; once one had not come, and the others waited in vain; once some were killed as they waited."""
    for start in range(2):
        met = [come(rank, size, 100 * start + rank) for rank in range(size)]
        met[0].result(30).set("name", f"start {start}")
        assert names(met) == [f"start {start}"] * size
    if size == 1:
        return
    vain = [come(rank, size, 200 + rank, 0.2) for rank in range(1, size)]
    for future in vain:
        with pytest.raises(PeerError) as missing:
            future.result(30)
        assert missing.value.ranks == (0,)
    met = [come(rank, size, 300 + rank) for rank in reversed(range(size))]
    met[0].result(30).set("name", "start 3")
    assert names(met) == ["start 3"] * size


@pytest.mark.slow
def test_a_process_waits_for_those_that_live(come: Come) -> None:
    """Rank 0 of the start before came, and was killed as it waited: rank 1 waits for the one that comes now."""
    killed = unittest.mock.patch.object(Rendezvous, "_agreed", side_effect=SystemExit)  # it gets as far as the list
    with killed, pytest.raises(SystemExit):
        come(0, 2, 10).result(30)
    here = come(1, 2, 21)
    time.sleep(0.3)
    assert not here.done()
    anew = come(0, 2, 20)
    anew.result(30).set("name", "both")
    assert names([here]) == ["both"]


@pytest.mark.slow
def test_other_numbers_of_ranks_than_in_the_start_before(come: Come) -> None:
    for start, size in enumerate((4, 2, 3)):
        met = [come(rank, size, 10 * start + rank) for rank in range(size)]
        met[0].result(30).set("name", str(size))
        assert names(met) == [str(size)] * size


@pytest.mark.slow
def test_a_note_of_the_start_before_is_nobodys(come: Come) -> None:
    """A rank that fails would read it, and blame the wrong one."""
    torch.distributed.init_process_group("gloo", store=come(0, 1, 10).result(30), rank=0, world_size=1)
    try:
        store = torch.distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
        store.set("onebit/notes/0", "of the start before")
        TorchTransport()
        assert not store.check(["onebit/notes/0"])
    finally:
        torch.distributed.destroy_process_group()
