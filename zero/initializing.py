"""Builds an engine, its optimizer, its data and its schedule from a configuration: read, form, features, engine.

Errors are raised before anything is sharded, and if possible before any process group is made. `forms/` shards the
model and builds the optimizer, `features/` adds to its steps; the engine drives it. Users call
`deepspeed/initializing.py`, which passes its class of engine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT
from torch.utils.data import Dataset

from ..comm.launch import Launch
from . import grid as grids
from .checkpoint.materialize import is_meta, materialize, to_device
from .checkpoint.weights import check_can_export
from .config.schema import is_set
from .config.whole import Config, Fills, read_config
from .data import Loader, ShardedLoader, size_of
from .engine import Engine
from .feature import Asked
from .features import features_of
from .form import Given
from .forms import build, shard_ranks
from .given import Schedule, check_fits, optimizer_for, scheduler_for
from .grid import Grid
from .lr_schedulers import build_scheduler
from .monitor import open_monitors
from .parallel import divided
from .parallel.groups import Groups, remembered, trained
from .parallel.model_plan import training_plan
from .parallel.tensor import Plan
from .pipeline import huggingface
from .pipeline import run as pipeline
from .pipeline.layers import Loss, PipelineModule, Stage, Stages

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

ConfigLike = Mapping[str, object] | str | os.PathLike[str]
E = TypeVar("E", bound=Engine)
T = TypeVar("T")


def initialize(
    engine_class: type[E],
    model: nn.Module | PipelineModule,
    config: ConfigLike,
    launch: Launch,
    *,
    optimizer: torch.optim.Optimizer | Callable[[ParamsT], torch.optim.Optimizer] | None = None,
    model_parameters: ParamsT | Groups | None = None,
    training_data: Dataset[object] | None = None,
    lr_scheduler: LRScheduler | Schedule | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    collate_fn: Callable[[list[Any]], object] | None = None,
    grid: Grid | None = None,
    tensor_plan: Plan | Literal["auto"] | None = "auto",
    weights: str | os.PathLike[str] | None = None,
    seed: int = 0,
    timeout_s: float = 300.0,
    **fills: Unpack[Fills],
) -> tuple[E, torch.optim.Optimizer | None, Loader | None, LRScheduler | None]:
    """Construct an engine of this class, its optimizer, data loader and scheduler. All ranks, once per model.

    The public function of this name, in `deepspeed/initializing.py`, documents the other arguments, the result and the
    errors.

    Args:
        engine_class: Class of the engine.
        model: The caller's, after `checked`.
        launch: The launcher's ranks.
        timeout_s: How long an operation waits for a peer, in seconds, if there is no grid yet. Default 300.
    """
    # Read the configuration, for the ranks of the grid or of the launcher.
    if isinstance(model, PipelineModule) and model.num_stages is not None:
        fills.setdefault("stages", model.num_stages)
    read = _read(config, launch, grid, fills)
    rank = launch.rank if grid is None else grid.world.rank
    if read.dump_state and rank == 0:
        log.info("configuration: %s", _shown(read))

    # Each rank alone checks all it can, before the grid: a later error on one rank would leave the others waiting.
    if read.pipeline.ranks > 1:
        if isinstance(model, nn.Module) and divided.has_parts(model):
            raise ValueError(
                f"rank {rank}: the model was built in zero.Init, every parameter in parts on all ranks, and the stages "
                "of a pipeline hold different layers: build it without zero.Init, or as a PipelineModule of LayerSpecs"
            )
        if huggingface.is_decoder(model):
            model = huggingface.DecoderPipeline(cast(nn.Module, model), read.pipeline)
        pipeline.check(read, model)
    elif rank == 0 and is_set(read, "pipeline"):
        for warning in pipeline.without_effect(read.pipeline, model):
            log.warning("%s", warning)
    _check_values(model, weights, rank)
    if grid is not None and grid.transport.ranks_change:
        if training_data is not None:
            raise ValueError(
                "training_data would be divided among ranks that stay, and the members of this grid come and go: leave "
                "it out, and draw from onebit.membership.MemberSampler"
            )
        if read.elasticity.enabled:
            raise ValueError(
                "elasticity chooses a batch for ranks that stay, and the members of this grid come and go: leave the "
                "block out"
            )
    if training_data is not None:
        size_of(training_data)
    monitors = open_monitors(read, rank)
    if read.zero_optimization.stage3_gather_16bit_weights_on_model_save:
        check_can_export()
    outline = model.outline() if isinstance(model, PipelineModule) else model
    if tensor_plan == "auto":
        tensor_ranks = (read.onebit.tensor or 1) if grid is None else grid.shape.size("tensor")
        tensor_plan = training_plan(outline, tensor_ranks) if tensor_ranks > 1 else None
    _check_tables(outline, read, rank, grid)
    features = features_of(Asked(read, outline, rank, lr_scheduler, tensor_plan))
    groups, make_optimizer = _groups(model_parameters, outline), None
    if optimizer is not None:
        _check_one_optimizer(read, optimizer, rank)
        make_optimizer, its_own = optimizer_for(optimizer, outline)
        groups = its_own or groups

    # Make the grid, and find this rank's part of the model.
    if grid is None:
        grid = grids.start(
            timeout_s=timeout_s,
            launch=launch,
            sequence=read.sequence_ranks,
            pipe=read.pipeline.ranks,
            shard=shard_ranks(read, launch),
            tensor=read.onebit.tensor,
        )
    loss_fn: Loss | None = None
    stages: dict[int, Stage] = {}
    if isinstance(model, PipelineModule):
        model.is_filled_later = weights is not None
        loss_fn = model.loss_fn if grid.shape.sequence == 1 else model.loss_of_pieces
        stages = pipeline.build_stages(model, read.pipeline, grid)
        model = next(iter(stages.values())) if len(stages) == 1 else Stages(list(stages.values()))
    else:
        if huggingface.is_decoder(model):
            loss_fn = huggingface.own_loss
        if read.zero_optimization.offload_param.device == "none":
            to_device(model, grid.device)

    fill: Callable[..., object] | None = None
    if divided.has_parts(model):
        if read.zero_optimization.stage == 3:
            fill = partial(divided.give_parts, parts=divided.take_parts(model))
        else:
            divided.complete(model)
    if weights is not None:
        fill = partial(materialize, weights=weights, seed=seed, is_stage=bool(stages))
    # Features change the whole model, as they find modules by their classes and shapes; then the form shards it.
    for feature in features:
        feature.prepare(model, grid, is_part=bool(stages))
    form = build(Given(read, grid, model, groups, make_optimizer, tensor_plan, fill))
    if make_optimizer is not None:
        check_fits(form.optimizer, grid.shape)

    # Schedule and data: the caller's, a feature's, or the configuration's.
    schedules = (feature.schedule(form.optimizer) for feature in features)
    if lr_scheduler is not None:
        scheduler: LRScheduler | None = scheduler_for(lr_scheduler, form.optimizer)
    elif (scheduler := _first(schedules)) is None and read.scheduler is not None:
        scheduler = build_scheduler(read.scheduler, form.optimizer)
    loader: Loader | None = None
    if training_data is not None:
        loader = _first(feature.loader(grid, training_data, collate_fn, seed) for feature in features)
        if loader is None:
            loader = ShardedLoader(
                training_data,
                read.train_micro_batch_size_per_gpu,
                rank=grid.data[0],
                world_size=grid.data[1],
                seed=seed,
                drop_last=read.dataloader_drop_last,
                collate_fn=collate_fn,
            )

    if not form.trains:
        scheduler = None
    engine = engine_class(form, scheduler, loader, monitors, loss_fn, features)
    if grid.shape.size("pipe") > 1:
        engine.pipeline = pipeline.Pipeline(stages, read, grid, cast(Loss, loss_fn), form.sharding)
    return engine, form.optimizer if form.trains else None, loader, scheduler


def _first(found: Iterable[T | None]) -> T | None:
    """Return the first that is not None, or None."""
    return next((each for each in found if each is not None), None)


def checked(model: object) -> nn.Module | PipelineModule:
    """Return the model, checked.

    Args:
        model: The caller's.

    Raises:
        TypeError: It is no model, or another library distributes it or a part of it.
    """
    if isinstance(model, Engine):
        raise TypeError("the model is an engine already; pass engine.module of none, and initialize each model once")
    if not isinstance(model, nn.Module | PipelineModule):
        raise TypeError(f"expected model=, a torch.nn.Module or a PipelineModule, got {type(model).__name__}")
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
    for part in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, kinds):
            raise TypeError(
                f"the model is wrapped in {type(part).__name__}; the engine averages gradients and shards by itself: "
                "pass the model without it (wrapped.module)"
            )
        if isinstance(part, FSDPModule):
            raise TypeError(
                f"{type(part).__name__} is sharded by FSDP2 already, by another engine at stage 3 or by fully_shard; "
                "two engines share a trunk at stages 1 and 2, which keep whole parameters"
            )
        if any(hasattr(p, "ds_id") and not hasattr(p, "full_tensor") for p in part._parameters.values()):
            raise TypeError(
                f"{type(part).__name__} has been built by DeepSpeed's zero.Init, which has taken its values apart; "
                "transformers' HfDeepSpeedConfig does this if DeepSpeed is installed: leave that line out"
            )
    return model


def _check_values(model: nn.Module | PipelineModule, weights: object, rank: int) -> None:
    """Raise ValueError if a model has no values and none are given."""
    layers = model.layers if isinstance(model, PipelineModule) else [model]
    if weights is None and any(isinstance(layer, nn.Module) and is_meta(layer) for layer in layers):
        raise ValueError(
            f'rank {rank}: the model has no values (device "meta"): pass initialize(weights=...), a folder of '
            'safetensors files or of checkpoints, or "reset_parameters" for initial values'
        )


def _check_tables(outline: nn.Module, read: Config, rank: int, grid: Grid | None) -> None:
    """Raise ValueError if forward writes rows of an embedding, and stage 3 or other ranks would not have them."""
    stage, has_rounds = read.zero_optimization.stage, read.onebit.local_steps.is_on
    is_alone = read.train_batch_size == read.train_micro_batch_size_per_gpu * read.gradient_accumulation_steps
    has_members = grid is not None and grid.transport.ranks_change
    if (stage == 0 and has_rounds) or (stage < 3 and is_alone and not has_members):
        return
    for name, module in outline.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"rank {rank}: {name or type(module).__name__} renormalises rows of its table in forward (max_norm): "
                "replicas would differ, and stage 3 drop it; leave max_norm out, and normalise what forward looks up"
            )


def _groups(given: ParamsT | Groups | None, outline: nn.Module) -> Groups:
    """Return a function that finds the parameters to train in the sharded model."""
    if given is None:
        return trained
    if isinstance(given, nn.Module):
        raise TypeError(f"model_parameters is a {type(given).__name__}; pass model_parameters=model.parameters()")
    return given if callable(given) else remembered(outline, given)


def _check_one_optimizer(read: Config, given: object, rank: int) -> None:
    """Warn that the caller's optimizer replaces the configuration's, as in DeepSpeed.

    Raises ValueError if it would replace a one-bit optimizer, which sends less.
    """
    if read.optimizer is None:
        return
    name = type(given).__name__ if isinstance(given, torch.optim.Optimizer) else "a function that makes one"
    if read.optimizer.is_one_bit:
        raise ValueError(
            f"the optimizer is given twice, as optimizer= and as {read.optimizer.type} in the configuration, which "
            f"sends a fraction of what the first does ({name}); give one"
        )
    if rank == 0:
        log.warning("optimizer= (%s) takes the place of %s in the configuration", name, read.optimizer.type)


def _read(config: ConfigLike, launch: Launch, grid: Grid | None, fills: Fills) -> Config:
    """Read the configuration for the ranks of the grid, or else of the launcher."""
    if grid is None:
        read = read_config(config, world_size=launch.world_size, rank=launch.rank, **fills)
    else:
        fills.setdefault("stages", grid.shape.size("pipe"))
        fills.setdefault("sequence_ranks", grid.shape.sequence)
        world, alike = grid.world, grid.world.world_size // grid.data[1]
        read = read_config(config, world_size=world.world_size, rank=world.rank, ranks_per_batch=alike, **fills)
        if read.onebit.tensor not in (None, grid.shape.size("tensor")):
            raise ValueError(
                f"onebit.tensor is {read.onebit.tensor}, the grid is {grid.shape}; leave it out, or the grid"
            )
    return read


def _shown(read: Config) -> str:
    """Return the configuration as JSON for a log, which others read: without its key."""
    shown = json.dumps(read.to_dict(), indent=2)
    return shown if not read.comet.api_key else shown.replace(json.dumps(read.comet.api_key), '"(hidden)"')
