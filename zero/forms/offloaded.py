"""Parameters of an engine in files: `offload_param` with device nvme, for a dense optimizer.

`Offload` in mode full takes the place of FSDP2: parameters are plain, come module by module from a file, and their
gradients leave for it. Several ranks are replicas: each has files of all of it, and a step averages gradients first.
What is cut along layers or stages, or one-bit, is FSDP2's, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from ..config.whole import Config
from ..grid import Grid, GridShape
from ..offload.optimizer import Offload


def is_asked_for(config: Config, shape: GridShape, form: str) -> bool:
    """Whether parameters lie in files."""
    is_whole = shape.size("pipe") == shape.size("tensor") == 1
    return config.zero_optimization.offload_param.device == "nvme" and form == "dense" and is_whole


def check(config: Config) -> None:
    """Raise ValueError where they cannot lie there as the configuration says."""
    state, params = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    if not params.nvme_path:
        raise ValueError('offload_param: device "nvme" needs nvme_path, a folder on a local disk')
    if state.device == "nvme" and state.nvme_path != params.nvme_path:
        raise ValueError(
            f"offload_param.nvme_path is {params.nvme_path}, offload_optimizer's is {state.nvme_path}: parameters, "
            "gradients and state lie in one folder; name it in both, or leave offload_optimizer out"
        )
    if config.fp16.enabled:
        raise ValueError(
            'offload_param: device "nvme" takes gradients away as they come, and float16 needs them for its loss '
            'scale; enable "bf16" in place of "fp16"'
        )


def build(
    config: Config,
    grid: Grid,
    model: nn.Module,
    make: Callable[[ParamsT], torch.optim.Optimizer],
    fill: Callable[..., object] | None,
) -> Offload:
    """The model's parameters in files, and their optimizer. fill: see `forms.build`.

    Gradients add up in float32, and masters keep the values from before the cast, as under FSDP2.
    """
    zero = config.zero_optimization
    offloads = [block for block in (zero.offload_optimizer, zero.offload_param) if block.device != "none"]
    return Offload(
        model,
        make,
        "full",
        zero.offload_param.nvme_path or "",
        buffer_count=zero.offload_param.buffer_count,
        max_grad_norm=config.gradient_clipping,
        pin_memory=all(block.pin_memory for block in offloads),
        rank=grid.world.rank,
        grad_dtype=torch.float32,
        transport=grid.world,
        device=grid.device,
        dtype=config.dtype,
        fill=None if fill is None else partial(fill, transport=grid.world, device=grid.device),
    )


def without_effect(config: Config, shape: GridShape, form: str) -> list[str]:
    """Of the two blocks, what is done in another way; one line each."""
    zero = config.zero_optimization
    if zero.offload_param.device != "nvme":
        return []
    if not is_asked_for(config, shape, form):
        return ["offload_param.device nvme: the parameters' shards lie in host memory, as with cpu"]
    lines = []
    if zero.offload_optimizer.device == "cpu":
        lines.append(
            "offload_optimizer.device cpu: state lies in files of offload_param.nvme_path, with the parameters"
        )
    if shape.world_size > 1:
        lines.append("zero_optimization.stage: each rank has files of all parameters and state; nothing is sharded")
    return lines
