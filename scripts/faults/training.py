"""A training that is small and known: every optimizer on the same toy problem, with gradients a fault may edit.

The parameters shall become `target`; a rank's gradient is the distance to it plus noise that follows from (step, rank).
No autograd where none is needed: a step of three ranks takes some milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import onebit
from onebit.comm import Transport
from onebit.dense import average_gradients, broadcast_parameters
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

SHAPES = ((33, 20), (33,), (700,), (5, 3))
FREEZE = 8

_COMMON = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.0}  # decay would hide that nothing else moves
_SHARDED = _COMMON | {"warmup_steps": FREEZE}
_REPLICATED = _COMMON | {"freeze_step": FREEZE}
_ZERO_ONE = _COMMON | {"var_freeze_step": 12, "var_update_scaler": 2, "local_step_scaler": 6, "local_step_clipper": 4}


@dataclass(frozen=True)
class Kind:
    """An optimizer: make(parameters, transport, options). is_dense: its gradients are averaged before it, in full."""

    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, object]
    is_dense: bool = False


OPTIMIZERS: dict[str, Kind] = {
    "OnebitAdam": Kind(onebit.OnebitAdam, _REPLICATED),
    "OnebitLamb": Kind(onebit.OnebitLamb, _REPLICATED),
    "ZeroOneAdam": Kind(onebit.ZeroOneAdam, _ZERO_ONE),
    "ShardedOnebitAdam": Kind(ShardedOnebitAdam, _SHARDED),
    "ShardedOnebitLamb": Kind(ShardedOnebitLamb, _SHARDED),
    "ShardedZeroOneAdam": Kind(ShardedZeroOneAdam, _SHARDED),
    "AdamW": Kind(torch.optim.AdamW, _COMMON, is_dense=True),
    "Lamb": Kind(onebit.Lamb, _COMMON, is_dense=True),
}

Spoil = Callable[[int, list[Tensor]], None]


class Training:
    """One rank's. options: the optimizer's, on top of its kind's. Dense ones are given none.

    before: edits parameters and target before the optimizer is made.
    """

    def __init__(
        self, name: str, transport: Transport, *, before: Callable[[Training], None] | None = None, **options: object
    ):
        self.transport, self.kind = transport, OPTIMIZERS[name]
        self.make_problem()
        if before is not None:
            before(self)
        named = [(f"layer{k}.weight", p) for k, p in enumerate(self.params)]
        if self.kind.is_dense:
            broadcast_parameters(self.params, transport)
            self.optimizer = self.kind.make(self.params, **self.kind.options)
        else:
            self.optimizer = self.kind.make(named, transport=transport, **self.kind.options | options)

    def make_problem(self) -> None:
        """Parameters and what they shall become; the same on all ranks."""
        generator = torch.Generator().manual_seed(7)
        self.target = [1.0 + torch.randn(shape, generator=generator) for shape in SHAPES]
        self.params = [nn.Parameter(0.5 + 0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]

    def gradients(self, step: int) -> list[Tensor]:
        """This rank's, of the step's data."""
        generator = torch.Generator().manual_seed(1000 * step + self.transport.rank)
        pairs = zip(self.params, self.target, strict=True)
        return [p.detach() - (t + 0.3 * torch.randn(t.shape, generator=generator)).to(p.dtype) for p, t in pairs]

    def step(self, number: int, spoil: Spoil = lambda step, gradients: None) -> None:
        """One step, with gradients that `spoil` may edit."""
        gradients = self.gradients(number)
        spoil(number, gradients)
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient
        if self.kind.is_dense:
            average_gradients(self.params, self.transport)
            if not all(bool(p.grad.isfinite().all()) for p in self.params if p.grad is not None):
                return  # as a loss scaler would skip it
        self.optimizer.step()

    def settle(self) -> None:
        """Make the replicas the same, where local steps let them differ."""
        if isinstance(self.optimizer, onebit.ZeroOneAdam):
            self.optimizer.sync()

    def loss(self) -> float:
        """Mean square of the distance to the target."""
        squares = [(p.detach() - t).double().square().sum() for p, t in zip(self.params, self.target, strict=True)]
        return float(sum(squares)) / sum(t.numel() for t in self.target)

    def fingerprint(self) -> str:
        """Of all bits; "nan" where a parameter is not finite."""
        self.settle()
        return fingerprint(self.params)


def fingerprint(tensors: Sequence[Tensor]) -> str:
    if not all(bool(x.isfinite().all()) for x in tensors):
        return "nan"
    return hashlib.sha256(b"".join(x.detach().cpu().float().numpy().tobytes() for x in tensors)).hexdigest()[:16]
