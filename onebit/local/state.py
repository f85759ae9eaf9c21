"""The state of local steps as a dict: saving, checking and loading it, also in a world of another size.

It is the inner optimizer's state, with "anchor", "worker_error", "outer_momentum" and "correction" among each
parameter's entries; the rest is under "onebit". Right after a round parameters are the anchors, and are left out;
otherwise each rank's are included. An exchange under way is saved as the frames that were sent, which are sent again
after loading.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..agreement.replicas import make_equal
from ..checkpoint.change_world_size import (
    PLACE,
    check_own,
    gather_states,
    is_of_other_rank,
    owing_nothing,
    resize,
    warn_of_other_rank,
)
from ..comm import Codec, ExchangeTask, Hierarchy
from ..layout.flat import lay_out
from ..model_parallel import ModelParallelGroup, local
from ..step.driver import StepState
from ..usage.contract import State, check_identity
from .buffers import BufferMean
from .fragment import Fragment, LocalBucket, Pace, Share
from .intervals import Auto, Interval
from .new_world import Stepping
from .stats import LocalTraffic

log = logging.getLogger(__name__)

KIND = "local steps"
_VERSION = 1
OURS = ("anchor", "worker_error", "outer_momentum", "correction")


class Saved(Stepping, Protocol):
    """Local steps, as their state is saved and taken back. `LocalSteps` is one."""

    codec: Codec
    interval: Interval
    hierarchy: Hierarchy
    model_parallel_group: ModelParallelGroup
    buffers: BufferMean
    traffic: LocalTraffic
    counts_steps: bool

    def is_at_anchor(self) -> bool:
        """Whether no step was taken since the last round."""

    def resume(self, record: State) -> None:
        """Restore the position in the run and the counts."""

    def load_state_dict(self, state_dict: State) -> None:
        """As torch's."""


def identity(optimizer: Saved) -> dict[str, object]:
    """The fields that a state must have to be this rank's."""
    return {
        "kind": KIND,
        "version": _VERSION,
        "inner": type(optimizer.inner).__name__,
        "rank": optimizer.transport.rank,
        "world_size": optimizer.transport.world_size,
        "local_size": optimizer.hierarchy.local_size,
        "shard": optimizer.model_parallel_group.whole.rank,
        "shards": optimizer.model_parallel_group.whole.world_size,
        "block": optimizer.codec.block,
        "codec": optimizer.codec.name,
        "fragments": len(optimizer.fragments),
    }


# ---------------------------------------------------------------- save


def save(optimizer: Saved, inner: State) -> State:
    """The inner optimizer's state, and this rank's part of local steps."""
    numbers = optimizer.buckets.numbers()
    entries = {key: dict(entry) for key, entry in inner["state"].items()}
    for bucket in optimizer.buckets:
        for p, ours in zip(bucket.params, _entries(bucket), strict=True):
            entries[numbers[p]] = {**entries.get(numbers[p], {}), **ours}
    stats = optimizer.stats
    record: State = {
        **identity(optimizer),
        "steps": optimizer.steps,
        "interval": stats.interval,
        "chosen": optimizer.interval.chosen if isinstance(optimizer.interval, Auto) else None,
        "is_frozen": optimizer.is_frozen,
        "counts_steps": optimizer.counts_steps,
        "counts": [stats.rounds, stats.missed_rounds, stats.skipped_steps],
        "dropped_states": stats.dropped_states,
        "sent_bytes": optimizer.traffic.sent_in_run,
        "timetable": [_timetable(fragment) for fragment in optimizer.fragments],
        "buckets": [
            {
                "phase": "local",
                "numel": bucket.layout.numel,
                "params": [numbers[p] for p in bucket.params],
                "frames": None,
                "server_error": bucket.ef.server,
                "peak_lr": bucket.peak_lr,
                "paces": [pace[:2] for pace in bucket.paces],
                "still": [pace.still for pace in bucket.paces],
            }
            for bucket in optimizer.buckets
        ],
    }
    if optimizer.balance is not None:
        record["balance"] = optimizer.balance.state_dict()
    if not optimizer.is_at_anchor():
        record["parameters"] = [w.detach() for bucket in optimizer.buckets for w in bucket.local_values]
        record["module_buffers"] = {name: local(buffer).detach() for name, buffer in optimizer.buffers.named()}
    return {**inner, "state": entries, "onebit": record}


def _entries(bucket: LocalBucket) -> list[dict[str, Tensor]]:
    """The state of local steps for each parameter."""
    ef = bucket.ef
    own = ef.worker_next if ef.worker_next.numel() > 0 else ef.worker  # members keep the one of before the round, too
    flats = {"anchor": bucket.anchor, "worker_error": _spread(bucket, own)}
    flats |= _optional(bucket)
    views = {name: bucket.layout.views(flat) for name, flat in flats.items()}
    return [{name: of[k] for name, of in views.items()} for k in range(len(bucket.params))]


def _optional(bucket: LocalBucket) -> dict[str, Tensor]:
    """State that only some options need."""
    flats = {"outer_momentum": bucket.velocity, "correction": bucket.correction}
    return {name: flat for name, flat in flats.items() if flat is not None}


def _spread(bucket: LocalBucket, own: Tensor) -> Tensor:
    """A flat tensor [W·N] with these own rows, and zeros in rows that another rank of the node keeps."""
    if bucket.hierarchy.local_size == 1:
        return own
    flat = own.new_zeros(bucket.layout.numel)
    rows = bucket.hierarchy.rows(flat)
    rows.copy_(own.view(rows.shape))
    return flat


def _timetable(fragment: Fragment) -> State:
    """The position of a fragment in its round, and its exchange under way."""
    found: State = {
        "buckets": len(fragment.buckets),
        "due": fragment.due,
        "keeps": list(fragment.keeps),
        "decays": list(fragment.decays),
        "tokens": fragment.tokens,
        "synced_at": fragment.synced_at,
        "lands_at": fragment.lands_at,
    }
    if fragment.is_under_way:
        found["sent_at"] = fragment.sent_at
        found["shares"] = [vars(share) for share in fragment.shares]
        found["sent"] = [bucket.sent_HB for bucket in fragment.buckets]
        found["at_send"] = [
            list(bucket.layout.views(bucket.at_send)) for bucket in fragment.buckets if bucket.at_send is not None
        ]
    return found


# ---------------------------------------------------------------- load


def load(optimizer: Saved, state: State) -> None:
    """See `LocalSteps.load_state_dict`."""
    record = state.get("onebit")
    where = f"rank {optimizer.transport.rank}: cannot load this optimizer state: "
    if record is None:
        optimizer.inner_step.load(state)
        _begin_here(optimizer)
        return
    if record.get("kind") != KIND:
        raise ValueError(
            f"{where}it belongs to {record.get('kind', 'a one-bit optimizer')}, this optimizer is local steps around "
            f"{type(optimizer.inner).__name__}; to continue from the model's weights alone, load no optimizer state"
        )
    if (mine := _as_own(optimizer, state)) is not state:
        warn_of_other_rank(log, record, optimizer.transport.rank)
        state, record = mine, mine["onebit"]
    check_identity(where, record, identity(optimizer), [bucket.layout.numel for bucket in optimizer.buckets])
    numbers = optimizer.buckets.numbers()
    for bucket in optimizer.buckets:
        for p, name, shape in zip(bucket.params, bucket.names, bucket.layout.shapes, strict=True):
            entry = state["state"].get(numbers[p], {})
            expected = ["anchor", "worker_error", *_optional(bucket)]
            if missing := [key for key in expected if key not in entry or entry[key].shape != shape]:
                raise ValueError(f"{where}it has no {missing[0]} of shape {tuple(shape)} for {name}")
    optimizer.inner_step.load(_inner_part(state))
    entries = {p: state["state"][numbers[p]] for p in optimizer.buckets.params}
    for bucket, saved in zip(optimizer.buckets, record["buckets"], strict=True):
        _restore_bucket(bucket, [entries[p] for p in bucket.params], saved)
    held = [w for bucket in optimizer.buckets for w in bucket.local_values]
    for w, saved in zip(held, record.get("parameters", ()), strict="parameters" in record):
        w.copy_(saved)
    named = dict(optimizer.buffers.named())
    for name, value in record.get("module_buffers", {}).items():
        if name in named:
            local(named[name]).copy_(value)
    optimizer.resume(record)
    for fragment, saved in zip(optimizer.fragments, record["timetable"], strict=True):
        _restore_timetable(optimizer, fragment, saved)


def _inner_part(state: State) -> State:
    """The inner optimizer's part of the state."""
    entries = {}
    for key, entry in state["state"].items():
        theirs = {name: value for name, value in entry.items() if name not in OURS}
        if theirs:
            entries[key] = theirs
    return {name: value for name, value in state.items() if name != "onebit"} | {"state": entries}


def _begin_here(optimizer: Saved) -> None:
    """Begin with residuals of zero and the parameters as anchors: the state was the inner optimizer's alone."""
    make_equal(optimizer.transport, [local(p) for p in optimizer.buckets.params if local(p).numel() > 0])
    optimizer.replica.adopt_parameters()


def _restore_bucket(bucket: LocalBucket, entries: Sequence[State], saved: State) -> None:
    worker = torch.zeros(bucket.layout.numel, dtype=bucket.ef.worker.dtype, device=bucket.device)
    for name, flat in {"anchor": bucket.anchor, "worker_error": worker, **_optional(bucket)}.items():
        for view, entry in zip(bucket.layout.views(flat), entries, strict=True):
            view.copy_(entry[name])
    bucket.ef.worker.copy_(bucket.hierarchy.rows(worker).reshape(-1))
    bucket.ef.server.copy_(saved["server_error"])
    bucket.peak_lr = saved.get("peak_lr", 0.0)  # older states have no correction, which alone needs it
    paces = saved.get("paces", ())
    still = saved.get("still", [0] * len(paces))
    bucket.paces = [Pace(move, relative, n) for (move, relative), n in zip(paces, still, strict=True)]
    bucket.wire = bucket.at_send = bucket.sent_HB = bucket.said_WB = None
    bucket.return_to_anchor()


def _restore_timetable(optimizer: Saved, fragment: Fragment, saved: State) -> None:
    fragment.due, fragment.tokens, fragment.synced_at = saved["due"], saved["tokens"], saved["synced_at"]
    fragment.keeps, fragment.decays = list(saved["keeps"]), list(saved["decays"])
    fragment.lands_at, fragment.sent_at, fragment.tasks = saved["lands_at"], saved.get("sent_at"), []
    fragment.state = StepState.IDLE if fragment.lands_at is None else StepState.SUSPENDED
    if not fragment.is_under_way:
        return
    fragment.shares = [Share(**share) for share in saved["shares"]]
    for bucket, weights, sent in zip(fragment.buckets, saved["at_send"], saved["sent"], strict=True):
        bucket.at_send = torch.zeros(bucket.layout.numel, device=bucket.device, dtype=torch.float32)
        torch._foreach_copy_(bucket.layout.views(bucket.at_send), list(weights))
        bucket.ef.worker_next = bucket.ef.worker
        frames = sent.to(bucket.device, copy=True)
        fragment.tasks.append(ExchangeTask(bucket.send_again(optimizer.codec, optimizer.transport, frames)))
    if optimizer.transport.ranks_change:  # alone until the run begins, with nobody who could be lost
        optimizer.rounds.land(fragment)
    elif optimizer.rounds.is_past_first_phase(fragment, optimizer.steps):
        for task in fragment.tasks:
            task.advance()


# ---------------------------------------------------------------- states of another world


def load_of_all_ranks(optimizer: Saved, states: Sequence[State]) -> None:
    """See `LocalSteps.load_state_dicts`."""
    rank, W, local_size = optimizer.transport.rank, optimizer.transport.world_size, optimizer.hierarchy.local_size
    if len(states) == W:
        check_own(optimizer.transport, states[rank])
        if states[rank].get("onebit", {}).get("local_size", 1) == local_size:
            optimizer.load_state_dict(states[rank])
            return
    world = gather_states(_landed(state, optimizer.codec) for state in states)
    optimizer.load_state_dict(_placed(optimizer, world.state, world.server_errors))
    if rank == 0:
        log.info(
            "local steps of %d ranks taken over by %d: anchors stay; residuals, parameters between rounds and inner "
            "states become the mean of the old ranks'",
            world.size,
            W,
        )


def _as_own(optimizer: Saved, state: State) -> State:
    """Another replica's state as this rank's: that replica's parameters and inner state, residuals of zero.

    A state of this rank is returned unchanged. In a world of the same size an exchange under way is sent again, with
    that replica's frames; otherwise it is dropped.
    """
    record, own = state["onebit"], identity(optimizer)
    if not is_of_other_rank(record, own):
        return state
    if record["world_size"] != own["world_size"]:
        state = _landed(state, optimizer.codec, keeps_residuals=False)
    elif any(saved["lands_at"] is not None for saved in record["timetable"]) and own["local_size"] != 1:
        raise ValueError(
            f"rank {own['rank']}: this state belongs to rank {record['rank']}, and was saved within a round on two "
            "levels, whose frames no other rank has; save on every rank, or between rounds"
        )
    errors = [saved["server_error"].new_zeros(saved["numel"]) for saved in record["buckets"]]
    return _placed(optimizer, {**state, "state": owing_nothing(state)}, errors)


def _placed(optimizer: Saved, state: State, server_errors: Sequence[Tensor | None]) -> State:
    """The state of a whole world, cut for this rank of this world. server_errors: those of all ranks, by bucket."""
    own, record = identity(optimizer), dict(state["onebit"])
    if "balance" in record:
        record["balance"] = record["balance"] | {"seconds": []}  # the speed of another rank
    if len(record["buckets"]) == len(optimizer.buckets):
        record["buckets"] = [
            {**saved, "numel": bucket.layout.numel, "server_error": _own_chunk(bucket, server_error)}
            for bucket, saved, server_error in zip(optimizer.buckets, record["buckets"], server_errors, strict=True)
        ]
    return {**state, "onebit": record | {key: own[key] for key in PLACE}}


def _own_chunk(bucket: LocalBucket, server_error: Tensor | None) -> Tensor:
    assert server_error is not None
    rows = resize(server_error, bucket.layout.numel).view(bucket.layout.world_size, -1)
    return rows[bucket.hierarchy.owner]


def _landed(state: State, codec: Codec, *, keeps_residuals: bool = True) -> State:
    """The state as if the exchange under way had not been sent: its values go back to the residual.

    Parameters keep the steps after it was sent; if residuals are about to be dropped, those before as well.
    """
    record = state.get("onebit")
    if record is None or all(saved["lands_at"] is None for saved in record.get("timetable", ())):
        return state
    record = dict(record)
    entries = {key: dict(entry) for key, entry in state["state"].items()}
    parameters = list(record["parameters"])
    numbers = [number for saved in record["buckets"] for number in saved["params"]]
    place, timetable = {number: k for k, number in enumerate(numbers)}, []
    buckets = iter(record["buckets"])
    for saved in record["timetable"]:
        mine = [next(buckets) for _ in range(saved["buckets"])]
        timetable.append({**saved, "lands_at": None, "sent_at": None})
        if saved["lands_at"] is None:
            continue
        for bucket, weights, frames, share in zip(mine, saved["at_send"], saved["sent"], saved["shares"], strict=True):
            shapes = [entries[number]["anchor"].shape for number in bucket["params"]]
            layout = lay_out(shapes, codec.block, record["world_size"])
            sent = _decoded(frames, codec, layout.chunk, record)
            views = zip(bucket["params"], weights, layout.views(sent), share["keep_K"], strict=True)
            for number, w_sent, q, keep in views:
                entry, k = entries[number], place[number]
                entry["anchor"] = entry["anchor"] * keep
                if keeps_residuals and not share["sends_weights"]:  # weights sent in full leave no residual
                    entry["worker_error"] = entry["worker_error"] + q.to(entry["worker_error"].dtype)
                    parameters[k] = entry["anchor"] + (parameters[k] - w_sent)
    record |= {"timetable": timetable, "parameters": parameters}
    return {**state, "state": entries, "onebit": record}


def _decoded(frames_HB: Tensor, codec: Codec, chunk: int, record: State) -> Tensor:
    """Decoded frames of a rank's own rows, flat [W·N]; zeros in rows that another rank of the node has sent."""
    values = torch.zeros(record["world_size"], chunk, device=frames_HB.device, dtype=torch.float32)
    nodes = len(frames_HB)
    first = record["rank"] % record["local_size"] * nodes
    codec.decode(frames_HB, values[first : first + nodes])
    return values.view(-1)
