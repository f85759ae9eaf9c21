"""From the blocks "data_efficiency" and "curriculum_learning" to samplers, loaders and dropping layers."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, cast

import numpy as np
from torch import nn
from torch.utils.data import Dataset

from ..config.data_efficiency import CurriculumSampling, DynamicBatching, LegacyCurriculum, RandomLtd, Scheduled
from ..config.whole import Config
from ..grid import Grid
from .loader import CurriculumLoader
from .measuring import read_metric
from .metrics import Array, Length
from .pacing import Custom, Discrete, Pacing, Root
from .sampler import CurriculumMetric, CurriculumSampler, Sampler, TokenSampler
from .token_dropping import TokenDropping, arm, middle_layers, stack_of

LEGACY = "seqlen_truncate"


def pacing_of(block: Scheduled, name: str) -> Pacing:
    """The pacing that a schedule's block describes."""
    kind, given = block.schedule_type, block.schedule_config
    if kind == "custom":
        return Custom(name)
    if kind == "fixed_discrete":
        return Discrete(given.difficulty, given.max_step)
    degree = (given.root_degree or 1.0) if kind == "fixed_root" else 1.0
    numbers = block.min_difficulty, block.max_difficulty, given.total_curriculum_step, given.difficulty_step
    first, last, total, multiple = cast("tuple[int, int, int, int]", numbers)  # not None: see `check_schedule`
    return Root(first, last, total, multiple, degree)


def has_sampler(config: Config) -> bool:
    """Whether the configuration decides on samples or their length, so that a `CurriculumLoader` is needed."""
    ours = config.data_efficiency
    return config.curriculum_learning.enabled or ours.curriculum is not None or ours.dynamic_batching is not None


def loader_of(
    config: Config,
    grid: Grid,
    dataset: Dataset[object],
    collate_fn: Callable[[list[Any]], object] | None,
    seed: int,
    **options: object,
) -> CurriculumLoader:
    """This rank's loader for the configured curriculum.

    Raises:
        ValueError: Metrics belong to another dataset.
    """
    ours, (rank, world_size) = config.data_efficiency, grid.data
    steps, passes = config.gradient_accumulation_steps, None
    sampler: Sampler
    if ours.curriculum is not None:
        sampler = _curriculum(ours.curriculum, dataset, config.train_batch_size, ours.seed)
    elif ours.dynamic_batching is not None:
        sampler = _token_batches(ours.dynamic_batching, dataset, config, world_size * steps)
    else:
        sampler = _legacy(config.curriculum_learning, dataset, config.train_batch_size, seed)
    if ours.data_sampling.enabled:
        passes = ours.data_sampling.num_epochs
        options = {
            "num_workers": ours.data_sampling.num_workers,
            "pin_memory": ours.data_sampling.pin_memory,
            **options,
        }
    where = {"rank": rank, "world_size": world_size, "parts_per_rank": steps}
    return CurriculumLoader(dataset, sampler, passes=passes, collate_fn=collate_fn, **where, **options)  # type: ignore[arg-type]


def _curriculum(block: CurriculumSampling, dataset: Dataset[object], batch_size: int, seed: int) -> CurriculumSampler:
    metrics = {}
    for name, metric in block.curriculum_metrics.items():
        path = metric.index_to_metric_path
        metrics[name] = CurriculumMetric(
            pacing_of(metric, name),
            None if path is None or metric.clustering_type == "single_cluster" else read_metric(path, dataset),
            metric.difficulty_type,
            metric.clustering_type,
        )
    return CurriculumSampler(len(cast(Sized, dataset)), batch_size, metrics, seed=seed)


def _legacy(block: LegacyCurriculum, dataset: Dataset[object], batch_size: int, seed: int) -> CurriculumSampler:
    metric = CurriculumMetric(pacing_of(block, LEGACY), clustering_type="single_cluster")
    return CurriculumSampler(len(cast(Sized, dataset)), batch_size, {LEGACY: metric}, seed=seed)


def _token_batches(block: DynamicBatching, dataset: Dataset[object], config: Config, parts: int) -> TokenSampler:
    return TokenSampler(
        _lengths(block, dataset),
        cast(int, block.max_tokens_per_batch),
        config.train_batch_size,
        parts=parts,
        scaling=block.lr_scaling_method,
        min_samples=block.min_batch_size,
        max_samples=block.max_batch_size,
        order=block.samples_order if block.samples_order in ("order", "seqlen") else "random",
        seed=config.data_efficiency.seed,
    )


def _lengths(block: DynamicBatching, dataset: Dataset[object]) -> Array:
    if block.lengths_path is not None:
        return read_metric(block.lengths_path, dataset)
    measure, n = Length(), len(cast(Sized, dataset))
    return np.concatenate([measure([dataset[index]]) for index in range(n)])


# -------------------------------------------------------------------------------- token dropping


def dropped_layers(block: RandomLtd, outline: nn.Module) -> tuple[list[str], int]:
    """The names of the layers that drop tokens, and how many layers there are.

    Raises:
        ValueError: The configuration does not fit the model's layers.
    """
    if block.layer_name is not None:
        middle = middle_layers(outline, block.layer_name)
        names = middle_layers(outline, block.layer_name, with_ends=True)
        if block.total_layer_num not in (None, len(names)):
            raise ValueError(
                f"random_ltd.total_layer_num is {block.total_layer_num}, but {block.layer_name!r} matches {len(names)} "
                "layers; correct one of them"
            )
    else:
        names = stack_of(outline, cast(int, block.total_layer_num))
        middle = names[1:-1]
    if not middle and not block.random_ltd_layer_id:
        raise ValueError(
            f"random_ltd: the model has {len(names)} layers, of which the first and the last keep all tokens; name "
            "layers in random_ltd_layer_id, or disable it"
        )
    if not block.random_ltd_layer_id:
        return middle, len(names)
    if beyond := [k for k in block.random_ltd_layer_id if k >= len(names)]:
        raise ValueError(
            f"random_ltd.random_ltd_layer_id names layer {beyond[0]}, but the model has {len(names)}, counted from 0"
        )
    return [names[k] for k in block.random_ltd_layer_id], len(names)


def drop_as_configured(
    config: Config, grid: Grid, model: nn.Module, names: list[str], *, splits_sequence: bool
) -> TokenDropping:
    """Let the layers of these names drop tokens. splits_sequence: each tensor rank holds a slice of the sequence."""
    block = cast(RandomLtd, config.data_efficiency.random_ltd)
    kept = block.random_ltd_schedule
    steps, multiple = kept.schedule_config.require_steps, kept.schedule_config.seq_per_step
    pacing = Root(cast(int, kept.min_value), cast(int, kept.max_value), cast(int, steps), multiple)
    dropping = TokenDropping(
        pacing,
        seed=config.data_efficiency.seed,
        data_rank=grid.data[0],
        sequence_dim=1 if block.hidden_state_order == "batch_seq_dim" else 0,
        mask_name=block.model_mask_name,
        parts=grid.shape.size("tensor") if splits_sequence else 1,
        part=grid.coordinates["tensor"] if splits_sequence else 0,
    )
    arm(dropping, model, names, is_stage=grid.shape.size("pipe") > 1)
    return dropping
