"""Which form a configuration takes on this grid, and the model and optimizer that it makes.

    replicated   stage 0, float32         the model as it is; a one-bit optimizer sends buckets during backward
    intra_node   stages 1 to 3, and any   FSDP2 over the ranks of a node (`parallel/fsdp.py`); a one-bit optimizer on
                 stage in bf16 and fp16   the local shards, between nodes. Masters are float32, computing is in dtype
    inter_node   stages 1 and 2           `sharded/`: sharding itself crosses the slow network, in one bit and four
    dense        Adam, AdamW, LaProp,     as intra_node, with gradients averaged between replicas in float32; stage 0:
                 Lamb                     as replicated
    local        the same, under          as dense inside a replica; between replicas `LocalSteps` exchanges differences
                 onebit.local_steps       every so many steps, and no gradients

`choose` is pure; `build` acts on it, on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from ...comm import codec_named
from ...dense import DenseAverager, broadcast_parameters
from ...layout.masters import is_low
from ...model_parallel import ModelParallelGroup, model_parallel_group_of
from ...optimizer import CompressedOptimizer
from ...usage.buffers import begin_equal
from ..config.entries.base import ShardedForm
from ..config.optimizers import OptimizerChoice, build_optimizer
from ..config.sections import Onebit
from ..config.whole import Config
from ..grid import Grid, GridShape
from ..offload.mapped import map_state
from ..offload.optimizer import Offload
from ..parallel import dense, fsdp, tensor
from ..parallel.groups import Groups
from ..pipeline.layers import Stage, Stages
from ..pipeline.run import Ties
from ..sharded.optimizer import WARMUP_STEPS, ShardedOnebitOptimizer, ShardedOptions
from . import local, offloaded

log = logging.getLogger(__name__)

_ONE_RANK = GridShape((1, 1, 1, 1))
FORMS = ("replicated", "intra_node", "inter_node", "dense", "local")


def choose(config: Config, shape: GridShape) -> str:
    """One of `FORMS`, on this grid. Raises ValueError where there is none."""
    choice, stage, sharding = config.optimizer, config.zero_optimization.stage, config.onebit.sharding
    if config.onebit.local_steps.is_on:
        local.check(config, shape)
        return "local"
    if choice is None or not choice.is_one_bit:
        return "dense"
    if stage == 0:
        return "replicated" if config.dtype == torch.float32 else "intra_node"
    has_shards, is_alone = shape.size("shard") > 1, shape.size("shard") == shape.size("replica") == 1
    # A stage's only rank has all that is to be shared out, and crosses no network for it.
    has_other_form = stage < 3 and config.pipeline.ranks == 1 and choice.entry.sharded is not None
    is_alone_in_node = is_alone and not has_other_form
    if sharding == "intra_node" or (sharding == "auto" and (has_shards or is_alone_in_node)):
        if not (has_shards or is_alone):
            raise ValueError(
                'onebit.sharding is "intra_node" and a node has one rank: there is nobody to shard with; leave it to '
                '"auto", or say how many ranks share a node with onebit.ranks_per_node'
            )
        return "intra_node"
    if config.pipeline.ranks > 1:
        raise ValueError(
            f"stage {stage} with one rank per node and a pipeline: sharding across nodes knows of no other stages; "
            "use stage 0, or several ranks on each node"
        )
    if stage == 3:
        raise ValueError(
            "stage 3 gathers parameters for every layer, which a slow network cannot carry, and a node has one rank "
            "here; use stage 2, or several ranks on each node"
        )
    _sharded_form(choice)
    return "inter_node"


@dataclass(frozen=True)
class Built:
    """What the engine drives. stage: of fsdp.begin_micro_batch; None where the model did not go through FSDP2.

    averager: averages a dense optimizer's gradients between replicas. model_parallel_group: the ranks that hold this
    replica. ties: what pipeline stages share.
    """

    form: str
    optimizer: torch.optim.Optimizer
    stage: int | None = None
    averager: DenseAverager | None = None
    model_parallel_group: ModelParallelGroup = field(default_factory=lambda: model_parallel_group_of(None))
    ties: Ties | None = None


def build(
    config: Config,
    grid: Grid,
    model: nn.Module,
    groups: Groups,
    optimizer: Callable[[ParamsT], torch.optim.Optimizer] | None,
    tensor_plan: tensor.Plan | None = None,
    fill: Callable[..., object] | None = None,
) -> Built:
    """Rank 0's values to all ranks, shard the model in place as the configuration says, make its optimizer. All ranks.

    groups: the parameters to train, or groups of them, of the sharded model. optimizer: makes a dense one of these, in
    place of the configuration's. tensor_plan: see `tensor.parallelize`; needed where the tensor axis has several ranks.
    fill: gives the sharded model its values, called as `materialize` with the grid's transport and a device.
    """
    form = choose(config, grid.shape)
    _check(config, grid, form, tensor_plan)
    if form == "local":
        local.check_model(model, config)
    elif optimizer is None:
        _check_dtypes(config, grid, model)
    if grid.world.rank == 0:
        for warning in without_effect(config, form, grid.shape):
            log.warning("%s", warning)
    for axis in ("tensor", "shard", "replica"):  # not pipe: other stages have other layers
        broadcast_parameters([p for p in model.parameters() if not p.is_meta], grid.transports[axis])
        begin_equal(model, grid.transports[axis])
    ties = Ties(model, grid) if grid.shape.size("pipe") > 1 else None
    if ties is not None and fill is None:
        ties.equalise()
    if form == "inter_node":
        model.to(config.dtype)
        _fill(grid, model, fill, 0.0)
        return Built(form, _inter_node(config, grid, groups(model)))
    if offloaded.is_asked_for(config, grid.shape, form):
        held = grid.model_parallel_group
        make = optimizer or (lambda params: _optimizer(config, grid, held, form, params, model))
        away = offloaded.build(config, grid, model, lambda params: make(groups(model)), fill)
        return Built(form, away, None, DenseAverager([], grid.transport), held)
    if tensor_plan is not None:
        tensor.parallelize(model, grid, tensor_plan, is_stage=ties is not None)
    stage = None if _is_plain(config) else max(config.zero_optimization.stage, 1)
    on_host = _share_on_host(config, form)
    if stage is not None:
        _shard(config, grid, model, stage, on_host)
    _fill(grid, model, fill, on_host)
    held = grid.model_parallel_group if ties is None else replace(grid.model_parallel_group, tied=ties.holders())
    whole = model if ties is None else None  # a stage's layers do not say which of them makes the outputs
    make = optimizer or (lambda params: _optimizer(config, grid, held, form, params, whole))
    is_chunked = form == "dense" and _uses_files(config)
    made = _in_files(config, grid, groups(model), make) if is_chunked else make(groups(model))
    if isinstance(made, CompressedOptimizer) and _uses_files(config):
        map_state(made, config.zero_optimization.offload_optimizer.nvme_path or "", grid.world.rank)
    if form == "local":
        made = local.around(made, config, grid, model, held)
    if stage is not None:
        _let_it_drop_all(made, model)
    averager = None
    if form == "dense":
        averager = DenseAverager(dense.parameters(made), grid.transport, config.onebit.bucket_cap_mb)
    return Built(form, made, stage, averager, held, ties)


def _fill(grid: Grid, model: nn.Module, fill: Callable[..., object] | None, on_host: float) -> None:
    """Values for what this rank holds; what was the same in files is the same on all ranks. on_host: see `_shard`."""
    if fill is None:
        return
    fill(model, transport=grid.world, device=torch.device("cpu") if on_host > 0.0 else grid.device)
    if 0.0 < on_host < 1.0:
        for part in parts_of(model):
            fsdp.bring_near(part, grid.device)


def _is_plain(config: Config) -> bool:
    """Whether nothing is sharded and nothing computed in another dtype: the model stays as it is."""
    return config.zero_optimization.stage == 0 and config.dtype == torch.float32


def _check(config: Config, grid: Grid, form: str, tensor_plan: tensor.Plan | None) -> None:
    """Raise ValueError where this form cannot be had on this grid. No communication."""
    shards, tensor_ranks = grid.shape.size("shard"), grid.shape.size("tensor")
    if _is_plain(config) and shards > 1:
        raise ValueError(
            f"stage 0 shards nothing, and the grid has {shards} ranks along its shard axis, which would train apart; "
            "make it with shard=1, or use stage 1"
        )
    if tensor_ranks > 1 and tensor_plan is None:
        raise ValueError(
            f"{tensor_ranks} ranks compute each layer together: pass initialize(tensor_plan=...), which says how"
        )
    if tensor_ranks > 1 and form == "inter_node":
        raise ValueError(
            "a tensor-parallel model is sharded inside a node or not at all: use stage 0, or several times as many "
            "ranks per node as onebit.tensor"
        )
    if offloaded.is_asked_for(config, grid.shape, form):
        offloaded.check(config)
    if not _offloads(config):
        return
    if _uses_files(config) and form == "local":
        raise ValueError(
            "offload_optimizer: local steps keep anchors and differences in memory, beside the optimizer's state; use "
            'device "cpu", or leave out onebit.local_steps'
        )
    if (served := getattr(grid.world, "device", torch.device("cpu"))).type != "cpu":
        raise ValueError(
            f"rank {grid.world.rank}: offloaded gradients are averaged in host memory, and the process group serves "
            f"{served.type} alone; call torch.distributed.init_process_group('cpu:gloo,cuda:nccl') before initialize()"
        )
    if form == "inter_node":
        raise ValueError(
            "offload_optimizer with one rank per node: the sharded form keeps master weights and variance with the "
            'parameters; leave it out, or shard inside nodes ("onebit": {"sharding": "intra_node"})'
        )


def _check_dtypes(config: Config, grid: Grid, model: nn.Module) -> None:
    """Raise ValueError where torch's own optimizer would round each step into parameters of less than float32."""
    if config.dtype != torch.float32 or _choice(config).type not in ("Adam", "AdamW"):
        return
    if low := next((name for name, p in model.named_parameters() if p.requires_grad and is_low(p)), None):
        dtype = model.get_parameter(low).dtype
        raise ValueError(
            f"rank {grid.world.rank}: {low} is {dtype}, the configuration computes in float32, and "
            f"torch's {_choice(config).type} keeps no float32 masters, so that small updates would be lost: enable "
            '"bf16" or "fp16", or cast the model with model.float()'
        )


def _shard(config: Config, grid: Grid, model: nn.Module, stage: int, on_host: float) -> None:
    """FSDP2 over the ranks of a node, of each root; in dtype, where that is not float32. on_host: see its ratio."""
    low = None if config.dtype == torch.float32 else config.dtype
    offload: dict[str, Any] = {"offload": on_host > 0.0, "ratio": on_host, "pin_memory": _pins(config)}
    for part in parts_of(model):
        blocks = part.blocks() if isinstance(part, Stage) else None
        fsdp.shard(part, grid, stage, dtype=low, blocks=blocks, **offload)


def _optimizer(
    config: Config, grid: Grid, held: ModelParallelGroup, form: str, params: ParamsT, whole: nn.Module | None
) -> torch.optim.Optimizer:
    """The configuration's. held: the ranks that hold this replica. whole: the model, where no stage is elsewhere."""
    options: dict[str, Any] = {"transport": grid.transport, "model_parallel_group": held, "model": whole}
    if form not in ("dense", "local"):
        options |= config.optimizer_options() | {"max_grad_norm": config.gradient_clipping}
    return build_optimizer(_choice(config), params, **options)


def _in_files(config: Config, grid: Grid, params: ParamsT, make: Callable[[ParamsT], torch.optim.Optimizer]) -> Offload:
    """A dense optimizer whose state lies in files: each rank's own, of its own shards."""
    block = config.zero_optimization.offload_optimizer
    buffers, folder, rank = block.buffer_count, block.nvme_path or "", grid.world.rank
    return Offload(params, make, "state", folder, buffer_count=buffers, pin_memory=block.pin_memory, rank=rank)


def _uses_files(config: Config) -> bool:
    return config.zero_optimization.offload_optimizer.device == "nvme"


def _let_it_drop_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """optimizer.zero_grad() drops what FSDP2 has not reduced as well: at stage 1 all but the last micro-batch."""
    its_own = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        its_own(set_to_none)
        for part in parts_of(model):
            fsdp.drop_unreduced(part)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def parts_of(model: nn.Module) -> Sequence[nn.Module]:
    """What FSDP2 takes as a root each: a rank's pipeline stages, or the model."""
    return model.parts if isinstance(model, Stages) else (model,)


def _inter_node(config: Config, grid: Grid, params: ParamsT) -> ShardedOnebitOptimizer:
    choice, ours, stage = _choice(config), config.onebit, config.zero_optimization.stage
    if stage == 2 and config.gradient_clipping > 0:
        stage = 1
        if grid.world.rank == 0:
            log.warning(
                "gradient_clipping needs all gradients before the first one may leave: stage 2 across nodes runs as "
                "stage 1, which keeps gradients until the step; set gradient_clipping to 0 for stage 2"
            )
    options: ShardedOptions = {
        "stage": stage,
        "differences": ours.differences,
        "warmup_codec": None if ours.warmup_codec is None else codec_named(ours.warmup_codec, ours.block),
        "max_grad_norm": config.gradient_clipping,
        "transport": grid.transport,
        "block": ours.block,
        "variance_floor": ours.variance_floor,
        "bucket_cap_mb": ours.bucket_cap_mb,
        "check_replicas_every": ours.check_replicas_every,
        "max_consecutive_skips": ours.max_consecutive_skips,
        "overlap": config.zero_optimization.overlap_comm,
    }
    sharded = _sharded_form(choice)
    if isinstance(steps := getattr(choice.params, sharded.warmup), int):
        options["warmup_steps"] = min(WARMUP_STEPS, steps)
    return sharded.build(choice.params, params, options)


def _sharded_form(choice: OptimizerChoice) -> ShardedForm[Any]:
    if (sharded := choice.entry.sharded) is None:
        raise ValueError(
            f"{choice.type} has no form that is sharded across nodes; use stage 0, or several ranks on each node"
        )
    return sharded


def _choice(config: Config) -> OptimizerChoice:
    if config.optimizer is None:
        raise ValueError('no optimizer: write a block "optimizer" into the configuration, or pass optimizer=')
    return config.optimizer


# Keys of the block "onebit" that every form acts on, and those that each form does.
_OF_ALL = {"sharding", "ranks_per_node", "tensor", "keep_checkpoints"}
_ALWAYS = {"bucket_cap_mb", "max_consecutive_skips"}
_SIGNS = _ALWAYS | {
    "codec", "warmup_codec", "compression", "error_dtype", "block", "variance_floor", "check_replicas_every",
    "delay",
}  # fmt: skip
_OURS = {
    "replicated": _SIGNS,
    "intra_node": _SIGNS,
    "inter_node": _SIGNS - {"codec", "compression", "error_dtype", "delay"} | {"differences"},
    "dense": _ALWAYS,
    "local": _ALWAYS | {"local_steps", "block", "error_dtype", "check_replicas_every"},
}


def without_effect(config: Config, form: str, shape: GridShape = _ONE_RANK) -> list[str]:
    """What a configuration asks for, other than the default, that this form does not do; one line each."""
    lines, ours = [], config.onebit
    for name in (f.name for f in fields(ours) if f.name not in _OURS[form] | _OF_ALL):
        if getattr(ours, name) != getattr(Onebit(), name):
            lines.append(f"onebit.{name} has no effect in the form {form!r}")
    lines += offloaded.without_effect(config, shape, form)
    is_parted = config.zero_optimization.offload_optimizer.ratio != 1.0 and _offloads(config)
    if is_parted and (why := _why_all_are_offloaded(config, form)):
        lines.append(f"offload_optimizer.ratio has no effect: {why}")
    if config.communication_data_type is not None and form in ("inter_node", "dense", "local"):
        sends = {
            "dense": "averages gradients in float32",
            "inter_node": "sends gradients in onebit.warmup_codec",
            "local": "sends differences in onebit.local_steps.codec",
        }
        if form != "dense" or config.communication_data_type != "fp32":
            lines.append(f"communication_data_type has no effect in the form {form!r}, which {sends[form]}")
    if form == "inter_node":
        lines += _of_frozen_things(_choice(config))
    if form == "inter_node" and not _choice(config).params.bias_correction:
        lines.append("optimizer.params.bias_correction: moments are always corrected where sharding is across nodes")
    if form in ("dense", "local") and not config.zero_optimization.overlap_comm:
        lines.append(f"zero_optimization.overlap_comm: false has no effect in the form {form!r}")
    summed = str(config.dtype if form == "inter_node" else torch.float32).removeprefix("torch.")
    wanted = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: summed}
    if wanted[config.data_types.grad_accum_dtype] != summed and config.gradient_accumulation_steps > 1:
        lines.append(f"data_types.grad_accum_dtype has no effect: micro-batches add up in {summed} in this form")
    return lines


def _of_frozen_things(choice: OptimizerChoice) -> list[str]:
    """Across nodes the variance lives: what is said of its end has no effect, but that it shortens the warm-up."""
    params, sharded = choice.params, _sharded_form(choice)
    names, steps = list(sharded.without_effect), getattr(params, sharded.warmup)
    if isinstance(steps, int) and steps > WARMUP_STEPS and not sharded.counts_from_warmup(params):
        names.append(sharded.warmup)
    fresh = type(params)()
    said = [name for name in names if getattr(params, name) != getattr(fresh, name)]
    return [
        f"optimizer.params.{name} has no effect across nodes: momentum is of gradients, nothing freezes, and "
        f"{WARMUP_STEPS} steps warm up"
        for name in said
    ]


def _pins(config: Config) -> bool:
    """Unless a block that offloads says otherwise."""
    zero = config.zero_optimization
    return all(block.pin_memory for block in (zero.offload_optimizer, zero.offload_param) if block.device != "none")


def _offloads(config: Config) -> bool:
    zero = config.zero_optimization
    return not zero.offload_optimizer.device == zero.offload_param.device == "none"


def _share_on_host(config: Config, form: str) -> float:
    """Of the shards' elements, which FSDP2 offloads and the optimizer steps in host memory."""
    if not _offloads(config):
        return 0.0
    return 1.0 if _why_all_are_offloaded(config, form) else config.zero_optimization.offload_optimizer.ratio


def _why_all_are_offloaded(config: Config, form: str) -> str:
    """Whatever the ratio is; empty where it has its effect."""
    zero, choice = config.zero_optimization, config.optimizer
    if zero.offload_param.device != "none":
        return "offload_param keeps all shards in host memory, and they are the masters"
    if zero.offload_optimizer.device == "nvme":
        return "files have the state of all shards"
    if form != "dense" or (choice is not None and choice.type == "Lamb"):
        return "the optimizer steps all shards in one memory; Adam, AdamW and LaProp step each where it is"
    return ""
