"""What the engine does around `LocalSteps`: the form "local", its clipping, and its state in a checkpoint.

Between rounds nothing travels between replicas, the engine's own votes included: whether a step is good, its norm and
its loss scale are settled by the ranks that hold one replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from ...comm import Transport, codec_named
from ...local.local_steps import LocalSteps
from ...local.state import OURS
from ...model_parallel import ModelParallelGroup, local
from ...usage.buffers import persistent_buffers
from ..config.whole import Config
from ..grid import Grid, GridShape
from ..parallel import dense

_BUFFERS = "engine_buffers"


def check(config: Config, shape: GridShape) -> None:
    """Raise ValueError where this configuration or grid has no place for local steps. No communication."""
    choice, stage = config.optimizer, config.zero_optimization.stage
    if choice is not None and choice.is_one_bit:
        raise ValueError(
            f"onebit.local_steps is for optimizers that do not exchange by themselves, got {choice.type}; take AdamW, "
            "or leave local_steps out"
        )
    if config.onebit.sharding == "inter_node":
        raise ValueError(
            'onebit.sharding is "inter_node", which divides a replica over nodes, and onebit.local_steps lets replicas '
            "train by themselves; leave one of them out"
        )
    if stage > 0 and shape.size("shard") == 1 and shape.size("replica") > 1:
        raise ValueError(
            f"onebit.local_steps at stage {stage} shards a replica over the ranks of a node, and a node has one rank; "
            "use stage 0, or say how many ranks share a node with onebit.ranks_per_node"
        )


def check_model(model: nn.Module, config: Config) -> None:
    """Raise TypeError where a few steps would be lost in the rounding of a parameter."""
    if config.dtype != torch.float32:
        return  # sharding makes float32 masters
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype != torch.float32:
            raise TypeError(
                f"{name} is {p.dtype}, and the configuration computes in float32: the difference of a few local steps "
                'is lost in its rounding; enable "bf16" or "fp16", whose masters are float32, or pass model.float()'
            )


def around(
    inner: torch.optim.Optimizer, config: Config, grid: Grid, model: nn.Module, held: ModelParallelGroup
) -> LocalSteps:
    """Local steps of this optimizer, between replicas. All ranks. held: the ranks that hold this replica."""
    ours, asked = config.onebit, config.onebit.local_steps
    return LocalSteps(
        inner,
        asked.interval(),
        start_steps=asked.start_steps,
        start_every=asked.start_every,
        outer_lr=asked.outer_lr,
        outer_momentum=asked.outer_momentum,
        error_decay=asked.error_decay,
        codec=codec_named(asked.codec, ours.block),
        fragments=asked.fragments,
        delay=asked.delay,
        correction_steps=asked.correction_steps,
        model=model,
        transport=_transport(grid, is_alone=asked.delay > 0),
        model_parallel_group=held,
        bucket_cap_mb=ours.bucket_cap_mb,
        error_dtype=torch.bfloat16 if ours.error_dtype == "bf16" else torch.float32,
        check_replicas_every=ours.check_replicas_every,
        max_consecutive_skips=ours.max_consecutive_skips,
    )


def _transport(grid: Grid, *, is_alone: bool) -> Transport:
    """Between replicas. is_alone: of its own process group, as what is under way must not meet other messages."""
    if not is_alone:
        return grid.transport
    return grid.world.split(grid.shape.along("replica", grid.world.rank))


def clip(optimizer: LocalSteps, scale: float, max_norm: float) -> float | None:
    """Clip this replica's gradients by their norm over all its ranks: the norm, without loss scale. Its ranks alike.

    None without clipping, and where the norm is not finite: then gradients become NaN, and `step` leaves them out.
    """
    if max_norm <= 0:
        return None
    with_grad = [p for p in dense.parameters(optimizer) if p.grad is not None]
    grads = [local(cast(Tensor, p.grad)) for p in with_grad]
    norm = dense.global_norm(with_grad, grads, optimizer.model_parallel_group) / scale
    if grads:
        factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan
        torch._foreach_mul_(grads, factor)
    return norm if math.isfinite(norm) else None


# ---------------------------------------------------------------- checkpoints


def state_of(module: nn.Module, optimizer: LocalSteps) -> StateDict:
    """This rank's own: tensors are its local elements, and stay as they are while the parameters show the anchors."""
    state = optimizer.state_dict()
    entries = {number: {name: _held(x) for name, x in entry.items()} for number, entry in state["state"].items()}
    record = dict(state["onebit"])
    if "parameters" in record:
        record["parameters"] = [p.clone() for p in record["parameters"]]
    buffers = {name: local(buffer).detach().clone() for name, buffer in persistent_buffers(module)}
    return {**state, "state": entries, "onebit": record, _BUFFERS: buffers}


def load_states(module: nn.Module, optimizer: LocalSteps, states: Sequence[StateDict]) -> None:
    """Go on from what the ranks with this part of the model saved, in order. Of as many ranks: to the bit."""
    if len(states) != optimizer.transport.world_size:
        optimizer.load_state_dicts(_Sharded(optimizer, states))
        return
    state = states[optimizer.transport.rank]
    optimizer.load_state_dict(_sharded(optimizer, state))
    with torch.no_grad():
        for name, buffer in persistent_buffers(module):
            local(buffer).copy_(state[_BUFFERS][name])


@dataclass(frozen=True)
class _Sharded(Sequence[StateDict]):
    """The states of some ranks as the optimizer has its own, each when it is asked for."""

    optimizer: LocalSteps
    states: Sequence[StateDict]

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> StateDict:  # type: ignore[override]
        return _sharded(self.optimizer, self.states[index])


def _sharded(optimizer: LocalSteps, state: StateDict) -> StateDict:
    """What `state_of` gave, with the inner optimizer's tensors as DTensors where the parameters are."""
    state = {name: value for name, value in state.items() if name != _BUFFERS}
    if not dense.has_sharded_state(optimizer.inner):
        return state
    entries = dict(state["state"])
    for number, p in enumerate(dense.parameters(optimizer)):
        entry, shape = entries.get(number, {}), local(p).shape
        entries[number] = {
            name: dense.like(p, x) if name not in OURS and isinstance(x, Tensor) and x.shape == shape else x
            for name, x in entry.items()
        }
    return {**state, "state": {number: entry for number, entry in entries.items() if entry}}


def _held(x: Any) -> Any:
    return local(x) if isinstance(x, Tensor) else x
