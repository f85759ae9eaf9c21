"""A change of members: brings an optimizer's state from the world of one epoch to that of the next.

    1. The step under way is forgotten: nothing of it was written, and its gradients remain. The state is taken as is.
    2. The members of the next epoch meet, and exchange how far each has come.
    3. The first of those that are furthest sends its state to newcomers, less what they have copied before
       (`copying.py`), and to members without the last step.
    4. Each keeps its own residuals, and divides its chunks for the new number of ranks.

If another member is lost meanwhile, this begins again at 2. Nothing is written before 4.

Every rank counts 1/W in a mean, so a residual e becomes e·W'/W: values that the remaining members have not sent yet
keep their weight. A server error of elements that this rank no longer owns is added to its worker error, times W',
without any traffic. The residuals of lost members are lost, and counted (`residuals.py`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from ..agreement.replicas import check_same_lines, make_equal
from ..comm import PeerError, Transport
from ..comm.messages import gather_bytes, gather_texts
from ..comm.transports.notes import outside_calls
from ..model_parallel import local
from ..usage.contract import Group, State
from .copying import (
    Giver,
    Repeatable,
    bytes_of,
    copy_state,
    difference,
    digested,
    filled,
    receive_state,
    send_state,
    without,
)
from .members import Members, Standing, Travels
from .published import Waits
from .rendezvous import MembershipError
from .residuals import NOTHING_LOST, Loss
from .sampler import MemberSampler

log = logging.getLogger(__name__)

STANDING_BYTES = 384
"""Length of a member's `Standing` as JSON, padded: room for numbers of 18 digits."""

_TELL_OF_IDLE = (5, 50, 500, 5000)

PIECE_BYTES = 4 << 20
"""A state is sent in pieces, each within the transport's timeout: four seconds of a link at 10 Mbit/s."""


class Changing(Protocol):
    """An optimizer whose world may change. Only `take_over` writes parameters."""

    param_groups: list[Group]
    transport: Transport

    @property
    def stats(self) -> Waits:
        """Figures of the last step."""

    def steps_taken(self) -> int:
        """Number of training steps that were taken."""

    def progress(self) -> tuple[int, ...]:
        """How far this member is. The furthest in the order of tuples gives its state to all others.

        First the number of calls of step() that are over for this member: of the steps that its gradients are in,
        whether they have landed or not, and of those that all have skipped.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block send nothing."""

    def zero_grad(self) -> None:
        """As torch's."""

    def end_interrupted_step(self) -> None:
        """Do together what the loss of a member has left undone. All members, after each change; may do nothing."""

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""

    def leave_world(self) -> State:
        """Forget the step under way, and return this rank's state. Local."""

    def enter_world(self, state: State) -> None:
        """Take back a state from `leave_world`, for the transport's world as it is now. Local.

        Args:
            state: From this rank's `leave_world`. It is used up: what it held may be gone from it.
        """

    def for_others(self, state: State) -> State:
        """The part of such a state that every rank has. Tensors, lists, dicts and plain values.

        Args:
            state: From `leave_world`.
        """

    def take_over(self, theirs: State, own: State | None) -> None:
        """Take over another rank's state. Local.

        Args:
            theirs: From the other rank's `for_others`.
            own: This rank's state from `leave_world`, of which it keeps the residuals. None: they are zero. Both
                states are used up.
        """


@dataclass(frozen=True)
class Change:
    """The result of a change of members.

    Attributes:
        took_step: Whether the others had taken the step in which this rank was, and it has taken it over.
        is_back: Whether the others had continued without this member, and it has begun anew with their state, before
            their next step. Default False.
        lost: Names of the members that are gone. Default ().
        joined: Names of the members that are new. Default ().
        gone: Residuals that lost members took with them. Default: none.
        seconds: Duration of the change. Default 0.
    """

    took_step: bool
    is_back: bool = False
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    gone: Loss = NOTHING_LOST
    seconds: float = field(default=0.0, compare=False)


def begin(optimizer: Changing, *, warm_up: Callable[[], object] | None = None, **travels: Travels) -> None:
    """Enter the run. Founders wait for each other; a newcomer is let in before a step, and gets a member's state.

    All members call it once, before the first step. Afterwards they have the same parameters and state, to the bit.

    Args:
        optimizer: Constructed over a `Members`.
        warm_up: A pass forward and backward, on any batch, whose gradients are dropped. It runs before the others are
            told that this member has come: they do not wait for what a first pass takes longer, such as compiling. It
            may move buffers, which a newcomer takes over if they are among `travels`. Default None.
        travels: Other objects with `state_dict` and `load_state_dict`, such as a schedule, by the same names on all
            members. A newcomer loads the state of the member that sends it the run's, founders that of the first.

    Raises:
        MembershipError: No epoch began within `Patience.wait_s`, or the run has ended.
        TypeError: The optimizer's transport is not a `Members`.
        ValueError: This newcomer has another model or other options than the run; among founders, on all of them. Or
            there are two samplers.
    """
    members = optimizer.transport
    if not isinstance(members, Members):
        raise TypeError(f"expected an optimizer over a Members transport, got one over {type(members).__name__}")
    samplers = [its for its in travels.values() if isinstance(its, MemberSampler)]
    if len(samplers) > 1:
        raise ValueError("expected one MemberSampler, got several; use one over a torch.utils.data.ConcatDataset")
    members.travels, members.sampler = travels, samplers[0] if samplers else None
    try:
        if isinstance(optimizer, Repeatable):
            members.copies = lambda: copy_state(optimizer, members, _lines(optimizer, members))
            members.copy_state()
            giver = members.giver = Giver(optimizer, members, lambda: _lines(optimizer, members))
            members.rendezvous.gives(giver)
        if warm_up is not None:
            with optimizer.no_sync():
                warm_up()
            optimizer.zero_grad()
        change(optimizer, members, None)
    except BaseException:
        members.abandon()  # members that wait for this one continue
        raise


def end(optimizer: Changing) -> None:
    """End the run once all members have taken its last step, and close the transport. All members, after that step.

    If a member is lost meanwhile, those that could not take the last step get it from one that has taken it, so that
    all end with the same parameters; after `Members.close` they would take it again by themselves. One that lives and
    does not come is left behind after up to twice `Patience.busy_s`.

    Args:
        optimizer: The one with which `begin` was called.

    Raises:
        MembershipError: The run has ended.
        RuntimeError: `begin` was not called.
    """
    members = optimizer.transport
    if not isinstance(members, Members) or members.roster is None:
        raise RuntimeError("this optimizer is in no run: call onebit.membership.begin(optimizer) first, then train")
    while True:
        try:
            members.rendezvous.confirm(members.roster, "end", members.rendezvous.patience.busy_s)
            break
        except PeerError as error:
            change(optimizer, members, error)
    members.close()


@torch.no_grad()
@outside_calls()  # members come to it from different calls: one may be in sync(), and another in the step before
def change(
    optimizer: Changing, members: Members, why: PeerError | None, *, lets_in: bool = True, meets: bool = True
) -> Change:
    """Bring this member and its optimizer into the next epoch. All members.

    Args:
        optimizer: The optimizer; its state is replaced.
        members: Its transport.
        why: The error that ended the epoch. None: a newcomer waits.
        lets_in: As in `Rendezvous.meet`; if a further member is lost meanwhile, too. Default True.
        meets: Whether all members come to a change for newcomers at the same point of their steps. Default True. False:
            some may be in an exchange, which this change breaks off.

    Raises:
        MembershipError: As `Rendezvous.meet`, or no remaining member has the state.
        ValueError: As `begin`.
    """
    began, before = time.monotonic(), members.roster
    took_step = is_back = False
    if why is None and before is not None and meets:
        why = _meet_before(members)
    without = set[str]()  # members that are back, and new ones
    while True:
        steps = optimizer.progress()[0]
        why, standing = _enter_next(optimizer, members, why, lets_in)
        assert members.roster is not None
        without |= {name for name, its in zip(members.roster.names, standing, strict=True) if not its.has_state}
        is_back |= not members.has_state and before is not None
        took_step |= optimizer.progress()[0] > steps and not is_back
        members.has_state = True
        try:
            optimizer.end_interrupted_step()
            members.is_due(False)  # a node's ranks go on together
            break
        except PeerError as error:
            why = error
    assert members.roster is not None
    names, last = members.roster.names, () if before is None else before.names
    lost, joined = (tuple(n for n in a if n not in b) for a, b in ((last, names), (names, last)))
    gone = members.take_residuals(sorted({*lost, *without}))
    optimizer.stats.lost_residuals += gone.elements
    optimizer.stats.lost_residual_norm += gone.norm
    found = Change(took_step, is_back, lost, joined, gone, time.monotonic() - began)
    members.rendezvous.note_change(optimizer, found.seconds, "" if why is None else str(why))
    _report(members, found, optimizer.steps_taken(), why)
    members.idle_changes = members.idle_changes + 1 if members.met_at == (names, optimizer.progress()) else 0
    members.met_at = names, optimizer.progress()
    if members.idle_changes in _TELL_OF_IDLE:
        log.warning(
            "%s: these %d members have met %d times without taking a step: either the network between them loses "
            "messages, or their scripts call step(), sync() and check_replicas() in different orders (%s)",
            members.rendezvous.name,
            len(names),
            members.idle_changes + 1,
            why,
        )
    return found


def _meet_before(members: Members) -> PeerError | None:
    """Meet in the epoch that ends. One that has died since all agreed on the change has broken its connections: why."""
    began = time.monotonic()
    try:
        gather_bytes(members, b"\0")
    except PeerError as error:
        # One that only comes late is not to be taken for lost sooner than a member that computes.
        return PeerError(str(error), error.ranks if time.monotonic() - began < members.timeout_s else ())
    return None


def _enter_next(
    optimizer: Changing, members: Members, why: PeerError | None, lets_in: bool
) -> tuple[PeerError | None, list[Standing]]:
    """Bring this member and its optimizer into the next epoch that begins.

    Returns the last error that ended one, and what the members of the new one have told.
    """
    own = optimizer.leave_world()
    sampler = members.sampler
    data, seconds = ([], 0.0) if sampler is None else (sampler.leave_world(), sampler.tell())
    progress, is_new = list(optimizer.progress()), members.roster is None
    steps = max(optimizer.steps_taken(), progress[0])  # a step under way has had its samples
    while True:
        try:
            members.enter_next(why, lets_in=lets_in)
            copied = members.copy is not None
            gave_up = any(members.told(members.gave_up_at == tuple(progress)))
            mine = Standing(steps, progress, members.has_state, is_new, data, seconds, copied, gave_up)
            standing = _exchange(members, mine)
            members.gave_up_at = max((tuple(its.progress) for its in standing if its.gave_up), default=())
            assert members.roster is not None
            if not any(its.has_state for its in standing) and members.rendezvous.has_begun(members.roster):
                raise MembershipError(
                    f"{members.rendezvous.name}: no member of epoch {members.roster.epoch} has the run's state: those "
                    "that had it are lost; start anew from a checkpoint"
                )
            theirs = members.together(partial(_bring_together, optimizer, members, standing, own))
            # A copy of the state may take longer than a transport's timeout: wait in the rendezvous instead.
            members.rendezvous.confirm(members.roster, "ready")
            break
        except PeerError as error:
            why = error
    members.copy = None
    if theirs is None or theirs["optimizer"] is None:
        optimizer.enter_world(own)
    else:
        optimizer.take_over(theirs["optimizer"], own if members.has_state else None)
        if members.giver is not None:
            members.giver.forget()
    if theirs is not None and not members.has_state:
        for name, its in members.travels.items():
            its.load_state_dict(theirs["travels"][name])
    if sampler is not None:
        sampler.enter_world(standing)
    members.rendezvous.begin()
    return why, standing


def _exchange(members: Members, mine: Standing) -> list[Standing]:
    rows = gather_bytes(members, json.dumps(asdict(mine)).ljust(STANDING_BYTES).encode())
    return [Standing(**json.loads(row)) for row in rows]


def _bring_together(optimizer: Changing, members: Members, standing: Sequence[Standing], own: State) -> State | None:
    """The state that this member lacks, from the member that sends it; None if it lacks nothing."""
    with_state = [rank for rank, its in enumerate(standing) if its.has_state]
    params = [local(p) for group in optimizer.param_groups for p in group["params"]]
    if len(with_state) < members.world_size:
        _refuse_strangers(optimizer, members, with_state)
    if not with_state:
        if not any(its.steps for its in standing):
            make_equal(members, [p for p in params if p.numel() > 0])
            return _share(members) if members.travels else None
        with_state = [max(range(len(standing)), key=lambda rank: standing[rank].steps)]  # it has loaded a checkpoint
        standing = [replace(its, has_state=rank in with_state) for rank, its in enumerate(standing)]
    furthest = max(standing[rank].progress for rank in with_state)
    source = next(rank for rank in with_state if standing[rank].progress == furthest)
    lacking = [rank for rank, its in enumerate(standing) if not its.has_state or its.progress < furthest]
    if not lacking or members.rank not in (source, *lacking):
        return None
    ranks = sorted([source, *lacking])
    part = members.split(ranks)
    may_have_some = any(standing[rank].copied for rank in lacking)
    if members.rank != source:
        held = {} if members.copy is None else members.copy.held(part.timeout_s / 2)
        if may_have_some:
            gather_texts(part, " ".join(held))
        theirs: State = filled(receive_state(part, ranks.index(source), PIECE_BYTES), held)
        return theirs
    state = optimizer.for_others(own)
    if may_have_some:
        digests = digested(state)
        told = [set(text.split()) for text in gather_texts(part, "")]
        del told[ranks.index(source)]
        rest = without(state, digests, set.intersection(*told))
        log.info(
            "%s: %.1f of %.1f MB of the state were copied before this change",
            members.rendezvous.name,
            (bytes_of(state) - bytes_of(rest)) / 1e6,
            bytes_of(state) / 1e6,
        )
        state = rest
    send_state(part, _shared(members, state), PIECE_BYTES)
    return None


def _share(members: Members) -> State | None:
    """Founders without steps take over the first one's other objects: buffers, a schedule."""
    if members.rank != 0:
        return receive_state(members, 0, PIECE_BYTES)
    send_state(members, _shared(members, None), PIECE_BYTES)
    return None


def _shared(members: Members, optimizer: State | None) -> State:
    return {"optimizer": optimizer, "travels": {name: its.state_dict() for name, its in members.travels.items()}}


def _refuse_strangers(optimizer: Changing, members: Members, with_state: Sequence[int]) -> None:
    """Raise ValueError in newcomers with another model or other options than the run.

    The others raise PeerError, and continue. If there are only founders, ValueError on all.
    """
    lines = _lines(optimizer, members)
    if not with_state:
        return check_same_lines(members, "models and options", lines, members.device)
    texts = [text.split("\n") for text in gather_texts(members, "\n".join(lines))]
    theirs = texts[with_state[0]]
    strangers = [rank for rank, text in enumerate(texts) if text != theirs]
    if members.rank in strangers:
        raise ValueError(difference(members.rendezvous.name, lines, theirs))
    if strangers:
        raise PeerError("newcomers with another model or other options were refused", strangers)
    return None


def _lines(optimizer: Changing, members: Members) -> list[str]:
    """What must be the same on all members, as text."""
    params = [local(p) for group in optimizer.param_groups for p in group["params"]]
    lines = [f"parameter {k}: {p.dtype} {tuple(p.shape)}" for k, p in enumerate(params)]
    lines += [*optimizer.option_lines(), f"travels: {sorted(members.travels)}"]
    lines += [] if members.sampler is None else members.sampler.option_lines()
    return [*lines, f"min_members={members.rendezvous.min_members}"]


def _report(members: Members, found: Change, steps: int, why: PeerError | None) -> None:
    assert members.roster is not None
    if members.speaks:
        lost = f"; lost: {', '.join(found.lost)} ({why})" if found.lost else ""
        if found.gone.elements:
            lost += f", with {found.gone.elements} residuals, of norm {found.gone.norm:.3g} in the mean"
        joined = f"; joined: {', '.join(found.joined)}" if found.joined else ""
        log.info(
            "epoch %d from step %d on, of %d members, after %.2f s%s%s",
            members.roster.epoch,
            steps + 1,
            members.world_size,
            found.seconds,
            lost,
            joined,
        )
