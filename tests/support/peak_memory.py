"""Peak memory of every step, read from the kernel: what torch's allocations, kernels and malloc come to together.

    MALLOC_MMAP_THRESHOLD_=65536 python tests/support/peak_memory.py    # JSON: bytes per parameter, by kind

Two ranks as threads; a first training of a few parameters loads what is loaded once. Linux only.
The threshold keeps malloc from holding on to freed tensors, which would hide a peak behind an earlier one.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path

import torch

import onebit
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates
from onebit.comm import SimTransport, run_ranks
from onebit.optimizer import CompressedOptimizer

RANKS, ROWS, COLUMNS, TENSORS, STEPS = 2, 256, 256, 40, 14
WARMUP = 4


def adam(params: list, transport: SimTransport, **options: object) -> CompressedOptimizer:
    optimizer = onebit.OnebitAdam(params, transport=transport, **options)  # type: ignore[arg-type]
    optimizer.rule.schedule = DenseSteps("auto", WARMUP, VarianceUpdates(2))  # with refreshes among the steps behind
    return optimizer


def muon(params: list, transport: SimTransport, **options: object) -> CompressedOptimizer:
    groups = [{"params": params, "use_muon": True}]
    return onebit.OnebitMuon(groups, transport=transport, freeze_step=WARMUP, ns_steps=1, **options)  # type: ignore[arg-type]


def zero_one(**rule: object) -> Callable[..., CompressedOptimizer]:
    def make(params: list, transport: SimTransport, **options: object) -> CompressedOptimizer:
        return onebit.ZeroOneAdam(params, transport=transport, var_update_scaler=2, **rule, **options)  # type: ignore[arg-type]

    return make


KINDS: dict[str, Callable[..., CompressedOptimizer]] = {
    "OnebitAdam": adam,
    "OnebitLamb": lambda p, t, **options: onebit.OnebitLamb(p, transport=t, freeze_step=WARMUP, **options),
    "OnebitMuon": muon,
    "ZeroOneAdam": zero_one(),
    "ZeroOneAdam, local steps": zero_one(local_step_clipper=4, local_step_scaler=1, var_freeze_step=4),
}


def resident(name: str) -> int:
    """Bytes: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def train(kind: str, tensors: int) -> list[tuple[str, float, float]]:
    """Of each step: which it was; bytes per parameter at its peak, and after it."""
    barrier, before = threading.Barrier(RANKS), resident("VmRSS")
    parameters = RANKS * tensors * ROWS * COLUMNS

    def work(transport: SimTransport) -> list[tuple[str, float, float]]:
        params = [torch.nn.Parameter(torch.ones(ROWS, COLUMNS)) for _ in range(tensors)]
        optimizer = KINDS[kind](params, transport, bucket_cap_mb=ROWS * COLUMNS * 4 / 2**20, lr=1e-3)
        steps = []
        for p in params:
            p.grad = torch.empty_like(p)
        for step in range(STEPS):
            for k, p in enumerate(params):
                p.grad.fill_(1.0 + transport.rank + (step + k) % 3)
            if barrier.wait() == 0:
                forget_peak()
            barrier.wait()
            optimizer.step()
            barrier.wait()
            peak, after = (resident(name) - before for name in ("VmHWM", "VmRSS"))
            steps.append((optimizer.stats.phase, peak / parameters, after / parameters))
            barrier.wait()
        return steps

    return run_ranks(RANKS, work)[0]


def main() -> None:
    torch.set_num_threads(1)
    steps = {}
    for kind in KINDS:
        train(kind, 2)
        gc.collect()
        steps[kind] = train(kind, TENSORS)
        gc.collect()
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
