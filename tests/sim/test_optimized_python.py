"""`python -O` leaves asserts out: nothing that a training needs may stand in one."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import onebit
from onebit import zero
from onebit.comm import SimTransport, run_ranks

ZERO_ONE = {"var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2}
FAMILY = [
    (onebit.Lamb, {}),
    (onebit.OnebitAdam, {"freeze_step": 2, "max_grad_norm": 1.0}),
    (onebit.OnebitLamb, {"freeze_step": 2}),
    (onebit.ZeroOneAdam, ZERO_ONE),
    (zero.ShardedOnebitAdam, {"stage": 0, "warmup_steps": 2}),
    (zero.ShardedOnebitAdam, {"stage": 2, "warmup_steps": 2}),
    (zero.ShardedOnebitLamb, {"warmup_steps": 2}),
    (zero.ShardedZeroOneAdam, {"warmup_steps": 0, "local_step_scaler": 2, "local_step_clipper": 2}),
]


def _train(transport: SimTransport) -> bytes:
    bits = b""
    for kind, options in FAMILY:
        shapes = [(40, 7), (300,), ()]
        params = [nn.Parameter(torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).reshape(shape)) for shape in shapes]
        if kind is not onebit.Lamb:
            options = options | {"transport": transport}
        optimizer = kind(params, **options)
        for step in range(6):
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            for p in params:
                (p * torch.randn(p.shape, generator=generator)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        bits += b"".join(p.detach().numpy().tobytes() for p in params)
    return bits


def digest() -> str:
    """Of every optimizer's parameters after a few steps on two ranks."""
    return hashlib.sha256(b"".join(run_ranks(2, _train))).hexdigest()


@pytest.mark.processes
@pytest.mark.thorough
def test_asserts_are_left_out_without_a_trace() -> None:
    ended = subprocess.run([sys.executable, "-O", __file__], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == digest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(digest())
