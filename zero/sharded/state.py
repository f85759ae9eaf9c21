"""Checkpoints of the sharded optimizers: one state per rank, which a world of another size can load as well.

Each rank saves its own momentum, by parameter, and its own chunks of variance and masters, by bucket. Loading into a
world of the same size is exact. In another, chunks move with their elements, and each rank takes the mean of the old
ranks' momenta: the updates that are still to be delivered stay the same in sum.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...checkpoint.change_world_size import check_own, resize
from ...comm import SignCodec, Transport
from ...layout.buckets import Buckets
from ...layout.masters import NAME as MASTER
from ...layout.masters import check_master
from ...step.clip import Clipper
from ...usage.contract import Group, State, check_identity, check_saved_groups
from .bounds import Bounds
from .bucket import ShardedBucket
from .exchange import Sharded
from .health import GradStats, Health
from .masters import TakenMasters
from .rule import ShardedRule
from .stats import ShardStats

log = logging.getLogger(__name__)

_VERSION = 1
# Entries of a bucket's record that hold this rank's chunk, float32; concatenated over ranks they are the whole bucket.
_CHUNKS = ("variance", "owned", "mean")


class ShardOwner(Protocol):
    """A sharded optimizer, as its state is saved and taken back. `ShardedOnebitOptimizer` is one."""

    param_groups: list[Group]
    state: Any  # torch's defaultdict
    transport: Transport
    rule: ShardedRule
    placement: Sharded
    buckets: Buckets[ShardedBucket]
    masters: TakenMasters
    momentum_dtype: torch.dtype
    clipper: Clipper
    bounds: Bounds
    stats: ShardStats
    grad_stats: GradStats
    health: Health

    def publish(self, bucket: ShardedBucket) -> None:
        """Show the bucket's state."""

    def load_state_dict(self, state_dict: State) -> None:
        """As torch's."""


def identity(optimizer: ShardOwner) -> dict[str, object]:
    """Return the entries that a state must have to be this rank's."""
    config, transport = optimizer.placement.config, optimizer.transport
    return {
        "kind": optimizer.rule.kind,
        "version": _VERSION,
        "rank": transport.rank,
        "world_size": transport.world_size,
        "block": config.codec.block,
        "has_masters": config.stage > 0,
    }


# ---------------------------------------------------------------- save


def save(optimizer: ShardOwner, state: State) -> State:
    """Add this rank's chunks and the optimizer's counters to torch's state, under "onebit"."""
    for bucket in optimizer.buckets:
        bucket.masters.settle()
    state["onebit"] = {
        **identity(optimizer),
        "buckets": bucket_records(optimizer.buckets, optimizer.placement.config.codec),
        "clip_average": optimizer.clipper.average,
        "skipped_steps": optimizer.stats.skipped_steps,
        "bounded_steps": optimizer.stats.bounded_steps,
        "usual_norms": optimizer.bounds.record(),
        "grad_stats": vars(optimizer.grad_stats).copy(),
        "health": vars(optimizer.health).copy(),
        **optimizer.rule.record(),
    }
    return state


def bucket_records(buckets: Sequence[ShardedBucket], codec: SignCodec) -> list[State]:
    """Return the chunks that this rank owns, by bucket; also the mean of the last frames, if a step needs it."""
    records = []
    for bucket in buckets:
        mean = bucket.mean if bucket.received is None else bucket.last_mean(codec)
        chunks = {"variance": bucket.variance, "owned": bucket.owned, "mean": mean}
        flags = {"is_warm": bucket.is_warm, "is_idle": bucket.is_idle}
        records.append({"numel": bucket.layout.numel, **flags, **chunks})
    return records


# ---------------------------------------------------------------- load


def check(optimizer: ShardOwner, state: State) -> None:
    """Raise ValueError if a state is not this rank's. Changes nothing."""
    rank, record = optimizer.transport.rank, state.get("onebit")
    where = f"rank {rank}: cannot load this optimizer state: "
    check_saved_groups(where, state["param_groups"], optimizer.param_groups)
    if record is None or record.get("kind") != optimizer.rule.kind:
        name = type(optimizer).__name__
        raise ValueError(f"{where}it is not that of a {name}; to start from a model's weights load none")
    if record["world_size"] > 1 and record["rank"] != rank:
        raise ValueError(
            f"{where}it is of rank {record['rank']} of {record['world_size']}, and a rank's state is a shard: it holds "
            "the variance and masters that this rank owns, and no other's; save on every rank, and load each rank's "
            "own, or those of all ranks with load_state_dicts"
        )
    check_identity(where, record, identity(optimizer), [bucket.layout.numel for bucket in optimizer.buckets])
    for name, p, entry in optimizer.buckets.saved_entries(state):
        check_entry(entry, p, name, optimizer.momentum_dtype, rank)
        check_master(f"rank {rank}: cannot load this optimizer state: ", name, entry, p)


def load(optimizer: ShardOwner, state: State) -> None:
    """Take over a state, which was checked."""
    entries, record = {p: entry for _, p, entry in optimizer.buckets.saved_entries(state)}, state["onebit"]
    optimizer.state.clear()
    for bucket, saved in zip(optimizer.buckets, record["buckets"], strict=True):
        restore(bucket, saved, [entries[p] for p in bucket.params])
        optimizer.publish(bucket)
    optimizer.clipper.average = tuple(record["clip_average"])
    optimizer.stats.skipped_steps = record["skipped_steps"]
    optimizer.stats.bounded_steps = record.get("bounded_steps", 0)  # older states have no bounds
    optimizer.bounds.load_record(record.get("usual_norms", {}))
    optimizer.grad_stats = GradStats(**record["grad_stats"])
    optimizer.health.load(record["health"])
    optimizer.masters.restored()
    optimizer.rule.load_record(record)


def check_entry(entry: State, p: Tensor, name: str, momentum_dtype: torch.dtype, rank: int) -> None:
    """Raise ValueError unless a parameter's saved state fits it exactly."""
    momentum = entry.get("momentum")
    found = "none" if momentum is None else f"{momentum.dtype} {tuple(momentum.shape)}"
    if momentum is None or momentum.shape != p.shape or momentum.dtype != momentum_dtype or "step" not in entry:
        raise ValueError(
            f"rank {rank}: cannot load this optimizer state: the momentum of {name} is {found}, expected "
            f"{momentum_dtype} {tuple(p.shape)}, with a step"
        )


def restore(bucket: ShardedBucket, saved: State, entries: Sequence[State]) -> None:
    """Take over a bucket's record and its parameters' entries, both checked."""
    bucket.variance.copy_(saved["variance"])
    bucket.owned.copy_(saved["owned"])
    bucket.is_warm = saved.get("is_warm", False)  # states from before the warm-up existed lack it
    bucket.is_idle = saved.get("is_idle", False)
    bucket.received = None
    bucket.mean = None if saved["mean"] is None else saved["mean"].to(bucket.device, torch.float32, copy=True)
    if bucket.masters.has_any:
        bucket.masters.load([entry.get(MASTER) for entry in entries])
    for view, step, entry in zip(bucket.layout.views(bucket.momentum), bucket.steps, entries, strict=True):
        view.copy_(entry["momentum"])
        step.fill_(float(entry["step"]))


# ---------------------------------------------------------------- of all ranks of another world


def load_of_all_ranks(optimizer: ShardOwner, states: Sequence[State]) -> None:
    """See `ShardedOnebitOptimizer.load_state_dicts`."""
    rank, world_size = optimizer.transport.rank, optimizer.transport.world_size
    if len(states) == world_size:
        check_own(optimizer.transport, states[rank])
        optimizer.load_state_dict(states[rank])
        return
    optimizer.load_state_dict(regather(states, optimizer.rule.kind, optimizer.buckets, world_size))
    if rank == 0:
        log.info(
            "optimizer state of %d ranks taken over by %d: each holds the mean of the residuals",
            len(states),
            world_size,
        )


def regather(states: Iterable[State], kind: str, buckets: Sequence[ShardedBucket], world_size: int) -> State:
    """Make one rank's state for a world of another size from the states of all old ranks.

    Args:
        states: The states of all ranks of one world, in rank order; read one at a time.
        kind: The rule's kind, which the states must have.
        buckets: The optimizer's buckets on this rank.
        world_size: Number of ranks now.

    Raises:
        ValueError: They are not the states of one world, or of another optimizer.
    """
    state: State | None = None
    sums: dict[object, Tensor] = {}
    chunks: list[dict[str, list[Any]]] = []
    old_size = 0
    for rank, one in enumerate(states):
        record = one.get("onebit")
        if record is None or record.get("kind") != kind or record["rank"] != rank:
            raise ValueError(
                f"expected the states of ranks 0, 1, 2, ... of one world of this optimizer, number {rank} is "
                + ("another optimizer's" if record is None or "rank" not in record else f"rank {record['rank']}'s")
            )
        if state is None:
            state = {**one, "state": {key: dict(entry) for key, entry in one["state"].items()}, "onebit": dict(record)}
            old_size, chunks = record["world_size"], [{name: [] for name in _CHUNKS} for _ in record["buckets"]]
        if record["world_size"] != old_size:
            raise ValueError(f"rank {rank}'s state is of a world of {record['world_size']}, rank 0's of {old_size}")
        if "waiting" in record:  # parameters with skipped gradients on any old rank: they are in the mean
            own = state["onebit"]["waiting"]
            state["onebit"]["waiting"] = [a or b for a, b in zip(own, record["waiting"], strict=True)]
        for key, entry in one["state"].items():  # masters are the same on all ranks
            momentum = entry["momentum"].to(torch.float64, copy=True)
            sums[key] = sums[key].add_(momentum) if key in sums else momentum
        for lists, saved in zip(chunks, record["buckets"], strict=True):
            for name in _CHUNKS:
                lists[name].append(saved[name])
    if state is None or len(chunks[0]["owned"] if chunks else []) != old_size:
        raise ValueError(f"expected the states of all {old_size or ''} ranks of a world, got fewer")
    for key, total in sums.items():
        entry = state["state"][key]
        entry["momentum"] = (total / old_size).to(entry["momentum"].dtype)
    state["onebit"] |= {"world_size": world_size, "rank": buckets[0].rank}
    state["onebit"]["buckets"] = [
        {
            "numel": bucket.layout.numel,
            "is_warm": saved.get("is_warm", False),
            "is_idle": saved.get("is_idle", False),
            **{name: _own_chunk(bucket, lists[name]) for name in _CHUNKS},
        }
        for bucket, lists, saved in zip(buckets, chunks, state["onebit"]["buckets"], strict=True)
    ]
    return state


def _own_chunk(bucket: ShardedBucket, chunks: Sequence[Tensor | None]) -> Tensor | None:
    """Cut this rank's chunk from the old ranks' chunks. Layouts differ only in the padding at the end."""
    if any(chunk is None for chunk in chunks):
        return None
    whole = resize(torch.cat([chunk for chunk in chunks if chunk is not None]), bucket.layout.numel)
    return whole.view(bucket.layout.world_size, -1)[bucket.rank].clone()
