"""Training steps that the doctor times: DDP in four forms, dense AdamW over any transport, and our optimizers.

A contender trains an `EmulatedModel`, which computes by sleeping: the rest of its steps is traffic, encoding and
updates, as on a host whose accelerator computes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ... import OnebitAdam, OnebitLamb, ZeroOneAdam
from ...comm import SignCodec, Transport, codec_named, torch_versions
from ...dense import DenseAverager
from ...usage.marks import INSPECTED
from ...zero.sharded.adam import ShardedOnebitAdam
from .prediction import FORWARD, Schedule

LR = 1e-4


class Computing:
    """Emulates the computing of a rank: on a host, which is busy meanwhile, or on a GPU, which works beside its host.

    A GPU begins when its earlier work is done, so a host that is busy meanwhile waits less.
    """

    def __init__(self, device: torch.device):
        self._is_beside_host = device.type == "cuda"
        self._done_at = 0.0

    def begin(self) -> None:
        """Begin a step: no work is queued."""
        self._done_at = time.perf_counter()

    def compute(self, seconds: float) -> None:
        """Compute for this long; return when it is done."""
        if self._is_beside_host:
            self._done_at += seconds
            seconds = self._done_at - time.perf_counter()
        if seconds > 0:
            time.sleep(seconds)


class EmulatedModel(nn.Module):
    """Matrices of these shapes, first layer first. Gradients come last layer first while backward computes.

    forward() returns a loss of zero. compute_s: seconds of a step, a third of it forward; each matrix takes its share.
    Gradients differ between ranks. Weights do not: sending them before the first step would take long on a slow
    network.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], transport: Transport, compute_s: float = 0.0):
        super().__init__()
        device = transport.device
        weights, gradients = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + transport.rank))
        total = sum(rows * columns for rows, columns in shapes)
        self.weights = nn.ParameterList()
        self._gradients, self._seconds, self._computing = [], [], Computing(device)
        for shape in shapes:
            self.weights.append(torch.randn(shape, generator=weights, device=device, dtype=torch.float32).mul_(0.02))
            self._gradients.append(
                torch.randn(shape, generator=gradients, device=device, dtype=torch.float32).mul_(1e-3)
            )
            self._seconds.append(compute_s * shape[0] * shape[1] / total)

    def forward(self) -> Tensor:
        x = torch.zeros((), device=self.weights[0].device, requires_grad=True, dtype=torch.float32)
        self._computing.begin()
        for weight, gradient, seconds in zip(self.weights, self._gradients, self._seconds, strict=True):
            x = _Layer.apply(x, weight, gradient, self._computing, seconds)  # type: ignore[no-untyped-call]
        return x


class _Layer(torch.autograd.Function):
    """Computes for a given time, and returns a given gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, computing: Computing, seconds: float) -> Tensor:
        ctx.gradient, ctx.computing, ctx.seconds = gradient, computing, seconds
        computing.compute(FORWARD * seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *into: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        ctx.computing.compute((1 - FORWARD) * ctx.seconds)
        return into[0], ctx.gradient.clone(), None, None, None


class Contender(ABC):
    """A model in training on this rank."""

    optimizer: torch.optim.Optimizer

    def __init__(self, model: EmulatedModel, transport: Transport):
        self.model = model

    def backward(self) -> None:
        """Forward and backward, including the traffic that is sent meanwhile."""
        self.model().backward()

    @abstractmethod
    def update(self) -> float:
        """Update the parameters. Returns the seconds of it spent waiting for traffic."""


class Ddp(Contender):
    """DistributedDataParallel with its defaults, buckets of 25 MiB, then AdamW.

    Attributes:
        max_grad_norm: Norm to which the mean gradient is clipped. Default 0: it is not.
    """

    bucket_cap_mb: float | None = None
    max_grad_norm: float = 0.0

    def __init__(self, model: EmulatedModel, transport: Transport):
        super().__init__(model, transport)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        # Replicas are equal already, and a broadcast takes time.
        self.ddp = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.bucket_cap_mb,
            **torch_versions.without_first_broadcast(),
        )

    def backward(self) -> None:
        self.ddp().backward()

    def update(self) -> float:
        if self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), self.max_grad_norm, foreach=True)
        self.optimizer.step()
        return 0.0


class DdpBfloat16(Ddp):
    """Buckets travel as bfloat16. torch's bf16_compress_hook refuses to run without CUDA; this does the same."""

    def __init__(self, model: EmulatedModel, transport: Transport):
        super().__init__(model, transport)
        self.ddp.register_comm_hook(None, bfloat16_hook)


def bfloat16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses postponed annotations
    """A hook for DistributedDataParallel. state: the process group; None: the default one."""
    group = dist.group.WORLD if state is None else state
    buffer = bucket.buffer()
    travels = buffer.to(torch.bfloat16).div_(dist.get_world_size(group))
    work = dist.all_reduce(travels, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


class PowerSgd(Ddp):
    """torch's powerSGD_hook, in float32 for two steps (the fewest it allows) and in low rank from then on.

    In one bucket: with several, each launches its second and third collective when the one before is done, over Gloo in
    a different order on every rank, and on 4 hosts they deadlocked (torch 2.13).
    """

    bucket_cap_mb = 1e4

    def __init__(self, model: EmulatedModel, transport: Transport, rank: int):
        super().__init__(model, transport)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Dense(Contender):
    """`DenseAverager` and AdamW: replaces DDP on transports without a process group."""

    def __init__(self, model: EmulatedModel, transport: Transport):
        super().__init__(model, transport)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        self.averager = DenseAverager(model.parameters(), transport)

    def update(self) -> float:
        began = time.perf_counter()
        self.averager.finish()
        waited_s = time.perf_counter() - began
        self.optimizer.step()
        return waited_s


class Onebit(Contender):
    """One of our optimizers, as in the README: the plain model, and the optimizer does the traffic."""

    def __init__(self, model: EmulatedModel, transport: Transport, make: Callable[..., Any], **options: object):
        super().__init__(model, transport)
        self.optimizer = make(model.parameters(), lr=LR, transport=transport, **options)

    def update(self) -> float:
        self.optimizer.step()
        waited_s: float = self.optimizer.stats.comm_ms / 1e3  # type: ignore[attr-defined]
        return waited_s


@dataclass(frozen=True)
class Method:
    """A row of the doctor's table.

    make: constructs it from model and transport. sent_bytes: most bytes per element, which bounds the samples.
    steps_before: steps that do not count. has_warmup: whether it begins with `WARMUP_STEPS` of a warm-up, which are
    timed as well. warmup_schedule: theirs, if it is another. needs_group: whether it needs a process group of
    torch.distributed. is_dense: a baseline of our methods (is_ours).
    """

    name: str
    make: Callable[[EmulatedModel, Transport], Contender]
    schedule: Schedule
    sent_bytes: float
    steps_before: int = 1
    has_warmup: bool = False
    warmup_schedule: Schedule | None = None
    needs_group: bool = False
    is_dense: bool = False
    is_ours: bool = False


FIRST = 1 + INSPECTED
"""Steps that do not count: the first one sends nothing during backward, the next ones look for edited gradients."""
WARMUP_STEPS = FIRST + 2
_DDP = Schedule(hides=1.0, bucket_mb=25.0, first_mb=1.0, closes_above=True, phases=1)
_OURS, _ONE_BUCKET = Schedule(hides=1.0), Schedule(hides=0.0, bucket_mb=1e4)
_BITS_DOWN = {"int4": 4, "sign": 1}


def _ours(name: str, make: Callable[..., Any], *, has_warmup: bool = False, **options: object) -> Method:
    build = partial(make, compression="always", check_replicas_every=0, **options)
    return Method(
        name, partial(Onebit, make=build), _OURS, 0.13, steps_before=FIRST, has_warmup=has_warmup, is_ours=True
    )


def _sharded(differences: str, *, has_warmup: bool = False) -> Method:
    warmup_steps = WARMUP_STEPS if has_warmup else 0
    build = partial(ShardedOnebitAdam, differences=differences, warmup_steps=warmup_steps, check_replicas_every=0)
    name = f"sharded, {differences} down"
    goes_up = Schedule(hides=1 / (1 + _BITS_DOWN[differences]), phases=1)  # after the warm-up, and only that
    return Method(
        name, partial(Onebit, make=build), goes_up, 0.33, steps_before=FIRST, has_warmup=has_warmup,
        warmup_schedule=Schedule(hides=0.0), is_ours=True,
    )  # fmt: skip


METHODS = (
    Method("DDP float32", Ddp, _DDP, 4.0, needs_group=True, is_dense=True),
    Method("DDP bfloat16", DdpBfloat16, _DDP, 2.0, needs_group=True, is_dense=True),
    Method("dense float32", Dense, _DDP, 4.0, is_dense=True),
    Method("PowerSGD rank 1", partial(PowerSgd, rank=1), _ONE_BUCKET, 1.0, steps_before=3, needs_group=True),
    Method("PowerSGD rank 4", partial(PowerSgd, rank=4), _ONE_BUCKET, 1.0, steps_before=3, needs_group=True),
    _ours("OnebitAdam", OnebitAdam, has_warmup=True, freeze_step=WARMUP_STEPS),
    _ours("ZeroOneAdam", ZeroOneAdam, var_freeze_step=0),
    _ours("OnebitLamb", OnebitLamb, freeze_step=1),
    _sharded("int4", has_warmup=True),
    _sharded("sign"),
)
"""The methods that are compared. "dense float32" replaces DDP if there is no process group."""


def methods_for(transport: Transport, warmup_codec: str | None = None) -> list[Method]:
    """The methods that run over this transport. warmup_codec: codec of their warm-ups; None: their default."""
    has_group = dist.is_available() and dist.is_initialized()
    known = [m for m in METHODS if m.needs_group == has_group or not (m.needs_group or m.is_dense)]
    if warmup_codec is None:
        return known
    codec = codec_named(warmup_codec, SignCodec().block)
    return [replace(m, make=_with(m.make, warmup_codec=codec)) if m.has_warmup else m for m in known]


def _with(make: Callable[..., Contender], **options: object) -> Callable[[EmulatedModel, Transport], Contender]:
    return partial(make, **options)
