"""`initialize`: an engine, its optimizer, its data and its schedule, from one DeepSpeed configuration.

    engine, optimizer, loader, scheduler = onebit.zero.initialize(model=net, config="ds.json", training_data=dataset)

What DeepSpeed's callers give in several places is brought together here, and its engine is handed to
`zero/initializing.py`, where the way goes on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT
from torch.utils.data import Dataset

from ...comm.launch import detect
from .. import initializing
from ..config.whole import Fills
from ..data import Loader
from ..given import Schedule
from ..grid import Grid
from ..initializing import ConfigLike
from ..parallel.groups import Groups
from ..parallel.tensor import Plan
from ..pipeline.layers import PipelineModule
from .comm import init_distributed, timeout_s
from .engine import DeepSpeedEngine
from .parameters import make_known

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Any: None without training_data, or without a schedule, which the caller knows and need not check.
Initialized = tuple[DeepSpeedEngine, torch.optim.Optimizer, Loader | Any, LRScheduler | Any]


def initialize(
    args: object = None,
    model: nn.Module | PipelineModule | None = None,
    optimizer: torch.optim.Optimizer | Callable[[ParamsT], torch.optim.Optimizer] | None = None,
    model_parameters: ParamsT | Groups | None = None,
    training_data: Dataset[object] | None = None,
    lr_scheduler: LRScheduler | Schedule | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    distributed_port: int | None = None,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], object] | None = None,
    config: ConfigLike | None = None,
    mesh_param: None = None,
    config_params: ConfigLike | None = None,
    *,
    grid: Grid | None = None,
    tensor_plan: Plan | None = None,
    weights: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **fills: Unpack[Fills],
) -> Initialized:
    """Engine, optimizer, data loader and scheduler, as DeepSpeed's users know them. All ranks, once per model.

    model: the same on every rank in shape (rank 0's values are taken), moved to this rank's device and sharded in
    place; or a list of layers, see `PipelineModule`. Where the configuration computes in bf16 or fp16, masters are
    float32, whatever its dtype is. config: see `read_config`; None: config_params, or args.deepspeed_config as argparse
    leaves it. model_parameters: what to train, of the model as it is passed, or a function that gives it of the sharded
    model: parameters or groups of them; default: all that requires gradients.

    optimizer: a dense one of this model's parameters, which is then given the sharded ones in their place, with no step
    taken; or a function that makes one. In place of a dense one in the configuration. lr_scheduler: one of that
    optimizer, or a function that makes one; in place of the configuration's.

    training_data, collate_fn: see `ShardedLoader`, and where the configuration has a curriculum,
    `data_efficiency.CurriculumLoader`; seed is theirs. grid: default: the launcher's ranks, sharded inside
    each node where the stage asks for it. tensor_plan: how the ranks of the grid's tensor axis divide the layers, see
    `tensor.parallelize`; with one rank there it changes nothing. weights: the model's values, which it may be built
    without (`with torch.device("meta")`): see `materialize`; every rank reads what it holds. mpu: see `check_mpu`.
    distributed_port, dist_init_required: see `comm.init_distributed`. fills: what "auto" stands for.

    Raises ValueError, TypeError, OSError and ImportError on bad configurations, before anything is sharded.
    """
    model = initializing.checked(model)
    if mesh_param is not None:
        raise ValueError("mesh_param is not here: there is no sequence parallelism; pass grid= for other axes")
    if dist_init_required is False or distributed_port is not None:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    given = _named_config(config, config_params, args)
    if mpu is not None:
        check_mpu(mpu, detect(os.environ).world_size if grid is None else grid.world.world_size)
    engine, made, loader, scheduler = initializing.initialize(
        DeepSpeedEngine,
        model,
        given,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        grid=grid,
        tensor_plan=tensor_plan,
        weights=weights,
        seed=seed,
        timeout_s=timeout_s(),
        **fills,
    )
    engine.mpu = mpu
    make_known(engine)
    return engine, made, loader, scheduler


def _named_config(config: ConfigLike | None, config_params: ConfigLike | None, args: object) -> ConfigLike:
    """The one that is given. DeepSpeed's add_config_arguments puts a file's name into args."""
    named = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"the configuration is given twice, as {' and as '.join(given)}; give one")
    if not given:
        raise ValueError(
            "no configuration: pass config=, a file's name or a dict, or args= with deepspeed_config "
            "(--deepspeed_config FILE)"
        )
    return cast(ConfigLike, next(iter(given.values())))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config; `initialize(args=...)` reads the file that the second names."""
    group = parser.add_argument_group("DeepSpeed", "the configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="for the script: nothing here reads it")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed's JSON")
    return parser


def check_mpu(mpu: object, world_size: int) -> None:
    """Raise TypeError and ValueError unless an object as Megatron's `mpu` says that every rank holds the whole model.

    Layers that the caller has divided by itself are not for this engine: it gives all ranks rank 0's values.
    """
    asked: dict[str, int | None] = {}
    for what in (
        "tensor_model_parallel",
        "model_parallel",
        "pipeline_model_parallel",
        "pipe_parallel",
        "data_parallel",
    ):
        ask = getattr(mpu, f"get_{what}_world_size", None)
        asked[what] = None if ask is None else int(ask())
    if asked["data_parallel"] is None or (asked["model_parallel"] is None and asked["tensor_model_parallel"] is None):
        raise TypeError(
            f"mpu is a {type(mpu).__name__} without get_model_parallel_world_size and get_data_parallel_world_size; "
            "leave it out where every rank holds the whole model"
        )
    for what, size in asked.items():
        if size not in (None, 1) and what != "data_parallel":
            raise ValueError(
                f"mpu says that {size} ranks share a model (get_{what}_world_size): layers divided by the script are "
                'not taken over; pass the whole model with initialize(tensor_plan=...) and "onebit": {"tensor": '
                f"{size}}}, or a PipelineModule, and no mpu"
            )
    if asked["data_parallel"] != world_size:
        raise ValueError(
            f"mpu says {asked['data_parallel']} data-parallel ranks of {world_size}, and one model-parallel: they "
            "contradict each other; correct the one that is wrong, or leave mpu out"
        )
