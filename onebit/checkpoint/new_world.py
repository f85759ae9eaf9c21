"""A state that stays in its process while the world around it changes: other ranks, another number of them.

What all ranks have (moments, D, frames) is cut into other chunks, without loss. Residuals are each rank's own. A rank
counts 1/W in every mean, so a worker error e becomes e·W'/W: what is not sent yet keeps its weight. A server error of
elements that this rank still owns stays; the rest goes into its worker error, times W', as nobody else can send it.
A step that was under way (`delay=1`) moves along, to be sent again: see `step/under_way.py`.

`onebit/membership/` moves an optimizer from one world to the next; the files of another world are taken over by
`change_world_size.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..layout.bucket import Bucket
from ..layout.flat import Layout, lay_out
from ..model_parallel import local
from ..step.under_way import NAME
from ..usage.contract import State
from ..usage.frozen import gradient_of
from .change_world_size import PLACE, reframe, resize
from .optimizer_state import identity, restore
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
    """Go on from a state that `leave` gave, in the transport's world."""
    residuals = [record["errors"] for record in state["onebit"]["buckets"]]
    _settle(optimizer, state, residuals, state["onebit"])
    if optimizer.forgotten is not None and "buckets" in optimizer.forgotten:
        pairs = zip(optimizer.buckets, optimizer.forgotten["buckets"], residuals, strict=True)
        buckets = [_moved(optimizer, bucket, sent, errors) for bucket, sent, errors in pairs]
        optimizer.forgotten = {**optimizer.forgotten, "buckets": buckets}


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
    residuals: list[tuple[Tensor, Tensor] | None] = [None] * len(optimizer.buckets)
    if own is not None:
        has_landed = own["onebit"]["steps"] == theirs["onebit"]["steps"]
        residuals = [record["errors" if has_landed else "next"] for record in own["onebit"]["buckets"]]
    _settle(optimizer, theirs, residuals, theirs["onebit"] if own is None else own["onebit"])
    if (step := theirs["onebit"].get(NAME)) is not None:
        present = [gradient_of(p) is not None for p in optimizer.buckets.params]
        step = {**step, "present": present, "scale": scale * step["clip_factor"]}
    optimizer.forgotten = step


def _settle(optimizer: StateOwner, state: State, residuals: list[tuple[Tensor, Tensor] | None], was: State) -> None:
    """was: the record that says in which world these residuals, (worker, server) of each bucket, are a rank's own."""
    former = [lay_out(bucket.layout.shapes, bucket.layout.block, was["world_size"]) for bucket in optimizer.buckets]
    optimizer.relay()
    identified = identity(optimizer)
    record = {name: value for name, value in state["onebit"].items() if name != NAME}
    record |= {key: identified[key] for key in PLACE}
    entries, buckets = {key: dict(entry) for key, entry in state["state"].items()}, []
    for bucket, layout, saved, both in zip(optimizer.buckets, former, record["buckets"], residuals, strict=True):
        frames, numel = saved["frames"], bucket.layout.numel
        server = None
        if saved["has_errors"]:
            worker, server = (x.to(optimizer.placement.error_dtype) for x in carried(bucket, layout, both, was["rank"]))
            for key, error in zip(saved["params"], bucket.layout.views(worker), strict=True):
                entries[key]["worker_error"] = error
        if frames is not None:
            frames = reframe(frames.to(bucket.device), optimizer.codec, saved["numel"], bucket.layout)
        buckets.append({**saved, "numel": numel, "frames": frames, "server_error": server})
    restore(optimizer, {**state, "state": entries, "onebit": {**record, "buckets": buckets}})


class LaidOut(Protocol):
    """A bucket of any optimizer, in the new world."""

    device: torch.device
    layout: Layout
    rank: int


def carried(bucket: LaidOut, former: Layout, both: tuple[Tensor, Tensor] | None, rank: int) -> tuple[Tensor, Tensor]:
    """Worker and server error in the new world, float32, from those of a rank in a former one. None: they are zero."""
    W, layout = bucket.layout.world_size, bucket.layout
    if both is None:
        zeros = torch.zeros(layout.numel, device=bucket.device, dtype=torch.float32)
        return zeros, zeros[: layout.chunk].clone()
    worker, server = (x.to(bucket.device, torch.float32) for x in both)
    flat = torch.zeros(former.numel, device=bucket.device, dtype=torch.float32)
    flat.view(former.world_size, -1)[rank] = server
    rest = resize(flat, layout.numel)
    own = rest.view(W, -1)[bucket.rank]
    kept = own.clone()
    own.zero_()
    return rest.mul_(W).add_(resize(worker, layout.numel), alpha=W / former.world_size), kept
