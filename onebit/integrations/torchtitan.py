"""For training loops like torchtitan's: one object steps all model parts, saved by torch.distributed.checkpoint.

    optimizers = build_optimizers(model_parts, config.optimizer, mesh=world_mesh["dp_replicate", "dp_shard"])
    schedulers = [LambdaLR(optimizer, warmup) for optimizer in optimizers]
    ...
    optimizers.step()
    dcp.save({"optimizer": optimizers, ...}, checkpoint_id=folder)

It does not need torchtitan, and takes its configurations: those with param_groups (0.3) and those without (0.2 and
before). Remove the loop's `clip_grad_norm_`, and pass `max_grad_norm=`. Rests on `transports_of` in
`model_parallel.py`.
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
"""torchtitan's names of torch's implementations. They have no effect here."""


def build_optimizers(
    model_parts: Sequence[nn.Module],
    optimizer_config: object,
    parallel_dims: object | None = None,
    ft_manager: object | None = None,
    *,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> OptimizersContainer:
    """Construct the optimizer of all model parts, as torchtitan's builders do. All ranks.

    Args:
        model_parts: This rank's parts of the model.
        optimizer_config: As torchtitan's: an object or mapping with param_groups, each with a pattern of parameter
            names, the name of an optimizer and its arguments (the first pattern that matches counts); or with name, lr,
            beta1, beta2, eps and weight_decay. "AdamW" and "Adam" mean OnebitAdam, with torch's defaults for omitted
            arguments; `implementation` has no effect.
        parallel_dims: torchtitan's, to check that a divided model comes with a mesh. Default None.
        ft_manager: torchtitan's; must be disabled. Default None.
        mesh: Mesh of replicas and shards, whose second axis was given to fully_shard (`transports_of`). Default None:
            every rank holds the whole model.
        **options: Arguments of the whole optimizer (freeze_step, max_grad_norm, ...).

    Raises:
        ValueError: Something in the configuration would have no effect; groups name different optimizers; a pattern
            matches no parameter, or a parameter no pattern; steps in backward or torchft are on; or parallel_dims
            divide the model, and there is no mesh.
    """
    chosen = _groups_of(optimizer_config)
    if len(kinds := {_KINDS[name] for _, name, _ in chosen}) != 1:
        names = ", ".join(dict.fromkeys(name for _, name, _ in chosen)) or "no group"
        raise ValueError(f"one optimizer steps all parameters, but param_groups name {names}: name one in all groups")
    if twice := [key for key in _OF_A_GROUP if key in options]:
        raise ValueError(f"{twice[0]} belongs in optimizer_config, which has its own; leave the argument out")
    if ft_manager is not None and getattr(ft_manager, "enabled", True):
        raise ValueError("torchft changes the ranks in a run, which residuals and frames do not support: turn it off")
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
    """Groups for an optimizer: named parameters by the first pattern that matches, and each group's arguments."""
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
    """(pattern, optimizer's name, its arguments) of each group. Raises ValueError if one cannot be translated."""
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
            "are already sent during backward: set it to False"
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
    """The arguments of a onebit group that match those of an optimizer of this name."""
    if name not in _KINDS:
        raise ValueError(f"the name of an optimizer must be one of {', '.join(_KINDS)}, got {name!r}")
    defaults = inspect.signature(_TORCHS.get(name, _KINDS[name])).parameters
    made = {key: given.get(key, defaults[key].default) for key in _OF_A_GROUP}
    is_decoupled = given.get("decoupled_weight_decay", name != "Adam")
    if made["weight_decay"] and not is_decoupled:
        raise ValueError(
            f"{name} with weight_decay={made['weight_decay']} adds the decay to the gradient; here decay is decoupled, "
            'as in AdamW: name "AdamW", or set it to 0'
        )
    if stray := given.keys() - {*_OF_A_GROUP, *TorchOptions.__annotations__, "decoupled_weight_decay"}:
        raise ValueError(
            f"{name}'s {', '.join(sorted(stray))} would have no effect in a group, which has lr, betas, eps and "
            "weight_decay: give options of the whole optimizer to build_optimizers(...)"
        )
    forms = {key: value for key, value in given.items() if key in TorchOptions.__annotations__}
    return made | forms  # the optimizer refuses options that it does not support


class OptimizersContainer:
    """The object that the loop steps, schedules and saves: one optimizer for all parts of the model on this rank.

    Iterating over it yields the optimizer, for schedulers. state_dict() has this rank's state under its rank's number,
    because torch.distributed.checkpoint would take equal names for copies. It loads on the same number of ranks.

    Args:
        optimizer: The optimizer, from `build_optimizers`.
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
        """As torch.optim.Optimizer's."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def state_dict(self) -> State:
        """This rank's state as bytes: its tensors change after the warm-up, and DCP loads into existing tensors."""
        held = io.BytesIO()
        torch.save(self.optimizer.state_dict(), held)
        return {self._key: held.getvalue()}

    def load_state_dict(self, state_dict: State) -> None:
        if self._key not in state_dict:
            raise ValueError(
                f"this checkpoint holds the optimizer of {', '.join(state_dict) or 'no rank'}, not of {self._key}; "
                "load it on the same number of ranks that wrote it"
            )
        self.optimizer.load_state_dict(read_archive(io.BytesIO(state_dict[self._key])))

    @property
    def _key(self) -> str:
        """A name that no other rank has, whether of another replica or of another part of this one."""
        parts = self.optimizer.model_parallel_group.whole
        return f"rank {self.optimizer.transport.rank}, part {parts.rank}"
