"""Checkpoints of the sharded optimizers: one state per rank, and what a world of another size makes of them.

Each rank saves its own momentum, by parameter, and its own chunks of variance and masters, by bucket. Loading into the
same world is exact. In another, chunks move with their elements, and each rank owes the mean of what the old ranks
owed: what will still be delivered is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...checkpoint.change_world_size import resize
from ...comm import SignCodec
from .bucket import ShardedBucket

VERSION = 1
# By bucket, float32: concatenated over ranks, the chunks of a bucket's elements.
_CHUNKS = ("variance", "owned", "mean")


def bucket_records(buckets: Sequence[ShardedBucket], codec: SignCodec) -> list[dict]:
    """The chunks that this rank owns, by bucket. mean: of the last frames, where warm-up or clipping asks for it."""
    records = []
    for bucket in buckets:
        mean = bucket.mean
        if bucket.received is not None:
            mean = torch.empty(bucket.layout.chunk, device=bucket.device)
            codec.decode_mean(bucket.received, mean)
        chunks = {"variance": bucket.variance, "owned": bucket.owned, "mean": mean}
        records.append({"numel": bucket.layout.numel, "is_warm": bucket.is_warm, **chunks})
    return records


def check_record(record: dict | None, mine: dict, buckets: Sequence[ShardedBucket], name: str) -> None:
    """Raise ValueError unless this record of a state fits this rank.

    mine: what it must say of kind, version, rank, ... name: of the optimizer.
    """
    where = f"rank {mine['rank']}: cannot load this optimizer state: "
    if record is None or record.get("kind") != mine["kind"]:
        raise ValueError(f"{where}it is not that of a {name}; to start from a model's weights load none")
    for key, value in mine.items():
        if record[key] != value:
            raise ValueError(
                f"{where}{key} is {record[key]} there and {value} here; each rank loads its own, or all ranks load "
                "those of all ranks with load_state_dicts"
            )
    there, here = [saved["numel"] for saved in record["buckets"]], [bucket.layout.numel for bucket in buckets]
    if there != here:
        raise ValueError(
            f"{where}its buckets hold {there} elements, these {here}; construct with the same groups, shapes and "
            "bucket_cap_mb"
        )


def check_entry(entry: dict, p: Tensor, name: str, momentum_dtype: torch.dtype, rank: int) -> None:
    """Raise ValueError unless a parameter's saved state fits it exactly."""
    momentum = entry.get("momentum")
    found = "none" if momentum is None else f"{momentum.dtype} {tuple(momentum.shape)}"
    if momentum is None or momentum.shape != p.shape or momentum.dtype != momentum_dtype or "step" not in entry:
        raise ValueError(
            f"rank {rank}: cannot load this optimizer state: the momentum of {name} is {found}, expected "
            f"{momentum_dtype} {tuple(p.shape)}, with a step"
        )


def restore(bucket: ShardedBucket, saved: dict, entries: Sequence[dict]) -> None:
    """Take over a bucket's record and its parameters' entries, both checked."""
    bucket.variance.copy_(saved["variance"])
    bucket.owned.copy_(saved["owned"])
    bucket.is_warm = saved.get("is_warm", False)  # before there was a warm-up, states did not say
    bucket.received = None
    bucket.mean = None if saved["mean"] is None else saved["mean"].to(bucket.device, torch.float32, copy=True)
    for view, step, entry in zip(bucket.layout.views(bucket.momentum), bucket.steps, entries, strict=True):
        view.copy_(entry["momentum"])
        step.fill_(float(entry["step"]))


def regather(states: Iterable[dict], kind: str, buckets: Sequence[ShardedBucket], world_size: int) -> dict:
    """The states of all ranks of one world, in rank order, as the state of one rank of a world of `world_size`.

    Reads them one at a time. Raises ValueError where they are not the states of one world.
    """
    state: dict | None = None
    sums: dict[object, Tensor] = {}
    chunks: list[dict[str, list]] = []
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
        if "waiting" in record:  # on any rank; the mean has a part of it
            own = state["onebit"]["waiting"]
            state["onebit"]["waiting"] = [a or b for a, b in zip(own, record["waiting"], strict=True)]
        for key, entry in one["state"].items():
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
            **{name: _own_chunk(bucket, lists[name]) for name in _CHUNKS},
        }
        for bucket, lists, saved in zip(buckets, chunks, state["onebit"]["buckets"], strict=True)
    ]
    return state


def _own_chunk(bucket: ShardedBucket, chunks: Sequence[Tensor | None]) -> Tensor | None:
    """This rank's chunk of what the old ranks' chunks make together. Layouts differ in the padding at the end alone."""
    if any(chunk is None for chunk in chunks):
        return None
    whole = resize(torch.cat([chunk for chunk in chunks if chunk is not None]), bucket.layout.numel)
    return whole.view(bucket.layout.world_size, -1)[bucket.rank].clone()
