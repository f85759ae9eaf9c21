"""Peers that torch does not have, as simulated ranks and emulated hosts train by them: PowerSGD and DeMo."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit.cli.doctor.contenders import LR, Contender, EmulatedModel
from onebit.comm import Transport

Groups = list[dict]
PLAIN = "plain"  # the only phase of a way whose steps are alike


class LowRank:
    """PowerSGD (arXiv 1905.13727) in front of AdamW, as torch's hook has it: error feedback, a warm start, and the
    dense mean in the first `start` steps, and always for vectors and for matrices that rank r makes less than half as
    small."""

    def __init__(self, groups: Groups, transport: Transport, rank: int, start: int):
        self.inner, self.transport, self.rank, self.left = torch.optim.AdamW(groups), transport, rank, start
        self.param_groups = self.inner.param_groups
        self.params = [p for group in self.param_groups for p in group["params"]]
        generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self.low: dict[Tensor, Tensor] = {}
        for p in self.params:
            if p.dim() > 1 and 2 * rank * (len(p) + p[0].numel()) < p.numel():
                self.low[p] = torch.randn(p[0].numel(), rank, generator=generator)
        self.errors = {p: torch.zeros_like(p) for p in self.low}
        self.phase = "warmup"

    def step(self) -> None:
        self.phase = "warmup" if self.left > 0 else PLAIN
        full = [p.grad for p in self.params if self.left > 0 or p not in self.low]
        self._average(full)
        if self.left <= 0:
            self._approximate()
        self.left -= 1
        self.inner.step()

    def _approximate(self) -> None:
        matrices = {p: (p.grad + self.errors[p]).view(len(p), -1) for p in self.low}
        lefts = [matrix @ self.low[p] for p, matrix in matrices.items()]
        self._average(lefts)
        bases = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ basis for matrix, basis in zip(matrices.values(), bases, strict=True)]
        self._average(rights)
        for (p, matrix), basis, right in zip(matrices.items(), bases, rights, strict=True):
            p.grad.copy_((basis @ right.T).view_as(p))
            self.errors[p] = matrix.view_as(p) - p.grad
            self.low[p] = right

    def _average(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([x.reshape(-1) for x in tensors])
        self.transport.all_reduce(flat).wait()
        flat /= self.transport.world_size
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class DeMo:
    """Decoupled momentum (arXiv 2411.19870): a rank's own momentum sends its largest frequencies and keeps the rest.

    A momentum m ← decay·m + lr·g is cut into blocks of at most 64 × 64, by the largest divisors of its shape; of each
    block the `top` largest coefficients of an orthonormal cosine transform are sent and taken out of m. The step is the
    sign of what all ranks sent, each coefficient averaged over those who sent it. More generous than the authors' code:
    all tensors are one message, and an index takes 16 bits instead of 64.
    """

    def __init__(self, groups: Groups, transport: Transport, decay: float = 0.999, top: int = 32):
        self.param_groups, self.transport, self.decay, self.top = groups, transport, decay, top
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if p.numel()]
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.momenta = {p: torch.zeros_like(p) for p in self.params}

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient; on all ranks the same have one. All ranks."""
        sent: list[Tensor] = []
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.momenta[p].mul_(self.decay).add_(p.grad, alpha=group["lr"])
                frequencies_JC = to_frequencies(momentum)
                index = frequencies_JC.abs().topk(min(self.top, frequencies_JC.shape[1])).indices
                values = frequencies_JC.gather(1, index)
                momentum -= from_frequencies(torch.zeros_like(frequencies_JC).scatter_(1, index, values), p.shape)
                sent += [index.to(torch.int16).view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)]
        mine = torch.cat(sent)
        every_WB = mine.new_empty(self.transport.world_size, len(mine))
        self.transport.all_gather(every_WB, mine).wait()
        self._move(list(every_WB.split([len(part) for part in sent], 1)))

    def _move(self, parts: list[Tensor]) -> None:
        """parts: indices and values of each parameter in turn, [W, bytes]."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                blank_JC = torch.zeros_like(to_frequencies(p))
                J = len(blank_JC)
                total, senders = blank_JC, torch.zeros_like(blank_JC)
                for index, values in zip(parts.pop(0), parts.pop(0), strict=True):
                    index_JK = index.view(torch.int16).view(J, -1).long()
                    values_JK = values.clone().view(torch.float32).view(J, -1)
                    total.scatter_add_(1, index_JK, values_JK)
                    senders.scatter_add_(1, index_JK, torch.ones_like(values_JK))
                direction = from_frequencies(total / senders.clamp_(min=1), p.shape).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


def to_frequencies(x: Tensor) -> Tensor:
    """Coefficients [blocks, of a block]. A vector is one row; a tensor of more dimensions has rows of its first."""
    rows, columns = _matrix(x.shape)
    h, w = _divisor(rows), _divisor(columns)
    blocks = x.reshape(rows // h, h, columns // w, w).permute(0, 2, 1, 3)
    return (_cosines(h) @ blocks @ _cosines(w).T).reshape(-1, h * w)


def from_frequencies(frequencies_JC: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape whose `to_frequencies` these are."""
    rows, columns = _matrix(shape)
    h, w = _divisor(rows), _divisor(columns)
    blocks = _cosines(h).T @ frequencies_JC.view(rows // h, columns // w, h, w) @ _cosines(w)
    return blocks.permute(0, 2, 1, 3).reshape(tuple(shape))


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _divisor(n: int, most: int = 64) -> int:
    """The largest one that is at most `most`."""
    return max(k for k in range(1, min(n, most) + 1) if n % k == 0)


def _cosines(n: int) -> Tensor:
    """The orthonormal cosine transform of n values: rows are frequencies."""
    k, j = torch.arange(n)[:, None], torch.arange(n)[None]
    rows = math.sqrt(2 / n) * torch.cos(math.pi * (2 * j + 1) * k / (2 * n))
    rows[0] *= math.sqrt(0.5)
    return rows


class Plain(Contender):
    """A peer whose optimizer does the traffic, with nothing hidden."""

    def __init__(self, model: EmulatedModel, transport: Transport, make: Callable[..., Any]):
        super().__init__(model, transport)
        self.optimizer = make(model.parameters(), lr=LR, transport=transport)

    def update(self) -> float:
        self.optimizer.step()
        return 0.0
