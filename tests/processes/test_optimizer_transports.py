"""The same training over the simulated network, Gloo and MPI: the same bits, in warm-up and after."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import pytest
import torch
import transport_ranks
from ranks import Ended, run_mpi, run_torchrun
from torch import nn

import onebit
from onebit.comm import HierarchicalTransport, Transport, hierarchical, init, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

_GLOBAL_RNG = threading.Lock()


def train(transport: Transport, max_grad_norm: float = 0.7, delay: int = 0) -> str:
    """Eight steps with two buckets, clipping in the second half's phase, a skipped step; a hash of all parameters."""
    common = {"max_grad_norm": max_grad_norm, "delay": delay, "freeze_step": 3, "compression": "always"}
    return _digest(transport, torch.float32, 8, onebit.OnebitAdam, **common)


def train_sharded(transport: Transport, stage: int = 1, kind: type = ShardedOnebitAdam, **options: object) -> str:
    """Eight steps with several buckets, the first three in eight bits, clipping at stage 1, a skipped step; a hash."""
    common = {"max_grad_norm": 0.7 if stage < 2 else 0.0, "stage": stage, "warmup_steps": 3}
    return _digest(transport, torch.bfloat16, 8, kind, **common, **options)


def _digest(transport: Transport, dtype: torch.dtype, steps: int, kind: type, **options: object) -> str:
    with _GLOBAL_RNG:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 65), nn.ReLU(), nn.Linear(65, 9)).to(dtype)
    optimizer = kind(
        net.parameters(), lr=0.01, transport=transport, bucket_cap_mb=0.003, check_replicas_every=3, **options
    )
    assert len(optimizer.buckets) == 2 if dtype == torch.float32 else len(optimizer.buckets) > 1
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + transport.rank)
        x, y = torch.randn(8, 20, generator=generator), torch.randint(0, 9, (8,), generator=generator)
        loss = nn.functional.cross_entropy(net(x.to(dtype)).float(), y)
        (loss * (float("nan") if step == 6 and transport.rank == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, onebit.OnebitAdam):
        optimizer.sync()
    assert optimizer.stats.skipped_steps == 1
    return hashlib.sha256(
        b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in net.parameters())
    ).hexdigest()


SHARDED: list[tuple[int, type, dict]] = [
    *((stage, ShardedOnebitAdam, {}) for stage in (0, 1, 2)),
    (1, ShardedOnebitLamb, {}),
    (2, ShardedZeroOneAdam, {"local_step_scaler": 3, "local_step_clipper": 2}),
]


def train_each(transport: Transport) -> list[str]:
    """OnebitAdam's digests, the second delayed, and those of every leaf of the sharded family."""
    delayed = train(transport, max_grad_norm=0.0, delay=1)
    return [
        train(transport),
        delayed,
        *(train_sharded(transport, stage, kind, **options) for stage, kind, options in SHARDED),
    ]


def over_processes() -> list[str]:
    """On 4 ranks of a real transport: the digests of the first three; then of all, on nodes of two, without clipping.

    In two levels without clipping, so that buckets leave during backward; and delayed.
    """
    transport = init(levels=2)
    assert isinstance(transport, HierarchicalTransport)
    three = transport_ranks.of_first(3)
    digests = [] if three is None else train_each(three)
    return [*digests, *train_in_nodes(transport)]


def train_in_nodes(transport: Transport) -> list[str]:
    return [train(transport, max_grad_norm=0.0, delay=delay) for delay in (0, 1)]


@pytest.mark.parametrize("run", [run_torchrun, pytest.param(run_mpi, marks=pytest.mark.thorough)])
def test_every_transport_gives_the_same_bits(run: Callable[..., Ended]) -> None:
    flat, in_hierarchy = (
        run_ranks(3, train_each),
        run_ranks(4, lambda transport: train_in_nodes(hierarchical(transport, 2))),
    )
    assert flat == flat[:1] * 3 and len(set(flat[0])) > 3
    assert in_hierarchy == in_hierarchy[:1] * 4
    expected = [[*digests, *in_hierarchy[0]] for digests in ([*flat[0]], [*flat[0]], [*flat[0]], [])]
    assert list(run(4, over_processes, timeout_s=110).check().results) == expected
