"""Members: the transport between the current members. An optimizer keeps it through all changes.

Each epoch has a transport; this one passes its operations on to that of the current epoch. Before the first epoch it is
a world of one rank, so that a newcomer constructs model and optimizer alone.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm import PeerError, SimTransport, Transport
from ..comm.transports.base import Channel, Work
from ..model_parallel import ModelParallelGroup
from .node import Found, InNode, Node, NodeRendezvous
from .rendezvous import Rendezvous, Roster
from .residuals import Loss, Residual, Residuals, RunningResidualNorm

log = logging.getLogger(__name__)

_NOTE = struct.Struct("<2d")
"""Of a member's vote: the norm of its residuals, and seconds of a micro-batch."""

Connect = Callable[[Roster, int], Transport]


class Travels(Protocol):
    """An object whose state a newcomer gets besides the optimizer's."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> object: ...


@dataclass(frozen=True)
class Standing:
    """What a member tells the others at a change.

    Attributes:
        steps: Number of steps that it has taken.
        progress: See `change.Changing.progress`.
        has_state: Whether it has the run's parameters and state.
        is_new: Whether it was in no epoch before.
        round: Its round of the data: see `MemberSampler.leave_world`. Empty: it has no sampler.
        seconds: Of its micro-batches: see `MemberSampler.tell`. Default 0.
        copied: Whether it has copied parts of the run's state before this change: see `copying.py`. Default False.
        gave_up: Whether it has given up a call between two steps since it came this far: see `Members.attempt`.
            Default False.
    """

    steps: int
    progress: list[int]
    has_state: bool
    is_new: bool
    round: Sequence[int]
    seconds: float = 0.0
    copied: bool = False
    gave_up: bool = False


class DividesData(Protocol):
    """A `MemberSampler`, as members see it."""

    balanced: bool

    @property
    def factor(self) -> float: ...
    def tell(self) -> float: ...
    def hear(self, seconds: Sequence[float]) -> None: ...
    def option_lines(self) -> list[str]: ...
    def leave_world(self) -> list[int]: ...
    def enter_world(self, standing: Sequence[Standing]) -> None: ...


class GivesCopies(Protocol):
    """A `copying.Giver`, as members see it."""

    @property
    def is_asked(self) -> bool: ...
    def begin_together(self, node: Node) -> None: ...
    def enter(self, roster: Roster) -> None: ...
    def forget(self) -> None: ...
    def stop(self) -> None: ...


class HoldsCopy(Protocol):
    """A `copying.Copy`, as members see it."""

    def held(self, within_s: float) -> dict[str, Tensor]: ...
    def stop(self) -> None: ...


class Members(Transport):
    """The transport between the members of a run. All members make one, and call `begin` (`change.py`) once.

    Args:
        rendezvous: Where members agree on an epoch.
        connect: Makes the transport of an epoch, from its roster and this member's rank in it.
        node: The ranks of this member, if it has several: the transport is then between the ranks at one place in each
            member. Default None: it has one.

    Attributes:
        rendezvous: The same.
        node: The same.
        roster: The current members; None before `begin`.
        has_state: Whether this member has the run's parameters and state.
        lost: Number of members that have gone since this one began.
        joined: Number of members that have come since this one began.
        travels: Other objects whose state a newcomer gets, by name.
        sampler: The one among them that divides the data; None if there is none.
        giver: Gives newcomers a copy of the state before they come in; None if steps cannot be repeated.
        copies: Copies the state, as far as that goes, before this member comes in. Default: does nothing.
        copy: What it has copied so; None if nothing, or later.
        met_at: The members of the last change, and how far this one was.
        idle_changes: Number of changes since then with the same members and no step.
        gave_up_at: How far one was that has given up a call between two steps; empty: none has. See `attempt`.
    """

    ranks_change = True

    def __init__(self, rendezvous: Rendezvous | NodeRendezvous, connect: Connect, node: Node | None = None):
        self.rendezvous, self._connect, self.node = rendezvous, connect, node
        self.roster: Roster | None = None
        self.has_state = False
        self.lost = self.joined = 0
        self.travels: Mapping[str, Travels] = {}
        self.sampler: DividesData | None = None
        self.giver: GivesCopies | None = None
        self.copies: Callable[[], HoldsCopy | None] = lambda: None
        self.copy: HoldsCopy | None = None
        self.met_at: object = None
        self.idle_changes = 0
        self.gave_up_at: tuple[int, ...] = ()
        self._residuals, self._residual_norm = Residuals(), RunningResidualNorm()
        self._now: Transport = SimTransport()
        self._sent_before = self._sent_before_inter_node = 0
        self._channels: list[Channel] = []  # of the epoch, in the order in which they were made
        self._channels_asked = 0

    # ---------------------------------------------------------------- epochs

    def enter_next(self, why: PeerError | None, *, lets_in: bool = True) -> None:
        """Leave the current epoch, and enter the next. Operations under way are forgotten.

        Args:
            why: The error that ended the epoch. None: a newcomer waits.
            lets_in: As in `Rendezvous.meet`. Default True.

        Raises:
            PeerError: A member was lost while the epoch began.
            MembershipError: As `Rendezvous.meet`.
        """
        last, missed = self.roster, []
        if last is not None:
            missed = [last.names[rank] for rank in (why.ranks if why is not None else ()) if rank != self.rank]
            self._sent_before, self._sent_before_inter_node = self.sent_bytes, self.sent_bytes_inter_node
            self._now.abandon("" if why is None else "another member was lost")
        self._now = SimTransport()
        self.roster = roster = self.rendezvous.meet(last, missed, lets_in=lets_in, when_left=self.copy_state)
        if self.giver is not None:
            self.giver.enter(roster)
        if last is not None and roster.epoch != last.epoch + 1:
            self.has_state = False  # the others have continued without this member
        if self.node is not None:
            self.node.is_in_run = True
        self._now = self._connect(roster, roster.names.index(self.rendezvous.name))
        self._channels = [self._now.new_channel() for _ in range(self._channels_asked)]
        if last is not None:
            gone, come = set(last.names) - set(roster.names), set(roster.names) - set(last.names)
            self.lost, self.joined = self.lost + len(gone), self.joined + len(come)

    def copy_state(self) -> None:
        """Copy the run's state before this member comes in, while the others train."""
        self.copy = self.copies()

    def connect_pair(self, pair: Roster) -> Transport:
        """The connection between a member and a newcomer. Both call it; from any thread.

        Args:
            pair: From `Rendezvous.ask`.

        Raises:
            PeerError: The other one is lost.
        """
        return self._connect(pair, pair.names.index(self.rendezvous.name))

    def is_awaited(self) -> bool:
        """Whether a newcomer waits to be let in, as far as this member has looked. The first member looks for all."""
        return self.rendezvous.is_awaited.is_set()

    def is_due(self, here: bool) -> bool:
        """Whether newcomers are to be let in before the next step, on any rank of this member.

        Args:
            here: Whether they are, by what this rank has heard.

        Raises:
            PeerError: Another rank of this member has lost the epoch.
        """
        if self.node is None:
            return here
        is_due, is_asked = self.node.check(is_due=here, is_asked=self.giver is not None and self.giver.is_asked)
        if is_asked:
            assert self.giver is not None
            self.giver.begin_together(self.node)
        return is_due

    def together(self, work: Callable[[], Found]) -> Found:
        """Do this on all ranks of this member, which wait for the slowest as long as it takes. See `Node.together`."""
        return work() if self.node is None else self.node.together(work)

    def told(self, value: Any) -> list[Any]:
        """What each rank of this member gives, a value of JSON. All of them."""
        return [value] if self.node is None else self.node.share(value)

    @property
    def speaks(self) -> bool:
        """Whether this rank logs what concerns all: the first rank of the first member."""
        return self.rank == 0 and (self.node is None or self.node.transport.rank == 0)

    def parts(self, group: ModelParallelGroup) -> ModelParallelGroup:
        """The ranks of this member, for an optimizer whose model they hold together.

        Args:
            group: The same ranks.

        Raises:
            ValueError: They are not all ranks of this member.
        """
        count = 1 if self.node is None else self.node.transport.world_size
        if self.node is None or group.whole.world_size != count:
            raise ValueError(
                f"{self.rendezvous.name} is a member of {count} ranks, which hold its model together; got parts on "
                f"{group.whole.world_size} ranks"
            )
        stages = None if group.stages is None else InNode(self.node, group.stages)
        return replace(group, transport=InNode(self.node, group.transport), stages=stages)

    def why_not_parts(self, group: ModelParallelGroup) -> str:
        """Why an optimizer over these members cannot have this group; "" if it can.

        Args:
            group: The ranks that hold the optimizer's model together.
        """
        its = group.whole.node if isinstance(group.whole, InNode) else None
        if its is self.node and (its is not None or group.whole.world_size == 1):
            return ""
        return (
            "the ranks of a member are those that hold its model together: give connect(node=...) their transport, and "
            "the optimizer model_parallel_group=members.parts(group); or neither"
        )

    def is_over(self) -> bool:
        """Whether another member has left the current epoch for the next, as far as this one has looked."""
        return self.rendezvous.is_over.is_set()

    def attempt(self, call: str, progress: Sequence[int], work: Callable[[], None]) -> PeerError | None:
        """Do this, a call of all members between two steps; if a member is lost meanwhile, give it up with a warning.

        One that comes to the call later than a change, because it was cut off in the step before, does not begin what
        another has given up: that one will not come.

        Args:
            call: Its name.
            progress: See `change.Changing.progress`.
            work: Does it.

        Returns:
            Why this member gave it up: the members are to meet before the next step. None if it did not.
        """
        if tuple(progress) == self.gave_up_at:
            log.warning("%s: %s was given up, as another member has given it up", self.rendezvous.name, call)
            return None
        try:
            work()
        except PeerError as error:
            log.warning("%s: %s was given up, as a member is lost: %s", self.rendezvous.name, call, error)
            self.gave_up_at = tuple(progress)
            if self.node is not None:
                self.node.leave()  # its other ranks are in the same call, and what follows it may need all of them
            return error
        return None

    def note(self, buckets: Sequence[Residual] = ()) -> bytes:
        """What this member adds to its vote on a step.

        Args:
            buckets: Those with residuals. Default: none.
        """
        return _NOTE.pack(self._residual_norm(buckets), 0.0 if self.sampler is None else self.sampler.tell())

    def hear(self, notes: Sequence[bytes], buckets: Sequence[Residual] = ()) -> None:
        """Take in what the members have added to their votes.

        Args:
            notes: From each rank's `note`.
            buckets: As there, of this rank.
        """
        norms, seconds = zip(*map(_NOTE.unpack, notes), strict=True)
        self.hear_residuals(norms, buckets)
        if self.sampler is not None:
            self.sampler.hear(seconds)

    @property
    def gradient_factor(self) -> float:
        """Factor of this step's gradients: see `MemberSampler.factor`."""
        return 1.0 if self.sampler is None else self.sampler.factor

    def hear_residuals(self, norms: Sequence[float], buckets: Sequence[Residual]) -> None:
        """Remember the norms of all members' residuals. Called with each vote.

        Args:
            norms: Of each rank's residuals.
            buckets: This rank's buckets, laid out for the current members.
        """
        assert self.roster is not None
        self._residuals.hear(self.roster.epoch, self.roster.names, norms, buckets)

    def take_residuals(self, lost: Sequence[str]) -> Loss:
        """Forget the residuals of these members, and return their size."""
        return self._residuals.take(lost)

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

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        return self._now.shift(out_B, in_B, by)

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
        """End the run for all members: newcomers that wait to be let in are told."""
        self._end_copies()
        self.rendezvous.end("its members have closed")
        self._now.close()

    def abandon(self, why: str = "") -> None:
        """Leave the run: the others continue without this member."""
        self._end_copies()
        self.rendezvous.leave()
        self._now.abandon(why)

    def _end_copies(self) -> None:
        for each in (self.giver, self.copy):
            if each is not None:
                each.stop()
