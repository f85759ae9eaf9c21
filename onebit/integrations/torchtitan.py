"""Loops in torchtitan's manner: one object that steps all model parts, saved by torch.distributed.checkpoint.

    optimizers = build_optimizers(model_parts, config.optimizer, mesh=world_mesh["dp_replicate", "dp_shard"])
    schedulers = [LambdaLR(optimizer, warmup) for optimizer in optimizers]
    ...
    optimizers.step()
    dcp.save({"optimizer": optimizers, ...}, checkpoint_id=folder)

Needs torchtitan for nothing: a `TrainSpec` takes `build_optimizers` as its builder, any other loop calls it. Leave out
the loop's `clip_grad_norm_`: give `max_grad_norm=`. Rests on `transports_of` in `model_parallel.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..model_parallel import transports_of
from ..onebit_adam import OnebitAdam
from ..onebit_lamb import OnebitLamb
from ..optimizer import CompressedOptimizer
from ..usage.contract import State
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

    optimizer_config: an object with name, lr, beta1, beta2, eps, weight_decay, as torchtitan's; what it lacks has our
    default. "AdamW" and "Adam" mean OnebitAdam; `implementation` is without effect. mesh: of replicas and shards, in
    which fully_shard got the second axis alone (`transports_of`); None: every rank holds the whole model. options: more
    of the optimizer's arguments (freeze_step, max_grad_norm, ...).
    Raises ValueError for another name, for steps in backward, for torchft, and where parallel_dims divide the model and
    no mesh says how.
    """
    name = getattr(optimizer_config, "name", "AdamW")
    if name not in _KINDS:
        raise ValueError(f"optimizer.name must be one of {', '.join(_KINDS)}, got {name!r}")
    implementation = getattr(optimizer_config, "implementation", "fused")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"optimizer.implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if getattr(optimizer_config, "early_step_in_backward", False):
        raise ValueError(
            "early_step_in_backward steps each parameter alone; here a step is one decision of all ranks, and buckets "
            "leave during backward already: set it to False"
        )
    if ft_manager is not None and getattr(ft_manager, "enabled", True):
        raise ValueError("torchft changes the ranks of a step, on which errors and frames rest: turn it off")
    divided = [axis for axis in ("dp_shard", "cp", "tp", "pp") if getattr(parallel_dims, axis, 1) > 1]
    if mesh is None and divided:
        raise ValueError(
            f"parallel_dims divide the model ({', '.join(divided)}); give build_optimizers the mesh of replicas and "
            'shards: mesh=world_mesh["dp_replicate", "dp_shard"]'
        )
    known = {
        key: getattr(optimizer_config, key) for key in ("lr", "eps", "weight_decay") if hasattr(optimizer_config, key)
    }
    if hasattr(optimizer_config, "beta1"):
        known["betas"] = (optimizer_config.beta1, optimizer_config.beta2)  # type: ignore[attr-defined]
    if mesh is not None:
        known |= transports_of(mesh)
    named = [
        (f"{k}.{name}" if len(model_parts) > 1 else name, p)
        for k, part in enumerate(model_parts)
        for name, p in part.named_parameters()
        if p.requires_grad
    ]
    return OptimizersContainer(_KINDS[name](named, **known | options))


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
        """As torch.optim.Optimizer's; also for what runs behind a step."""
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
        self.optimizer.load_state_dict(torch.load(io.BytesIO(state_dict[self._key]), weights_only=True))

    @property
    def _key(self) -> str:
        """Of all ranks, of one replica's parts as well: no two have the same."""
        parts = self.optimizer.model_parallel_group.whole
        return f"rank {self.optimizer.transport.rank}, part {parts.rank}"
