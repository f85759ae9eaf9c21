"""A torch optimizer around another one: the parts that `LocalSteps` shows of it, and the checks of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..bucket_optimizer import BucketOptimizer
from ..comm import torch_versions
from ..layout.masters import is_low
from ..model_parallel import like, local
from ..usage.contract import Group, State, check_number, refuse_copy
from ..usage.graphs import Optimizer


class Wrapped(Optimizer):
    """An optimizer that shows param_groups and state of an inner one. `build` is called for each new group."""

    def __init__(self, inner: torch.optim.Optimizer):
        self._inner: torch.optim.Optimizer | None = None
        super().__init__([{"params": list(group["params"])} for group in inner.param_groups], {})
        self._inner, self.defaults = inner, inner.defaults

    def build(self) -> None:
        """Take over new groups. Raises TypeError or ValueError if they are not accepted."""
        raise NotImplementedError

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the local steps."""
        assert self._inner is not None
        return self._inner

    @property
    def param_groups(self) -> list[Group]:
        """The inner optimizer's."""
        return self._own_groups if self._inner is None else self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        if self._inner is None:
            self._own_groups = groups
        else:
            self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizer's."""
        return self._own_state if self._inner is None else self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if self._inner is None:
            self._own_state = state
        else:
            self._inner.state = state

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the inner optimizer. All ranks, at the same step. It travels with the last fragment.

        Args:
            param_group: As in torch.
        """
        if self._inner is None:
            super().add_param_group(param_group)
            return
        self._inner.add_param_group(param_group)
        try:
            self.build()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    def __getstate__(self) -> State:
        raise refuse_copy(self)


def check_inner(inner: object) -> None:
    """Raise TypeError or ValueError unless this is an optimizer that can take local steps."""
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"LocalSteps takes a torch optimizer, got {type(inner).__name__}: "
            "LocalSteps(torch.optim.AdamW(model.parameters(), lr=1e-3), every=32)"
        )
    if isinstance(inner, BucketOptimizer | Wrapped):
        raise TypeError(
            f"{type(inner).__name__} exchanges with other ranks itself; give LocalSteps an optimizer that does not, "
            "such as torch.optim.AdamW"
        )
    if isinstance(inner, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates its closure several times in a step; LocalSteps needs one that steps once")
    for g, group in enumerate(inner.param_groups):
        check_group(f"group {g}", group)


def check_group(where: str, group: Group) -> None:
    if "lr" not in group:
        raise ValueError(f'{where} of the inner optimizer has no "lr", which LocalSteps compares between ranks')
    check_number(f"{where} of the inner optimizer", "lr", group["lr"])
    for k, p in enumerate(group["params"]):
        if not p.requires_grad or p.dtype == torch.float32:
            continue
        name = group["param_names"][k] if "param_names" in group else f"parameter {k} of {where}"
        if not is_low(p):
            raise TypeError(f"{name} is {p.dtype}; LocalSteps takes float32, and bfloat16 and float16 with masters")
        if local(p) is not p:
            raise TypeError(
                f"{name} is a shard in {p.dtype}, which would need a float32 master; shard float32 parameters, and "
                "compute in few bits: fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            )


def are_finite(grads: Iterable[Tensor]) -> bool:
    """Whether all elements are finite. Looks at the sums first: one pass at memory speed, and a yes is exact."""
    held = [grad._values() if grad.is_sparse else local(grad) for grad in grads]
    sums: dict[torch.device, list[Tensor]] = {}
    for x in held:
        sums.setdefault(x.device, []).append(x.sum(dtype=torch.float32))
    if all(bool(torch.stack(each).isfinite().all()) for each in sums.values()):
        return True
    return all(bool(x.isfinite().all()) for x in held)  # sums of finite elements may overflow float32


def local_state(inner: torch.optim.Optimizer) -> State:
    """An optimizer's state with this rank's elements alone, and under "shards" which of its tensors were DTensors."""
    state, entries, shards = inner.state_dict(), {}, []
    for number, entry in state["state"].items():
        entries[number] = {name: local(x) if isinstance(x, Tensor) else x for name, x in entry.items()}
        shards += [[number, name] for name, x in entry.items() if entries[number][name] is not x]
    return {**state, "state": entries, "shards": shards}


def with_shards(inner: torch.optim.Optimizer, state: State) -> State:
    """A state of `local_state` with its DTensors, for an optimizer whose parameters are sharded as there."""
    params = [p for group in inner.param_groups for p in group["params"]]
    entries = {number: dict(entry) for number, entry in state["state"].items()}
    for number, name in state["shards"]:
        entries[number][name] = like(params[number], entries[number][name])
    return {**{key: value for key, value in state.items() if key != "shards"}, "state": entries}


def kept_by_decay(inner: torch.optim.Optimizer, group: Group) -> float:
    """Factor of a parameter in one step by weight decay, if that is decoupled from the gradient; else 1."""
    is_decoupled = torch_versions.decouples_decay(inner, group)
    return 1.0 - float(group["lr"]) * float(group["weight_decay"]) if is_decoupled else 1.0
