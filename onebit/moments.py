"""The bases of dense optimizers: `DenseOptimizer` of all, and `MomentOptimizer` of LaProp, Lion and Muon.

The state of the latter is a few float32 moments of each parameter. A rule writes `_update`, its formula for lists of
tensors. State, float32 masters of low-precision parameters, and the checks of groups and of loaded states are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .layout.masters import NAME as MASTER
from .layout.masters import check_master, is_low, own_master, round_into_
from .usage.contract import (
    Group,
    State,
    TorchOptions,
    check_arguments,
    check_group,
    check_parameters,
    check_saved_groups,
    listed_parameters,
    load_checked,
    loss_of,
)
from .usage.gradients import with_gradient
from .usage.graphs import Optimizer, outside_graphs

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DenseOptimizer(Optimizer):
    """Steps one group after the other, outside compiled graphs."""

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of each parameter that has a gradient.

        Args:
            closure: Evaluates the model again and returns the loss. Default None.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: Group) -> None:
        raise NotImplementedError


class MomentOptimizer(DenseOptimizer):
    """Steps each parameter that has a gradient, and keeps `moments` of it beside the number of its steps.

    Moments are float32 for every dtype. Parameters in bfloat16 or float16 have float32 masters, on which the step is
    taken (`layout/masters.py`). Sends nothing.

    Args:
        params: Parameters or groups.
        defaults: Options of groups that lack them.
        **torchs: torch.optim.AdamW's other arguments, as far as they have a meaning here.

    Raises:
        ValueError: An option is out of its range.
        TypeError: An argument is unknown, or a parameter has an unsupported dtype.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the moments in the state, if they are the same in all groups; see `_moments_of`."""

    def __init__(self, params: object, defaults: Group, **torchs: Unpack[TorchOptions]):
        name = type(self).__name__
        check_arguments(name, torchs)
        super().__init__(listed_parameters(name, params), defaults)

    def _moments_of(self, group: Group) -> tuple[str, ...]:
        """Names of the moments that a group's parameters have."""
        return self.moments

    def _check_group(self, where: str, group: Group) -> None:
        """Raise TypeError or ValueError if a param group has an option that is not supported, or out of its range."""
        check_group(where, group)

    def _update(
        self, group: Group, held: list[Tensor], grads: list[Tensor], steps: Sequence[int], *moments: list[Tensor]
    ) -> None:
        """Take the step of parameters of a group.

        Args:
            group: Their options.
            held: Parameters, or their masters, modified in place.
            grads: Their gradients, float32.
            steps: Number of each one's step, from 1.
            *moments: Their moments, a list for each of `_moments_of` the group, modified in place.
        """
        raise NotImplementedError

    def add_param_group(self, param_group: Group) -> None:
        """As torch's. Raises ValueError/TypeError as the constructor does, and then changes nothing."""
        super().add_param_group(param_group)
        g, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:
            self._check_group(f"group {g}", group)
            check_parameters(0, [(p, f"parameter {k} of group {g}") for k, p in enumerate(group["params"])])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def begin_state(self) -> None:
        """Give each parameter without state that of step 0, to read a checkpoint into."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and not self.state[p]:
                    self.state[p] = self._first_state(group, p)

    def _first_state(self, group: Group, p: Tensor) -> State:
        zeros = {name: torch.zeros_like(p, dtype=torch.float32) for name in self._moments_of(group)}
        return {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")} | zeros

    def load_state_dict(self, state_dict: State) -> None:
        """As torch's, but moments stay float32.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It does not fit, or is another optimizer's. Nothing has changed.
        """
        saved = load_checked(self, state_dict, self._check_loadable)
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        for group, there in pairs:
            for p, key in zip(group["params"], there["params"], strict=True):
                if entry := saved["state"].get(key):
                    moments = self._moments_of(group)
                    names = (*moments, MASTER) if MASTER in entry else moments
                    self.state[p] |= {name: entry[name].to(p.device, torch.float32, copy=True) for name in names}

    def _step_group(self, group: Group) -> None:
        params = with_gradient(type(self).__name__, group["params"])
        for p in params:
            if not self.state[p]:
                check_parameters(0, [(p, "a parameter")])  # it may have come into its group without add_param_group
                self.state[p] = self._first_state(group, p)
            self.state[p]["step"] += 1
        if not params:
            return
        held = [own_master(self.state[p], p.detach()) if is_low(p) else p for p in params]
        grads = [p.grad.float() for p in params if p.grad is not None]
        moments = [[self.state[p][name] for p in params] for name in self._moments_of(group)]
        self._update(group, held, grads, [int(self.state[p]["step"]) for p in params], *moments)
        round_into_(params, held)

    def _check_loadable(self, state: State) -> None:
        where, name = "cannot load this optimizer state: ", type(self).__name__
        check_saved_groups(where, state["param_groups"], self.param_groups)
        for group, there in zip(self.param_groups, state["param_groups"], strict=True):
            moments = self._moments_of(group)
            for p, key in zip(group["params"], there["params"], strict=True):
                entry = state["state"].get(key, {})
                check_master(where, f"parameter {key}", entry, p)
                if entry and (missing := [name for name in ("step", *moments) if name not in entry]):
                    raise ValueError(
                        f"{where}parameter {key} has no {missing[0]} there, so it is not {name}'s; load a state of "
                        f"{name}, or none"
                    )
                if extra := sorted(entry.keys() - {"step", MASTER, *moments}):
                    raise ValueError(
                        f"{where}parameter {key} has {extra[0]} there, so it is not {name}'s; load a state of {name}, "
                        "or none"
                    )
                if wrong := [name for name in moments if entry and entry[name].shape != p.shape]:
                    shapes = f"shape {tuple(entry[wrong[0]].shape)} there and {tuple(p.shape)} here"
                    raise ValueError(f"{where}{wrong[0]} of parameter {key} has {shapes}; load that of this model")
