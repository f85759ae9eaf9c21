"""Parameters in files: `offload_param` with device nvme, for a dense optimizer. In checkpoints it is "dense".

`Offload` in mode "full" replaces FSDP2: parameters are plain tensors and are read from a file module by module, and
gradients are written to it. Several ranks are replicas: each has files of everything, and a step averages gradients
first. With a tensor or pipeline axis, or a one-bit optimizer, FSDP2 keeps the shards in host memory instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from ...layout.masters import NAME as MASTER
from ..config.whole import Config
from ..form import Form, Given, pins
from ..grid import GridShape
from ..offload.optimizer import Offload
from ..parallel import dense
from .dense import Dense
from .in_node import IN_FILES


class Offloaded(Dense):
    """Keeps all parameters, gradients and state in files of each rank."""

    optimizer: Offload
    block = "zero_optimization.offload_param"
    example: ClassVar[Mapping[str, object]] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}},
    }

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        is_in_files = config.zero_optimization.offload_param.device == "nvme"
        return is_in_files and shape.size("pipe") == shape.size("tensor") == 1 and super().fits(config, shape)

    @classmethod
    def why_members_stay(cls, given: Given) -> str:
        return IN_FILES

    @classmethod
    def check(cls, given: Given) -> None:
        super().check(given)
        zero = given.config.zero_optimization
        state, params = zero.offload_optimizer, zero.offload_param
        if not params.nvme_path:
            raise ValueError('offload_param: device "nvme" needs nvme_path, a folder on a local disk')
        if state.device == "nvme" and state.nvme_path != params.nvme_path:
            raise ValueError(
                f"offload_param.nvme_path is {params.nvme_path}, offload_optimizer's is {state.nvme_path}: parameters, "
                "gradients and state are in one folder; name it in both, or leave offload_optimizer out"
            )
        if given.config.fp16.enabled:
            raise ValueError(
                'offload_param: device "nvme" takes gradients away as they come, and float16 needs them for its loss '
                'scale; enable "bf16" in place of "fp16"'
            )

    @classmethod
    def params_in_files(cls, config: Config, shape: GridShape) -> list[str]:
        lines = []
        if config.zero_optimization.offload_optimizer.device == "cpu":
            lines.append(
                "offload_optimizer.device cpu: state is in files of offload_param.nvme_path, with the parameters"
            )
        if shape.world_size > 1:
            lines.append("zero_optimization.stage: each rank has files of all parameters and state; nothing is sharded")
        return lines

    @classmethod
    def build(cls, given: Given) -> Form:
        """Build `Offload`. Gradients add up in float32, and masters keep the values before the cast, as under FSDP2."""
        config, grid, held = given.config, given.grid, given.grid.model_parallel_group
        params = config.zero_optimization.offload_param

        def make(params: ParamsT) -> torch.optim.Optimizer:
            return given.optimizer(held)(given.groups(given.model))

        optimizer = Offload(
            given.model,
            make,
            "full",
            params.nvme_path or "",
            buffer_count=params.buffer_count,
            max_grad_norm=config.gradient_clipping,
            pin_memory=pins(config),
            rank=grid.world.rank,
            grad_dtype=torch.float32,
            transport=grid.world,
            device=grid.device,
            dtype=config.dtype,
            fill=None if given.fill is None else partial(given.fill, transport=grid.world, device=grid.device),
        )
        return cls(given, optimizer, None, held)

    def averaged(self) -> list[Tensor]:
        """Return none: gradients are with the parameters, and `Offload` averages them."""
        return []

    def update(self, number: int, scale: float) -> bool:
        """Take the step: `Offload` averages, checks, clips, and skips."""
        stats, world = self.optimizer.stats, self.grid.world
        before, waited_s = stats.skipped_steps, stats.network_s
        dense.said_in_step(self.optimizer, world, number, b"")
        self.optimizer.step()
        self.comm_ms = 1e3 * (stats.network_s - waited_s)
        self._grad_norm = stats.grad_norm if self.config.gradient_clipping > 0 else None
        is_skipped = stats.skipped_steps > before
        self._skips.observe(is_skipped, [], world)
        return is_skipped

    def weights(self) -> dict[str, Tensor]:
        return {**super().weights(), **self.masters()}

    def weights_were_loaded(self) -> None:
        self.optimizer.round_masters()

    def masters(self) -> dict[str, Tensor]:
        """Return the masters, which a checkpoint contains as the model's weights."""
        masters = {p: entry[MASTER] for p, entry in self.optimizer.state.items() if MASTER in entry}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: masters[p] for name, p in named if p in masters}

    def state(self) -> tuple[dict[str, Tensor], StateDict]:
        if self.shares_state:
            return super().state()
        found: dict[str, Any] = self.optimizer.state_dict()
        entries = found["state"].items()
        return {}, found | {"state": {k: {n: x for n, x in entry.items() if n != MASTER} for k, entry in entries}}
