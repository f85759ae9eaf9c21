"""An optimizer's state by parameter, from which a rank with other slices of the parameters can cut its own.

A rank's state is flat: parameters are in buckets, and the server error is spread over the replicas. `take_apart` turns
it into states of single parameters. `put_together` makes the state of an optimizer with other parameters, other slices
or other buckets, for its `load_state_dict`. A rule takes its additional state apart and puts it together itself.
`zero/checkpoint/reshard.py` knows which rank holds which slices; `change_world_size.py` changes the number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..layout.flat import Layout, lay_out
from ..optimizer import CompressedOptimizer
from ..usage.contract import Group, State
from .optimizer_state import check_kind, identity
from .parameter_state import ParameterState, flat_of, spread_over

# Fields of a record that identify its rank. The others are the same on all ranks, or belong to single parameters.
_OF_A_RANK = ("version", "rank", "world_size", "local_size", "shard", "shards", "block", "codec")
# Fields of a group that may differ between ranks.
_OF_A_GROUP = ("params", "param_names", "exp_avg_mask")


@dataclass
class Shared:
    """The part of a state that belongs to no single parameter. options: of each group. record: the family's fields."""

    options: list[State]
    record: State = field(default_factory=dict)

    def join(self, other: Shared) -> None:
        """Add the fields from ranks with other layers, for groups without parameters here."""
        for key, theirs in other.record.items():
            mine = self.record.get(key)
            if isinstance(mine, dict):
                self.record[key] = theirs | mine
            elif isinstance(mine, list) and len(theirs) > len(mine):
                self.record[key] = theirs


def take_apart(
    optimizer: torch.optim.Optimizer, state: State, server_errors: Sequence[Tensor | None] = ()
) -> tuple[dict[int, ParameterState], Shared]:
    """Split a state of an optimizer of this kind: ({parameter's number: its state}, the rest). Mostly views.

    server_errors: by bucket, those of all replicas in order; `change_world_size.gather_states` gives these and the
    state of a one-bit optimizer. Raises ValueError if the state is of another kind, or does not name the parameters in
    its buckets.
    """
    group_of = {key: g for g, group in enumerate(state["param_groups"]) for key in group["params"]}
    found = {
        key: ParameterState(
            group_of[key],
            "",
            {name: value for name, value in entry.items() if name != "step"},
            {"step": torch.as_tensor(entry["step"], device="cpu")} if "step" in entry else {},
        )
        for key, entry in state["state"].items()
    }
    options = [{key: x for key, x in group.items() if key not in _OF_A_GROUP} for group in state["param_groups"]]
    record = state.get("onebit")
    if record is None or not isinstance(optimizer, CompressedOptimizer):
        return found, Shared(options)
    check_kind(optimizer, record)
    for index, saved in enumerate(record["buckets"]):
        if "params" not in saved:
            raise ValueError(
                "this optimizer state does not name the parameters in its buckets, because an early version wrote it; "
                "load it on the layout on which it was saved, and save it again"
            )
        states = [found[key] for key in saved["params"]]
        layout = _layout_of(states, record, saved)
        if server_errors and (owed := server_errors[index]) is not None:
            spread_over(layout, states, "server_error", owed)
        for one in states:
            one.phase = saved["phase"]
        optimizer.rule.take_apart(record, index, layout, states)
    of_parameters = ("buckets", *optimizer.rule.of_parameters)
    rest = {key: value for key, value in record.items() if key not in (*_OF_A_RANK, *of_parameters)}
    return found, Shared(options, rest)


def _layout_of(states: Sequence[ParameterState], record: State, saved: Group) -> Layout:
    shapes = [next(iter(one.elements.values())).shape for one in states]
    layout = lay_out(shapes, record["block"], record["world_size"])
    if layout.numel != saved["numel"]:
        raise ValueError(f"a bucket of {saved['numel']} elements holds parameters that take {layout.numel}: damaged")
    return layout


def put_together(
    optimizer: torch.optim.Optimizer, states: Mapping[int, ParameterState], shared: Shared
) -> dict[str, object]:
    """A state for `optimizer.load_state_dict`, on the CPU. states: of its parameters' local elements, by their number.

    Every replica gets the worker error of the states. Raises ValueError if a parameter of a one-bit optimizer has no
    state, or parameters of one bucket are in different phases.
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
    if isinstance(optimizer, CompressedOptimizer):
        made["onebit"] = _record(optimizer, states, shared, groups)
    made["state"] = {key: _entry(states[key]) for group in groups for key in group["params"] if key in states}
    return made


def _entry(one: ParameterState) -> dict[str, Tensor]:
    """The state that torch shows of it."""
    elements = {name: x for name, x in one.elements.items() if name != "server_error"}
    return elements | {name: number for name, number in one.numbers.items() if name == "step"}


def _record(
    optimizer: CompressedOptimizer, states: Mapping[int, ParameterState], shared: Shared, groups: Sequence[Group]
) -> State:
    """The part under "onebit"."""
    numbers_of, saved = optimizer.buckets.numbers(), []
    of_buckets = []
    for bucket in optimizer.buckets:
        numbers = [numbers_of[p] for p in bucket.params]
        if missing := [name for key, name in zip(numbers, bucket.names, strict=True) if key not in states]:
            raise ValueError(f"there is no state of {missing[0]}; train the same parameters as the run that saved")
        mine = [states[key] for key in numbers]
        if len(phases := {one.phase for one in mine}) > 1:
            raise ValueError(f"{bucket.names[0]} and others of its bucket are in the phases {sorted(phases)}")
        of_buckets.append((bucket, mine))
        owed = flat_of(bucket.layout, mine, "server_error")
        saved.append(
            {
                "phase": mine[0].phase,
                "numel": bucket.layout.numel,
                "params": numbers,
                "frames": optimizer.rule.pack(bucket, mine, groups[bucket.group_index]["betas"][0]),
                "server_error": None if owed is None else bucket.own_chunk(owed),
            }
        )
    rules = optimizer.rule.put_together(of_buckets)
    for one in (one for _, mine in of_buckets for one in mine):
        if "worker_error" in one.elements:
            one.elements["worker_error"] = one.elements["worker_error"].to(optimizer.placement.error_dtype)
    return {**identity(optimizer), **shared.record, "buckets": saved, **rules}
