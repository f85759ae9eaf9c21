# ruff: noqa: RUF009  (`key` and `block` are dataclasses.field)
"""The blocks of a DeepSpeed JSON that have an effect here, and this package's own block, "onebit".

Names and defaults come from DeepSpeed's "Configuration JSON" page; each class is the list of its keys (see
`schema.py`). Optimizers and schedulers are in `optimizers.py` and `lr_schedules.py`, keys outside of blocks in
`whole.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...agreement.skips import MOST_SKIPS
from ...comm import CODECS, momentum_codecs
from . import schema
from .ignored_keys import ACTIVATIONS, BF16, COMMS_LOGGER, DATA_TYPES, FP16, OFFLOAD, OFFLOAD_PARAM, PIPELINE, ZERO
from .local_steps import LocalRounds
from .schema import BOOL, DEGREE, FLOAT, INT, LIST, NAMES, TEXT, TEXTS, Block, Inert, block, key

DTYPES = ("fp32", "bf16", "fp16")
_WIRES = tuple(name for name in CODECS if name != "fp32")


@dataclass(frozen=True)
class Fp16(Block):
    """Training in float16 with a loss scale. loss_scale: 0: dynamic, by the rule of `precision.py`."""

    inert: ClassVar[Mapping[str, Inert]] = FP16

    enabled: bool = key(False, BOOL, fill="fp16")
    loss_scale: float = key(0.0, FLOAT, least=0)
    initial_scale_power: int = key(16, INT, least=0, most=127)
    loss_scale_window: int = key(1000, INT, least=1)
    hysteresis: int = key(2, INT, least=1)
    consecutive_hysteresis: bool = key(False, BOOL)
    min_loss_scale: float = key(1.0, FLOAT, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_scale == 0 and self.min_loss_scale > 2.0**self.initial_scale_power:
            raise ValueError(
                f"expected min_loss_scale at most 2^initial_scale_power = {2.0**self.initial_scale_power:g}, "
                f"got {self.min_loss_scale:g}"
            )


@dataclass(frozen=True)
class Bf16(Block):
    """Training in bfloat16; no loss scale."""

    inert: ClassVar[Mapping[str, Inert]] = BF16

    enabled: bool = key(False, BOOL, fill="bf16")


_AUTOCAST = {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "torch.float16": "fp16"}


@dataclass(frozen=True)
class TorchAutocast(Block):
    """Forward passes under torch.autocast in bfloat16; parameters, gradients and messages stay as they are."""

    inert: ClassVar[Mapping[str, Inert]] = {
        "lower_precision_safe_modules": Inert(LIST, "gradients are sent in the optimizer's format, of all modules")
    }

    enabled: bool = key(False, BOOL)
    dtype: str = key("bfloat16", TEXT, choices=("bf16", "fp16", *_AUTOCAST))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled and _AUTOCAST.get(self.dtype, self.dtype) == "fp16":
            raise ValueError('float16 needs a loss scale: write the block "fp16" instead, or "dtype": "bfloat16"')


@dataclass(frozen=True)
class OffloadOptimizer(Block):
    """The place of optimizer state and master weights. device: "none": with the parameters; "cpu": in host memory.

    "nvme": master weights in host memory, moments in a file in nvme_path, of which buffer_count chunks are in memory
    at once; a one-bit optimizer's state in mapped files, which the kernel caches as far as there is room. The step runs
    in host memory. pin_memory: use page-locked memory if there is CUDA. ratio: least share of a rank's elements that
    are offloaded to "cpu", in whole blocks; a dense optimizer steps the others on the device.
    """

    inert: ClassVar[Mapping[str, Inert]] = OFFLOAD

    device: str = key("none", TEXT, required=True, choices=("none", "cpu", "nvme"))
    nvme_path: str | None = key(None, TEXT, null=True)
    pin_memory: bool = key(True, BOOL)
    buffer_count: int = key(4, INT, least=2)
    ratio: float = key(1.0, FLOAT, least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError('device "nvme" needs nvme_path, a folder on a local disk')


@dataclass(frozen=True)
class OffloadParam(Block):
    """The place of the parameters' shards, at stage 3. They are the masters: offloading one offloads the other.

    device: "cpu": in host memory. "nvme": with a dense optimizer, all parameters, gradients and state in each rank's
    files in nvme_path; buffer_count pieces of them are in memory at once. With a one-bit optimizer, pipeline stages or
    tensor parallelism, shards stay in host memory, with a warning.
    """

    inert: ClassVar[Mapping[str, Inert]] = OFFLOAD_PARAM

    device: str = key("none", TEXT, required=True, choices=("none", "cpu", "nvme"))
    nvme_path: str | None = key(None, TEXT, null=True)
    pin_memory: bool = key(True, BOOL)
    buffer_count: int = key(5, INT, least=2)


@dataclass(frozen=True)
class LeafModule(Block):
    """Modules that stage 3 gathers as one, so that ranks may run different parts of them; see `parallel/leaves.py`.

    A layer of a list is gathered as one in any case, with all its experts.

    classes: names of classes, with the Python module's name or without. names: as in `named_modules`. name_suffixes:
    ends of such names.
    """

    classes: tuple[str, ...] = key((), NAMES)
    names: tuple[str, ...] = key((), NAMES)
    name_suffixes: tuple[str, ...] = key((), NAMES)


@dataclass(frozen=True)
class ZeroOptimization(Block):
    """Sharding: stage 0 none, 1 optimizer state, 2 also gradients, 3 also parameters.

    overlap_comm: send buckets during the backward pass; DeepSpeed's default is false below stage 3, here it is true.
    mics_shard_size, zero_hpz_partition_size: size of a group of ranks that shard among themselves, replicated beyond;
    see `ranks_per_shard_group`. gather_16bit...: write complete weights with each checkpoint, in the compute dtype.
    """

    inert: ClassVar[Mapping[str, Inert]] = ZERO

    stage: int = key(0, INT, choices=(0, 1, 2, 3))
    overlap_comm: bool = key(True, BOOL)
    mics_shard_size: int = key(-1, INT, least=-1)
    zero_hpz_partition_size: int = key(1, INT, least=0)
    stage3_gather_16bit_weights_on_model_save: bool = key(False, BOOL)
    offload_optimizer: OffloadOptimizer = block(OffloadOptimizer)
    offload_param: OffloadParam = block(OffloadParam)
    leaf_module: LeafModule = block(LeafModule)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload_param.device != "none" and self.stage != 3:
            raise ValueError(f"offload_param: parameters are offloaded at stage 3, got stage {self.stage}")
        if self.offload_optimizer.device != "none" and self.stage == 0:
            raise ValueError("offload_optimizer: optimizer state is offloaded at stages 1, 2 and 3, got stage 0")
        sizes = {size for size in (self.mics_shard_size, self.zero_hpz_partition_size) if size > 1}
        if len(sizes) > 1:
            raise ValueError(
                f"mics_shard_size {self.mics_shard_size} and zero_hpz_partition_size {self.zero_hpz_partition_size} "
                "both set how many ranks shard among themselves; keep one"
            )

    @property
    def ranks_per_shard_group(self) -> int | None:
        """Ranks that shard among themselves, by DeepSpeed's keys; None: the file has none of them."""
        sizes = [size for size in (self.mics_shard_size, self.zero_hpz_partition_size) if size > 1]
        return sizes[0] if sizes else None


@dataclass(frozen=True)
class FlopsProfiler(Block):
    """Count one forward pass on rank 0: parameters, operations, milliseconds; see `features/flops_profiler.py`.

    profile_step: steps before it. recompute_fwd_factor: share of the forward pass that activation checkpointing
    computes again, for the estimate of both passes. detailed: list all modules down to module_depth (-1: all levels),
    instead of the top_modules largest of that level. output_file: where to write it; null: the log.
    """

    enabled: bool = key(False, BOOL)
    recompute_fwd_factor: float = key(0.0, FLOAT, least=0)
    profile_step: int = key(1, INT, least=0)
    module_depth: int = key(-1, INT, least=-1)
    top_modules: int = key(1, INT, least=1)
    detailed: bool = key(True, BOOL)
    output_file: str | None = key(None, TEXT, null=True)


@dataclass(frozen=True)
class ProgressiveLayerDrop(Block):
    """Let the model skip layers; see `features/progressive_layer_drop.py`.

    theta: the share of layers that is kept in the end. gamma: how fast the share falls, per step.
    """

    enabled: bool = key(False, BOOL)
    theta: float = key(1.0, FLOAT, above=0, most=1)
    gamma: float = key(0.001, FLOAT, least=0)


@dataclass(frozen=True)
class CommsLogger(Block):
    """List the messages of the step before each line in the log; see `features/comms_logger.py`.

    verbose: each message, instead of sums by name and size.
    """

    inert: ClassVar[Mapping[str, Inert]] = COMMS_LOGGER

    enabled: bool = key(False, BOOL)
    verbose: bool = key(False, BOOL)


@dataclass(frozen=True)
class ActivationCheckpointing(Block):
    """Where the inputs of checkpointed parts wait for the backward pass; see `activations.py`.

    partition_activations: each tensor rank keeps a share. cpu_checkpointing: in host memory. In a file:
    "onebit": {"activation_folder": ...}.
    """

    inert: ClassVar[Mapping[str, Inert]] = ACTIVATIONS

    partition_activations: bool = key(False, BOOL)
    cpu_checkpointing: bool = key(False, BOOL)


@dataclass(frozen=True)
class Monitor(Block):
    """Scalars of every step, written by rank 0 to output_path/job_name; "": under the working directory."""

    enabled: bool = key(False, BOOL)
    output_path: str = key("", TEXT)
    job_name: str = key("DeepSpeedJobName", TEXT)


@dataclass(frozen=True)
class Wandb(Block):
    """Scalars of every step, written by rank 0 to Weights & Biases. team: its "entity"."""

    enabled: bool = key(False, BOOL)
    group: str | None = key(None, TEXT, null=True)
    team: str | None = key(None, TEXT, null=True)
    project: str = key("deepspeed", TEXT)


@dataclass(frozen=True)
class Comet(Block):
    """Scalars, written by rank 0 to Comet, at most once in samples_log_interval samples. null: Comet's own setting."""

    enabled: bool = key(False, BOOL)
    workspace: str | None = key(None, TEXT, null=True)
    project: str | None = key(None, TEXT, null=True)
    samples_log_interval: int = key(100, INT, least=1)
    experiment_name: str | None = key(None, TEXT, null=True)
    api_key: str | None = key(None, TEXT, null=True)
    experiment_key: str | None = key(None, TEXT, null=True)
    online: bool | None = key(None, BOOL, null=True)
    mode: str | None = key(None, TEXT, null=True, choices=("get", "create", "get_or_create"))


@dataclass(frozen=True)
class DataTypes(Block):
    """grad_accum_dtype: dtype in which gradients are summed over micro-batches. Not a choice: each form has one.

    None: float32; with sharding across nodes the compute dtype.
    """

    inert: ClassVar[Mapping[str, Inert]] = DATA_TYPES

    grad_accum_dtype: str | None = key(None, TEXT, null=True, choices=DTYPES)


@dataclass(frozen=True)
class Pipelining(Block):
    """Pipeline stages: DeepSpeed's block "pipeline", and keys of this package for how they run.

    stages: ranks of a pipeline; null: one, or the PipelineModule's. partition, activation_checkpoint_interval: override
    those of the PipelineModule, see there. schedule: "gpipe", "1f1b", "interleaved" (1F1B with several stages on each
    rank), "zero-bubble", "zbv". chunks: stages on each rank; null: the schedule's usual number. activations,
    activation_gradients: format between stages: uncompressed (null), "bf16", "int8" or "int4".
    """

    inert: ClassVar[Mapping[str, Inert]] = PIPELINE

    stages: int | None = key(None, INT, fill="stages", null=True, least=1)
    partition: str | None = key(None, TEXT, null=True)
    activation_checkpoint_interval: int | None = key(None, INT, null=True, least=0)
    schedule: str = key("1f1b", TEXT, choices=("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"))
    chunks: int | None = key(None, INT, null=True, least=1)
    activations: str | None = key(None, TEXT, null=True, choices=_WIRES)
    activation_gradients: str | None = key(None, TEXT, null=True, choices=_WIRES)

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.stages or 1


@dataclass(frozen=True)
class Sequence(Block):
    """How the ranks of a sequence exchange keys and values, if sequence_parallel_size is above 1.

    codec: format in which they travel; null: uncompressed. block: elements per scale of int8 and int4. ulysses_degree:
    how many neighbouring ranks, those of a node, divide the heads; "auto": as many as share a host and divide them
    evenly, in a model of transformers. See `sequence/ring.py` and `sequence/ranks.py`.
    """

    codec: str | None = key(None, TEXT, null=True, choices=("bf16", "int8", "int4"))
    block: int = key(64, INT, least=64)
    ulysses_degree: int | str = key(1, DEGREE, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % 64:
            raise ValueError(f"expected block to be a multiple of 64, got {self.block}")


@dataclass(frozen=True)
class Onebit(Block):
    """The block "onebit" of the file, for options without a key of DeepSpeed. Every key may be left out.

    Attributes:
        sharding: Axis that divides the state of stages 1 and 2. "intra_node": over the ranks of a node, with the usual
            optimizers between nodes; "inter_node": over nodes, by the sharded one-bit algorithm; "auto": intra_node if
            a node has several ranks, else inter_node.
        differences: Codec of parameter differences under inter_node: "int4" (4.06 bits per parameter) or "sign" (1.02).
        ranks_per_node: Ranks on each node; null: from the launcher.
        compression, bucket_cap_mb, error_dtype, check_replicas_every, max_consecutive_skips, delay: See
            `onebit.optimizer.CommonOptions`.
        codec: Codec of momentum.
        block: Elements per scale of its frames, a multiple of 64.
        warmup_codec: Codec of gradients in warm-up and refreshes; null: communication_data_type's, or the optimizer's
            default; under inter_node, momentum in eight bits.
        variance_floor: See `onebit.arithmetic.adam.floor_of_blocks`.
        tensor: Ranks that compute each layer together (`parallel/tensor.py`); null: one, or those of the given grid.
        keep_checkpoints: Number of this run's newest checkpoints to keep in a folder; null: all.
        forward_methods: Names of the model's methods, besides forward and generate, that compute with its parameters:
            stage 3 gathers for them as well.
        activation_folder: Folder for a file in which checkpointed activations wait for the backward pass; null: none.
        local_steps: Rounds of differences around a dense optimizer, see there.
        sequence: Keys and values between the ranks of a sequence, see there.
    """

    sharding: str = key("auto", TEXT, choices=("auto", "intra_node", "inter_node"))
    differences: str = key("int4", TEXT, choices=("int4", "sign"))
    ranks_per_node: int | None = key(None, INT, null=True, least=1)
    compression: str = key("auto", TEXT, choices=("auto", "always"))
    bucket_cap_mb: float | None = key(None, FLOAT, null=True, above=0)
    error_dtype: str = key("fp32", TEXT, choices=("fp32", "bf16"))
    codec: str = key("sign", TEXT, choices=momentum_codecs())
    warmup_codec: str | None = key(None, TEXT, null=True, choices=tuple(CODECS))
    block: int = key(256, INT, least=64)
    variance_floor: float = key(0.01, FLOAT, least=0)
    check_replicas_every: int = key(100, INT, least=0)
    max_consecutive_skips: int = key(MOST_SKIPS, INT, least=0)
    tensor: int | None = key(None, INT, null=True, least=1)
    keep_checkpoints: int | None = key(None, INT, null=True, least=1)
    delay: int = key(0, INT, least=0, most=1)
    forward_methods: tuple[str, ...] = key((), TEXTS)
    activation_folder: str | None = key(None, TEXT, null=True)
    local_steps: LocalRounds = schema.block(LocalRounds)  # `block` is a key here
    sequence: Sequence = schema.block(Sequence)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % 64:
            raise ValueError(f"expected block to be a multiple of 64, got {self.block}")
