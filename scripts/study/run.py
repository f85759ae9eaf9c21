"""One run of the study: the optimizers and their dense twins, what a run is, and how it is done. See `study.py`.

Ranks are threads of one process over `SimTransport`, each with its own batches, the same bits as over a network. A
dense method sees the concatenation of the ranks' batches, which is the averaged gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from provenance import revision
from torch import Tensor, nn
from torch.optim import Optimizer
from train.model import decay_groups
from train.schedule import train_steps

import onebit
from onebit.arithmetic.schedule import long_warmup
from onebit.comm import IdentityCodec, Int8Codec, Log4Codec, SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam
from study.catalog import load_task
from study.tasks import Task, joined

WEIGHT_DECAY = 0.01
_POINTS = 20  # of a curve

# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Method:
    """An optimizer under a name. twin: the dense method it is measured against; "": none.

    make(param_groups, transport, steps of the run): transport is None for a dense method. A learning rate is set in
    every step. other_batches: of as many further ranks, so that a method can be measured against itself.
    """

    name: str
    twin: str
    make: Callable[[list[dict], SimTransport | None, int], Optimizer]
    is_dense: bool = False
    other_batches: bool = False
    groups: Callable[[nn.Module], list[dict]] = lambda model: decay_groups(model, WEIGHT_DECAY)


FAST = 15 / 16  # β2 of a variance in which a new gradient weighs at least 1/16
AT_FAST = f"beta2 {FAST:g}"


def _adamw(name: str, twin: str, beta2: float = 0.999, *, other_batches: bool = False) -> Method:
    return Method(
        name,
        twin,
        lambda groups, transport, steps: torch.optim.AdamW(groups, betas=(0.9, beta2)),
        is_dense=True,
        other_batches=other_batches,
    )


def _laprop(name: str, twin: str, beta2: float = 0.999) -> Method:
    return Method(name, twin, lambda groups, transport, steps: onebit.LaProp(groups, betas=(0.9, beta2)), is_dense=True)


def _ours(name: str, twin: str, kind: Callable[..., Optimizer], **options: object) -> Method:
    """An optimizer that does its own traffic, with these options."""
    return Method(name, twin, lambda groups, transport, steps: kind(groups, transport=transport, **options))


def _with_a_long_warmup(groups: list[dict], transport: SimTransport | None, steps: int) -> Optimizer:
    """With the dense steps that LAMB and Muon have: the default before it was `DenseSteps`."""
    optimizer = onebit.OnebitAdam(groups, transport=transport, warmup_codec=Int8Codec())
    optimizer.rule.schedule = long_warmup()
    return optimizer


def _frozen_early(groups: list[dict], transport: SimTransport | None, steps: int) -> Optimizer:
    """1-bit Adam as the paper has it: warm-up for 15 % of the run, then a variance that is fixed for good."""
    return onebit.OnebitAdam(groups, freeze_step=max(1, round(0.15 * steps)), transport=transport)


def _zero_one_adam_by_steps(clipper: int) -> Method:
    """Up to `clipper` steps per exchange, doubling with every 16th of the run after its first quarter."""
    return Method(
        f"zero-one-adam H={clipper} by steps",
        "adamw",
        lambda groups, transport, steps: onebit.ZeroOneAdam(
            groups,
            var_freeze_step=steps // 4,
            local_step_scaler=max(1, steps // 16),
            local_step_clipper=clipper,
            transport=transport,
        ),
    )


# 0/1 Adam with DeepSpeed's defaults: float32 variance rounds, and local steps that no short run ever reaches.
PEERS_SCHEDULE = {
    "var_freeze_step": 100_000,
    "var_update_scaler": 16,
    "local_step_scaler": 32_678,
    "local_step_clipper": 16,
    "variance_codec": IdentityCodec(),
}


def muon_groups(model: nn.Module) -> list[dict]:
    """As `decay_groups`, and hidden matrices apart from embeddings and the head; most tasks' heads are embeddings."""
    made = onebit.muon_groups(model, head=getattr(model, "head", None))
    kinds = [(group["use_muon"], [p for _, p in group["params"]]) for group in made]
    return [
        {"params": params, "use_muon": use_muon, "weight_decay": WEIGHT_DECAY if is_matrix else 0.0}
        for use_muon, of_kind in kinds
        for is_matrix in (True, False)
        if (params := [p for p in of_kind if (p.dim() > 1) == is_matrix])
    ]


class DenseMuon:
    """torch's Muon for groups with use_muon, its AdamW for the others: what a study asks of one optimizer."""

    def __init__(self, groups: list[dict]):
        muon, others = ([{k: v for k, v in g.items() if k != "use_muon"} for g in groups if g["use_muon"] == is_so]
                        for is_so in (True, False))  # fmt: skip
        self._both = [torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others)]
        self.param_groups = [group for each in self._both for group in each.param_groups]

    def step(self) -> None:
        for each in self._both:
            each.step()

    def zero_grad(self) -> None:
        for each in self._both:
            each.zero_grad()


METHODS = {
    method.name: method
    for method in (
        _adamw("adamw", ""),
        _adamw("adamw, other batches", "adamw", other_batches=True),
        *(_adamw(f"adamw, beta2 {beta2:g}", "adamw", beta2) for beta2 in (0.95, 0.9)),
        _ours("onebit-adam", "adamw", onebit.OnebitAdam),
        *(
            _ours(f"onebit-adam, beta2 {beta2:g}", f"adamw, beta2 {beta2:g}", onebit.OnebitAdam, betas=(0.9, beta2))
            for beta2 in (0.95, 0.9)
        ),
        Method("onebit-adam, frozen at 15 %", "adamw", _frozen_early),
        _ours("zero-one-adam", "adamw", onebit.ZeroOneAdam, local_step_clipper=1),
        # Up to H steps per exchange, doubling as the learning rate halves.
        *(_ours(f"zero-one-adam H={H}", "adamw", onebit.ZeroOneAdam, local_step_clipper=H) for H in (2, 4, 8, 16)),
        *(_zero_one_adam_by_steps(clipper) for clipper in (4, 16)),
        _ours("zero-one-adam, peer's schedule", "adamw", onebit.ZeroOneAdam, **PEERS_SCHEDULE),
        *(
            _ours(f"sharded-onebit-adam, {name}", "adamw", ShardedOnebitAdam, **options)
            for name, options in {
                "int4 differences": {},
                "sign differences": {"differences": "sign"},
                "int4 differences, limit 1": {"update_limit": 1.0},
                "sign differences, limit 1": {"differences": "sign", "update_limit": 1.0},
                "int4 differences, no warm-up": {"warmup_steps": 0},
                "sign differences, no warm-up": {"differences": "sign", "warmup_steps": 0},
                "stage 0, int4 updates": {"stage": 0, "updates": "int4"},
                "stage 0, sign updates": {"stage": 0, "updates": "sign"},
            }.items()
        ),
        _ours("sharded-zero-one-adam H=8", "adamw", ShardedZeroOneAdam, local_step_clipper=8),
        Method("lamb", "", lambda groups, transport, steps: onebit.Lamb(groups), is_dense=True),
        _ours("onebit-lamb", "lamb", onebit.OnebitLamb),
        Method("muon", "adamw", lambda groups, transport, steps: DenseMuon(groups), is_dense=True, groups=muon_groups),
        replace(_ours("onebit-muon", "muon", onebit.OnebitMuon), groups=muon_groups),
        _ours("sharded-onebit-lamb, int4 differences", "lamb", ShardedOnebitLamb),
        # Warm-ups in four bits, momenta of moves, fast variances: each against the same rule, dense.
        _adamw(f"adamw, {AT_FAST}", "adamw", FAST),
        _laprop("laprop", "adamw"),
        _laprop(f"laprop, {AT_FAST}", "adamw", FAST),
        _ours("onebit-adam, eight-bit gradients", "adamw", onebit.OnebitAdam, warmup_codec=Int8Codec()),
        Method("onebit-adam, eight-bit gradients, long warm-up", "adamw", _with_a_long_warmup),
        _ours("onebit-adam, delay 1", "adamw", onebit.OnebitAdam, delay=1),
        _ours(f"onebit-adam, {AT_FAST}", f"adamw, {AT_FAST}", onebit.OnebitAdam, betas=(0.9, FAST)),
        _ours("onebit-adam, moves", "laprop", onebit.OnebitAdam, momentum_of="moves"),
        _ours(
            f"onebit-adam, moves, {AT_FAST}", f"laprop, {AT_FAST}", onebit.OnebitAdam, momentum_of="moves",
            betas=(0.9, FAST),
        ),
        _ours("zero-one-adam, against its own rule", f"laprop, {AT_FAST}", onebit.ZeroOneAdam),
        _ours("sharded-onebit-adam, four-bit warm-up", "adamw", ShardedOnebitAdam, warmup_codec=Log4Codec()),
        _ours(f"sharded-onebit-adam, {AT_FAST}", f"adamw, {AT_FAST}", ShardedOnebitAdam, betas=(0.9, FAST)),
        _ours(
            f"sharded-onebit-adam, {AT_FAST}, four-bit warm-up", f"adamw, {AT_FAST}", ShardedOnebitAdam,
            betas=(0.9, FAST), warmup_codec=Log4Codec(),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """What a task is run with unless the command line says otherwise. batch_size: per rank."""

    steps: int
    batch_size: int
    seeds: int
    lrs: tuple[float, ...]


DEFAULTS = {
    "byte-lm": Defaults(steps=2000, batch_size=8, seeds=3, lrs=(2e-3, 4e-3, 8e-3, 1.6e-2)),
    "demo-lm": Defaults(steps=200, batch_size=4, seeds=3, lrs=(1.4e-3,)),  # as in demo.py
    "masked-lm": Defaults(steps=2000, batch_size=4, seeds=3, lrs=(2e-3, 4e-3, 8e-3, 1.6e-2)),
    "denoise": Defaults(steps=600, batch_size=8, seeds=3, lrs=(4e-3, 8e-3, 1.6e-2)),
    "lm-10m": Defaults(steps=300, batch_size=4, seeds=1, lrs=(4e-3, 8e-3, 1.6e-2)),
    "digits": Defaults(steps=400, batch_size=16, seeds=20, lrs=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)),
    "byte-lm-unlike": (BYTES := Defaults(steps=1000, batch_size=4, seeds=3, lrs=(2e-3, 4e-3, 8e-3))),
    "byte-lm-mixed": BYTES,
    "digits-unlike": (DIGITS := Defaults(steps=400, batch_size=16, seeds=5, lrs=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))),
    "digits-mixed": DIGITS,
    "sums-unlike": (SUMS := Defaults(steps=600, batch_size=32, seeds=5, lrs=(4e-3, 8e-3, 1.6e-2))),
    "sums-mixed": SUMS,
}


# ---------------------------------------------------------------- one run


@dataclass(frozen=True)
class Setting:
    """What the runs of one table have in common."""

    task: str
    ranks: int
    steps: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.task}, {self.ranks} ranks, {self.steps} steps, batch {self.batch_size} per rank"


@dataclass(frozen=True)
class Job:
    """One training run. batch_size: per rank."""

    task: str
    method: str
    lr: float
    seed: int
    steps: int
    ranks: int
    batch_size: int

    @property
    def setting(self) -> Setting:
        return Setting(self.task, self.ranks, self.steps, self.batch_size)


@dataclass(frozen=True)
class Point:
    """A place on a run's curve: after `step` steps, with the bits sent so far by rank 0 per parameter."""

    step: int
    loss: float
    bits: float


@dataclass(frozen=True)
class Result:
    """How a run went. Losses are validation losses, inf where they are not finite; seconds are of the whole run.

    Traffic is the payload that rank 0 sent to others: for a dense method that of a ring all-reduce in float32. At the
    curve's last point the replicas are the same; at the others it is rank 0's own model.
    """

    job: Job
    curve: tuple[Point, ...]
    seconds: float
    revision: str

    @property
    def loss(self) -> float:
        return self.curve[-1].loss

    @property
    def bits_per_step(self) -> float:
        """Bits sent per parameter and step, mean over the run."""
        return self.curve[-1].bits / self.job.steps

    @property
    def bits_in_full(self) -> float:
        """The same if a rank counted what it keeps for itself in both phases: ·W/(W-1), which W does not change."""
        return self.bits_per_step * self.job.ranks / max(1, self.job.ranks - 1)

    @property
    def bytes_sent(self) -> float:
        """Bytes sent per parameter in the whole run."""
        return self.curve[-1].bits / 8


def run_job(job: Job) -> Result:
    """Train and validate; a function of the job and of the installed code, but for the time it takes."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    task = load_task(job.task)
    if METHODS[job.method].is_dense:
        curve = _train(job, task, None)
    else:
        curve = run_ranks(job.ranks, lambda transport: _train(job, task, transport), timeout_s=600)[0]
    return Result(job, tuple(curve), time.perf_counter() - began, revision())


def _train(job: Job, task: Task, transport: SimTransport | None) -> list[Point]:
    """One rank's run and, on rank 0, its curve; transport None: the run of all ranks at once."""
    model = task.build(job.seed)
    optimizer = METHODS[job.method].make(METHODS[job.method].groups(model), transport, job.steps)
    is_first, sent_at_start = transport is None or transport.rank == 0, 0 if transport is None else transport.sent_bytes
    numel = sum(p.numel() for p in model.parameters())
    validated = {round(job.steps * k / _POINTS) for k in range(1, _POINTS)} - {0, job.steps}
    curve = []

    def validate(step: int) -> None:
        loss = task.evaluate(model)
        sent = (
            _dense_bits(job.ranks) * step if transport is None else 8 * (transport.sent_bytes - sent_at_start) / numel
        )
        curve.append(Point(step, loss if math.isfinite(loss) else math.inf, sent))

    ranks = range(job.ranks) if transport is None else [transport.rank]
    first = job.ranks if METHODS[job.method].other_batches else 0

    def loss_of(step: int) -> Tensor:
        return task.loss(model, joined(task, job.seed, step, [first + rank for rank in ranks], job.batch_size))

    for step, _ in train_steps(optimizer, job.steps, loss_of, job.lr):
        if is_first and step + 1 in validated:
            validate(step + 1)
    if is_first:
        validate(job.steps)
    return curve


def _dense_bits(ranks: int) -> float:
    """Bits that a rank sends per parameter and step in a ring all-reduce of float32."""
    return 2 * (ranks - 1) / ranks * 32
