"""Local steps whose world changes: other ranks, another number of them. See `membership/change.py`.

Anchors and outer momentum are the same on all members, parameters and the inner optimizer's state are each one's own.
Residuals are carried over as in `checkpoint/new_world.py`. Corrections begin anew: they add up to zero over the members
that learnt them, and would no longer.

Members that have landed a round and members that could not land it both have their parameters of before: the latter
take over the anchor. A newcomer begins at the anchor, with a member's inner state and nothing to say about the round
under way; it counts by its own steps in it, as all do (`round_vote.weights_of`).
"""

from __future__ import annotations

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
    is_round_due: bool

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the local steps."""

    def adopt_parameters(self) -> None:
        """Make the current parameters the anchors."""


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
    (fragment,) = optimizer.fragments
    flats = [(bucket, bucket.anchor, bucket.velocity) for bucket in optimizer.buckets]
    return {
        "anchors": [list(bucket.layout.views(anchor)) for bucket, anchor, _ in flats],
        "velocities": [[] if u is None else list(bucket.layout.views(u)) for bucket, _, u in flats],
        "inner": optimizer.inner.state_dict(),
        "steps": optimizer.steps,
        "is_round_due": optimizer.is_round_due,
        "synced_at": fragment.synced_at,
        "due": fragment.due,
        "interval": optimizer.stats.interval,
        "keeps": list(fragment.keeps),
        "decays": list(fragment.decays),
    }


def enter(optimizer: Stepping, own: State) -> None:
    """Go on with the residuals that `leave` gave, in the transport's world."""
    _relay(optimizer, own, "now")
    if optimizer.steps == 0:  # founders: their parameters have just become equal
        optimizer.adopt_parameters()


def take_over(optimizer: Stepping, theirs: State, own: State | None) -> None:
    """Land the round that others have landed; a member without the run's state begins where they are."""
    _relay(optimizer, own, "next")
    (fragment,) = optimizer.fragments
    for bucket, anchor, velocity in zip(optimizer.buckets, theirs["anchors"], theirs["velocities"], strict=True):
        torch._foreach_copy_(list(bucket.layout.views(bucket.anchor)), anchor)
        if bucket.velocity is not None:
            torch._foreach_copy_(list(bucket.layout.views(bucket.velocity)), velocity)
        bucket.return_to_anchor()
    fragment.synced_at, fragment.due, fragment.tokens = theirs["synced_at"], theirs["due"], 0.0
    fragment.keeps, fragment.decays = [1.0] * len(fragment.keeps), [True] * len(fragment.decays)
    optimizer.stats.interval, optimizer.is_frozen, optimizer.is_round_due = theirs["interval"], False, False
    if own is None:
        optimizer.inner_step.load(theirs["inner"])
        optimizer.steps, optimizer.is_round_due = theirs["steps"], theirs["is_round_due"]
        fragment.keeps, fragment.decays = list(theirs["keeps"]), list(theirs["decays"])
        decays = iter(fragment.decays)
        for bucket in optimizer.buckets:
            for w in bucket.local_values:
                if next(decays):
                    w.mul_(fragment.keeps[bucket.group_index])
    if optimizer.balance is not None:
        optimizer.balance.begin(fragment.due - optimizer.steps, fragment.due - optimizer.steps)
    optimizer.replica.show()
    optimizer.rounds.stop_looking()
    optimizer.replica_check.restart(optimizer.steps)


def _relay(optimizer: Stepping, own: State | None, which: str) -> None:
    """Lay all buckets out for the transport's ranks, with these residuals carried over; None: they are zero."""
    transport = optimizer.transport
    optimizer.replica.hierarchy.count()
    for k, bucket in enumerate(optimizer.buckets):
        shapes, block = bucket.layout.shapes, bucket.layout.block
        bucket.relay(lay_out(shapes, block, transport.world_size), transport.rank)
        both: tuple[Tensor, Tensor] | None = None if own is None else own["residuals"][k][which]
        if own is not None and both is not None:
            former = lay_out(shapes, block, own["world_size"])
            worker, server = carried(bucket, former, both, own["rank"])
            bucket.ef.worker.copy_(worker)
            bucket.ef.server.copy_(server)
