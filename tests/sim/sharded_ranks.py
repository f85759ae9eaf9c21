"""Small runs of the sharded optimizer on simulated ranks, with gradients that come from nowhere but step and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from onebit.comm import SimTransport
from onebit.reference.sharded import ShardedAdam
from onebit.zero import ShardedOnebitAdam
from onebit.zero.sharded.bucket import ParamSlice, ShardedBucket
from onebit.zero.sharded.optimizer import ShardedOnebitOptimizer

SIZES = (300, 7, 513, 256)
WARMUP = 4
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "warmup_steps": WARMUP}


def initial(dtype: torch.dtype = torch.float32, sizes: Sequence[int] = SIZES) -> list[torch.nn.Parameter]:
    """The same values on every rank, in memory of its own."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(0.1 * torch.randn(n, generator=generator).to(dtype)) for n in sizes]


def gradient(step: int, rank: int, sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """Noise on something common, of another size in each parameter."""
    generator = np.random.default_rng([step, rank, 7])
    grads = [generator.normal(size=n) * 10.0 ** (j - 1) + 0.3 * j for j, n in enumerate(sizes)]
    return [torch.tensor(g, dtype=torch.float32) for g in grads]


def take_steps(
    params: Sequence[torch.nn.Parameter],
    optimizer: ShardedOnebitOptimizer,
    steps: range,
    spoil: Callable[[int, list[Tensor]], None] = lambda step, grads: None,
) -> None:
    """Steps with this rank's gradients, after `spoil` has been at them."""
    for step in steps:
        grads = gradient(step, optimizer.transport.rank, [p.numel() for p in params])
        spoil(step, grads)
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


def new(
    transport: SimTransport,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = SIZES,
    kind: type[ShardedOnebitOptimizer] = ShardedOnebitAdam,
    **options: object,
):
    """Parameters and their optimizer."""
    params = initial(dtype, sizes)
    return params, kind(params, transport=transport, **{**OPTIONS, **options})


def owners(optimizers: Sequence[ShardedOnebitOptimizer], sizes: Sequence[int] = SIZES) -> np.ndarray:
    """Which rank owns each element, from what each says of itself."""
    owner = np.full(sum(sizes), -1)
    for optimizer in optimizers:
        for bucket, piece, here in pieces_in_order(optimizer, sizes):
            assert (owner[here] == -1).all() and piece.at < bucket.layout.chunk
            owner[here] = optimizer.transport.rank
    assert (owner >= 0).all()
    return owner


def pieces_in_order(
    optimizer: ShardedOnebitOptimizer, sizes: Sequence[int] = SIZES
) -> Iterator[tuple[ShardedBucket, ParamSlice, slice]]:
    """Every bucket's pieces, and where each lies among all elements in the order of the parameters."""
    starts = np.cumsum([0, *sizes])
    params = [id(p) for p in optimizer.param_groups[0]["params"]]
    for bucket in optimizer.buckets:
        for piece in bucket.pieces:
            first = starts[params.index(id(bucket.params[piece.k]))]
            yield bucket, piece, slice(first + piece.start, first + piece.stop)


def assert_state_is(
    oracle: ShardedAdam, optimizers: Sequence[ShardedOnebitOptimizer], owned_atol: float | None = 1e-6
) -> None:
    """Masters, or residuals without masters, and variances are the textbook's, within float32.

    owned_atol: None if the first are not compared.
    """
    owned = oracle.master if oracle.has_masters else oracle.error
    for optimizer in optimizers:
        for bucket, piece, there in pieces_in_order(optimizer):
            here = slice(piece.at, piece.at + piece.stop - piece.start)
            if owned_atol is not None:
                np.testing.assert_allclose(bucket.owned[here].numpy(), owned[there], rtol=1e-5, atol=owned_atol)
            scale = np.abs(oracle.v[there]).max()
            np.testing.assert_allclose(bucket.variance[here].numpy(), oracle.v[there], atol=1e-5 * scale)


def values(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in params])


def state_of(optimizer: ShardedOnebitOptimizer) -> list[Tensor]:
    """Copies of all that a rank keeps."""
    kept = []
    for bucket in optimizer.buckets:
        kept += [bucket.momentum, bucket.variance, bucket.owned, torch.stack(bucket.steps)]
    return [t.clone() for t in kept]
