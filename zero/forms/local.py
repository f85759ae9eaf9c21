"""The form "local": as "dense" inside a replica; between replicas `LocalSteps` exchanges differences, and no gradients.

Between rounds nothing is sent between replicas, not even the engine's votes: the ranks of each replica decide whether a
step counts, its norm and its loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ...comm import Transport, codec_named
from ...local.local_steps import LocalSteps
from ...local.state import OURS
from ...model_parallel import ModelParallelGroup, like, local
from ...usage.buffers import persistent_buffers
from ..config.whole import Config
from ..form import Given
from ..grid import GridShape
from ..parallel import dense
from .in_node import InNode, uses_files

_BUFFERS = "engine_buffers"


class Local(InNode):
    """Lets replicas take steps apart, and exchanges their differences every few steps."""

    name = "local"
    example: ClassVar[Mapping[str, object]] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "onebit": {"local_steps": {"every": 3}},
    }
    block = "onebit.local_steps"
    keys = frozenset({"local_steps", "block", "error_dtype", "check_replicas_every"})
    sends = "sends differences in onebit.local_steps.codec"
    fixed_cut = "the form local"
    steps_apart = True
    optimizer: LocalSteps
    _grad_norm: float | None = None

    # ---------------------------------------------------------------- before it is made

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        choice, stage = config.optimizer, config.zero_optimization.stage
        if choice is not None and choice.is_one_bit:
            raise ValueError(
                f"onebit.local_steps is for optimizers that do not exchange by themselves, got {choice.type}; take "
                "AdamW, or leave local_steps out"
            )
        if config.onebit.sharding == "inter_node":
            raise ValueError(
                'onebit.sharding is "inter_node", which divides a replica over nodes, and onebit.local_steps lets '
                "replicas train by themselves; leave one of them out"
            )
        if stage > 0 and shape.size("shard") == 1 and shape.size("replica") > 1:
            raise ValueError(
                f"onebit.local_steps at stage {stage} shards a replica over the ranks of a node, and a node has one "
                "rank; use stage 0, or say how many ranks share a node with onebit.ranks_per_node"
            )
        return True

    @classmethod
    def check(cls, given: Given) -> None:
        super().check(given)
        if uses_files(given.config):
            raise ValueError(
                "offload_optimizer: local steps keep anchors and differences in memory, beside the optimizer's state; "
                'use device "cpu", or leave out onebit.local_steps'
            )
        if given.config.dtype != torch.float32:
            return  # sharding makes float32 masters
        for name, p in given.model.named_parameters():
            if p.requires_grad and p.dtype != torch.float32:
                raise TypeError(
                    f"{name} is {p.dtype}, and the configuration computes in float32: the difference of a few local "
                    'steps is lost in its rounding; enable "bf16" or "fp16", whose masters are float32, or pass '
                    "model.float()"
                )

    @classmethod
    def make_optimizer(cls, given: Given, held: ModelParallelGroup) -> LocalSteps:
        inner = super().make_optimizer(given, held)
        grid, ours, asked = given.grid, given.config.onebit, given.config.onebit.local_steps
        between = grid.transport
        if asked.delay and not between.ranks_change:
            # A round that stays under way must not mix with other messages; between members there are no others.
            between = grid.world.split(grid.shape.along("replica", grid.world.rank))
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
            model=given.model,
            transport=between,
            model_parallel_group=held,
            bucket_cap_mb=ours.bucket_cap_mb,
            error_dtype=torch.bfloat16 if ours.error_dtype == "bf16" else torch.float32,
            check_replicas_every=ours.check_replicas_every,
            max_consecutive_skips=ours.max_consecutive_skips,
        )

    # ---------------------------------------------------------------- a step

    def set_grad_scale(self, scale: float) -> None:
        """Set the loss scale in float16 only: without one, `LocalSteps` pauses after a non-finite gradient.

        It then takes no local steps until the next round.
        """
        if self.config.fp16.enabled:
            super().set_grad_scale(scale)

    def update(self, number: int, scale: float) -> bool:
        before = self.optimizer.stats.skipped_steps
        self._grad_norm = self._clip(scale, self.config.gradient_clipping)
        with dense.naming_shards(self.optimizer.inner):
            self.optimizer.step()
        return self.optimizer.stats.skipped_steps > before

    def _clip(self, scale: float, max_norm: float) -> float | None:
        """Clip this replica's gradients by their norm over all its ranks, and return the norm without loss scale.

        Returns None without clipping, and if the norm is not finite: then gradients become NaN, and `step` skips them.
        """
        if max_norm <= 0:
            return None
        with_grad = [p for p in dense.parameters(self.optimizer) if p.grad is not None]
        grads = [local(cast(Tensor, p.grad)) for p in with_grad]
        norm = self.optimizer.model_parallel_group.global_norm(with_grad, grads) / scale
        if grads:
            factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan
            torch._foreach_mul_(grads, factor)
        return norm if math.isfinite(norm) else None

    @property
    def grad_norm(self) -> float | None:
        return self._grad_norm

    @property
    def peers(self) -> Transport:
        return self.model_parallel_group.whole

    # ---------------------------------------------------------------- weights and checkpoints

    def adopt_parameters(self) -> None:
        super().adopt_parameters()
        self.optimizer.adopt_parameters()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the anchors, between rounds."""
        with self.optimizer.anchors():
            self.sharding.gather()
            yield
        self.sharding.gather()

    def close(self) -> None:
        if self.optimizer.transport is not self.grid.transport:
            self.optimizer.transport.close()

    def optimizer_name(self) -> str:
        return f"{super().optimizer_name()} around {type(self.optimizer.inner).__name__}"

    def state(self) -> tuple[dict[str, Tensor], StateDict]:
        """Return the state with this rank's local tensors, copied if showing the anchors would change them."""
        state = self.optimizer.state_dict()
        entries = {
            number: {name: local(x) if isinstance(x, Tensor) else x for name, x in entry.items()}
            for number, entry in state["state"].items()
        }
        record = dict(state["onebit"])
        if "parameters" in record:
            record["parameters"] = [p.clone() for p in record["parameters"]]
        buffers = {name: local(buffer).detach().clone() for name, buffer in persistent_buffers(self.module)}
        return {}, {**state, "state": entries, "onebit": record, _BUFFERS: buffers}

    def load_own(self, states: Sequence[StateDict]) -> None:
        optimizer = self.optimizer
        if len(states) != optimizer.transport.world_size:
            optimizer.load_state_dicts(_Sharded(optimizer, states))
            return
        state = states[optimizer.transport.rank]
        optimizer.load_state_dict(_sharded(optimizer, state))
        with torch.no_grad():
            for name, buffer in persistent_buffers(self.module):
                local(buffer).copy_(state[_BUFFERS][name])


@dataclass(frozen=True)
class _Sharded(Sequence[StateDict]):
    """The states of some ranks in the optimizer's own layout, each converted on access."""

    optimizer: LocalSteps
    states: Sequence[StateDict]

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> StateDict:  # type: ignore[override]
        return _sharded(self.optimizer, self.states[index])


def _sharded(optimizer: LocalSteps, state: StateDict) -> StateDict:
    """Convert a state of `Local.state`: the inner optimizer's tensors become DTensors if the parameters are."""
    state = {name: value for name, value in state.items() if name != _BUFFERS}
    if not dense.has_sharded_state(optimizer.inner):
        return state
    entries = dict(state["state"])
    for number, p in enumerate(dense.parameters(optimizer)):
        entry, shape = entries.get(number, {}), local(p).shape
        entries[number] = {
            name: like(p, x) if name not in OURS and isinstance(x, Tensor) and x.shape == shape else x
            for name, x in entry.items()
        }
    return {**state, "state": {number: entry for number, entry in entries.items() if entry}}
