# ruff: noqa: RUF009  (`key` and `block` are dataclasses.field)
"""The blocks "data_efficiency" and, of older files, "curriculum_learning": half the data for the same loss.

`zero/data_efficiency/` acts on them; `docs/data-efficiency.md` shows whole files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .schema import BOOL, FLOAT, INT, INTS, OBJECT, TEXT, Block, Inert, block, key, named_blocks

_CLUSTERS = "clusters follow from the metrics and are kept in memory"
_OF_METRICS = "write it into a metric of curriculum_metrics"
SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")


@dataclass(frozen=True)
class ScheduleConfig(Block):
    """How a difficulty rises; which keys are needed depends on schedule_type. See `data_efficiency/pacing.py`."""

    total_curriculum_step: int | None = key(None, INT, null=True, least=1)
    difficulty_step: int | None = key(None, INT, null=True, least=1)
    root_degree: float | None = key(None, FLOAT, null=True, above=0)
    difficulty: tuple[int, ...] = key((), INTS, least=0)
    max_step: tuple[int, ...] = key((), INTS, least=1)


@dataclass(frozen=True)
class Scheduled(Block):
    """Keys of all curricula."""

    min_difficulty: int | None = key(None, INT, null=True, least=0)
    max_difficulty: int | None = key(None, INT, null=True, least=1)
    schedule_type: str = key("fixed_linear", TEXT, choices=SCHEDULES)
    schedule_config: ScheduleConfig = block(ScheduleConfig)

    def check_schedule(self) -> None:
        """Raise ValueError if keys of this schedule_type are missing or contradict each other."""
        kind, given = self.schedule_type, self.schedule_config
        if kind == "custom":
            return
        if kind == "fixed_discrete":
            if len(given.difficulty) != len(given.max_step) + 1:
                raise ValueError(
                    "schedule_config: fixed_discrete needs lists difficulty and, of one entry less, max_step, got "
                    f"{len(given.difficulty)} and {len(given.max_step)} entries"
                )
            return
        wanted: dict[str, object] = {
            "min_difficulty": self.min_difficulty,
            "max_difficulty": self.max_difficulty,
            "schedule_config.total_curriculum_step": given.total_curriculum_step,
            "schedule_config.difficulty_step": given.difficulty_step,
        }
        if kind == "fixed_root":
            wanted["schedule_config.root_degree"] = given.root_degree
        if missing := [name for name, value in wanted.items() if value is None]:
            raise ValueError(f"{missing[0]} is missing: the schedule {kind} needs {', '.join(wanted)}")
        assert self.min_difficulty is not None and self.max_difficulty is not None
        if self.min_difficulty > self.max_difficulty:
            raise ValueError(
                f"expected min_difficulty at most max_difficulty, got {self.min_difficulty} and {self.max_difficulty}"
            )


@dataclass(frozen=True)
class CurriculumMetricBlock(Scheduled):
    """One metric of a curriculum. index_to_metric_path: the .npy file that `data_efficiency.measure` writes.

    difficulty_type, clustering_type: see `data_efficiency.sampler.CurriculumMetric`.
    """

    inert: ClassVar[Mapping[str, Inert]] = {
        "index_to_sample_path": Inert(TEXT, "samples are ordered by the file of index_to_metric_path"),
    }

    index_to_metric_path: str | None = key(None, TEXT, null=True)
    difficulty_type: str = key("value", TEXT, choices=("value", "percentile"))
    clustering_type: str = key("schedule_based", TEXT, choices=("schedule_based", "single_cluster"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_schedule()
        if self.clustering_type == "schedule_based" and self.index_to_metric_path is None:
            raise ValueError(
                "index_to_metric_path is missing: a schedule_based metric selects samples by it; measure the dataset "
                "with onebit.zero.data_efficiency.measure and write the name of its .npy file"
            )
        most = self.max_difficulty or max(self.schedule_config.difficulty, default=0)
        if self.difficulty_type == "percentile" and most > 100:
            raise ValueError(f"difficulties are percentiles, at most 100, got {most}")


@dataclass(frozen=True)
class CurriculumSampling(Block):
    """The order of samples. curriculum_metrics: by name; seqlen_truncate and seqlen_reshape change lengths, too."""

    inert: ClassVar[Mapping[str, Inert]] = {
        "data_cluster_path": Inert(TEXT, _CLUSTERS),
        "curriculum_type": Inert(TEXT, _OF_METRICS),
        "min_difficulty": Inert(INT, _OF_METRICS),
        "max_difficulty": Inert(INT, _OF_METRICS),
        "schedule_type": Inert(TEXT, _OF_METRICS),
        "schedule_config": Inert(OBJECT, _OF_METRICS),
    }

    enabled: bool = key(False, BOOL)
    curriculum_metrics: Mapping[str, CurriculumMetricBlock] = named_blocks(CurriculumMetricBlock)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled and not self.curriculum_metrics:
            raise ValueError("curriculum_metrics is empty: name at least one metric, or set enabled to false")


@dataclass(frozen=True)
class DynamicBatching(Block):
    """Micro-batches of about the same number of tokens. See `data_efficiency.sampler.TokenSampler`.

    samples_order: "random", "dataloader", "default": shuffled; "order": as in the dataset; "seqlen": by length within
    stretches of a shuffled pass. lengths_path (a key of this package): a .npy file of lengths in tokens, as
    `data_efficiency.measure` writes with the metric `Length`; null: lengths are measured when training begins.
    """

    inert: ClassVar[Mapping[str, Inert]] = {
        "dataloader_num_workers": Inert(INT, 'write it as "data_sampling": {"num_workers"}', fine=(0,)),
        "dataloader_pin_memory": Inert(BOOL, 'write it as "data_sampling": {"pin_memory"}', fine=(False,)),
        "verbose": Inert(BOOL, "batches are not logged", fine=(False,)),
    }

    enabled: bool = key(False, BOOL)
    max_tokens_per_batch: int | None = key(None, INT, null=True, least=1)
    lr_scaling_method: str = key("linear", TEXT, choices=("linear", "sqrt", "none"))
    min_batch_size: int = key(1, INT, least=1)
    max_batch_size: int | None = key(None, INT, null=True, least=1)
    samples_order: str = key("dataloader", TEXT, choices=("dataloader", "random", "order", "default", "seqlen"))
    lengths_path: str | None = key(None, TEXT, null=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled and self.max_tokens_per_batch is None:
            raise ValueError("max_tokens_per_batch is missing: dynamic batching fills micro-batches up to it")


@dataclass(frozen=True)
class DataSampling(Block):
    """num_epochs: passes over the data that may be read. num_workers, pin_memory: of torch's DataLoader."""

    enabled: bool = key(False, BOOL)
    num_epochs: int = key(1000, INT, least=1)
    num_workers: int = key(0, INT, least=0)
    pin_memory: bool = key(False, BOOL)
    curriculum_learning: CurriculumSampling = block(CurriculumSampling)
    dynamic_batching: DynamicBatching = block(DynamicBatching)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curriculum_learning.enabled and self.dynamic_batching.enabled:
            raise ValueError(
                "curriculum_learning and dynamic_batching both choose the samples of a batch; enable one of them"
            )


@dataclass(frozen=True)
class KeptTokensConfig(Block):
    """require_steps: until all tokens are kept. seq_per_step: the number of kept tokens is a multiple of it."""

    require_steps: int | None = key(None, INT, null=True, least=1)
    seq_per_step: int = key(1, INT, least=1)


@dataclass(frozen=True)
class KeptTokens(Block):
    """Number of tokens of a sequence that a layer keeps: rises linearly from min_value to max_value."""

    min_value: int | None = key(None, INT, null=True, least=1)
    max_value: int | None = key(None, INT, null=True, least=1)
    schedule_type: str = key("fixed_linear", TEXT, choices=("fixed_linear",))
    schedule_config: KeptTokensConfig = block(KeptTokensConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_value is not None and self.max_value is not None and self.min_value > self.max_value:
            raise ValueError(f"expected min_value at most max_value, got {self.min_value} and {self.max_value}")


@dataclass(frozen=True)
class LayerTokenRates(Block):
    """Learning rates as a function of tokens times layers, instead of the block "scheduler". See `TokenLR`."""

    inert: ClassVar[Mapping[str, Inert]] = {"warmup_type": Inert(TEXT, "rates rise in a line", fine=("linear",))}

    enabled: bool = key(False, BOOL)
    total_layer_tokens: int | None = key(None, INT, null=True, least=1)
    warmup_layer_tokens: int = key(0, INT, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled and self.total_layer_tokens is None:
            raise ValueError("total_layer_tokens is missing: the number of tokens over which rates fall")


@dataclass(frozen=True)
class RandomLtd(Block):
    """Random layerwise token dropping.

    Which layers: random_ltd_layer_id of the total_layer_num, or all except the first and the last. layer_name (a key of
    this package): the pattern of their names, "transformer.h.*"; null: the model's only list of total_layer_num modules
    of one class. model_mask_name: the layers' argument that is a mask, if its name does not show that. model_type has
    no effect: masks are gathered by rows and columns, which is right for both types.
    """

    inert: ClassVar[Mapping[str, Inert]] = {
        "model_type": Inert(TEXT, "masks are gathered by rows and columns", fine=("decoder", "encoder")),
        "micro_batch_size": Inert(INT, "it is train_micro_batch_size_per_gpu", fine=()),
        "global_batch_size": Inert(INT, "it is train_batch_size", fine=()),
    }

    enabled: bool = key(False, BOOL)
    total_layer_num: int | None = key(None, INT, null=True, least=1)
    random_ltd_layer_num: int | None = key(None, INT, null=True, least=1)
    random_ltd_layer_id: tuple[int, ...] = key((), INTS, least=0)
    layer_name: str | None = key(None, TEXT, null=True)
    model_mask_name: str | None = key(None, TEXT, null=True)
    hidden_state_order: str = key("batch_seq_dim", TEXT, choices=("batch_seq_dim", "seq_batch_dim"))
    random_ltd_schedule: KeptTokens = block(KeptTokens)
    layer_token_lr_schedule: LayerTokenRates = block(LayerTokenRates)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.enabled:
            return
        schedule = self.random_ltd_schedule
        if None in (schedule.min_value, schedule.max_value, schedule.schedule_config.require_steps):
            raise ValueError(
                "random_ltd_schedule does not set how many tokens are kept: write {min_value, max_value, "
                "schedule_config: {require_steps, seq_per_step}}"
            )
        if self.total_layer_num is None and self.layer_name is None:
            raise ValueError('total_layer_num is missing: write it, or the layers\' names as "layer_name"')
        layers = len(self.random_ltd_layer_id)
        if layers and self.random_ltd_layer_num not in (None, layers):
            raise ValueError(
                f"random_ltd_layer_num is {self.random_ltd_layer_num}, and random_ltd_layer_id names {layers} layers; "
                "correct one of them"
            )
        beyond = [k for k in self.random_ltd_layer_id if self.total_layer_num is not None and k >= self.total_layer_num]
        if beyond:
            raise ValueError(
                f"random_ltd_layer_id: expected numbers below total_layer_num = {self.total_layer_num}, got {beyond[0]}"
            )


@dataclass(frozen=True)
class DataRouting(Block):
    """Dropping of tokens."""

    enabled: bool = key(False, BOOL)
    random_ltd: RandomLtd = block(RandomLtd)


@dataclass(frozen=True)
class DataEfficiency(Block):
    """The whole block. seed: of samples and positions. A block that is enabled needs all blocks around it enabled."""

    enabled: bool = key(False, BOOL)
    seed: int = key(1234, INT, least=0)
    data_sampling: DataSampling = block(DataSampling)
    data_routing: DataRouting = block(DataRouting)

    def __post_init__(self) -> None:
        super().__post_init__()
        sampling, routing = self.data_sampling, self.data_routing
        for name, is_on, outer, is_outer_on in (
            ("data_sampling", sampling.enabled, "data_efficiency", self.enabled),
            ("data_routing", routing.enabled, "data_efficiency", self.enabled),
            ("curriculum_learning", sampling.curriculum_learning.enabled, "data_sampling", sampling.enabled),
            ("dynamic_batching", sampling.dynamic_batching.enabled, "data_sampling", sampling.enabled),
            ("random_ltd", routing.random_ltd.enabled, "data_routing", routing.enabled),
        ):
            if is_on and not is_outer_on:
                raise ValueError(f"{name} is enabled and {outer} around it is not: set both, or neither")

    @property
    def curriculum(self) -> CurriculumSampling | None:
        """The block if it is enabled, else None."""
        is_on = self.enabled and self.data_sampling.enabled and self.data_sampling.curriculum_learning.enabled
        return self.data_sampling.curriculum_learning if is_on else None

    @property
    def dynamic_batching(self) -> DynamicBatching | None:
        """The block if it is enabled, else None."""
        is_on = self.enabled and self.data_sampling.enabled and self.data_sampling.dynamic_batching.enabled
        return self.data_sampling.dynamic_batching if is_on else None

    @property
    def random_ltd(self) -> RandomLtd | None:
        """The block if it is enabled, else None."""
        is_on = self.enabled and self.data_routing.enabled and self.data_routing.random_ltd.enabled
        return self.data_routing.random_ltd if is_on else None


@dataclass(frozen=True)
class LegacyCurriculum(Scheduled):
    """The block "curriculum_learning" at the top level: sequences are cut to a length that rises."""

    inert: ClassVar[Mapping[str, Inert]] = {
        "data_cluster_path": Inert(TEXT, _CLUSTERS),
        "curriculum_metrics": Inert(OBJECT, 'write them into "data_efficiency": {"data_sampling": ...}'),
    }

    enabled: bool = key(False, BOOL)
    curriculum_type: str = key("seqlen", TEXT, choices=("seqlen",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled:
            self.check_schedule()
