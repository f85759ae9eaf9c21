"""DeepSpeed 0.19.6's one-bit optimizers among the ways, in their own environment (`bench/peer_deepspeed.py`).

A rank is a process of that environment's Python. The loops around the optimizers are those of all ways, so onebit is on
the path there. Its code does none of their arithmetic and none of their traffic.
"""

from __future__ import annotations

import contextlib
import io
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from bench.command import COMMAND
from bench.peer_deepspeed import ROOT, python, start

from time_to_loss.peers import Groups

_MODULES = {"OnebitAdam": "adam", "ZeroOneAdam": "zoadam"}


def worker_command(name: str, *launcher: str) -> list[str]:
    """The words that start a rank of `bench.py time_to_loss NAME`, or `launcher`, a module of Python's that does."""
    return ["env", f"PYTHONPATH={ROOT}", *python(), *launcher, COMMAND, "time_to_loss", name]


class Stepped:
    """An optimizer of DeepSpeed's, and what its engine does for it: mean gradients in float32, in one flat buffer,
    before the steps in which the optimizer asks for them.

    The first step only tries the collective. It reads no gradient, and the engine averages them in vain; here they are
    not averaged. dense: the phase of a step with mean gradients.
    """

    def __init__(self, kind: str, groups: Groups, dense: str, **options: object):
        self.engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
        self.collectives = start()
        made = getattr(import_module(f"deepspeed.runtime.fp16.onebit.{_MODULES[kind]}"), kind)
        self.inner: Any = made(groups, deepspeed=self.engine, **options)
        self.param_groups = self.inner.param_groups
        self.dense = self.phase = dense

    @property
    def sent_bytes(self) -> int:
        return self.collectives.sent_bytes

    def step(self) -> None:
        is_dense = self.engine.enable_backward_allreduce and self.inner.initialize
        has_rounds, before = getattr(self.inner, "freeze_key", False), self.sent_bytes
        if is_dense:
            self._average()
        with contextlib.redirect_stdout(io.StringIO()):  # it says on every rank where a phase begins
            self.inner.step()
        if is_dense:
            self.phase = self.dense
        elif has_rounds:
            self.phase = "round" if self.sent_bytes > before else "local"
        else:
            self.phase = "compressed"

    def _average(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat.mul_(1 / dist.get_world_size())
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def zero_grad(self) -> None:
        self.inner.zero_grad()
