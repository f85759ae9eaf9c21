"""Peak memory of every step, read from the kernel: what torch's allocations, kernels and malloc come to together.

    MALLOC_MMAP_THRESHOLD_=32768 python tests/processes/peak_memory.py    # JSON: bytes per parameter, by kind

Two ranks as threads; a first training of a few parameters loads what is loaded once. Linux only.
The threshold keeps malloc from holding on to freed tensors, which would hide a peak behind an earlier one.
"""

from __future__ import annotations

import functools
import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path

import torch

import onebit
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates
from onebit.comm import Int8Codec, SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam

RANKS, ROWS, COLUMNS, TENSORS, STEPS = 2, 160, 160, 40, 10
WARMUP = 4


def adam(params: list, transport: SimTransport, **options: object) -> torch.optim.Optimizer:
    optimizer = onebit.OnebitAdam(params, transport=transport, **options)  # type: ignore[arg-type]
    optimizer.rule.schedule = DenseSteps("auto", WARMUP, VarianceUpdates(2), undelayed=0)  # with refreshes
    return optimizer


def muon(params: list, transport: SimTransport, **options: object) -> torch.optim.Optimizer:
    groups = [{"params": params, "use_muon": True}]
    return onebit.OnebitMuon(groups, transport=transport, freeze_step=WARMUP, ns_steps=1, **options)  # type: ignore[arg-type]


def zero_one(**rule: object) -> Callable[..., torch.optim.Optimizer]:
    def make(params: list, transport: SimTransport, **options: object) -> torch.optim.Optimizer:
        return onebit.ZeroOneAdam(params, transport=transport, var_update_scaler=2, **rule, **options)  # type: ignore[arg-type]

    return make


def sharded(params: list, transport: SimTransport, **options: object) -> torch.optim.Optimizer:
    return ShardedOnebitAdam(params, transport=transport, warmup_steps=WARMUP, **options)  # type: ignore[arg-type]


def local(every: int, **options: int) -> Callable[..., torch.optim.Optimizer]:
    def make(params: list, transport: SimTransport, *, lr: float, bucket_cap_mb: float) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(params, lr=lr, fused=True)
        return onebit.LocalSteps(inner, every, bucket_cap_mb=bucket_cap_mb, transport=transport, **options)

    return make


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "OnebitAdam": adam,
    "OnebitAdam, eight-bit gradients": functools.partial(adam, warmup_codec=Int8Codec()),
    "OnebitAdam, delay 1": functools.partial(adam, delay=1),
    "OnebitLamb": lambda p, t, **options: onebit.OnebitLamb(p, transport=t, freeze_step=WARMUP, **options),
    "OnebitMuon": muon,
    "ZeroOneAdam": zero_one(),
    "ZeroOneAdam, local steps": zero_one(local_step_clipper=4, local_step_scaler=1, var_freeze_step=4),
    "LocalSteps": local(4),
    "LocalSteps, 4 fragments, delay 1": local(8, fragments=4, delay=1),
}
# These keep more in their first steps, or while a round is under way, than in the others.
EARLY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ShardedOnebitAdam": sharded,
    "LocalSteps, delay 1": local(4, delay=1),
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
        optimizer = (KINDS | EARLY)[kind](params, transport, bucket_cap_mb=ROWS * COLUMNS * 4 / 2**20, lr=1e-3)
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
    for kind in KINDS | EARLY:
        train(kind, 4)
        gc.collect()
        steps[kind] = train(kind, TENSORS)
        gc.collect()
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
