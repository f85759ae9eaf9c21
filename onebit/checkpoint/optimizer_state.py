"""The state of a compressed optimizer as a dict: saving, checking and loading it.

It is torch's state, by parameter, with the state of the compression under "onebit". Each rank saves and loads its own.
For another number of ranks see `change_world_size.py`, for other slices of the parameters `portable.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

import torch
from torch import Tensor

from ..layout.bucket import Bucket
from ..layout.masters import NAME as MASTER
from ..layout.masters import check_master
from ..model_parallel import local
from ..step import under_way
from ..usage.contract import Group, State, check_adam_entry, check_identity, check_saved_groups, load_checked
from .change_world_size import (
    PLACE,
    check_own,
    gather_states,
    is_of_other_rank,
    owing_nothing,
    reframe,
    resize,
    warn_of_other_rank,
)
from .owner import StateOwner

log = logging.getLogger(__name__)

_VERSION = 1


def identity(optimizer: StateOwner) -> dict[str, object]:
    """The fields that a state must have to be this rank's."""
    return {
        "kind": optimizer.rule.kind,
        "version": _VERSION,
        "rank": optimizer.transport.rank,
        "world_size": optimizer.transport.world_size,
        "local_size": optimizer.placement.hierarchy.local_size,
        "shard": optimizer.model_parallel_group.whole.rank,
        "shards": optimizer.model_parallel_group.whole.world_size,
        "block": optimizer.codec.block,
        "codec": optimizer.codec.name,
    }


# ---------------------------------------------------------------- save


def save(optimizer: StateOwner, state: State) -> State:
    """torch's state, and this rank's state of the compression."""
    for key, entry in state["state"].items():
        # Here one tensor counts steps for a whole group; torch's optimizers expect one tensor per parameter.
        state["state"][key] = {**entry, "step": entry["step"].clone()}
    numbers = optimizer.buckets.numbers()
    for bucket in optimizer.buckets:
        bucket.masters.settle()
        if bucket.ef is not None:
            errors = bucket.layout.views(bucket.spread(bucket.ef.worker))
            for p, error in zip(bucket.params, errors, strict=True):
                state["state"][numbers[p]]["worker_error"] = error
    state["onebit"] = {
        **identity(optimizer),
        "steps": [int(count) for count in optimizer.steps],
        "buckets": [
            {
                "phase": bucket.phase,
                "numel": bucket.layout.numel,
                "params": [numbers[p] for p in bucket.params],
                "frames": bucket.frames,
                "server_error": None if bucket.ef is None else bucket.ef.server,
            }
            for bucket in optimizer.buckets
        ],
        "skipped_steps": optimizer.stats.skipped_steps,
        "clip_average": optimizer.clipper.average,
        "compresses": optimizer.policy.compresses,
        "ahead": None if optimizer.ahead is None else asdict(optimizer.ahead),
        **optimizer.rule.record(),
    }
    if (step := optimizer.step_under_way) is not None:
        state["onebit"][under_way.NAME] = step.record(optimizer.buckets[:])
    return state


# ---------------------------------------------------------------- check


def check_and_load_groups(optimizer: StateOwner, state_dict: State) -> State:
    """Load the groups as torch.optim's load_state_dict does, except masks, which stay. Returns the checked state.

    Raises ValueError, before anything is changed, if the state is not this rank's.
    """
    masks = [group.get("exp_avg_mask") for group in optimizer.param_groups]
    given = load_checked(
        cast(torch.optim.Optimizer, optimizer), state_dict, lambda state: _check(optimizer, _as_own(optimizer, state))
    )
    if (saved := _as_own(optimizer, given)) is not given:
        warn_of_other_rank(log, given["onebit"], optimizer.transport.rank)
    for g, (group, mask) in enumerate(zip(optimizer.param_groups, masks, strict=True)):
        if group.pop("exp_avg_mask", None) is not None and mask is None and optimizer.transport.rank == 0:
            log.warning(
                "the exp_avg_mask of group %d in this state is not taken over: give it to the optimizer's group if it "
                "is still wanted",
                g,
            )
        if mask is not None:
            group["exp_avg_mask"] = mask
    return saved


def check_kind(optimizer: StateOwner, record: State) -> None:
    """Raise ValueError unless the record is of an optimizer of this kind."""
    kind, mine = record.get("kind", "another optimizer"), optimizer.rule.kind
    if kind != mine:
        raise ValueError(
            f"rank {optimizer.transport.rank}: cannot load this optimizer state: it is that of {kind}, this is {mine}, "
            "for which it has no meaning; to continue from the model's weights alone, load no optimizer state"
        )


def _check(optimizer: StateOwner, state: State) -> None:
    where = f"rank {optimizer.transport.rank}: cannot load this optimizer state: "
    check_saved_groups(where, state["param_groups"], optimizer.param_groups)
    record = state.get("onebit")
    if record is not None:
        check_kind(optimizer, record)
        _check_record(optimizer, record, where)
    optimizer.rule.check_state(where, state)
    for name, p, entry in optimizer.buckets.saved_entries(state):
        shape = local(p).shape
        check_master(where, name, entry, p)
        if record is None:
            check_adam_entry(where, name, entry, shape)
        for key, value in entry.items():
            if key == "step":
                continue
            if value.shape != shape:
                raise ValueError(f"{where}{key} of {name} has shape {tuple(value.shape)}, the parameter {tuple(shape)}")
            expected = optimizer.placement.error_dtype if key == "worker_error" else None
            if not value.is_floating_point() or expected not in (None, value.dtype):
                raise ValueError(f"{where}{key} of {name} is {value.dtype}, expected {expected or 'floating point'}")


def _check_record(optimizer: StateOwner, record: State, where: str) -> None:
    check_identity(where, record, identity(optimizer), [bucket.layout.numel for bucket in optimizer.buckets])
    if under_way.NAME in record:
        under_way.check_record(where, record[under_way.NAME], optimizer.buckets[:], optimizer.codec)


# ---------------------------------------------------------------- load


def restore(optimizer: StateOwner, state: State) -> None:
    """Take over a checked state of this rank, or of a dense optimizer."""
    record = state.get("onebit")
    entries = {p: entry for _, p, entry in optimizer.buckets.saved_entries(state)}
    optimizer.state.clear()
    for bucket in optimizer.buckets:
        saved = None if record is None else record["buckets"][bucket.index]
        restore_bucket(optimizer, bucket, saved, [entries[p] for p in bucket.params])
    restore_rest(optimizer, record)


def restore_rest(optimizer: StateOwner, record: State | None) -> None:
    """Take over what such a state has besides its buckets, after them. record: None if it is a dense optimizer's."""
    if record is not None:
        for count, saved_count in zip(optimizer.steps, record.get("steps", ()), strict=False):
            count.fill_(float(saved_count))  # also for groups without parameters here
        optimizer.stats.skipped_steps = record["skipped_steps"]
        optimizer.clipper.average = tuple(record["clip_average"])
        optimizer.policy.load(record.get("compresses"))
        ahead = record.get("ahead")
        if ahead is not None and len(ahead["weights"]) != len(optimizer.buckets):
            ahead = None
        optimizer.ahead = None if ahead is None else under_way.Lookahead(**ahead)
        optimizer.rule.load_record(record)
    else:
        optimizer.rule.adopt_dense_state()
    optimizer.read_masks()
    for bucket in optimizer.buckets:
        optimizer.rule.mask_state(bucket)
    if record is not None and under_way.NAME in record:
        optimizer.send_again(record[under_way.NAME])


def restore_bucket(optimizer: StateOwner, bucket: Bucket, saved: Group | None, entries: Sequence[State]) -> None:
    """Take over a bucket's record, and the entries of its parameters; the bucket lets go of its old state."""
    optimizer.rule.allocate(bucket, "warmup" if saved is None else saved["phase"])
    for name, flat in bucket.flat.items():
        for entry, view in zip(entries, bucket.layout.views(flat), strict=True):
            found = entry.get(name, entry.get(optimizer.rule.adam_names.get(name, "")))
            if found is not None:
                view.copy_(found)
    bucket.masters.load([entry.get(MASTER) for entry in entries])
    if saved is not None and bucket.frames is not None:
        bucket.frames.copy_(saved["frames"])
    if saved is not None and bucket.ef is not None:
        bucket.ef.server.copy_(saved["server_error"])
        is_whole = bucket.hierarchy.local_size == 1
        flat = bucket.ef.worker if is_whole else bucket.ef.worker.new_zeros(bucket.layout.numel)
        for view, entry in zip(bucket.layout.views(flat), entries, strict=True):
            if (error := entry.get("worker_error")) is not None:
                view.copy_(error)
        if not is_whole:
            bucket.ef.worker.copy_(bucket.own_rows(flat).view(-1))
    step = entries[0].get("step")
    if step is not None:
        bucket.steps.fill_(float(step))
    optimizer.publish(bucket)


# ---------------------------------------------------------------- states of another rank


def _as_own(optimizer: StateOwner, state: State) -> State:
    """Another replica's state as this rank's: state that is the same on all ranks stays, residuals become zero.

    A state of this rank is returned unchanged, as is one of another optimizer. In a world of the same size a step under
    way is sent again, with that replica's frames; otherwise it is dropped.
    """
    record, own = state.get("onebit"), identity(optimizer)
    if record is None or record.get("kind") != own["kind"] or not is_of_other_rank(record, own):
        return state
    record = dict(record)
    if (step := record.pop(under_way.NAME, None)) is not None and record["world_size"] == own["world_size"]:
        if own["local_size"] != 1:
            raise ValueError(
                f"rank {optimizer.transport.rank}: this state belongs to rank {record['rank']}, and was saved within a "
                "step with delay=1 on two levels, whose frames no other rank has; save on every rank, or before such a "
                "step"
            )
        nothing = [{**one, "residual": torch.zeros_like(one["residual"])} for one in step["buckets"]]
        record[under_way.NAME] = {**step, "buckets": nothing}
    errors = [
        None if (owed := saved["server_error"]) is None else owed.new_zeros(saved["numel"])
        for saved in record["buckets"]
    ]
    return _placed(optimizer, {**state, "state": owing_nothing(state), "onebit": record}, errors)


def _placed(optimizer: StateOwner, state: State, server_errors: Sequence[Tensor | None]) -> State:
    """The state of a whole world, cut for this rank of this world. server_errors: those of all ranks, by bucket."""
    own, codec = identity(optimizer), optimizer.codec
    record = state["onebit"] | {key: own[key] for key in PLACE}
    is_of_this_codec = (record["block"], record["codec"]) == (codec.block, codec.name)
    if is_of_this_codec and len(record["buckets"]) == len(optimizer.buckets):
        triples = zip(optimizer.buckets, record["buckets"], server_errors, strict=True)
        record["buckets"] = [_adapt(optimizer, *each) for each in triples]
    return {**state, "onebit": record}


# ---------------------------------------------------------------- states of another world


def load_of_all_ranks(optimizer: StateOwner, states: Sequence[State]) -> None:
    """See `CompressedOptimizer.load_state_dicts`."""
    transport, local_size = optimizer.transport, optimizer.placement.hierarchy.local_size
    if len(states) == transport.world_size:
        mine = states[transport.rank]
        check_own(transport, mine)
        if mine.get("onebit", {}).get("local_size", 1) == local_size:
            optimizer.load_state_dict(mine)
            return
    if states and (first := states[0].get("onebit")) is not None:
        check_kind(optimizer, first)
    world = gather_states(states)
    optimizer.load_state_dict(_placed(optimizer, world.state, world.server_errors))
    if transport.rank == 0:
        log.info(
            "optimizer state of %d ranks taken over by %d: each rank takes the mean of the old residuals",
            world.size,
            transport.world_size,
        )


def _adapt(optimizer: StateOwner, bucket: Bucket, saved: Group, server_error: Tensor | None) -> State:
    """A bucket's record, converted for this rank of this world."""
    layout, frames = bucket.layout, saved["frames"]
    return {
        "phase": saved["phase"],
        "numel": layout.numel,
        "frames": None if frames is None else reframe(frames, optimizer.codec, saved["numel"], layout),
        "server_error": None if server_error is None else bucket.own_chunk(resize(server_error, layout.numel)),
    }
