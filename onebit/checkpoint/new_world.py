"""A state that stays in its process while the world around it changes: other ranks, another number of them.

What all ranks have (moments, D, frames) is cut into other chunks, without loss. Residuals are each rank's own. A rank
counts 1/W in every mean, so a worker error e becomes e·W'/W: what is not sent yet keeps its weight. A server error of
elements that this rank still owns stays; the rest goes into its worker error, times W', as nobody else can send it.
A step that was under way (`delay=1`) moves along, to be sent again: see `step/under_way.py`.

`onebit/membership/` moves an optimizer from one world to the next; the files of another world are taken over by
`change_world_size.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..layout.bucket import Bucket
from ..layout.flat import Layout, lay_out
from ..model_parallel import local
from ..step.under_way import NAME
from ..usage.contract import State
from ..usage.gradients import gradient_of
from .change_world_size import PLACE, reframe, resize
from .optimizer_state import identity, restore_bucket, restore_rest
from .owner import StateOwner

_APART = ("params", "param_names", "exp_avg_mask")
"""Of a group, what is not an option."""


def leave(optimizer: StateOwner, sent: Sequence[bool]) -> State:
    """This rank's state, with what the step under way would make of its residuals, for ranks that lack that step.

    sent: for each bucket, whether that step sends momentum in one bit.
    """
    state = optimizer.state_dict()
    for bucket, record, is_sent in zip(optimizer.buckets, state["onebit"]["buckets"], sent, strict=True):
        ef = bucket.ef
        record["has_errors"] = ef is not None
        record["errors"] = record["next"] = None if ef is None else (ef.worker, ef.server)
        if ef is not None and is_sent:
            record["next"] = (ef.worker_next, ef.server_next)
    if optimizer.forgotten is not None:
        state["onebit"][NAME] = optimizer.forgotten
    return state


def for_others(optimizer: StateOwner, state: State) -> State:
    """Of such a state, and of the parameters, what every rank has."""
    entries = {
        key: {name: x for name, x in entry.items() if name != "worker_error"} for key, entry in state["state"].items()
    }
    own = ("server_error", "errors", "next")
    buckets = [{name: x for name, x in one.items() if name not in own} for one in state["onebit"]["buckets"]]
    record = {**state["onebit"], "buckets": buckets}
    if NAME in record:
        record[NAME] = {name: record[NAME][name] for name in ("step", "kind", "numbers", "clip_factor")}
    return {
        "groups": [{k: x for k, x in group.items() if k not in _APART} for group in optimizer.param_groups],
        "parameters": [local(p).detach() for group in optimizer.param_groups for p in group["params"]],
        "state": entries,
        "param_groups": [{"params": group["params"]} for group in state["param_groups"]],
        "onebit": record,
    }


def enter(optimizer: StateOwner, state: State) -> None:
    """Go on from a state that `leave` gave, in the transport's world.

    The state is emptied: a bucket's old memory is free before the next bucket gets new.
    """
    step, residuals = optimizer.forgotten, _residuals(state, "errors")
    if step is None or "buckets" not in step:
        return _settle(optimizer, state, residuals, state["onebit"])
    former = list(residuals)
    _settle(optimizer, state, iter(former), state["onebit"])
    pairs = zip(optimizer.buckets, step["buckets"], former, strict=True)
    buckets = [_moved(optimizer, bucket, sent, errors) for bucket, sent, errors in pairs]
    optimizer.forgotten = {**step, "buckets": buckets}


def _moved(optimizer: StateOwner, bucket: Bucket, its: State, errors: tuple[Tensor, Tensor] | None) -> State:
    """The frames and the residual of a step that is sent again. errors: in the former world, before that step."""
    assert errors is not None and bucket.ef is not None
    change = its["residual"].float() - errors[0].float()
    residual = resize(change, bucket.layout.numel).add_(bucket.ef.worker)
    return {"sent": reframe(its["sent"], optimizer.codec, change.numel(), bucket.layout), "residual": residual}


def take_over(optimizer: StateOwner, theirs: State, own: State | None, scale: float) -> None:
    """Take over what another rank gave `for_others`, a step later than `own`, or into a rank that had no state.

    With a state of its own a rank keeps its options: it takes the same step, and its schedule moves on from there.

    scale: of this rank's gradients, for a step under way there that it has not sent here.
    """
    mine = optimizer.param_groups
    for group, options in zip(mine, theirs["groups"], strict=True) if own is None else ():
        lr = options.pop("lr")
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = float(lr)
        group.update(options)
    params = [p for group in mine for p in group["params"]]
    with torch.no_grad():
        for p, x in zip(params, theirs["parameters"], strict=True):
            local(p).copy_(x)
    was = theirs["onebit"]
    residuals: Iterable[tuple[Tensor, Tensor] | None] = [None] * len(optimizer.buckets)
    if own is not None:
        has_landed = own["onebit"]["steps"] == theirs["onebit"]["steps"]
        was, residuals = own["onebit"], _residuals(own, "errors" if has_landed else "next")
    _settle(optimizer, theirs, residuals, was)
    if (step := theirs["onebit"].get(NAME)) is not None:
        present = [gradient_of(p) is not None for p in optimizer.buckets.params]
        step = {**step, "present": present, "scale": scale * step["clip_factor"]}
    optimizer.forgotten = step


def _residuals(state: State, name: str) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Of each bucket, those of this name; neither they nor the others remain in the state."""
    for record in state["onebit"]["buckets"]:
        yield {key: record.pop(key) for key in ("errors", "next")}[name]


def _settle(optimizer: StateOwner, state: State, residuals: Iterable[tuple[Tensor, Tensor] | None], was: State) -> None:
    """Lay everything out anew, bucket by bucket, and take the state's entries out of it meanwhile.

    was: the record that says in which world these residuals, (worker, server) of each bucket, are a rank's own.
    """
    former = [lay_out(bucket.layout.shapes, bucket.layout.block, was["world_size"]) for bucket in optimizer.buckets]
    optimizer.relay()
    optimizer.state.clear()
    record, entries, error_dtype = state["onebit"], state["state"], optimizer.placement.error_dtype
    own = identity(optimizer)
    for bucket, layout, saved, both in zip(optimizer.buckets, former, record["buckets"], residuals, strict=True):
        frames, numel, server = saved["frames"], bucket.layout.numel, None
        of_bucket = [dict(entries.pop(key)) for key in saved["params"]]
        if saved["has_errors"]:
            worker, server = (x.to(error_dtype) for x in carried(bucket, layout, both, was["rank"]))
            for entry, error in zip(of_bucket, bucket.layout.views(worker), strict=True):
                entry["worker_error"] = error
        if frames is not None:
            frames = reframe(frames.to(bucket.device), optimizer.codec, saved["numel"], bucket.layout)
        moved = {**saved, "numel": numel, "frames": frames, "server_error": server}
        restore_bucket(optimizer, bucket, moved, of_bucket)
    restore_rest(optimizer, {k: x for k, x in record.items() if k != NAME} | {k: own[k] for k in PLACE})


class LaidOut(Protocol):
    """A bucket of any optimizer, in the new world."""

    device: torch.device
    layout: Layout
    rank: int


def carried(bucket: LaidOut, former: Layout, both: tuple[Tensor, Tensor] | None, rank: int) -> tuple[Tensor, Tensor]:
    """Worker and server error in the new world, float32, from those of a rank in a former one. None: they are zero."""
    W, layout = bucket.layout.world_size, bucket.layout
    moved, kept = (torch.zeros(n, device=bucket.device, dtype=torch.float32) for n in (layout.numel, layout.chunk))
    if both is None:
        return moved, kept
    worker, server = (x.to(bucket.device, torch.float32) for x in both)
    numel = min(former.numel, layout.numel)  # beyond it is padding
    torch.mul(worker[:numel], W / former.world_size, out=moved[:numel])
    first, own = rank * former.chunk, bucket.rank * layout.chunk  # where the chunks of this rank begin
    rest = server[: max(0, numel - first)].clone()
    begin, end = max(first, own), min(first + len(rest), own + layout.chunk)
    if begin < end:
        still_own = rest[begin - first : end - first]
        kept[begin - own : end - own] = still_own
        still_own.zero_()
    moved[first : first + len(rest)].add_(rest, alpha=W)
    return moved, kept
