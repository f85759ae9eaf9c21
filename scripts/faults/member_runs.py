"""Runs of simulated members that come and go: threads over one store, a network each epoch."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from onebit.comm import PeerError, SimTransport
from onebit.comm.transports.notes import Operation
from onebit.comm.transports.simulated import SimNetwork
from onebit.membership import Members, MembershipError, Patience, Rendezvous, Roster
from onebit.membership.node import Node, NodeRendezvous


class Killed(BaseException):
    """A member has been killed."""


class PartialNetwork(SimNetwork):
    """A network in which what a rank sends as it dies reaches some ranks, and others not."""

    def __init__(self, world_size: int, timeout_s: float):
        super().__init__(world_size, timeout_s)
        self._hidden: dict[tuple[int, int], tuple[int, list[int]]] = {}

    def post_last(self, operation: Operation, rank: int, data: Tensor, hidden_from: list[int]) -> None:
        with self._changed:
            self._hidden[operation.channel, operation.number] = rank, hidden_from
        self.post(operation, rank, data)
        self.leave(rank)

    def collect(self, operation: Operation, rank: int) -> list[Tensor]:
        posted = super().collect(operation, rank)
        sender, hidden_from = self._hidden.get((operation.channel, operation.number), (0, []))
        if rank in hidden_from:
            raise PeerError(f"rank {rank}: rank {sender} broke off in {operation}", [sender])
        return posted


class MortalTransport(SimTransport):
    """Of a member that dies at an operation: at its launch, or when it waits for it.

    fuse: how many of both it has left; with a fraction, what it sends last reaches a part of the others. thread: the
    member's own; if another one dies, which copies its state or a newcomer's, its own dies at its next operation.
    """

    network: PartialNetwork
    fuse: list[float]
    thread: threading.Thread

    def burn(self) -> bool:
        self.fuse[0] -= 1
        return self.fuse[0] < 0

    def die(self) -> None:
        self.network.leave(self.rank)
        raise Killed if threading.current_thread() is self.thread else PeerError("its process was killed")

    def _launch(self, name: str, nbytes: int, data: Tensor, *rest: Any) -> Any:
        if self.burn():
            if self.fuse[0] % 1:
                others = [rank for rank in range(self.world_size) if rank != self.rank]
                operation = self._numbering.operation(name, nbytes)
                self.network.post_last(operation, self.rank, data, others[::2])
            self.die()
        work = super()._launch(name, nbytes, data, *rest)
        wait = work.wait

        def mortal_wait() -> None:
            if self.burn():
                self.die()
            wait()

        work.wait = mortal_wait
        return work


@dataclass
class Hub:
    """Where members meet. networks: by epoch. holds: a member waits for newcomers.

    of_places: networks of the second and later ranks of nodes.
    """

    founders: int
    timeout_s: float = 20.0
    wait_s: float = 20.0
    min_members: int = 1
    store: HashStore = field(default_factory=HashStore)
    networks: dict[int, PartialNetwork] = field(default_factory=dict)
    of_places: dict[int, dict[int, PartialNetwork]] = field(default_factory=lambda: defaultdict(dict))
    lock: threading.Lock = field(default_factory=threading.Lock)
    holds: threading.Event = field(default_factory=threading.Event)

    def members(self, name: str, fuse: list[float], node: Node | None = None) -> Members:
        """One member's transport. node: its ranks, if it has several; then that of one of them."""
        patience = Patience(beat_s=0.02, suspect_s=0.3, silent_s=0.6, wait_s=self.wait_s, look_s=0.02)
        place, first, thread = 0 if node is None else node.transport.rank, None, threading.current_thread()
        if place == 0:
            first = Rendezvous(
                lambda: self.store,
                name,
                token="secret",
                founders=self.founders,
                min_members=self.min_members,
                patience=patience,
            )

        def connect(roster: Roster, rank: int) -> MortalTransport:
            with self.lock:
                new = PartialNetwork(len(roster.names), self.timeout_s)
                networks = self.networks if place == 0 else self.of_places[place]
                network = networks.setdefault(roster.epoch, new)
            transport = MortalTransport(network, rank)
            transport.fuse, transport.thread = fuse, thread
            return transport

        if node is None:
            assert first is not None
            return Members(first, connect)
        return Members(NodeRendezvous(node, first, name, self.min_members, patience), connect, node)


@dataclass
class Run:
    """The members of a run as threads. results: what `work` gave, by name; errors: what it raised.

    work: called with the transport of the members. In a run of nodes, whose ranks are named "a0", "a1", ..., also with
    that between the ranks of the node.
    """

    hub: Hub
    work: Callable[..., Any]
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, name: str, fuse: float = float("inf")) -> None:
        """fuse: how many operations the member lives."""
        self._start(name, name, fuse)

    def start_node(self, name: str, fuses: Sequence[float]) -> None:
        """A member of as many ranks as there are fuses: see `start`. If one ends, the others learn it at once."""
        network = SimNetwork(len(fuses), self.hub.timeout_s)
        for rank, fuse in enumerate(fuses):
            self._start(f"{name}{rank}", name, fuse, SimTransport(network, rank))

    def _start(self, called: str, name: str, fuse: float, *local: SimTransport) -> None:
        """called: the key of what comes of it. local: between the ranks of a node."""

        def live() -> None:
            torch.set_num_threads(1)
            members: list[Members] = []
            try:
                nodes = [Node(link.split(range(link.world_size))) for link in local]
                members.append(self.hub.members(name, [fuse], *nodes))
                self.results[called] = self.work(*members, *local)
                members[0].close()
            except BaseException as error:
                self.errors[called] = error
                for each in (*members, *local):
                    each.abandon()

        self.threads.append(threading.Thread(target=live, daemon=True, name=called))
        self.threads[-1].start()

    def wait(self, timeout_s: float = 60.0) -> None:
        """For the end of all, whatever they raised."""
        for thread in self.threads:
            thread.join(timeout_s)
        assert not any(thread.is_alive() for thread in self.threads), "a member hangs"

    def joined_by(self, names: str) -> Run:
        """join() with these newcomers, for whom the founders wait."""
        came = not names or self.hub.holds.wait(60)
        assert came, f"no founder has come to where it waits for {', '.join(names)} in 60 s; errors: {self.errors}"
        for name in names:
            self.start(name)
        return self.join()

    def join(self) -> Run:
        """Wait for the end of all; AssertionError if one has failed otherwise than by its fuse, or by coming late."""
        self.wait()
        for name, error in self.errors.items():
            came_late = isinstance(error, MembershipError) and "the run has ended" in str(error)
            if not (came_late or isinstance(error, Killed)):
                raise AssertionError(f"{name} failed") from error
        return self


def founded(hub: Hub, work: Callable[[Members], Any], fuses: Sequence[float] | None = None) -> Run:
    """A run of founders "a", "b", ... with these fuses; without, they live to the end."""
    run = Run(hub, work)
    for name, fuse in zip("abcdefgh", [float("inf")] * hub.founders if fuses is None else fuses, strict=False):
        run.start(name, fuse)
    return run
