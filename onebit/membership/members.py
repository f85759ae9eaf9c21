"""Members: the transport between those who are members now. An optimizer keeps it through all changes.

Each epoch has a transport; this one hands its operations on to that of the epoch under way. Before the first it is a
world of one rank, so that whoever comes constructs model and optimizer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm import PeerError, SimTransport, Transport
from ..comm.transports.base import Channel, Work
from .rendezvous import Rendezvous, Roster

Connect = Callable[[Roster, int], Transport]


class Travels(Protocol):
    """What a newcomer gets besides the optimizer's state."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> object: ...


class Members(Transport):
    """The members of a run, as one of them sees them. All members make one, and call `begin` (`change.py`) once.

    roster: who they are now; None before `begin`. has_state: whether this member has the run's parameters and state.
    lost, joined: how many members have gone and come since this one began. connect: makes the transport of an epoch,
    from its roster and this member's rank in it.
    """

    ranks_change = True

    def __init__(self, rendezvous: Rendezvous, connect: Connect):
        self.rendezvous, self._connect = rendezvous, connect
        self.roster: Roster | None = None
        self.has_state = False
        self.lost = self.joined = 0
        self.travels: Mapping[str, Travels] = {}
        self._now: Transport = SimTransport()
        self._sent_before = self._sent_before_inter_node = 0
        self._channels: list[Channel] = []  # of the epoch, in the order in which they were asked for
        self._channels_asked = 0

    # ---------------------------------------------------------------- epochs

    def enter_next(self, why: PeerError | None) -> None:
        """Leave the epoch under way, and be in the next. All that was launched is forgotten. May raise PeerError.

        why: what ended it; None: a newcomer waits.
        """
        last, missed = self.roster, []
        if last is not None:
            missed = [last.names[rank] for rank in (why.ranks if why is not None else ()) if rank != self.rank]
            self._sent_before, self._sent_before_inter_node = self.sent_bytes, self.sent_bytes_inter_node
            self._now.abandon("" if why is None else "another member was lost")
        self._now = SimTransport()
        self.roster = roster = self.rendezvous.meet(last, missed)
        if last is not None and roster.epoch != last.epoch + 1:
            self.has_state = False  # the others went on without this member
        self._now = self._connect(roster, roster.names.index(self.rendezvous.name))
        self._channels = [self._now.new_channel() for _ in range(self._channels_asked)]
        if last is not None:
            gone, come = set(last.names) - set(roster.names), set(roster.names) - set(last.names)
            self.lost, self.joined = self.lost + len(gone), self.joined + len(come)

    def is_awaited(self) -> bool:
        """Whether a newcomer waits, as far as this member has looked. The first member looks for all."""
        return self.rendezvous.is_awaited.is_set()

    # ---------------------------------------------------------------- the transport of the epoch

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._now.rank

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return self._now.world_size

    @property
    def timeout_s(self) -> float:  # type: ignore[override]
        return self._now.timeout_s

    @property
    def sent_bytes(self) -> int:
        return self._sent_before + self._now.sent_bytes

    @property
    def sent_bytes_inter_node(self) -> int:
        return self._sent_before_inter_node + self._now.sent_bytes_inter_node

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        return self._now.all_to_all(out_WB, in_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        return self._now.all_gather(out_WB, in_B)

    def all_reduce(self, x: Tensor) -> Work:
        return self._now.all_reduce(x)

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self._now.broadcast(x, src)

    def split(self, ranks: Sequence[int]) -> Transport:
        return self._now.split(ranks)

    def new_channel(self) -> Channel:
        index, self._channels_asked = self._channels_asked, self._channels_asked + 1
        self._channels.append(self._now.new_channel())

        def channel() -> AbstractContextManager[None]:
            return self._channels[index]()

        return channel

    @property
    def device(self) -> torch.device:
        return self._now.device

    def reaches(self, device: torch.device) -> bool:
        return self._now.reaches(device)

    @property
    def has_network(self) -> bool:
        return self._now.has_network

    @property
    def reduces_in_ring(self) -> bool:
        return self._now.reduces_in_ring

    @property
    def has_failed(self) -> bool:
        return self._now.has_failed

    def describe(self) -> str:
        return f"{self._now.describe()}, of members that come and go"

    def close(self) -> None:
        """The run has ended, for all members: whoever waits to be let in is told."""
        self.rendezvous.end("its members have closed")
        self._now.close()

    def abandon(self, why: str = "") -> None:
        """Leave: the others go on without this member."""
        self.rendezvous.leave()
        self._now.abandon(why)
