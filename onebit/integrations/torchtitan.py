"""Loops in torchtitan's manner: one object that steps all model parts, saved by torch.distributed.checkpoint.

    optimizers = build_optimizers(model_parts, config.optimizer, mesh=world_mesh["dp_replicate", "dp_shard"])
    schedulers = [LambdaLR(optimizer, warmup) for optimizer in optimizers]
    ...
    optimizers.step()
    dcp.save({"optimizer": optimizers, ...}, checkpoint_id=folder)

Needs torchtitan for nothing, and takes its configurations: those with param_groups (0.3) and those without (0.2 and
before). Leave out the loop's `clip_grad_norm_`: give `max_grad_norm=`. Rests on `transports_of` in `model_parallel.py`.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint.archive import read_archive
from ..model_parallel import transports_of
from ..onebit_adam import OnebitAdam
from ..onebit_lamb import OnebitLamb
from ..optimizer import CompressedOptimizer
from ..usage.contract import State, TorchOptions
from ..zero_one_adam import ZeroOneAdam

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KINDS: Mapping[str, Callable[..., CompressedOptimizer]] = {
    "Adam": OnebitAdam,
    "AdamW": OnebitAdam,
    "OnebitAdam": OnebitAdam,
    "OnebitLamb": OnebitLamb,
    "ZeroOneAdam": ZeroOneAdam,
}
_TORCHS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
_OF_A_GROUP = ("lr", "betas", "eps", "weight_decay")
_FLAT = ("name", "lr", "beta1", "beta2", "eps", "weight_decay", "implementation", "early_step_in_backward")
_GROUPED = ("param_groups", "implementation", "optimizer_factory_kwargs_by_name")
IMPLEMENTATIONS = ("fused", "foreach", "for-loop")
"""How torch runs the same mathematics."""


def build_optimizers(
    model_parts: Sequence[nn.Module],
    optimizer_config: object,
    parallel_dims: object | None = None,
    ft_manager: object | None = None,
    *,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> OptimizersContainer:
    """The optimizer of all model parts, as torchtitan's builders give it. All ranks.

    optimizer_config: as torchtitan's: an object or mapping with param_groups, each with a pattern of parameter names,
    the name of an optimizer and its arguments, of which the first that matches counts; or with name, lr, beta1, beta2,
    eps and weight_decay. "AdamW" and "Adam" mean OnebitAdam with torch's own defaults for what is left out;
    `implementation` is without effect. mesh: of replicas and shards, in which fully_shard got the second axis alone
    (`transports_of`); None: every rank holds the whole model. options: arguments of the whole optimizer (freeze_step,
    max_grad_norm, ...).
    Raises ValueError at anything in the configuration that would have no effect; for optimizers that cannot step
    together, patterns that match no parameter, parameters that match no pattern; for steps in backward, for torchft,
    and if parallel_dims divide the model and no mesh says how.
    """
    chosen = _groups_of(optimizer_config)
    if len(kinds := {_KINDS[name] for _, name, _ in chosen}) != 1:
        names = ", ".join(dict.fromkeys(name for _, name, _ in chosen)) or "no group"
        raise ValueError(f"one optimizer steps all parameters, but param_groups name {names}: name one in all groups")
    if twice := [key for key in _OF_A_GROUP if key in options]:
        raise ValueError(f"{twice[0]} belongs in optimizer_config, which has its own; leave the argument out")
    if ft_manager is not None and getattr(ft_manager, "enabled", True):
        raise ValueError("torchft changes the ranks of a step, on which errors and frames rest: turn it off")
    divided = [axis for axis in ("dp_shard", "cp", "tp", "pp") if getattr(parallel_dims, axis, 1) != 1]
    if mesh is None and divided:
        raise ValueError(
            f"parallel_dims divide the model ({', '.join(divided)}); give build_optimizers the mesh of replicas and "
            'shards: mesh=world_mesh["dp_replicate", "dp_shard"]'
        )
    transports: Mapping[str, Any] = {} if mesh is None else transports_of(mesh)
    return OptimizersContainer(kinds.pop()(_param_groups(model_parts, chosen), **transports, **options))


def _param_groups(
    model_parts: Sequence[nn.Module], chosen: Sequence[tuple[str, str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What an optimizer takes: named parameters by the first pattern that matches, and each group's arguments."""
    left = {
        (k, name): p for k, part in enumerate(model_parts) for name, p in part.named_parameters() if p.requires_grad
    }
    groups: list[dict[str, Any]] = []
    for pattern, _, arguments in chosen:
        taken = [(k, name) for k, name in left if re.search(pattern, name)]
        if not taken:
            raise ValueError(f"the pattern {pattern!r} matches no trained parameter that is left: change or remove it")
        named = [(f"{k}.{name}" if len(model_parts) > 1 else name, left.pop((k, name))) for k, name in taken]
        groups.append({"params": named, **arguments})
    if left:
        names = ", ".join(name for _, name in left)
        raise ValueError(f"no pattern of param_groups matches {names}: end with a group whose pattern is '.*'")
    return groups


def _groups_of(config: object) -> list[tuple[str, str, dict[str, Any]]]:
    """(pattern, optimizer's name, its arguments) of each group. Raises ValueError at what cannot be translated."""
    if not isinstance(config, Mapping):
        attributes = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
        config = {name: value for name, value in attributes.items() if not callable(value)}
    known = _GROUPED if "param_groups" in config else _FLAT
    if stray := [str(name) for name in config if name not in known]:
        raise ValueError(
            f"optimizer_config has {', '.join(stray)}, which would have no effect; known: {', '.join(known)}"
        )
    if (implementation := config.get("implementation", "fused")) not in IMPLEMENTATIONS:
        raise ValueError(
            f"optimizer.implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if config.get("early_step_in_backward", False):
        raise ValueError(
            "early_step_in_backward steps each parameter alone; here a step is one decision of all ranks, and buckets "
            "leave during backward already: set it to False"
        )
    if "param_groups" in config:
        shared = config.get("optimizer_factory_kwargs_by_name", {})
        return [
            (
                group.pattern,
                group.optimizer_name,
                _arguments(group.optimizer_name, {**shared.get(group.optimizer_name, {}), **group.optimizer_kwargs}),
            )
            for group in config["param_groups"]
        ]
    if missing := [name for name in ("name", "lr", "beta1", "beta2") if name not in config]:
        raise ValueError(
            f"expected an optimizer_config with param_groups, or with name, lr, beta1 and beta2: it has no {missing[0]}"
        )
    given = {key: config[key] for key in ("lr", "eps", "weight_decay") if key in config}
    betas = config["beta1"], config["beta2"]
    return [("", config["name"], _arguments(config["name"], {**given, "betas": betas}))]


def _arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group of ours that do what an optimizer of this name does with those given."""
    if name not in _KINDS:
        raise ValueError(f"the name of an optimizer must be one of {', '.join(_KINDS)}, got {name!r}")
    defaults = inspect.signature(_TORCHS.get(name, _KINDS[name])).parameters
    made = {key: given.get(key, defaults[key].default) for key in _OF_A_GROUP}
    is_decoupled = given.get("decoupled_weight_decay", name != "Adam")
    if made["weight_decay"] and not is_decoupled:
        raise ValueError(
            f"{name} with weight_decay={made['weight_decay']} adds it to the gradient; here it acts beside it, as in "
            'AdamW: name "AdamW", or set it to 0'
        )
    if stray := given.keys() - {*_OF_A_GROUP, *TorchOptions.__annotations__, "decoupled_weight_decay"}:
        raise ValueError(
            f"{name}'s {', '.join(sorted(stray))} would have no effect in a group, which has lr, betas, eps and "
            "weight_decay: give options of the whole optimizer to build_optimizers(...)"
        )
    forms = {key: value for key, value in given.items() if key in TorchOptions.__annotations__}
    return made | forms  # the optimizer refuses those that it has no form of


class OptimizersContainer:
    """What the loop steps, schedules and saves: one optimizer, however many parts the model has on this rank.

    Iterates over it, as schedulers do. state_dict() holds this rank's state under its rank's number, so that
    torch.distributed.checkpoint keeps all of them: it would take equal names for copies. Loads on as many ranks.
    """

    def __init__(self, optimizer: CompressedOptimizer):
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[CompressedOptimizer]:
        return iter([self.optimizer])

    def __len__(self) -> int:
        return 1

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.zero_grad(*args, **kwargs)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """As torch.optim.Optimizer's; also for what runs after a step."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def state_dict(self) -> State:
        """Bytes: what an optimizer holds changes with the warm-up, and a checkpoint is loaded into a new one."""
        held = io.BytesIO()
        torch.save(self.optimizer.state_dict(), held)
        return {self._key: held.getvalue()}

    def load_state_dict(self, state_dict: State) -> None:
        if self._key not in state_dict:
            raise ValueError(
                f"this checkpoint holds the optimizer of {', '.join(state_dict) or 'no rank'}, not of {self._key}; "
                "load it on as many ranks as have written it"
            )
        self.optimizer.load_state_dict(read_archive(io.BytesIO(state_dict[self._key])))

    @property
    def _key(self) -> str:
        """Of all ranks, of one replica's parts as well: no two have the same."""
        parts = self.optimizer.model_parallel_group.whole
        return f"rank {self.optimizer.transport.rank}, part {parts.rank}"
