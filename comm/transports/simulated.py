"""A simulated network: N ranks as threads of one process. For tests, teaching and convergence studies.

`run_ranks(n, f)` calls `f(transport)` in n threads and returns their results in rank order. If a rank raises, the
others get a `PeerError` that names it at once; if a rank is late, they get one after the timeout.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from .base import Channel, PeerError, Transport, Work
from .edge import check_shift, check_split
from .notes import Numbering, Operation

T = TypeVar("T")
Slot: TypeAlias = tuple[int, int]
"""An operation's channel and its number there."""


@dataclass(frozen=True)
class _Posted:
    """A rank's part of an operation. data: a copy. written: event after the copy on that rank's stream; None: host."""

    operation: Operation
    data: Tensor
    written: torch.cuda.Event | None

    @classmethod
    def copied(cls, operation: Operation, data: Tensor) -> _Posted:
        copy = data.clone()
        return cls(operation, copy, torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None)

    def read(self) -> Tensor:
        """The data, readable on the current stream, which waits for the stream that wrote it."""
        if self.written is not None:
            stream = torch.cuda.current_stream(self.data.device)
            stream.wait_event(self.written)
            self.data.record_stream(stream)
        return self.data


class SimNetwork:
    """The network that simulated ranks share: operation k of every rank, in each channel, meets in slot k.

    Construct one, and give it to a `SimTransport` per thread; `run_ranks` does both.

    Args:
        world_size: Number of ranks.
        timeout_s: Seconds that a rank waits for another before it raises a PeerError. Default 60.
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0):
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._slots: dict[Slot, dict[int, _Posted]] = {}
        self._readers: dict[Slot, int] = {}
        self._dead: set[int] = set()
        self._changed = threading.Condition()
        self._parts: dict[tuple[tuple[int, ...], int], SimNetwork] = {}

    def part(self, ranks: tuple[int, ...], number: int) -> SimNetwork:
        """The network of some of the ranks: the same object for each of them.

        Args:
            ranks: Ranks of this network, ascending.
            number: How often these ranks have split, from 1: each time they get a new network.
        """
        with self._changed:
            part = self._parts.setdefault((ranks, number), SimNetwork(len(ranks), self.timeout_s))
            for rank in self._dead.intersection(ranks):
                part.leave(ranks.index(rank))
            return part

    def post(self, operation: Operation, rank: int, data: Tensor) -> None:
        """Offer a copy of this rank's data for an operation. Returns at once."""
        with self._changed:
            slot = self._slots.setdefault(_slot(operation), {})
            slot[rank] = _Posted.copied(operation, data)
            if len(slot) == self.world_size or any(its.operation != operation for its in slot.values()):
                self._changed.notify_all()

    def collect(self, operation: Operation, rank: int) -> list[Tensor]:
        """Wait until all ranks have posted for this operation; their data in rank order.

        Raises:
            PeerError: A rank posted another operation, or has ended: at once. A rank is late: after the timeout.
        """
        deadline, place = time.monotonic() + self.timeout_s, _slot(operation)
        with self._changed:
            while True:
                slot = self._slots.setdefault(place, {})
                others = {peer: its.operation for peer, its in sorted(slot.items()) if its.operation != operation}
                if others:
                    launched = "; ".join(f"rank {peer} {theirs}" for peer, theirs in others.items())
                    raise PeerError(
                        f"rank {rank}: {operation}: the ranks launched different operations: {launched}", list(others)
                    )
                missing = sorted(set(range(self.world_size)) - set(slot))
                if not missing:
                    break
                dead = [peer for peer in missing if peer in self._dead]
                left = deadline - time.monotonic()
                if dead:
                    raise PeerError(f"rank {rank}: rank {dead} ended before {operation}", dead)
                if left <= 0:
                    raise PeerError(
                        f"rank {rank}: nothing from rank {missing} for {self.timeout_s} s in {operation}", missing
                    )
                self._changed.wait(left)
            posted = [slot[peer].read() for peer in range(self.world_size)]
            self._readers[place] = self._readers.get(place, 0) + 1
            if self._readers[place] == self.world_size:
                del self._slots[place], self._readers[place]
            return posted

    def is_decided(self, operation: Operation) -> bool:
        """Whether `collect` would return or raise at once: all ranks have posted, or a missing one has ended."""
        with self._changed:
            slot = self._slots.get(_slot(operation), {})
            differ = any(its.operation != operation for its in slot.values())
            missing = set(range(self.world_size)) - set(slot)
            return differ or not missing or bool(missing & self._dead)

    def leave(self, rank: int) -> None:
        """Note that a rank has ended: whoever waits for it raises a PeerError."""
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()
            parts = [(ranks.index(rank), part) for (ranks, _), part in self._parts.items() if rank in ranks]
        for local_rank, part in parts:
            part.leave(local_rank)


def _slot(operation: Operation) -> Slot:
    return operation.channel, operation.number


class _SimWork:
    def __init__(self, finish: Callable[[], None], is_decided: Callable[[], bool]):
        self._finish: Callable[[], None] | None = finish
        self._is_decided = is_decided

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_ready(self) -> bool:
        return self._finish is None or self._is_decided()


class SimTransport(Transport):
    """One rank of a `SimNetwork`. Same contract, bytes and order of summation as the real transports.

    Args:
        network: The network, shared by all ranks. Default None: a new one, of one rank.
        rank: This rank. Default 0.
    """

    sent_bytes = 0

    def __init__(self, network: SimNetwork | None = None, rank: int = 0):
        self.network = SimNetwork(1) if network is None else network
        self.rank = rank
        self.world_size = self.network.world_size
        self.timeout_s = self.network.timeout_s
        self._numbering = Numbering(itertools.count(1))
        self._splits: dict[tuple[int, ...], int] = {}

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        def finish(posted: list[Tensor]) -> None:
            for peer, rows in enumerate(posted):
                out_WB[peer].copy_(rows[self.rank])

        return self._launch("all_to_all", in_WB[0].nbytes, in_WB, finish, in_WB[0].nbytes * (self.world_size - 1))

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        def finish(posted: list[Tensor]) -> None:
            for peer, row in enumerate(posted):
                out_WB[peer].copy_(row)

        return self._launch("all_gather", in_B.nbytes, in_B, finish, in_B.nbytes * (self.world_size - 1))

    def all_reduce(self, x: Tensor) -> Work:
        def finish(posted: list[Tensor]) -> None:
            x.copy_(posted[0])
            for other in posted[1:]:
                x.add_(other)

        sent_bytes = 2 * x.nbytes * (self.world_size - 1) // self.world_size
        return self._launch("all_reduce", x.nbytes, x, finish, sent_bytes)

    def broadcast(self, x: Tensor, src: int) -> Work:
        def finish(posted: list[Tensor]) -> None:
            x.detach().copy_(posted[src])

        is_source = self.rank == src
        data = x if is_source else x.detach().new_empty(0)
        sent_bytes = x.nbytes * (self.world_size - 1) if is_source else 0
        return self._launch(f"broadcast from rank {src}", x.nbytes, data, finish, sent_bytes)

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        check_shift(self.rank, self.world_size, out_B, in_B, by)

        def finish(posted: list[Tensor]) -> None:
            source = (self.rank - by) % self.world_size
            if len(posted[source]) != len(out_B):
                what = f"shift by {by}: expected {len(out_B)} bytes from rank {source}, got {len(posted[source])}"
                raise PeerError(f"rank {self.rank}: {what}", [source])
            out_B.copy_(posted[source])

        return self._launch(f"shift by {by}", 0, in_B, finish, in_B.nbytes if by else 0)

    def split(self, ranks: Sequence[int]) -> SimTransport:
        check_split(self.rank, self.world_size, ranks)
        members = tuple(ranks)
        number = self._splits[members] = self._splits.get(members, 0) + 1
        return SimTransport(self.network.part(members, number), members.index(self.rank))

    def new_channel(self) -> Channel:
        return self._numbering.new_channel()

    def close(self) -> None:
        """Does nothing: a simulated rank holds no resources, and does not wait for the others."""

    def abandon(self, why: str = "") -> None:
        """See `Transport`: whoever waits for this rank learns at once that it has gone."""
        self.network.leave(self.rank)

    @property
    def has_network(self) -> bool:
        return False

    @property
    def reduces_in_ring(self) -> bool:
        return True

    def describe(self) -> str:
        return "none (in this process)"

    def _launch(
        self, name: str, nbytes: int, data: Tensor, finish: Callable[[list[Tensor]], None], sent_bytes: int
    ) -> Work:
        operation = self._numbering.operation(name, nbytes)
        self.sent_bytes += sent_bytes
        self.network.post(operation, self.rank, data)
        return _SimWork(
            lambda: finish(self.network.collect(operation, self.rank)), lambda: self.network.is_decided(operation)
        )


def run_ranks(world_size: int, work: Callable[[SimTransport], T], timeout_s: float = 60.0) -> list[T]:
    """Run a function on simulated ranks, one thread each, and return the results of all.

    Args:
        world_size: Number of ranks.
        work: Called once per rank with its `SimTransport`.
        timeout_s: Seconds after which a rank that waits for another raises a PeerError. Default 60.

    Returns:
        The results in rank order.

    Raises:
        BaseException: The exception of the lowest rank that failed by itself; a PeerError only if there is no other.
    """
    network = SimNetwork(world_size, timeout_s)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(SimTransport(network, rank))
        except BaseException as error:
            errors[rank] = error
        finally:
            network.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors.items(), key=lambda item: (isinstance(item[1], PeerError), item[0]))[1]
    return [results[rank] for rank in range(world_size)]
