"""What the ranks of test_sparse_engine.py do: a model with sparse attention in several layouts of the same ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from train.layouts import layers_plan
from train.model import ModelSize
from train.model_layers import build_layers

from onebit import zero
from onebit.zero import grid as grids
from onebit.zero.sparse_attention import SparseSelfAttention

SIZE = ModelSize(layers=2, width=32, heads=4, context=32)
SPARSE = {"mode": "bigbird", "block": 4, "num_sliding_window_blocks": 1, "different_layout_per_head": True, "seed": 3}
STEPS, SEQUENCES, RATE = 2, 4, 1e-2
# Stage, and ranks on each axis; of four.
LAYOUTS = {
    "stage 0, replicas": (0, {"shard": 1}),
    "stage 3, slices": (3, {"shard": 2, "tensor": 2}),
    "stages, slices": (0, {"pipe": 2, "shard": 1, "tensor": 2}),
    "stages, stage 2": (2, {"pipe": 2, "shard": 2}),
}


def windows(step: int) -> Tensor:
    """What all ranks read in a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(256, (SEQUENCES, SIZE.context + 1), generator=generator)


def run() -> dict[str, tuple[list[float], int]]:
    """Losses of each layout, and how many modules attend sparsely on this rank."""
    logging.disable(logging.WARNING)
    found, opened = {}, []
    for name, (stage, sizes) in LAYOUTS.items():
        grid = grids.start(**sizes)
        opened.append(grid)
        found[name] = _train(grid, stage)
    for grid in reversed(opened):
        grid.close()
    return found


def _train(grid: grids.Grid, stage: int) -> tuple[list[float], int]:
    place, ranks = grid.data
    micros = 2 if grid.shape.size("pipe") > 1 else 1
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES // ranks // micros,
        "gradient_accumulation_steps": micros,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": grid.shape.size("pipe")},
        "sparse_attention": SPARSE,
    }
    plan = layers_plan(SIZE, grid.shape.size("tensor"))
    engine = zero.initialize(model=build_layers(SIZE, seed=0), config=config, grid=grid, tensor_plan=plan)[0]
    losses = []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(_pairs(windows(step).chunk(ranks)[place], micros))))
    sparse = sum(isinstance(module, SparseSelfAttention) for module in engine.module.modules())
    return losses, sparse


def _pairs(mine: Tensor, micros: int) -> Iterator[tuple[Tensor, Tensor]]:
    return iter([(part[:, :-1], part[:, 1:]) for part in mine.chunk(micros)])
