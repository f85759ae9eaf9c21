"""Numeric storms: gradients that are huge, tiny, zero, not finite, on one rank or on all; a learning rate of 0.

Every optimizer trains a toy problem through a storm and on from it: the one-bit family on three simulated ranks, the
dense optimizers in the engine on two processes. Promised: parameters stay finite and the same on all ranks, they go on
moving, and stand still at learning rate 0; the loss is at most half above that of the dense optimizer under the same
storm (AdamW, for LAMB's forms Lamb if that has more), or above that of the same optimizer in a run without the storm's
steps: these may cost time; or an error names the rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from faults.case import AS_PROMISED, SILENT, Case, End, Outcome, Promise, Tools, judge
from faults.ranks import Rank, fork_ranks, sim_ranks
from faults.training import OPTIMIZERS, Spoil, Training
from onebit import zero
from onebit.comm import SimTransport
from onebit.zero import grid as grids
from onebit.zero.sharded.optimizer import ShardedOnebitOptimizer

_RANKS, _VICTIM = 3, 1
_MOST = 1.5  # times the loss that a storm is held to: so far apart are two seeds of a one-bit run of 110 steps
_AFTER = 110  # steps from the storm's end on: what a variance with β2 = 0.99 remembers has faded


@dataclass(frozen=True)
class Storm:
    """spoil(step since its begin, rank, gradients); lasts so many steps. lr: what it is set to meanwhile."""

    spoil: Callable[[int, int, list[Tensor]], None]
    steps: int = 1
    lr: float | None = None


def _scaled(factor: float, rank: int | None = None) -> Callable[[int, int, list[Tensor]], None]:
    """All gradients times a factor; of one rank, or of all."""

    def spoil(step: int, here: int, gradients: list[Tensor]) -> None:
        for g in gradients if rank in (None, here) else []:
            g.mul_(factor)

    return spoil


def _filled(value: float, rank: int | None = None) -> Callable[[int, int, list[Tensor]], None]:
    def spoil(step: int, here: int, gradients: list[Tensor]) -> None:
        for g in gradients if rank in (None, here) else []:
            g.fill_(value)

    return spoil


def _element(value: float, rank: int | None = _VICTIM) -> Callable[[int, int, list[Tensor]], None]:
    """One element of the second parameter."""

    def spoil(step: int, here: int, gradients: list[Tensor]) -> None:
        if rank in (None, here):
            gradients[1].view(-1)[3] = value

    return spoil


def _alternating(step: int, here: int, gradients: list[Tensor]) -> None:
    for g in gradients:
        g.mul_(1e4 if step % 2 else -1e4)


def _nothing(step: int, here: int, gradients: list[Tensor]) -> None:
    """The gradients as they are."""


STORMS: dict[str, Storm] = {
    "1e30 on all ranks, 1 step": Storm(_scaled(1e30)),
    "1e30 on all ranks, 50 steps": Storm(_scaled(1e30), 50),
    "1e30 on one rank, 1 step": Storm(_scaled(1e30, _VICTIM)),
    "1e30 on one rank, 50 steps": Storm(_scaled(1e30, _VICTIM), 50),
    "1e15 on one rank, 1 step": Storm(_scaled(1e15, _VICTIM)),
    "1e8 on one rank, 1 step": Storm(_scaled(1e8, _VICTIM)),
    "1e4 on one rank, 1 step": Storm(_scaled(1e4, _VICTIM)),
    "1e4 on one rank, 5 steps": Storm(_scaled(1e4, _VICTIM), 5),
    "1e4 on all ranks, 1 step": Storm(_scaled(1e4)),
    "1e4 on one rank, 50 steps": Storm(_scaled(1e4, _VICTIM), 50),
    "1e4 of alternating sign on all ranks, 20 steps": Storm(_alternating, 20),
    "30 on one rank, 50 steps": Storm(_scaled(30.0, _VICTIM), 50),
    "1e-30 on all ranks, 50 steps": Storm(_scaled(1e-30), 50),
    "1e-30 on one rank, 50 steps": Storm(_scaled(1e-30, _VICTIM), 50),
    "1e-44 on all ranks, 50 steps": Storm(_filled(1e-44), 50),
    "zeros on all ranks, 50 steps": Storm(_filled(0.0), 50),
    "3e38 in one element of one rank, 1 step": Storm(_element(3e38)),
    "-3e38 in one element of all ranks, 3 steps": Storm(_element(-3e38, None), 3),
    "NaN on one rank, 1 step": Storm(_filled(math.nan, _VICTIM)),
    "NaN in one element of one rank, 50 steps": Storm(_element(math.nan), 50),
    "an infinity in one element of one rank, 1 step": Storm(_element(math.inf)),
    "learning rate 0, 50 steps": Storm(_nothing, 50, lr=0.0),
    "learning rate 0 and 1e30 on one rank, 20 steps": Storm(_scaled(1e30, _VICTIM), 20, lr=0.0),
}
_BEGINS = {"in the warm-up": 4, "behind it": 30}
_CALM = Storm(_nothing)


class Stormy(Protocol):
    """What a storm needs of a training; see `faults.training.Training`."""

    params: list
    optimizer: torch.optim.Optimizer

    def step(self, number: int, spoil: Spoil = ...) -> None: ...

    def settle(self) -> None: ...

    def loss(self) -> float: ...

    def fingerprint(self) -> str: ...


def _weather(training: Stormy, storm: Storm, begin: int, here: int, rank: Rank) -> dict:
    """Train through it; what became of the parameters. here: this rank."""
    end, lr = begin + storm.steps, training.optimizer.param_groups[0]["lr"]
    before, masters, loss, is_still = _copies(training), _masters(training), math.nan, True
    for step in range(end + _AFTER):
        is_storm = begin <= step < end
        if step == begin:
            loss = training.loss()
            before, masters = _copies(training), _masters(training)
            rank.note_fault()
        if storm.lr is not None:
            for group in training.optimizer.param_groups:
                group["lr"] = storm.lr if is_storm else lr
        training.step(step, lambda step, gradients, s=is_storm: s and storm.spoil(step - begin, here, gradients))
        if is_storm and storm.lr == 0.0:
            is_still = is_still and all(map(torch.equal, masters, _masters(training)))
        if step == end + _AFTER // 2:
            before = _copies(training)
    bits = training.fingerprint()
    stats = getattr(training.optimizer, "stats", None)
    return {
        "bits": bits, "loss": training.loss(), "loss_before": loss, "skipped": getattr(stats, "skipped_steps", 0),
        "is_still": is_still, "moved": _moved(training, before),
    }  # fmt: skip


def _copies(training: Stormy) -> list[Tensor]:
    training.settle()
    return [p.detach().clone() for p in training.params]


def _masters(training: Stormy) -> list[Tensor]:
    """What a learning rate of 0 leaves alone: of sharded optimizers the owners' values, which replicas approach."""
    if isinstance(training.optimizer, ShardedOnebitOptimizer):
        return [bucket.owned.clone() for bucket in training.optimizer.buckets]
    return [p.detach().clone() for p in training.params]


def _moved(training: Stormy, before: list[Tensor]) -> float:
    """The share of elements that are no longer what they were."""
    pairs = list(zip(training.params, before, strict=True))
    return sum(int((p.detach() != q).sum()) for p, q in pairs) / sum(q.numel() for q in before)


def _on_simulated_ranks(name: str, options: dict, storm: Storm, begin: int) -> dict[int, End]:
    def work(transport: SimTransport, rank: Rank) -> dict:
        logging.getLogger("onebit").setLevel(logging.ERROR)
        return _weather(Training(name, transport, **options), storm, begin, transport.rank, rank)

    return sim_ranks(_RANKS, work)


def _storms(name: str, options: dict, tools: Tools) -> Iterator[Outcome]:
    for storm, begin in tools.some([(storm, begin) for storm in STORMS for begin in _BEGINS], 4):
        ends = _on_simulated_ranks(name, options, STORMS[storm], _BEGINS[begin])
        calm = _on_simulated_ranks(name, options, _CALM, _BEGINS[begin])
        yield _judge(f"{storm}, {begin}", ends, max(_dense_loss(name, STORMS[storm], _BEGINS[begin]), _loss(calm)))


@cache
def _dense_loss(name: str, storm: Storm, begin: int) -> float:
    """AdamW's under the same storm; for LAMB's forms Lamb's if that is more. Steps that are not finite are skipped."""
    kinds = ("AdamW", "Lamb") if "Lamb" in name else ("AdamW",)
    return max(_loss(_on_simulated_ranks(kind, {}, storm, begin)) for kind in kinds)


def _loss(ends: dict[int, End]) -> float:
    found = ends[0].value
    return float(found["loss"]) if isinstance(found, dict) else 0.0


def _judge(fault: str, ends: dict[int, End], held_to: float) -> Outcome:
    if any(end.what != "returned" for end in ends.values()):
        # Of a storm on all ranks any of them may be named.
        return judge(fault, ends, Promise("Error: ", frozenset({_VICTIM}), frozenset(ends)))
    found: list[dict] = [end.value for end in ends.values()]  # type: ignore[misc]
    first = found[0]
    text = (
        f"loss {first['loss_before']:.3g} before, {first['loss']:.3g} after, where {held_to:.3g} is expected; "
        f"{first['skipped']} steps skipped"
    )
    wrong = ""
    if any(one["bits"] == "nan" for one in found):
        wrong = "parameters are not finite"
    elif len({one["bits"] for one in found}) > 1:
        wrong = "replicas differ"
    elif not all(one["is_still"] for one in found):
        wrong = "parameters moved at learning rate 0"
    elif first["moved"] < 0.5:
        wrong = f"only {first['moved']:.0%} of the parameters move any more"
    elif not first["loss"] <= _MOST * held_to:
        wrong = "training does not recover as a dense one"
    return Outcome(fault, SILENT, f"{wrong}; {text}") if wrong else Outcome(fault, AS_PROMISED, text)


# ---------------------------------------------------------------- the engine's dense optimizers


class _EngineTraining(Training):
    """The same problem in the engine: the loss is the product of parameters and the gradients they shall have."""

    def __init__(self, name: str, grid: grids.Grid, clipping: float):
        self.transport = grid.world
        self.make_problem()
        params = {"lr": 0.02, "betas": [0.9, 0.99], "weight_decay": 0.0}
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": clipping,
            "optimizer": {"type": name, "params": params}, "zero_optimization": {"stage": 0},
        }  # fmt: skip
        module = nn.Module()
        module.params = nn.ParameterList(self.params)
        self.engine, self.optimizer, *_ = zero.initialize(model=module, config=config, grid=grid)

    def step(self, number: int, spoil: Spoil = lambda step, gradients: None) -> None:
        gradients = self.gradients(number)
        spoil(number, gradients)
        self.engine.backward(sum((p * g).sum() for p, g in zip(self.params, gradients, strict=True)))
        self.engine.step()


def _engine_work(name: str, clipping: float, faults: list[tuple[str, str]], rank: Rank) -> list[dict | str]:
    """All storms in one start of the ranks."""
    torch.set_num_threads(1)
    logging.getLogger("onebit").setLevel(logging.ERROR)
    grid, found = grids.start(timeout_s=60.0, shard=1), []
    for storm, begin in faults:
        try:
            training = _EngineTraining(name, grid, clipping)
            found.append(_weather(training, STORMS[storm], _BEGINS[begin], grid.world.rank, rank))
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    grid.close()
    return found


def _engine_storms(name: str, clipping: float, tools: Tools) -> Iterator[Outcome]:
    faults = tools.some([(storm, begin) for storm in STORMS for begin in _BEGINS], 4)
    ends = fork_ranks([partial(_engine_work, name, clipping, faults)] * 2, patience_s=300.0)
    if any(end.what != "returned" for end in ends.values()):
        yield judge("the storms one after the other", ends, Promise())
        return
    for k, (storm, begin) in enumerate(faults):
        each = {rank: end.value[k] for rank, end in ends.items()}  # type: ignore[index]
        of_ranks = {
            r: End("raised", v, seconds=0.0) if isinstance(v, str) else End("returned", value=v)
            for r, v in each.items()
        }
        calm = _on_simulated_ranks(name, {}, _CALM, _BEGINS[begin])
        yield _judge(f"{storm}, {begin}", of_ranks, max(_dense_loss(name, STORMS[storm], _BEGINS[begin]), _loss(calm)))


def cases() -> Iterator[Case]:
    promised = "finite, the same on all ranks, moving, still at rate 0; as good as dense; or an error names the rank"
    injected = "gradients or rate of one rank or all, for 1 to 50 steps, in the warm-up and behind it"
    observed = f"parameters and loss {_AFTER} steps later"
    for clipping in (0.0, 1.0):
        suffix = ", clipped" if clipping else ""
        for name in (name for name, kind in OPTIMIZERS.items() if not kind.is_dense):
            yield Case(
                f"{name}{suffix}", promised, injected, observed,
                partial(_storms, name, {"max_grad_norm": clipping} if clipping else {}),
                is_quick=name in ("OnebitAdam", "ShardedOnebitAdam") and not clipping, cost_s=30.0,
            )  # fmt: skip
        for name in ("AdamW", "Lamb"):
            yield Case(
                f"engine, {name}{suffix}",
                promised,
                injected,
                observed,
                partial(_engine_storms, name, clipping),
                cost_s=30.0,
            )
