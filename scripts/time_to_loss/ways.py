"""What is compared: DDP, PowerSGD, DeMo, DeepSpeed, DiLoCo and ours; each as it trains, and as it is timed.

A way's loss and its time are measured apart. Its loss is of simulated ranks (`losses.py`), a function of the step. Its
seconds are of emulated hosts (`seconds.py`), by the phase of a step: a warm-up, a step between two rounds and a round
take different times, and a run has so many of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from study.run import WEIGHT_DECAY, DenseMuon, muon_groups
from torch import nn
from train.model import decay_groups

import onebit
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates
from onebit.cli.doctor.contenders import LR, Contender, Ddp, DdpBfloat16, EmulatedModel, Onebit, PowerSgd
from onebit.comm import Codec, IdentityCodec, Int8Codec, Log4Codec, SignCodec, Transport
from onebit.zero import ShardedOnebitAdam
from time_to_loss.deepspeed import Stepped
from time_to_loss.peers import PLAIN, DeMo, Groups, LowRank, Plain

ALONE = "one worker alone"
STARTS = 3
NESTEROV = (0.7, 0.9)  # DiLoCo's outer rate and momentum (arXiv 2311.08105)


class Trained(Protocol):
    """What the training loop asks of an optimizer; it changes the groups' learning rates."""

    param_groups: list[dict]

    def step(self) -> object:
        """Exchange, and move the parameters."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


@dataclass(frozen=True)
class Way:
    """make(groups, transport, steps of the run): of one simulated rank; transport None: one worker has all batches.

    timed(model, transport): the same on an emulated host. cycle: steps that are timed together, whatever their
    phases; 1: every phase in `phases` on its own; the one that most steps are in stands last. start_cycle: `STARTS`
    such cycles come first, and steps with and without a round are told apart by the two lengths; 0: none. run: so
    many of these are timed together, as the traffic of each travels under the next. full_steps: timed ones in the
    phase "warmup", where the optimizer has no phases of its own. loss_of, time_of: the way whose loss, or whose
    seconds, this one has too; seconds where it was not timed itself. A way of Muon then lacks its Newton-Schulz
    iterations. is_alone: it trains on one rank's batches. is_deepspeeds: its ranks are processes of DeepSpeed's
    environment. groups(model): the parameter groups that `make` is given.
    """

    name: str
    timed: Callable[[EmulatedModel, Transport], Contender] | None
    make: Callable[[Groups, Transport | None, int], Trained] | None = None
    is_one_worker: bool = False
    is_alone: bool = False
    cycle: int = 1
    start_cycle: int = 0
    run: int = 1
    phases: Sequence[str] = (PLAIN,)
    full_steps: int = 0
    loss_of: str = ""
    time_of: str = ""
    needs_group: bool = False
    is_deepspeeds: bool = False
    groups: Callable[[nn.Module], Groups] = lambda model: decay_groups(model, WEIGHT_DECAY)


def phase_of(optimizer: Any) -> str:
    """Of the step that it has just taken."""
    stats = getattr(optimizer, "stats", optimizer)
    return str(getattr(stats, "phase", PLAIN))


def _dense(groups: Groups, transport: Transport | None, steps: int) -> Trained:
    return torch.optim.AdamW(groups)


def _muon(groups: Groups, transport: Transport | None, steps: int) -> Trained:
    return DenseMuon(groups)


def _power_sgd(rank: int) -> Way:
    return Way(
        f"PowerSGD rank {rank}",
        partial(PowerSgd, rank=rank),
        lambda groups, transport, steps: LowRank(groups, transport, rank, start=max(2, steps // 10)),
        phases=("warmup", PLAIN),
        full_steps=2,
        needs_group=True,
    )


def _clipped(way: Way) -> Way:
    """The same in seconds, with its mean gradient clipped in every step; its losses are not clipped."""

    def timed(model: EmulatedModel, transport: Transport) -> Contender:
        assert way.timed is not None
        contender = way.timed(model, transport)
        assert isinstance(contender, Ddp)
        contender.max_grad_norm = 1e-3
        return contender

    return replace(way, name=f"{way.name}, clipped", timed=timed, make=None, loss_of=way.loss_of or way.name)


class _MuonInBfloat16(DdpBfloat16):
    """Its matrices are all hidden ones: their Newton-Schulz iterations are computed, not slept."""

    def __init__(self, model: EmulatedModel, transport: Transport):
        super().__init__(model, transport)
        self.optimizer = torch.optim.Muon(model.parameters(), lr=LR, adjust_lr_fn="match_rms_adamw")


def _demo() -> Way:
    def timed(params: Any, lr: float, transport: Transport) -> DeMo:
        return DeMo([{"params": list(params), "lr": lr, "weight_decay": 0.0}], transport)

    def made(groups: Groups, transport: Transport | None, steps: int) -> DeMo:
        assert transport is not None
        return DeMo(groups, transport)

    return Way("DeMo", partial(Plain, make=timed), made)


def _deepspeed(
    name: str, kind: str, phases: Sequence[str], timed: dict, made: Callable[[int], dict], time_of: str = ""
) -> Way:
    """timed: options by which all phases come within a few steps. made(steps of the run): those of a run."""
    dense = phases[0]

    def on_host(params: Any, lr: float, transport: Transport) -> Stepped:
        return Stepped(kind, [{"params": list(params), "lr": lr, "weight_decay": 0.0}], dense, **timed)

    return Way(
        f"DeepSpeed {name}",
        partial(Plain, make=on_host),
        lambda groups, transport, steps: Stepped(kind, groups, dense, **made(steps)),
        phases=phases,
        time_of=time_of,
        is_deepspeeds=True,
    )


_DEEPSPEED = (
    _deepspeed(
        "OneBitAdam",
        "OnebitAdam",
        ("warmup", "compressed"),
        {"freeze_step": 2},
        lambda steps: {"freeze_step": max(2, steps * 15 // 100)},  # its authors' advice: 15 to 25 %
    ),
    _deepspeed(
        "ZeroOneAdam",
        "ZeroOneAdam",
        ("variance", "compressed"),
        {"var_update_scaler": 1},
        lambda steps: {},  # its defaults freeze the variance after 100,000 steps
        time_of="DeepSpeed ZeroOneAdam, local steps",
    ),
    # Shares of our choosing: by its defaults no short run takes a local step. https://deepspeed.ai/tutorials/zero-one-adam
    # advises the end of the rate's warm-up for var_freeze_step, and gives no share for the other.
    _deepspeed(
        "ZeroOneAdam, local steps",
        "ZeroOneAdam",
        ("variance", "compressed", "local", "round"),
        {"var_update_scaler": 1, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 2},
        lambda steps: {"var_freeze_step": max(2, steps // 10), "local_step_scaler": max(1, steps * 28 // 100)},
    ),
)


# ---------------------------------------------------------------- ours, and DiLoCo by our wrapper


def _alone() -> Way:
    """What one rank learns without the others. A step without any traffic, in cycles: hosts run free of each other."""

    def timed(params: Any, lr: float, transport: Transport) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, fused=True)

    return Way(ALONE, partial(Plain, make=timed), _dense, is_one_worker=True, is_alone=True, cycle=32)


def _with_muon(way: Way, name: str, make: Callable[[Groups, Transport | None, int], Trained]) -> Way:
    """The same traffic with Muon in place of AdamW; its seconds are the way's, without Newton-Schulz iterations."""
    time_of = way.time_of or way.name
    return replace(way, name=name, timed=None, make=make, loss_of="", time_of=time_of, groups=muon_groups)


def _local(
    name: str,
    every: int,
    codec: Codec,
    outer: tuple[float, float] = (1.0, 0.0),
    delay: int = 0,
    start_every: int = 0,
    correction_steps: int = 0,
    time_of: str = "",
    inner: Callable[[Groups], torch.optim.Optimizer] = torch.optim.AdamW,
) -> Way:
    """inner: between rounds. delay: steps that a round's traffic may take. start_every: of the first tenth of a run."""
    options: dict[str, Any] = {"every": every, "codec": codec, "outer_lr": outer[0], "outer_momentum": outer[1]}
    options |= {"delay": delay, "correction_steps": correction_steps, "check_replicas_every": 0}

    def timed(params: Any, lr: float, transport: Transport) -> onebit.LocalSteps:
        table = {"every": {0: start_every, STARTS * start_every: every}} if start_every else {}
        return onebit.LocalSteps(torch.optim.AdamW(params, lr=lr, fused=True), transport=transport, **options | table)

    def make(groups: Groups, transport: Transport | None, steps: int) -> onebit.LocalSteps:
        start = {"start_steps": steps // 10, "start_every": start_every} if start_every else {}
        fine = {"bucket_cap_mb": 0.1 if delay else 16.0}
        return onebit.LocalSteps(inner(groups), transport=transport, **options, **start, **fine)

    way = Way(
        ", ".join(
            [name, f"H = {every}"]
            + [f"a tenth at {start_every}"] * (start_every > 0)
            + ["corrected"] * (correction_steps > 0)
        ),
        None if time_of else partial(Onebit, make=timed),
        make,
        cycle=every,
        start_cycle=start_every,
        phases=("round", "local") if start_every else (PLAIN,),
        time_of=time_of,
    )
    return way if inner is torch.optim.AdamW else _with_muon(way, f"Muon in {way.name}", make)


WARM = 3  # steps of a warm-up that is timed
_ADAM = ("warmup", "refresh", "compressed")
_ZERO_ONE: dict[str, Any] = {"var_freeze_step": 2}


def _with_phases(kind: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A timed optimizer whose phases all come within a few steps."""

    def make(params: Any, lr: float, transport: Transport) -> Any:
        made = kind(params, lr=lr, transport=transport, compression="always", check_replicas_every=0, **options)
        if kind is onebit.OnebitAdam:
            made.rule.schedule = DenseSteps("auto", WARM, VarianceUpdates(1, var_freeze_step=16), undelayed=0)
        return made

    return make


def _onebit_muon() -> Way:
    def timed(params: Any, lr: float, transport: Transport) -> onebit.OnebitMuon:
        groups, options = [{"params": list(params), "use_muon": True}], {"freeze_step": WARM, "check_replicas_every": 0}
        return onebit.OnebitMuon(groups, lr=lr, transport=transport, compression="always", **options)

    return Way(
        "OnebitMuon",
        partial(Onebit, make=timed),
        lambda groups, transport, steps: onebit.OnebitMuon(groups, transport=transport),
        phases=("warmup", "compressed"),
        groups=muon_groups,
        time_of="OnebitAdam",
    )


def _ours(name: str, kind: Callable[..., Any], phases: Sequence[str], timed: dict | None = None, **options: Any) -> Way:
    """timed: options in place of a run's, so that all phases come soon."""
    return Way(
        name,
        partial(Onebit, make=_with_phases(kind, **options | (timed or {}))),
        lambda groups, transport, steps: kind(groups, transport=transport, **options),
        phases=phases,
        run=16 if options.get("delay") else 1,
    )


def _zero_one_local(most: int) -> Way:
    """0/1 Adam whose local steps double in number with every sixteenth of a run, whatever the rate; D in four bits."""
    name, phases = f"ZeroOneAdam, H = {most}", ("variance", "compressed", "local")
    timed = _ZERO_ONE | {"local_step_scaler": 1, "local_step_clipper": 2, "variance_codec": Log4Codec()}
    return Way(
        name,
        partial(Onebit, make=_with_phases(onebit.ZeroOneAdam, **timed)),
        lambda groups, transport, steps: onebit.ZeroOneAdam(
            groups, transport=transport, variance_codec=Log4Codec(), local_step_scaler=max(1, steps // 16),
            local_step_clipper=most,
        ),
        phases=phases,
    )  # fmt: skip


def _sharded(differences: str, stage: int = 1) -> Way:
    """At stage 2 buckets vote alone and come down during backward, and the loss is that of stage 1."""

    def timed(params: Any, lr: float, transport: Transport) -> ShardedOnebitAdam:
        options: dict[str, Any] = {"stage": stage, "warmup_steps": WARM, "check_replicas_every": 0}
        return ShardedOnebitAdam(params, lr=lr, transport=transport, differences=differences, **options)

    name, phases = f"sharded, {differences} down", ("warmup", "compressed")
    if stage == 2:
        return Way(f"{name}, stage 2", partial(Onebit, make=timed), phases=phases, loss_of=name)
    return Way(
        name,
        partial(Onebit, make=timed),
        lambda groups, transport, steps: ShardedOnebitAdam(groups, transport=transport, differences=differences),
        phases=phases,
    )


WAYS = {
    way.name: way
    for way in (
        _alone(),
        _with_muon(_alone(), f"{ALONE}, Muon", _muon),
        Way("DDP float32", Ddp, _dense, is_one_worker=True, needs_group=True),
        Way("DDP bfloat16", DdpBfloat16, loss_of="DDP float32", needs_group=True),
        _clipped(Way("DDP bfloat16", DdpBfloat16, loss_of="DDP float32", needs_group=True)),
        Way(
            "Muon, DDP bfloat16", _MuonInBfloat16, _muon,
            is_one_worker=True, needs_group=True, groups=muon_groups, time_of="DDP bfloat16",
        ),
        _power_sgd(1),
        _clipped(_power_sgd(1)),
        _power_sgd(4),
        _demo(),
        *_DEEPSPEED,
        _local("DiLoCo fp32", 32, IdentityCodec(), NESTEROV),
        *(_local("DiLoCo int8", every, Int8Codec(), NESTEROV) for every in (8, 32, 128)),
        *(
            _local(f"DiLoCo int8, outer {text}", every, Int8Codec(), outer, time_of=f"DiLoCo int8, H = {every}")
            for text, outer in (("1 and 0", (1.0, 0.0)), (".7 and .6", (0.7, 0.6)))
            for every in (8, 32, 128)
        ),
        # As MuLoCo (arXiv 2505.23725) in DiLoCo's traffic; its own two bits with error feedback are not among the ways.
        *(_local("DiLoCo int8", every, Int8Codec(), (0.7, 0.6), inner=onebit.Muon) for every in (8, 32)),
        _ours("OnebitAdam", onebit.OnebitAdam, _ADAM),
        _ours("OnebitAdam, clipped", onebit.OnebitAdam, _ADAM, {"max_grad_norm": 1e-3}, max_grad_norm=1.0),
        _ours("OnebitAdam, buckets of 64 MiB", onebit.OnebitAdam, _ADAM, bucket_cap_mb=64.0),
        _ours("OnebitAdam, eight-bit gradients", onebit.OnebitAdam, _ADAM, warmup_codec=Int8Codec()),
        _ours("OnebitAdam, delay 1", onebit.OnebitAdam, _ADAM, delay=1),
        _ours("ZeroOneAdam", onebit.ZeroOneAdam, ("variance", "compressed"), _ZERO_ONE),
        _zero_one_local(8),
        _onebit_muon(),
        _sharded("int4"),
        _sharded("sign"),
        _sharded("int4", stage=2),
        _sharded("sign", stage=2),
        *(_local("local steps in one bit", every, SignCodec()) for every in (8, 32, 128)),
        *(
            _local("local steps in one bit", every, SignCodec(), start_every=often)
            for every, often in ((8, 1), (32, 4))
        ),
        _local("local steps in one bit, hidden", 32, SignCodec(), delay=16),
        _local("local steps in one bit, hidden", 32, SignCodec(), delay=16, correction_steps=80),
        # A round of 25 M parameters takes 5 s at 10 Mbit/s: 14 steps of .38 s.
        _local("local steps in one bit, hidden", 16, SignCodec(), delay=14),
        _local("local steps in one bit, hidden", 16, SignCodec(), delay=14, correction_steps=80),
        *(
            _local("local steps in one bit", every, SignCodec(), start_every=often, correction_steps=80)
            for every, often in ((8, 0), (32, 0), (32, 4))
        ),
        *(
            _local("local steps in one bit", every, SignCodec(), start_every=often, inner=onebit.Muon)
            for every, often in ((8, 1), (32, 4))
        ),
    )
}  # fmt: skip
