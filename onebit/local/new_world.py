"""Local steps whose world changes: other ranks, another number of them. See `membership/change.py`.

Anchors and outer momentum are the same on all members, parameters and the inner optimizer's state are each one's own.
Residuals are carried over as in `checkpoint/new_world.py`. Corrections begin anew: they add up to zero over the members
that learnt them, and would no longer.

Members that have landed a round and members that could not land it both have their parameters of before: the latter
take over the anchor. With a delay, they add what their parameters have gained since these were sent. If nobody has
landed a delayed round, all forget what they have sent, and the differences go with the fragment's next round.

A newcomer begins at the anchor, with a member's inner state and nothing to say about the round under way; it counts by
its own steps in it, as all do (`round_vote.weights_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..agreement.replicas import ReplicaCheck
from ..checkpoint.new_world import carried
from ..comm import Transport
from ..layout.buckets import Buckets
from ..layout.flat import lay_out
from ..usage.contract import State
from .balance import Balance
from .fragment import Fragment, LocalBucket
from .inner_step import InnerStep
from .options import LocalOptions
from .replica import Replica
from .rounds import Rounds
from .stats import LocalStats
from .wrapped import local_state, with_shards

_TIMETABLE = ("synced_at", "due", "rounds", "landed")
"""Of a fragment, the same on all members."""


class Stepping(Protocol):
    """Local steps, as they are moved from one world to the next. `LocalSteps` is one."""

    transport: Transport
    options: LocalOptions
    buckets: Buckets[LocalBucket]
    fragments: list[Fragment]
    inner_step: InnerStep
    replica: Replica
    rounds: Rounds
    replica_check: ReplicaCheck
    stats: LocalStats
    balance: Balance | None
    steps: int
    is_frozen: bool
    rounds_due: list[Fragment]
    is_syncing: bool

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the local steps."""


def leave(optimizer: Stepping) -> State:
    """This rank's residuals, and what the round under way would make of them."""
    transport, decay = optimizer.transport, optimizer.options.outer.error_decay
    residuals = []
    for bucket in optimizer.buckets:
        ef, bucket.wire, bucket.said_WB = bucket.ef, None, None
        was_sent = ef.worker_next.numel() > 0
        worker_next = ef.worker_next if decay == 1.0 else ef.worker_next * decay
        residuals.append({"now": (ef.worker, ef.server), "next": (worker_next, ef.server_next) if was_sent else None})
    return {"rank": transport.rank, "world_size": transport.world_size, "residuals": residuals}


def for_others(optimizer: Stepping) -> State:
    """What all members have, and this one's inner state for newcomers. Needs the layout with which it was made."""
    flats = [(bucket, bucket.anchor, bucket.velocity) for bucket in optimizer.buckets]
    return {
        "anchors": [list(bucket.layout.views(anchor)) for bucket, anchor, _ in flats],
        "velocities": [[] if u is None else list(bucket.layout.views(u)) for bucket, _, u in flats],
        "inner": local_state(optimizer.inner),
        "steps": optimizer.steps,
        "interval": optimizer.stats.interval,
        "rounds_due": [fragment.index for fragment in optimizer.rounds_due],
        "is_syncing": optimizer.is_syncing,
        "compared": optimizer.replica_check.compared,
        "fragments": [
            {"since_landed": fragment.since_landed()[1:], **{name: getattr(fragment, name) for name in _TIMETABLE}}
            for fragment in optimizer.fragments
        ],
    }


def enter(optimizer: Stepping, own: State) -> None:
    """Go on with the residuals that `leave` gave, in the transport's world. Rounds under way are not taken."""
    optimizer.replica.hierarchy.count()
    for fragment in optimizer.fragments:
        _discard(optimizer, fragment)
    for bucket, residuals in zip(optimizer.buckets, own["residuals"], strict=True):
        _relay(optimizer, bucket, own, residuals["now"])
    if optimizer.steps == 0:  # founders: their parameters have just become equal
        optimizer.replica.adopt_parameters()


def take_over(optimizer: Stepping, theirs: State, own: State | None) -> None:
    """Land the rounds that others have landed; a member without the run's state begins where they are."""
    optimizer.replica.hierarchy.count()
    still_due = []
    for fragment, its in zip(optimizer.fragments, theirs["fragments"], strict=True):
        if own is not None and fragment in optimizer.rounds_due and fragment.rounds == its["rounds"]:
            still_due.append(fragment)
        has_missed = own is not None and its["landed"] > fragment.landed
        if not has_missed:
            _discard(optimizer, fragment)
        elif fragment.is_under_way:
            fragment.complete("resume", "commit")
        else:  # it has been sent, and its exchange has not ended here
            fragment.count_anew()
        for bucket in fragment.buckets:
            k = bucket.index
            both = None if own is None else own["residuals"][k]["next" if has_missed else "now"]
            _relay(optimizer, bucket, own, both)
            if own is None or has_missed:
                torch._foreach_copy_(list(bucket.layout.views(bucket.anchor)), theirs["anchors"][k])
                if bucket.velocity is not None:
                    torch._foreach_copy_(list(bucket.layout.views(bucket.velocity)), theirs["velocities"][k])
                bucket.follow_anchor()
        for name in _TIMETABLE:
            setattr(fragment, name, its[name])
        if own is None:
            _decay(fragment, *its["since_landed"])
    optimizer.rounds_due = still_due
    optimizer.stats.interval, optimizer.is_frozen = theirs["interval"], False
    if own is None:
        optimizer.inner_step.load(with_shards(optimizer.inner, theirs["inner"]))
        optimizer.steps, optimizer.is_syncing = theirs["steps"], theirs["is_syncing"]
        optimizer.rounds_due = [optimizer.fragments[k] for k in theirs["rounds_due"]]
    if optimizer.balance is not None:
        left = optimizer.fragments[0].due - optimizer.steps
        optimizer.balance.begin(left, left)
    optimizer.replica.show()
    optimizer.rounds.stop_looking()
    optimizer.replica_check.compared = theirs["compared"]  # or some would compare anchors in a round, and others not


def _decay(fragment: Fragment, keeps: Sequence[float], decays: Sequence[bool]) -> None:
    """Decay parameters that are at the anchor as those of the others have decayed since."""
    fragment.tokens, fragment.keeps, fragment.decays = 0.0, list(keeps), list(decays)
    has_decayed = iter(decays)
    for bucket in fragment.buckets:
        for w in bucket.local_values:
            if next(has_decayed):
                w.mul_(keeps[bucket.group_index])


def _discard(optimizer: Stepping, fragment: Fragment) -> None:
    """Forget the exchange under way, which no member has landed: its difference goes with the next round."""
    if fragment.is_under_way:
        fragment.discard()
        optimizer.stats.missed_rounds += 1


def _relay(optimizer: Stepping, bucket: LocalBucket, own: State | None, both: tuple[Tensor, Tensor] | None) -> None:
    """Lay the bucket out for the transport's ranks, with these residuals carried over; None: they are zero."""
    shapes, block, transport = bucket.layout.shapes, bucket.layout.block, optimizer.transport
    bucket.relay(lay_out(shapes, block, transport.world_size), transport.rank)
    if own is not None and both is not None:
        worker, server = carried(bucket, lay_out(shapes, block, own["world_size"]), both, own["rank"])
        bucket.ef.worker.copy_(worker)
        bucket.ef.server.copy_(server)
