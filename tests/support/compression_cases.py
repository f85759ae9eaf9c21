"""Small models and the JSON of their compression, for the tests of zero/compression."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from train.model import GPT, ModelSize, build_model

SIZE = ModelSize(layers=2, width=16, heads=4, context=8)


def gpt(seed: int = 0) -> GPT:
    return build_model(SIZE, seed)


def windows(k: int, rows: int = 4) -> Tensor:
    """Counting up, modulo 16, from anywhere: a few steps learn something of it."""
    first = torch.randint(16, (rows, 1), generator=torch.Generator().manual_seed(k))
    return (first + torch.arange(SIZE.context + 1)) % 16


def technique(modules: list[str], params: dict, related: list[list[str]] | None = None, **shared: Any) -> dict:
    group = {"params": params, "modules": modules} | ({} if related is None else {"related_modules": related})
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"all": group}}


def config(**techniques: dict) -> dict:
    return {"compression_training": copy.deepcopy(techniques)}


GPT_TECHNIQUES: dict[str, dict] = {
    "weight_quantization": technique(
        ["blocks"], {"start_bits": 8, "target_bits": 4}, schedule_offset=1, quantization_period=2, quantize_groups=4
    ),
    "sparse_pruning": technique(["qkv"], {"dense_ratio": 0.5}, schedule_offset=2, method="topk"),
    "row_pruning": technique(["mlp_in"], {"dense_ratio": 0.5}, [["mlp_out"]], schedule_offset=1),
    "head_pruning": technique(
        ["attention_out"], {"dense_ratio": 0.5, "qkv_layout": "heads"}, [["qkv"]],
        schedule_offset=1, num_heads=4, method="topk",
    ),
    "activation_quantization": technique(
        ["mlp_in"], {"bits": 8}, range_calibration="static", quantization_type="asymmetric", schedule_offset=2
    ),
}  # fmt: skip
"""All that a transformer has, switched on at different steps."""


class ConvNet(nn.Module):
    """Two convolutions with a norm between, whose bias keeps dropped channels from being zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.head = nn.Linear(4, 5)
        nn.init.ones_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.sigmoid(self.norm(self.first(x)))).mean((2, 3)))


def train(model: nn.Module, loss: Any, steps: int, lr: float = 1e-2) -> list[float]:
    """By AdamW and the scheduler; the losses."""
    from onebit.zero.compression import CompressionScheduler

    optimizer, losses = torch.optim.AdamW(model.parameters(), lr), []
    handle = CompressionScheduler(model).attach(optimizer)
    for k in range(steps):
        value = loss(model, k)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    handle.remove()
    return losses


def gpt_loss(model: nn.Module, k: int) -> Tensor:
    return model.loss(windows(k))
