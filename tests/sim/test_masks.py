"""Where `exp_avg_mask` is 0 an element has no momentum, in any phase: it takes no part in what its block sends."""

from __future__ import annotations

import copy

import pytest
import torch
from family import FAMILY
from family_contract import run_world
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport, Transport
from onebit.optimizer import CompressedOptimizer

KINDS = {name: (kind, {**options, "betas": (0.9, 0.99)}) for name, (kind, options) in FAMILY.items()}
KINDS["auto"] = (onebit.OnebitAdam, {"lr": 0.01})  # 100 steps of warm-up, refreshes at 104, 108, ...

mask = torch.tensor([1.0] * 10 + [0.0] * 290)


def build(
    name: str, transport: Transport, given: Tensor | None = mask, **more: object
) -> tuple[Tensor, CompressedOptimizer]:
    kind, options = KINDS[name]
    p = nn.Parameter(torch.zeros(300))
    return p, kind(
        [{"params": [p], "exp_avg_mask": given}], transport=transport, compression="always", **options | more
    )


def masked_parts(optimizer: CompressedOptimizer) -> list[Tensor]:
    """What is kept of the elements that may not move: momentum, moves to come, and what the next exchange sends."""
    bucket, rows = optimizer.buckets[0], optimizer.transport.world_size
    parts = {name: flat for name, flat in bucket.flat.items() if name in ("exp_avg", "exp_avg_update", "accumulated")}
    parts["momentum"] = optimizer.rule.momentum(bucket)
    if bucket.ef is not None:
        sent = bucket.own_rows(parts.get("exp_avg_update", torch.zeros(bucket.layout.numel))).clone()
        if bucket.frames is not None:
            unpacked = torch.empty(bucket.layout.numel)
            optimizer.codec.decode(bucket.frames, unpacked.view(rows, -1))
            sent = bucket.own_rows(unpacked)
        sent = 0.9 * sent + bucket.ef.worker.float().view_as(sent)
        parts["payload"] = torch.zeros(bucket.layout.numel)
        bucket.own_rows(parts["payload"]).copy_(sent)
    return [bucket.layout.views(flat)[0][mask == 0] for flat in parts.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nodes", "local_size"),
    [("OnebitAdam", 1, 1), ("OnebitLamb", 2, 2), ("ZeroOneAdam", 2, 2), *((name, 3, 1) for name in KINDS)],
)
def test_what_may_not_move_has_no_momentum(name: str, nodes: int, local_size: int) -> None:
    def ours(transport: Transport) -> set[str]:
        p, optimizer = build(name, transport)
        generator, phases = torch.Generator().manual_seed(transport.rank), set()
        for step in range(114 if name == "auto" else 24):
            if step == 10:
                state = copy.deepcopy(optimizer.state_dict())
                p, optimizer = build(name, transport)
                optimizer.load_state_dict(state)
            p.grad = 1.0 + 0.5 * torch.randn(300, generator=generator)
            optimizer.step()
            phases.add(optimizer.stats.phase)
            for part in masked_parts(optimizer):
                torch.testing.assert_close(part, torch.zeros(290), rtol=0, atol=1e-7)  # β1·m - β1·m, fused or not
        return phases

    for phases in run_world((nodes, local_size), ours):
        assert len(phases) > 1


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_that_comes_with_a_resume_takes_the_momentum_away(name: str) -> None:
    options = {"local_step_clipper": 1} if name == "ZeroOneAdam" else {}
    for steps in (3, 105) if name == "auto" else (3, 12):
        p, optimizer = build(name, SimTransport(), None, **options)
        for _ in range(steps):
            p.grad = torch.linspace(1.0, 2.0, 300)
            optimizer.step()
        q, resumed = build(name, SimTransport(), **options)
        resumed.load_state_dict(optimizer.state_dict())
        for part in masked_parts(resumed):
            torch.testing.assert_close(part, torch.zeros(290), rtol=0, atol=1e-7)
        q.grad = torch.ones(300)
        resumed.step()
        assert not q[10:].any() and q[:10].all()
