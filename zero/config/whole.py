# ruff: noqa: RUF009  (`key` and `block` are dataclasses.field)
"""A DeepSpeed configuration, file or dict, as frozen dataclasses.

    world = {"world_size": transport.world_size, "rank": transport.rank}
    config = read_config("ds_config.json", **world, lr=3e-4, total_num_steps=10_000)
    options = config.optimizer_options()
    optimizer = build_optimizer(config.optimizer, model.parameters(), transport=transport, **options)
    scheduler = build_scheduler(config.scheduler, optimizer)

Keys with an effect become fields; a known key without an effect adds a warning; an unknown one is refused with the
nearest known name. `sections.py`, `optimizers.py` and `lr_schedules.py` define the keys of the blocks,
`ignored_keys.py` those without effect, `schema.py` and `reader.py` how they are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch

from ...comm import Codec, codec_named
from ..compression.config import read_compression
from ..lr_schedulers import SCHEDULERS, SchedulerChoice, build_scheduler
from ..sparse_attention.config import SparsityConfig
from .compat import load, modernised
from .data_efficiency import DataEfficiency, LegacyCurriculum
from .elasticity import Elasticity
from .ignored_keys import TOP_LEVEL
from .lr_schedules import WarmupDecay
from .optimizers import OptimizerChoice, build_optimizer, read_optimizer
from .reader import Reading, nearest, read_block, read_choice, read_object, write_block, write_choice
from .schema import AUTO, BOOL, FLOAT, INT, OBJECT, PERIOD, TEXT, Block, Inert, block, blocks_of, key, keys_of
from .sections import (
    DTYPES,
    ActivationCheckpointing,
    Bf16,
    Comet,
    CommsLogger,
    DataTypes,
    FlopsProfiler,
    Fp16,
    Monitor,
    Onebit,
    Pipelining,
    ProgressiveLayerDrop,
    TorchAutocast,
    Wandb,
    ZeroOptimization,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Config", "Fills", "batch_triangle", "build_optimizer", "build_scheduler", "read_config"]

log = logging.getLogger(__name__)


class Fills(TypedDict, total=False):
    """Arguments of `read_config` that replace "auto" and absent keys of the file.

    Each has the name of its key; fp16 and bf16 are the "enabled" of their blocks. A contradiction to the file is an
    error; an argument whose block the file does not have is ignored.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    fp16: bool
    bf16: bool
    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    freeze_step: int
    var_freeze_step: int
    total_num_steps: int
    warmup_num_steps: int
    warmup_min_lr: float
    warmup_max_lr: float
    cycle_min_lr: float
    cycle_max_lr: float
    cycle_first_step_size: int
    stages: int
    sequence_ranks: int


@dataclass(frozen=True)
class _TopLevel(Block):
    """Keys outside of blocks, as the file contains them."""

    inert: ClassVar[Mapping[str, Inert]] = TOP_LEVEL
    read_apart: ClassVar[tuple[str, ...]] = ("optimizer", "scheduler")

    train_batch_size: int | None = key(None, INT, fill="train_batch_size", null=True, least=1)
    train_micro_batch_size_per_gpu: int | None = key(
        None, INT, fill="train_micro_batch_size_per_gpu", null=True, least=1
    )
    gradient_accumulation_steps: int | None = key(None, INT, fill="gradient_accumulation_steps", null=True, least=1)
    gradient_clipping: float = key(0.0, FLOAT, fill="gradient_clipping", least=0)
    communication_data_type: str | None = key(None, TEXT, null=True, choices=DTYPES)
    sequence_parallel_size: int | None = key(None, INT, fill="sequence_ranks", null=True, least=1)
    steps_per_print: int | None = key(10, PERIOD, least=1)
    wall_clock_breakdown: bool = key(False, BOOL)
    dump_state: bool = key(False, BOOL)
    dataloader_drop_last: bool = key(False, BOOL)
    compression_training: Mapping[str, object] | None = key(None, OBJECT, null=True)
    fp16: Fp16 = block(Fp16)
    bf16: Bf16 = block(Bf16)
    torch_autocast: TorchAutocast = block(TorchAutocast)
    zero_optimization: ZeroOptimization = block(ZeroOptimization)
    data_types: DataTypes = block(DataTypes)
    tensorboard: Monitor = block(Monitor)
    csv_monitor: Monitor = block(Monitor)
    wandb: Wandb = block(Wandb)
    comet: Comet = block(Comet)
    flops_profiler: FlopsProfiler = block(FlopsProfiler)
    comms_logger: CommsLogger = block(CommsLogger)
    activation_checkpointing: ActivationCheckpointing = block(ActivationCheckpointing)
    pipeline: Pipelining = block(Pipelining)
    onebit: Onebit = block(Onebit)
    sparse_attention: SparsityConfig = block(SparsityConfig)
    data_efficiency: DataEfficiency = block(DataEfficiency)
    curriculum_learning: LegacyCurriculum = block(LegacyCurriculum)
    elasticity: Elasticity = block(Elasticity)
    progressive_layer_drop: ProgressiveLayerDrop = block(ProgressiveLayerDrop)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("fp16 and bf16 are both enabled; enable one of them")
        if self.torch_autocast.enabled and (self.fp16.enabled or self.bf16.enabled or self.pipeline.ranks > 1):
            raise ValueError(
                'torch_autocast casts in the forward pass of a float32 model: enable neither "fp16" nor "bf16", nor '
                "pipeline stages, with it"
            )
        if self.curriculum_learning.enabled and self.data_efficiency.data_sampling.enabled:
            raise ValueError(
                "curriculum_learning, the older block, and data_efficiency.data_sampling are both enabled; write the "
                "first as a metric seqlen_truncate of the second, or disable one"
            )
        if self.activation_checkpointing.cpu_checkpointing and self.onebit.activation_folder is not None:
            raise ValueError(
                "activation_checkpointing.cpu_checkpointing keeps activations in host memory, onebit.activation_folder "
                "in a file; choose one"
            )
        if self.onebit.warmup_codec is not None and self.communication_data_type is not None:
            raise ValueError(
                "onebit.warmup_codec and communication_data_type both set the format of gradients; keep one of them"
            )

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share each sequence."""
        return self.sequence_parallel_size or 1


@dataclass(frozen=True)
class Config(_TopLevel):
    """A checked configuration: every option of the engine, with defaults. Made by `read_config`.

    The three batch sizes are numbers, and consistent: train = micro · steps · world_size.

    Attributes:
        world_size: Ranks that read different data.
        sequence_parallel_size: Ranks that share each sequence; None: one, or those of the given grid.
        optimizer: Name and parameters; None: the file has no optimizer.
        scheduler: Name and parameters; None: the file has no scheduler.
        communication_data_type: Format of gradients; None: a one-bit optimizer's default, float32 of others.
            "fp16" counts as "bf16", which has the same bytes and does not overflow.
    """

    train_batch_size: int = key(1, INT, least=1)
    train_micro_batch_size_per_gpu: int = key(1, INT, least=1)
    gradient_accumulation_steps: int = key(1, INT, least=1)
    world_size: int = 1
    optimizer: OptimizerChoice | None = None
    scheduler: SchedulerChoice | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        batch_triangle(*sizes, self.world_size)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of parameters and activations."""
        return torch.float16 if self.fp16.enabled else torch.bfloat16 if self.bf16.enabled else torch.float32

    @property
    def ranks_per_shard_group(self) -> int | None:
        """Ranks that shard among themselves, from the file; None: from the launcher."""
        return self.onebit.ranks_per_node or self.zero_optimization.ranks_per_shard_group

    def optimizer_options(self) -> dict[str, Any]:
        """Keyword arguments of `build_optimizer`, without the transport. For fp16 and overlap see `precision.py`."""
        return {
            "gradient_codec": self._gradient_codec(),
            "variance_floor": self.onebit.variance_floor,
            "max_grad_norm": self.gradient_clipping,
            "codec": codec_named(self.onebit.codec, self.onebit.block),
            "error_dtype": torch.bfloat16 if self.onebit.error_dtype == "bf16" else torch.float32,
            "compression": self.onebit.compression,
            "overlap": self.zero_optimization.overlap_comm and not self.fp16.enabled,
            "bucket_cap_mb": self.onebit.bucket_cap_mb,
            "check_replicas_every": self.onebit.check_replicas_every,
            "max_consecutive_skips": self.onebit.max_consecutive_skips,
            "delay": self.onebit.delay,
        }

    def to_dict(self) -> dict[str, object]:
        """The configuration as a file would contain it, without "auto": `read_config` of it is equal."""
        data = write_block(self)
        if self.optimizer is not None:
            data["optimizer"] = write_choice(self.optimizer)
        if self.scheduler is not None:
            data["scheduler"] = write_choice(self.scheduler)
        return data

    def _gradient_codec(self) -> Codec | None:
        name = self.onebit.warmup_codec or {"fp16": "bf16"}.get(str(self.communication_data_type))
        name = name or self.communication_data_type
        return None if name is None else codec_named(name, self.onebit.block)


def read_config(
    config: Mapping[str, object] | str | os.PathLike[str],
    *,
    world_size: int,
    rank: int = 0,
    ranks_per_batch: int | None = None,
    **fills: Unpack[Fills],
) -> Config:
    """Read a DeepSpeed configuration: a JSON file, or its content as a dict. No communication.

    An "auto" takes the argument of its name, see `Fills`, or else the key's default. There is no sound default for the
    batch sizes, lr, warmup_num_steps and total_num_steps: they need the argument. warmup_max_lr defaults to the
    optimizer's lr, gradient_clipping to 1.0, as in DeepSpeed's documentation and Hugging Face's trainer. freeze_step
    and the local_step keys pass "auto" on.

    Args:
        config: Name of a file, or a dict.
        world_size: Number of all ranks.
        rank: This rank; rank 0 logs warnings. Default 0.
        ranks_per_batch: Ranks that read the same batch, if a grid is given. Default None: from the file's pipeline
            stages, onebit.tensor and sequence_parallel_size.
        **fills: Values for "auto", see `Fills`.

    Raises:
        ValueError: A key or argument is unknown, twice there, out of range or not supported, or batch sizes contradict
            each other.
        TypeError: A value has the wrong type.
        OSError: The file cannot be read.
    """
    if world_size < 1:
        raise ValueError(f"expected world_size of at least 1, got {world_size}")
    for name in fills:
        if name not in Fills.__annotations__:
            advice = nearest(name, Fills.__annotations__)
            raise ValueError(f"unknown argument {name!r}; " + (f"did you mean {advice!r}?" if advice else "see Fills"))
    if isinstance(config, str) and config.lstrip().startswith("{"):
        raise ValueError("expected the name of a file or a dict, got JSON text; pass json.loads(text)")
    if isinstance(config, Mapping):
        data: object = config
        reading = Reading("config", dict(fills), Config)
    else:
        data = load(Path(config))
        reading = Reading(Path(config).name, dict(fills), Config)
    made = _make(data, world_size, ranks_per_batch, reading)
    if rank == 0:
        for warning in dict.fromkeys(reading.warnings):
            log.warning("%s", warning)
        for note in reading.notes:
            log.info("%s", note)
    return made


def batch_triangle(train: int | None, micro: int | None, steps: int | None, world_size: int) -> tuple[int, int, int]:
    """All three batch sizes from the given ones: train = micro · steps · world_size; steps is 1 by default.

    Raises ValueError if they contradict each other, do not divide, or are not enough.
    """
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "data-parallel ranks": world_size,
    }
    numbers = ", ".join(f"{name} = {'not given' if size is None else size}" for name, size in sizes.items())
    if train is None and micro is None:
        raise ValueError(
            f"the batch size is not known: {numbers}; write train_batch_size or train_micro_batch_size_per_gpu, or "
            "pass train_micro_batch_size_per_gpu=... to initialize()"
        )
    if train is None:
        assert micro is not None
        steps = steps or 1
        return micro * steps * world_size, micro, steps
    if micro is None:
        steps = steps or 1
        micro = train // (steps * world_size)
    elif steps is None:
        steps = train // (micro * world_size)
    if micro * steps * world_size != train:
        raise ValueError(
            "expected train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · data-parallel "
            f"ranks, got {numbers}; change one of them"
        )
    return train, micro, steps


def _make(config: object, world_size: int, ranks_per_batch: int | None, reading: Reading) -> Config:
    data = modernised(read_object(config, "", reading), reading)
    if data.get("gradient_clipping") == AUTO and "gradient_clipping" not in reading.fills:
        reading.notes.append(f'{reading.at("gradient_clipping")} is "auto": 1.0')
        data["gradient_clipping"] = 1.0
    if "stages" in reading.fills:
        data.setdefault("pipeline", {})  # which a list of layers need not have written
    optimizer = scheduler = None
    optimizer_data, scheduler_data = (data.pop(name, None) for name in _TopLevel.read_apart)
    if optimizer_data is not None:
        optimizer = read_optimizer(optimizer_data, reading)
    if scheduler_data is not None:
        scheduler = _read_scheduler(scheduler_data, optimizer, reading)
    top = read_block(_TopLevel, data, "", reading)
    if top.compression_training is not None:
        read_compression(top.compression_training, reading)  # what `init_compression` acts on is checked here already
    if top.communication_data_type == "fp16":
        reading.warnings.append(f"{reading.at('communication_data_type')} fp16 is taken as bf16: as many bytes")
    readers = (top.onebit.tensor or 1) * top.pipeline.ranks * top.sequence_ranks
    readers = readers if ranks_per_batch is None else ranks_per_batch
    if world_size % readers:
        raise ValueError(
            f"{reading.source}: {world_size} ranks cannot be divided by the {readers} that read each batch together; "
            f"start a multiple of {readers}, or change pipeline.stages, onebit.tensor or sequence_parallel_size"
        )
    world_size //= readers
    sizes = top.train_batch_size, top.train_micro_batch_size_per_gpu, top.gradient_accumulation_steps
    sizes = _without_slices(*sizes, world_size, top.onebit.tensor or 1, reading)
    try:
        if top.elasticity.enabled:
            sizes = _elastic_sizes(top, world_size, reading)
        train, micro, steps = batch_triangle(*sizes, world_size)
    except ValueError as wrong:
        raise ValueError(f"{reading.source}: {wrong}") from wrong
    values = {name: getattr(top, name) for name in [*keys_of(_TopLevel), *blocks_of(_TopLevel)]}
    values |= {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return Config(**values, world_size=world_size, optimizer=optimizer, scheduler=scheduler)


def _without_slices(
    train: int | None, micro: int | None, steps: int | None, world_size: int, slices: int, reading: Reading
) -> tuple[int | None, int | None, int | None]:
    """The sizes, train without the ranks that divide layers and so read the same batches.

    DeepSpeed counts them in train_batch_size, and so does transformers, which fills in all three sizes.
    """
    if slices > 1 and micro is not None and steps is not None and train == micro * steps * world_size * slices:
        train //= slices
        reading.warnings.append(
            f"{reading.at('train_batch_size')} counts the {slices} ranks of a layer's slices apart; they read the same "
            f"samples, {train} in a step"
        )
    return train, micro, steps


def _elastic_sizes(top: _TopLevel, ranks: int, reading: Reading) -> tuple[int, int, int]:
    """The sizes that the block "elasticity" chooses. Those that are given must be the same, or are ignored."""
    train, micro = top.elasticity.batch_sizes(ranks)
    sizes = train, micro, train // (micro * ranks)
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    chosen = ", ".join(f"{name} = {size}" for name, size in zip(names, sizes, strict=True))
    for name, size in zip(names, sizes, strict=True):
        if (given := getattr(top, name)) in (None, size):
            continue
        if not top.elasticity.ignore_non_elastic_batch_info:
            raise ValueError(
                f"elasticity chooses {chosen} for {ranks} data-parallel ranks, and {name} = {given} is given, "
                'in the file or as an argument: leave it out, or write "ignore_non_elastic_batch_info": true'
            )
        reading.warnings.append(f"{reading.at(name)} has no effect: elasticity chooses {chosen}")
    reading.notes.append(f"{reading.at('elasticity')} chooses {chosen}")
    return sizes


def _read_scheduler(given: object, optimizer: OptimizerChoice | None, reading: Reading) -> SchedulerChoice:
    """Read the block "scheduler"; "auto" for warmup_max_lr is the optimizer's lr."""
    data = read_object(given, "scheduler", reading)
    params = read_object(data.get("params") or {}, "scheduler.params", reading)
    if params.get("warmup_max_lr") == AUTO:
        rate = reading.fills.get("lr") if optimizer is None else optimizer.params.lr
        if rate is not None and "warmup_max_lr" not in reading.fills:
            reading = replace(reading, fills={**reading.fills, "warmup_max_lr": rate})
    kinds = {name: cls.kind for name, cls in SCHEDULERS.items()}
    choice = SchedulerChoice(*read_choice(data, "scheduler", kinds, reading))
    is_left_out = "warmup_max_lr" not in {*params, *reading.fills}
    if isinstance(choice.params, WarmupDecay) and is_left_out and (optimizer is None or optimizer.params.lr != 1e-3):
        reading.warnings.append(
            f"{reading.at('scheduler.params', 'warmup_max_lr')} is left out: WarmupDecayLR then rises to 0.001, as in "
            "DeepSpeed, whatever the optimizer's lr is; write a rate, or null for each group's own"
        )
    return choice
