# ruff: noqa: RUF009  (`key` and `block` are dataclasses.field)
"""The blocks of a DeepSpeed JSON that mean something here, and the one that is this package's own, "onebit".

Names and defaults are the file's, from DeepSpeed's "Configuration JSON" page; each class is the list of its keys (see
`schema.py`). Optimizers and schedulers are in `optimizers.py` and `lr_schedules.py`, keys outside all blocks in
`whole.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...agreement.skips import MOST_SKIPS
from ...comm import CODECS, momentum_codecs
from . import schema
from .ignored_keys import BF16, DATA_TYPES, FP16, OFFLOAD, OFFLOAD_PARAM, PIPELINE, ZERO
from .local_steps import LocalRounds
from .schema import BOOL, FLOAT, INT, TEXT, Inert, block, check_block, key

DTYPES = ("fp32", "bf16", "fp16")
_WIRES = tuple(name for name in CODECS if name != "fp32")


@dataclass(frozen=True)
class Fp16:
    """Training in float16 under a loss scale. loss_scale: 0: dynamic, by the rule of `precision.py`."""

    inert: ClassVar[Mapping[str, Inert]] = FP16

    enabled: bool = key(False, BOOL, fill="fp16")
    loss_scale: float = key(0.0, FLOAT, least=0)
    initial_scale_power: int = key(16, INT, least=0, most=127)
    loss_scale_window: int = key(1000, INT, least=1)
    hysteresis: int = key(2, INT, least=1)
    consecutive_hysteresis: bool = key(False, BOOL)
    min_loss_scale: float = key(1.0, FLOAT, above=0)

    def __post_init__(self) -> None:
        check_block(self)
        if self.loss_scale == 0 and self.min_loss_scale > 2.0**self.initial_scale_power:
            raise ValueError(
                f"expected min_loss_scale at most 2^initial_scale_power = {2.0**self.initial_scale_power:g}, "
                f"got {self.min_loss_scale:g}"
            )


@dataclass(frozen=True)
class Bf16:
    """Training in bfloat16; no loss scale."""

    inert: ClassVar[Mapping[str, Inert]] = BF16

    enabled: bool = key(False, BOOL, fill="bf16")

    def __post_init__(self) -> None:
        check_block(self)


@dataclass(frozen=True)
class OffloadOptimizer:
    """Where optimizer state and master weights live. device: "none": with the parameters; "cpu": in host memory.

    "nvme": master weights in host memory, moments in a file of nvme_path, of which buffer_count chunks are in memory
    at once; a one-bit optimizer's state in mapped files, of which the kernel keeps what there is room for. The step is
    taken in host memory; pin_memory: in page-locked memory, where there is CUDA. ratio: of a rank's elements that are
    offloaded to "cpu", at least, in whole blocks; a dense optimizer steps the others where they are.
    """

    inert: ClassVar[Mapping[str, Inert]] = OFFLOAD

    device: str = key("none", TEXT, required=True, choices=("none", "cpu", "nvme"))
    nvme_path: str | None = key(None, TEXT, null=True)
    pin_memory: bool = key(True, BOOL)
    buffer_count: int = key(4, INT, least=2)
    ratio: float = key(1.0, FLOAT, least=0, most=1)

    def __post_init__(self) -> None:
        check_block(self)
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError('device "nvme" needs nvme_path, a folder on a local disk')


@dataclass(frozen=True)
class OffloadParam:
    """Where the parameters' shards live, at stage 3. They are the masters: offloading one is offloading the other.

    device: "cpu": in host memory. "nvme": with a dense optimizer all parameters, gradients and state, in files of
    nvme_path of each rank's own; buffer_count pieces of them are in memory at once. With a one-bit optimizer, pipeline
    stages or tensor parallelism shards in host memory, and a warning.
    """

    inert: ClassVar[Mapping[str, Inert]] = OFFLOAD_PARAM

    device: str = key("none", TEXT, required=True, choices=("none", "cpu", "nvme"))
    nvme_path: str | None = key(None, TEXT, null=True)
    pin_memory: bool = key(True, BOOL)
    buffer_count: int = key(5, INT, least=2)

    def __post_init__(self) -> None:
        check_block(self)


@dataclass(frozen=True)
class ZeroOptimization:
    """What is sharded: stage 1 optimizer state, 2 gradients too, 3 parameters too; 0 nothing.

    overlap_comm: send buckets during the backward pass; DeepSpeed's default is false below stage 3, here it is true.
    mics_shard_size, zero_hpz_partition_size: ranks that shard among themselves and are replicated beyond, see
    `ranks_per_shard_group`. gather_16bit...: the engine writes whole weights with each checkpoint, in the type that
    is computed in.
    """

    inert: ClassVar[Mapping[str, Inert]] = ZERO

    stage: int = key(0, INT, choices=(0, 1, 2, 3))
    overlap_comm: bool = key(True, BOOL)
    mics_shard_size: int = key(-1, INT, least=-1)
    zero_hpz_partition_size: int = key(1, INT, least=0)
    stage3_gather_16bit_weights_on_model_save: bool = key(False, BOOL)
    offload_optimizer: OffloadOptimizer = block(OffloadOptimizer)
    offload_param: OffloadParam = block(OffloadParam)

    def __post_init__(self) -> None:
        check_block(self)
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
        """Ranks that shard among themselves, as the file says it in DeepSpeed's words; None: it does not."""
        sizes = [size for size in (self.mics_shard_size, self.zero_hpz_partition_size) if size > 1]
        return sizes[0] if sizes else None


@dataclass(frozen=True)
class Monitor:
    """Scalars of every step, written by rank 0 to output_path/job_name; "": under the working directory."""

    enabled: bool = key(False, BOOL)
    output_path: str = key("", TEXT)
    job_name: str = key("DeepSpeedJobName", TEXT)

    def __post_init__(self) -> None:
        check_block(self)


@dataclass(frozen=True)
class DataTypes:
    """grad_accum_dtype: in which gradients are summed over micro-batches. Not a choice: each form has its own.

    None: float32, and where sharding is across nodes the type computed in.
    """

    inert: ClassVar[Mapping[str, Inert]] = DATA_TYPES

    grad_accum_dtype: str | None = key(None, TEXT, null=True, choices=DTYPES)

    def __post_init__(self) -> None:
        check_block(self)


@dataclass(frozen=True)
class Pipelining:
    """Pipeline stages: DeepSpeed's block "pipeline", and how they are run, which is this package's own.

    stages: ranks of a pipeline; null: one, or as the PipelineModule says. partition, activation_checkpoint_interval: in
    place of the PipelineModule's own, see there. schedule: "gpipe", "1f1b", "interleaved" (1F1B with several stages on
    each rank), "zero-bubble", "zbv". chunks: stages on each rank; null: what the schedule is made for. activations,
    activation_gradients: what travels from stage to stage: as it is computed (null), or in "bf16", "int8" or "int4".
    """

    inert: ClassVar[Mapping[str, Inert]] = PIPELINE

    stages: int | None = key(None, INT, fill="stages", null=True, least=1)
    partition: str | None = key(None, TEXT, null=True)
    activation_checkpoint_interval: int | None = key(None, INT, null=True, least=0)
    schedule: str = key("1f1b", TEXT, choices=("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"))
    chunks: int | None = key(None, INT, null=True, least=1)
    activations: str | None = key(None, TEXT, null=True, choices=_WIRES)
    activation_gradients: str | None = key(None, TEXT, null=True, choices=_WIRES)

    def __post_init__(self) -> None:
        check_block(self)

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.stages or 1


@dataclass(frozen=True)
class Onebit:
    """What DeepSpeed has no key for: the block "onebit" of the file. Every key may be left out.

    sharding: where the state of stages 1 and 2 is divided. "intra_node": over the ranks of a node, with the optimizers
    as they are on the replica axis between nodes; "inter_node": over nodes, by the sharded one-bit algorithm; "auto":
    intra_node where a node has several ranks, inter_node where it has one. differences: what parameter differences
    travel in under inter_node: "int4" (4.06 bits per parameter) or "sign" (1.02). ranks_per_node: null: as the launcher
    says. compression, bucket_cap_mb, error_dtype, check_replicas_every, max_consecutive_skips, delay: see
    `onebit.optimizer.CommonOptions`. codec: what momentum travels in; block: elements per scale of its frames, a
    multiple of 64. warmup_codec: what gradients travel in, in warm-up and refreshes; null: eight bits, or what
    communication_data_type says; under inter_node momentum in eight bits. variance_floor: see
    `onebit.arithmetic.adam.floor_of_blocks`. tensor: how many ranks compute each layer together (`parallel/tensor.py`);
    null: one, or as many as the given grid has. keep_checkpoints: how many checkpoints of this run stay in a folder,
    the newest; null: all. local_steps: rounds of differences around a dense optimizer, see there.
    """

    sharding: str = key("auto", TEXT, choices=("auto", "intra_node", "inter_node"))
    differences: str = key("int4", TEXT, choices=("int4", "sign"))
    ranks_per_node: int | None = key(None, INT, null=True, least=1)
    compression: str = key("auto", TEXT, choices=("auto", "always"))
    bucket_cap_mb: float = key(16.0, FLOAT, above=0)
    error_dtype: str = key("fp32", TEXT, choices=("fp32", "bf16"))
    codec: str = key("sign", TEXT, choices=momentum_codecs())
    warmup_codec: str | None = key(None, TEXT, null=True, choices=tuple(CODECS))
    block: int = key(256, INT, least=64)
    variance_floor: float = key(0.01, FLOAT, least=0)
    check_replicas_every: int = key(100, INT, least=0)
    max_consecutive_skips: int = key(MOST_SKIPS, INT, least=0)
    tensor: int | None = key(None, INT, null=True, least=1)
    keep_checkpoints: int | None = key(None, INT, null=True, least=1)
    delay: int = key(0, INT, least=0)
    local_steps: LocalRounds = schema.block(LocalRounds)  # `block` is a key here

    def __post_init__(self) -> None:
        check_block(self)
        if self.block % 64:
            raise ValueError(f"expected block to be a multiple of 64, got {self.block}")
