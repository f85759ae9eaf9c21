"""`initialize`: an engine, its optimizer, its data and its schedule, from one DeepSpeed configuration.

    engine, optimizer, loader, scheduler = onebit.zero.initialize(model=net, config="ds.json", training_data=dataset)

The arguments of DeepSpeed's callers are brought into one form here; `zero/initializing.py` does the rest.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT
from torch.utils.data import Dataset

from ...comm.launch import detect
from .. import initializing
from ..config.compat import contents_of
from ..config.whole import Fills
from ..data import Loader
from ..given import Schedule
from ..grid import Grid
from ..initializing import ConfigLike
from ..parallel.groups import Groups
from ..parallel.tensor import Plan
from ..pipeline.layers import PipelineModule
from . import stand_in
from .comm import init_distributed, timeout_s
from .engine import DeepSpeedEngine
from .parameters import make_known
from .topology import PipelineParallelGrid, PipeModelDataParallelTopology

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

# Any: None without training_data or without a schedule. The caller knows which, and need not check.
Initialized = tuple[DeepSpeedEngine, torch.optim.Optimizer | Any, Loader | Any, LRScheduler | Any]


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
    mesh_param: tuple[int, int] | None = None,
    config_params: ConfigLike | None = None,
    *,
    grid: Grid | None = None,
    tensor_plan: Plan | Literal["auto"] | None = "auto",
    weights: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **fills: Unpack[Fills],
) -> Initialized:
    """Construct engine, optimizer, data loader and scheduler, as DeepSpeed's function does. All ranks, once per model.

    Args:
        args: An object whose attribute deepspeed_config names the configuration, as argparse makes it. Default None.
        model: The model, with the same shapes on every rank (rank 0's values are taken); it is moved to this rank's
            device and sharded in place. Or a list of layers, see `PipelineModule`. If the configuration computes in
            bf16 or fp16, masters are float32 for every dtype of the model.
        optimizer: A dense optimizer of this model's parameters, before its first step; it gets the sharded ones. Or a
            function that makes one. Default None: the configuration's.
        model_parameters: Parameters or groups to train, or a function that returns them for the sharded model. Default
            None: all that require gradients.
        training_data: Dataset of the loader, see `ShardedLoader`; with a curriculum in the configuration,
            `data_efficiency.CurriculumLoader`. Default None: no loader.
        lr_scheduler: A scheduler of that optimizer, or a function that makes one. Default None: the configuration's.
        distributed_port: See `comm.init_distributed`. Default None.
        mpu: An object as Megatron's, for one rank per model, see `check_mpu`. Default None.
        dist_init_required: See `comm.init_distributed`. Default None.
        collate_fn: As in DataLoader. Default None.
        config: The configuration: a file's name or a dict, see `read_config`. Default None: config_params, or the file
            of args.
        mesh_param: Shares of the data, and ranks that share each sequence, as sequence_parallel_size in the
            configuration. Default None: the configuration's.
        config_params: As config. Default None.
        grid: Layout of the ranks. Default None: the launcher's ranks, sharded inside each node if the stage asks for
            it.
        tensor_plan: Division of layers over the grid's tensor axis, see `tensor.parallelize`; without effect on one
            rank. Default "auto": a Hugging Face model's own plan.
        weights: The model's values, see `materialize`; the model may then be built under `torch.device("meta")`. Each
            rank reads only its part. Default None: the model's own values.
        seed: Seed of the data order. Default 0.
        **fills: Values for "auto" in the configuration, see `Fills`.

    Returns:
        (engine, optimizer, loader, scheduler); each but the engine is None if there is none. Without an optimizer, or
        if no parameter requires gradients, the engine computes, as a reference or reward model, and refuses backward().

    Raises:
        ValueError: The configuration or an argument is wrong. Before anything is sharded, as all errors here.
        TypeError: One has the wrong type.
        OSError: The configuration cannot be read.
        ImportError: An optional package is missing.
    """
    model = initializing.checked(model)
    if not isinstance(grid, Grid | None):
        raise TypeError(f"grid must be a Grid, made by onebit.zero.grid.start(), got {grid!r}")
    if tensor_plan != "auto" and not isinstance(tensor_plan, Mapping | None):
        raise TypeError(f'tensor_plan must be "auto", None or a dict from names to styles, got {tensor_plan!r}')
    if dist_init_required is False or distributed_port is not None:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    given = _named_config(config, config_params, args)
    launch = detect(os.environ)
    world_size = launch.world_size if grid is None else grid.world.world_size
    if mesh_param is not None:
        shares, ranks = mesh_param
        if shares * ranks != world_size:
            raise ValueError(
                f"mesh_param={tuple(mesh_param)}: expected numbers whose product is the {world_size} ranks; correct "
                "them, or write sequence_parallel_size into the configuration, and pass grid= for other axes"
            )
        fills.setdefault("sequence_ranks", ranks)
    if mpu is not None:
        check_mpu(mpu, world_size)
    engine, made, loader, scheduler = initializing.initialize(
        DeepSpeedEngine,
        model,
        given,
        launch,
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
    if stand_in.is_installed() and engine.grid.world.rank == 0 and "gradient_clipping" not in contents_of(given):
        log.warning(
            "gradient_clipping is not in the configuration, and nothing is clipped; DeepSpeed clips at 1.0 then, from "
            "0.19.3 on: write the value that you want"
        )
    engine.mpu = _mpu_of(engine.grid) if mpu is None and isinstance(model, PipelineModule) else mpu
    make_known(engine)
    return engine, made, loader, scheduler


def _mpu_of(grid: Grid) -> PipelineParallelGrid | None:
    """The ranks of a list of layers, as its engine's `mpu` has them. All ranks. None: these are not all ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() != grid.shape.world_size:
        return None
    stages, slices = grid.shape.size("pipe"), grid.shape.size("tensor")
    replicas = grid.shape.world_size // (stages * slices)
    return PipelineParallelGrid(PipeModelDataParallelTopology(stages, slices, replicas))


def _named_config(config: ConfigLike | None, config_params: ConfigLike | None, args: object) -> ConfigLike:
    """The configuration that is given. DeepSpeed's add_config_arguments puts a file's name into args."""
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
    """Add the options --deepspeed and --deepspeed_config to a parser; `initialize(args=...)` reads the latter.

    Args:
        parser: Gets the options, and is returned.
    """
    group = parser.add_argument_group("DeepSpeed", "the configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="use the engine (read by the script, not by onebit)")
    group.add_argument("--deepspeed_config", metavar="FILE", help="read DeepSpeed's JSON from FILE")
    return parser


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: ConfigLike | None = None, **kwargs: object
) -> nn.Module:
    """Return the model as it is: `initialize` divides its layers over ranks, as the configuration says.

    Args:
        model: The model.
        tp_size: Ranks that divide a layer, the same as in the configuration.
        dtype: Without effect: the configuration's is computed in.
        config: The configuration. Default None.
        **kwargs: Without effect.

    Raises:
        ValueError: The configuration does not ask for that number of ranks.
    """
    data = contents_of(config or {})
    asked = (data.get("tensor_parallel") or {}).get("autotp_size") or (data.get("onebit") or {}).get("tensor")
    if asked != tp_size:
        raise ValueError(
            f"tp_size is {tp_size}, and the configuration has {asked}: initialize() divides layers as it says; write "
            f'"tensor_parallel": {{"autotp_size": {tp_size}}} there, and pass it here as well'
        )
    return model


def check_mpu(mpu: object, world_size: int) -> None:
    """Raise TypeError or ValueError unless every rank holds the whole model, by an object as Megatron's `mpu`.

    The engine cannot train layers that the caller has divided: it gives rank 0's values to all ranks.
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
            "leave it out if every rank holds the whole model"
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
