"""An optimizer's state by parameter: what a rank that holds other slices of the parameters can cut its own out of.

A rank's state is flat: parameters lie in buckets, momentum is packed in blocks, and what the server owes is spread over
the replicas. `take_apart` says what all of it means for the elements of each parameter; `put_together` makes the state
of an optimizer that holds other parameters, other slices of them or other buckets, for its `load_state_dict`. Who holds
what, and what is cut where, is in `zero/checkpoint/reshard.py`; what becomes of a world of replicas in
`change_world_size.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..bucket import Bucket
from ..bucketed import BucketedOptimizer
from ..comm import codec_named
from ..flat import Layout, lay_out

# Of a record: what says whose it is, and what is of single parameters. The rest is the same for all of them.
_OF_A_RANK = ("version", "rank", "world_size", "local_size", "shard", "shards", "block", "codec")
_OF_PARAMETERS = ("buckets", "live_blocks", "layers", "parameters", "waiting")
# Of a group: what is not the same in every rank's.
_OF_A_GROUP = ("params", "param_names", "exp_avg_mask")


@dataclass
class ParameterState:
    """What an optimizer knows of one parameter, or of a slice of it.

    elements: tensors in its shape: what torch calls its state, and "worker_error" and "server_error", what each replica
    owes to the mean and what all of them owe together; "momentum", unpacked; "is_live", whether the element's block has
    seen a gradient; "value", the parameter itself, where it is part of the state. numbers: of the whole parameter,
    tensors of no dimensions. group: whose options it takes.
    """

    group: int
    phase: str
    elements: dict[str, Tensor]
    numbers: dict[str, Tensor]


@dataclass
class Shared:
    """What belongs to no single parameter. options: of each group. record: what the family keeps beside it."""

    options: list[dict]
    record: dict = field(default_factory=dict)

    def join(self, other: Shared) -> None:
        """Take in what other layers' ranks know: of groups that have no parameters here."""
        for key, theirs in other.record.items():
            mine = self.record.get(key)
            if isinstance(mine, dict):
                self.record[key] = theirs | mine
            elif isinstance(mine, list) and len(theirs) > len(mine):
                self.record[key] = theirs


def take_apart(state: dict, server_errors: Sequence[Tensor | None] = ()) -> tuple[dict[int, ParameterState], Shared]:
    """({parameter's number: its state}, the rest) of the state of any optimizer here. Views of its tensors, mostly.

    server_errors: by bucket, those of all replicas in order; `elastic.gather_states` gives these and the state of a
    one-bit optimizer. Raises ValueError where that does not say which parameters its buckets hold.
    """
    record = state.get("onebit", {})
    group_of = {key: g for g, group in enumerate(state["param_groups"]) for key in group["params"]}
    found = {
        key: ParameterState(
            group_of[key],
            "",
            {name: value for name, value in entry.items() if name != "step"},
            {"step": torch.as_tensor(entry["step"])} if "step" in entry else {},
        )
        for key, entry in state["state"].items()
    }
    values, waiting = iter(record.get("parameters", ())), iter(record.get("waiting", ()))
    for index, saved in enumerate(record.get("buckets", ())):
        if "params" not in saved:
            raise ValueError(
                "this optimizer state does not say which parameters its buckets hold, as the first ones did not; load "
                "it where it was saved, and save it again"
            )
        states = [found[key] for key in saved["params"]]
        layout = _layout_of(states, record, saved)
        for name, flat in _flat_tensors(index, saved, record, server_errors, layout).items():
            for one, view in zip(states, layout.views(flat), strict=True):
                one.elements[name] = view
        for k, one in enumerate(states):
            one.phase = saved["phase"]
            if "layers" in record:
                one.numbers |= {name: table_K[k] for name, table_K in record["layers"][index].items()}
            if (value := next(values, None)) is not None:
                one.elements["value"] = value
            if (waits := next(waiting, None)) is not None:
                one.numbers["waits"] = torch.tensor(waits)
    options = [{key: x for key, x in group.items() if key not in _OF_A_GROUP} for group in state["param_groups"]]
    rest = {key: value for key, value in record.items() if key not in (*_OF_A_RANK, *_OF_PARAMETERS)}
    return found, Shared(options, rest)


def _layout_of(states: Sequence[ParameterState], record: dict, saved: dict) -> Layout:
    shapes = [next(iter(one.elements.values())).shape for one in states]
    layout = lay_out(shapes, record["block"], record["world_size"])
    if layout.numel != saved["numel"]:
        raise ValueError(f"a bucket of {saved['numel']} elements holds parameters that take {layout.numel}: damaged")
    return layout


def _flat_tensors(
    index: int, saved: dict, record: dict, server_errors: Sequence[Tensor | None], layout: Layout
) -> dict[str, Tensor]:
    """What a bucket's record has for each element, flat as the bucket is."""
    found = {}
    if saved["frames"] is not None:
        found["momentum"] = torch.empty(layout.numel)
        codec_named(record.get("codec", "sign"), layout.block).decode(
            saved["frames"].cpu(), found["momentum"].view(layout.world_size, -1)
        )
    if server_errors and (owed := server_errors[index]) is not None:
        found["server_error"] = owed
    if "live_blocks" in record and (live_J := record["live_blocks"][index]) is not None:
        found["is_live"] = live_J.repeat_interleave(layout.block)
    return found


def put_together(
    optimizer: torch.optim.Optimizer, states: Mapping[int, ParameterState], shared: Shared
) -> dict[str, object]:
    """A state for `optimizer.load_state_dict`, on the CPU. states: of its parameters' local elements, by their number.

    Every replica owes what the states say a replica owes. Momentum is packed anew; where its blocks are not those it
    was packed in, that leaves a residual r, and β1·r is added to what is owed: the next exchange sends β1·m + owed, as
    if nothing had been packed. A block is live where any of its elements was. Raises ValueError where a parameter of a
    one-bit optimizer has no state, or those of one bucket are in different phases.
    """
    own = optimizer.state_dict()
    if len(own["param_groups"]) != len(shared.options):
        raise ValueError(
            f"the state has {len(shared.options)} parameter groups, this optimizer {len(own['param_groups'])}; "
            "construct it with the same groups"
        )
    groups = [{**group, **options} for group, options in zip(own["param_groups"], shared.options, strict=True)]
    for g, group in enumerate(groups):
        for key in group["params"]:
            if key in states and states[key].group != g:
                raise ValueError(f"parameter {key} is in group {g}, its state is of group {states[key].group}")
    made: dict[str, object] = {"param_groups": groups}
    if isinstance(optimizer, BucketedOptimizer):
        made["onebit"] = _record(optimizer, states, shared, groups)
    made["state"] = {key: _entry(states[key]) for group in groups for key in group["params"] if key in states}
    return made


def _entry(one: ParameterState) -> dict[str, Tensor]:
    beside = ("momentum", "server_error", "is_live", "value")
    elements = {name: x for name, x in one.elements.items() if name not in beside}
    return elements | {name: number for name, number in one.numbers.items() if name == "step"}


def _record(
    optimizer: BucketedOptimizer, states: Mapping[int, ParameterState], shared: Shared, groups: Sequence[dict]
) -> dict:
    """What belongs under "onebit". Residuals of packing go into the worker errors of the states, in place."""
    record: dict = {**optimizer._identity(), **shared.record, "buckets": []}
    keys, live, layers, values, waiting = optimizer._keys(), [], [], [], []
    for bucket in optimizer._buckets:
        numbers = [keys[p] for p in bucket.params]
        if missing := [name for key, name in zip(numbers, bucket.names, strict=True) if key not in states]:
            raise ValueError(f"there is no state of {missing[0]}; train the parameters that were trained")
        of_bucket = [states[key] for key in numbers]
        if len(phases := {one.phase for one in of_bucket}) > 1:
            raise ValueError(f"{bucket.names[0]} and others of its bucket are in the phases {sorted(phases)}")
        frames = _packed(optimizer, bucket, of_bucket, groups[bucket.group_index]["betas"][0])
        owed = _flat(bucket.layout, of_bucket, "server_error")
        record["buckets"].append(
            {
                "phase": of_bucket[0].phase,
                "numel": bucket.layout.numel,
                "params": numbers,
                "frames": frames,
                "server_error": None if owed is None else bucket.own_chunk(owed),
            }
        )
        is_live = _flat(bucket.layout, of_bucket, "is_live")
        live.append(None if is_live is None else is_live.view(-1, bucket.layout.block).any(1))
        names = [name for name in of_bucket[0].numbers if name not in ("step", "waits")]
        layers.append({name: torch.stack([one.numbers[name] for one in of_bucket]) for name in names})
        waiting += [bool(one.numbers["waits"]) for one in of_bucket if "waits" in one.numbers]
        values += [one.elements["value"] for one in of_bucket if "value" in one.elements]
        for one in of_bucket:
            if "worker_error" in one.elements:
                one.elements["worker_error"] = one.elements["worker_error"].to(optimizer.error_dtype)
    return record | {"live_blocks": live, "layers": layers, "parameters": values, "waiting": waiting}


def _flat(layout: Layout, states: Sequence[ParameterState], name: str) -> Tensor | None:
    """The elements of that name, laid out as a bucket, zeros in its padding; None where there are none."""
    if name not in states[0].elements:
        return None
    flat = torch.zeros(layout.numel, dtype=states[0].elements[name].dtype)
    for one, view in zip(states, layout.views(flat), strict=True):
        view.copy_(one.elements[name])
    return flat


def _packed(
    optimizer: BucketedOptimizer, bucket: Bucket, states: Sequence[ParameterState], beta1: float
) -> Tensor | None:
    """The frames of the momentum; β1 times what they do not say is added to the worker errors."""
    layout = bucket.layout
    m = _flat(layout, states, "momentum")
    if m is None:
        return None
    codec = optimizer.codec.on_host()
    frames = torch.empty(layout.world_size, codec.frame_bytes(layout.chunk), dtype=torch.uint8)
    codec.encode(m.view(layout.world_size, -1), None, frames, layout.counts())
    for one, residual in zip(states, layout.views(m), strict=True):
        one.elements["worker_error"] = one.elements["worker_error"].float().add(residual, alpha=beta1)
    return frames
