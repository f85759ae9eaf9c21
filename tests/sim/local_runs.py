"""One rank's training by `onebit.LocalSteps` on a noisy quadratic loss of its own, for tests on simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import SignCodec, Transport
from onebit.reference.codecs import parameter_blocks

SIZES = [(30, 20), (300,), (7,), (16, 16)]
TOTAL = sum(int(np.prod(size)) for size in SIZES)
BLOCK = 64
BLOCKS = parameter_blocks([int(np.prod(size)) for size in SIZES], BLOCK)
SMALL_BUCKETS = 0.0015  # MiB: three buckets


def start() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(TOTAL).astype(np.float32)


def targets(rank: int) -> np.ndarray:
    """What a rank's quadratic loss is least at: mostly common."""
    common, own = (np.random.default_rng(seed).standard_normal(TOTAL) for seed in (1, 50 + rank))
    return (common + 0.3 * own).astype(np.float32)


def noise(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng(1000 + 10 * step + rank).standard_normal(TOTAL).astype(np.float32)


def make_params() -> list[nn.Parameter]:
    pieces = torch.from_numpy(start()).split([int(np.prod(size)) for size in SIZES])
    return [nn.Parameter(piece.reshape(size).clone()) for piece, size in zip(pieces, SIZES, strict=True)]


def flat(tensors: Sequence[Tensor]) -> np.ndarray:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).numpy().copy()


def set_gradients(params: Sequence[Tensor], step: int, rank: int) -> None:
    g = torch.from_numpy(flat(params) - targets(rank) + noise(step, rank))
    for p, piece in zip(params, g.split([p.numel() for p in params]), strict=True):
        p.grad = piece.reshape(p.shape).clone()


class Run:
    """One rank's training."""

    def __init__(self, transport: Transport, inner: Any = torch.optim.AdamW, lr: float = 0.01, **options: Any):
        options = {"codec": SignCodec(block=BLOCK), "bucket_cap_mb": SMALL_BUCKETS, "every": 4} | options
        inner_options = options.pop("inner_options", {})
        self.params = make_params()
        self.optimizer = onebit.LocalSteps(inner(self.params, lr=lr, **inner_options), transport=transport, **options)
        self.rank = transport.rank

    def train(self, steps: Sequence[int]) -> Run:
        for step in steps:
            set_gradients(self.params, step, self.rank)
            self.optimizer.step()
        return self

    @property
    def w(self) -> np.ndarray:
        return flat(self.params)

    @property
    def theta(self) -> np.ndarray:
        with self.optimizer.anchors():
            return self.w

    def by_parameter(self, what: str) -> np.ndarray:
        """The anchor, the worker error, or the server error with zeros where other ranks own it."""
        found = {}
        for bucket in self.optimizer.buckets:
            if what == "server":
                whole = torch.zeros(bucket.layout.numel)
                whole.view(bucket.layout.world_size, -1)[bucket.hierarchy.owner] = bucket.ef.server
            else:
                whole = bucket.anchor if what == "anchor" else bucket.ef.worker
            found.update(zip(bucket.params, bucket.layout.views(whole), strict=True))
        return flat([found[p] for p in self.params])
