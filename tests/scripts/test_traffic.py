"""A compressed step touches memory no more than said, and allocates none: counted, not timed."""

from __future__ import annotations

import pytest
import torch
from bench.traffic import Alone, cases, count

MOST = {
    "OnebitAdam": 27.0,
    "OnebitAdam, bf16 errors": 22.0,
    "OnebitLamb": 27.0,
    "ZeroOneAdam": 35.0,
    "ZeroOneAdam, bf16 errors": 30.0,
    "AdamW, fused": 28.0,
}


@pytest.mark.parametrize("name", MOST)
def test_bytes_per_parameter_and_step(name: str) -> None:
    """Of one rank of four; the scales, votes and sums of blocks are below 0.2."""
    by_operation = count(cases()[name], 1 << 18)
    assert sum(by_operation.values()) <= MOST[name], by_operation
    if name != "AdamW, fused":
        assert by_operation["encode_momentum"] > 12.0
        assert sum(number for operation, number in by_operation.items() if operation.startswith("torch.")) < 0.2


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"])
def test_a_step_allocates_nothing_of_the_size_of_the_model(name: str) -> None:
    """Less than a fiftieth of the parameters' bytes in all: scales, which are read for the verdict."""
    params = [torch.nn.Parameter(torch.randn(256, 512)) for _ in range(4)]
    optimizer = cases()[name](params, Alone())
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(5):
        optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert allocated < sum(p.nbytes for p in params) / 50
