"""Ranks that do not do the same: options, parameters, rates, steps, state. Simulated ranks, every optimizer.

Promised is an error on every rank that names the odd one, before anything is written; where what differs does not
matter, the same result as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from faults.case import AS_PROMISED, SILENT, Case, End, Outcome, Promise, Tools, judge
from faults.ranks import Rank, sim_ranks
from faults.training import OPTIMIZERS, Training
from onebit.comm import SignCodec, SimTransport

RANKS, STEPS, VOTE_EVERY = 3, 24, 5
_TIMEOUT_S = 4.0
_LATEST_S = 2 * _TIMEOUT_S + 10.0  # seconds behind the fault: a rank waits for the odd one, and this machine is busy


def _nothing(training: Training, step: int) -> None:
    """As it is."""


@dataclass(frozen=True)
class Odd:
    """What one rank does otherwise.

    options: given to its optimizer. build: edits its parameters before that. edit: its training, before step `at` and
    (unless `once`) all later ones. steps: how often it takes step `at`. last: it has no batches from there on.
    harmless: the result is promised to be as ever; like: as if the rank did this instead. only: the optimizers that it
    concerns.
    """

    options: dict[str, object] = field(default_factory=dict)
    build: Callable[[Training], None] | None = None
    edit: Callable[[Training, int], None] = _nothing
    once: bool = True
    steps: int = 1
    at: int = 3
    harmless: bool = False
    like: Odd | None = None
    only: tuple[str, ...] = ()
    last: int = STEPS


_REPLICATED = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
_FREEZING = ("OnebitAdam", "OnebitLamb")
_SHARDED = ("ShardedOnebitAdam", "ShardedOnebitLamb", "ShardedZeroOneAdam")


def _set(name: str, value: object) -> Callable[[Training, int], None]:
    def edit(training: Training, step: int) -> None:
        for group in training.optimizer.param_groups:
            group[name] = value

    return edit


def _move_one(training: Training, step: int) -> None:
    with torch.no_grad():
        training.params[2].view(-1)[5] += 1e-3


def _state(*names: str) -> Callable[[Training, int], None]:
    """Another value in a piece of state that the ranks share, through state_dict and back."""

    def edit(training: Training, step: int) -> None:
        state = training.optimizer.state_dict()
        for entries in state["state"].values():
            for name in names:
                if isinstance(entries.get(name), torch.Tensor) and entries[name].numel() > 1:
                    entries[name] = entries[name].clone().mul_(1.5)
        training.optimizer.load_state_dict(state)

    return edit


_FROZEN = 1


def _freeze(training: Training, step: int) -> None:
    training.params[_FROZEN].requires_grad_(False)
    training.params[_FROZEN].grad = None


def _leave_gradient_out(training: Training, step: int) -> None:
    """Of the parameter that `_freeze` freezes."""
    gradients = training.gradients
    training.gradients = lambda number: [None if k == _FROZEN else g for k, g in enumerate(gradients(number))]


def _add_group(training: Training, step: int) -> None:
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(64))]})


AT_CONSTRUCTION: dict[str, Odd] = {
    "lr": Odd({"lr": 0.01}),
    "betas": Odd({"betas": (0.8, 0.99)}),
    "eps": Odd({"eps": 1e-6}),
    "weight_decay": Odd({"weight_decay": 0.5}),
    "max_grad_norm": Odd({"max_grad_norm": 1.0}),
    "check_replicas_every": Odd({"check_replicas_every": 7}),
    "bucket_cap_mb": Odd({"bucket_cap_mb": 0.001}),
    "freeze_step": Odd({"freeze_step": 6}, only=_FREEZING),
    "var_freeze_step": Odd({"var_freeze_step": 9}, only=("ZeroOneAdam",)),
    "local_step_clipper": Odd({"local_step_clipper": 2}, only=("ZeroOneAdam",)),
    "block": Odd({"codec": SignCodec(64)}, only=_REPLICATED),
    "scale": Odd({"codec": SignCodec(scale="mean_abs")}, only=_REPLICATED),
    "error_dtype": Odd({"error_dtype": torch.bfloat16}, only=_REPLICATED),
    "compression": Odd({"compression": "always"}, only=_REPLICATED),
    "overlap": Odd({"overlap": False}, only=_REPLICATED),
    "stage": Odd({"stage": 2}, only=_SHARDED),
    "differences": Odd({"differences": "sign"}, only=_SHARDED),
    "sharded warmup_steps": Odd({"warmup_steps": 5}, only=_SHARDED),
    "momentum_dtype": Odd({"momentum_dtype": torch.float32}, only=_SHARDED),
    "initial values": Odd(build=lambda training: _replace(training, 1, torch.full((33,), 9.0)), harmless=True),
    "a shape": Odd(build=lambda training: _replace(training, 1, torch.ones(34))),
    "the order": Odd(build=lambda training: training.params.reverse()),
    "one parameter less": Odd(build=lambda training: training.params.__delitem__(3)),
    "a dtype": Odd(build=lambda training: _replace(training, 1, torch.ones(33, dtype=torch.bfloat16))),
    "a frozen parameter": Odd(build=lambda training: _freeze(training, 0)),
}

DURING: dict[str, Odd] = {
    "lr, from step 10": Odd(edit=_set("lr", 0.013), at=10, once=False),
    "lr, in one step": Odd(edit=_set("lr", 0.013), at=10),
    "betas": Odd(edit=_set("betas", (0.85, 0.99)), at=10),
    "weight_decay": Odd(edit=_set("weight_decay", 0.5), at=10),
    "lr that is NaN": Odd(edit=_set("lr", float("nan")), at=10),
    "one number of a parameter": Odd(edit=_move_one, at=10),
    "the variance": Odd(edit=_state("denominator", "exp_avg_sq", "variance"), at=13, only=_REPLICATED),
    "a parameter frozen": Odd(edit=_freeze, at=10, like=Odd(edit=_leave_gradient_out, at=10)),
    "a group added": Odd(edit=_add_group, at=10),
    "a step left out, in the warm-up": Odd(steps=0, at=3),
    "a step left out, behind it": Odd(steps=0, at=14),
    "a step taken twice, in the warm-up": Odd(steps=2, at=3),
    "a step taken twice, behind it": Odd(steps=2, at=14),
    "fewer batches": Odd(last=16),
    "fewer batches, in the warm-up": Odd(last=4),
}


def _replace(training: Training, k: int, values: torch.Tensor) -> None:
    training.params[k] = torch.nn.Parameter(values)
    if values.shape != training.target[k].shape:
        training.target[k] = torch.ones_like(values)


def train(name: str, odd: Odd, victim: int, transport: SimTransport, rank: Rank) -> str:
    """One rank's training, in which the victim is odd; its parameters' fingerprint."""
    is_odd = transport.rank == victim
    if is_odd and (odd.options or odd.build):
        rank.note_fault()
    options = {"check_replicas_every": VOTE_EVERY} | (odd.options if is_odd else {})
    training = Training(name, transport, before=odd.build if is_odd else None, **options)
    for step in range(odd.last if is_odd else STEPS):
        times = 1
        if is_odd and (step == odd.at or (step > odd.at and not odd.once)):
            if odd.edit is not _nothing or odd.steps != 1:
                rank.note_fault()
            odd.edit(training, step)
            times = odd.steps
        for _ in range(times):
            training.step(step)
    if is_odd and odd.last < STEPS:
        rank.note_fault()
    return training.fingerprint()


def _run(name: str, table: dict[str, Odd], tools: Tools) -> Iterator[Outcome]:
    plain = sim_ranks(RANKS, lambda transport, rank: train(name, Odd(), -1, transport, rank), timeout_s=_TIMEOUT_S)
    expected = plain[0].value
    if any(end.what != "returned" or end.value != expected for end in plain.values()):
        raise RuntimeError(f"{name} fails without any fault: {plain}")
    mine = [what for what, odd in table.items() if not odd.only or name in odd.only]
    for what in tools.some(mine, 5):
        for victim in tools.some([0, RANKS - 1], 1):
            odd = table[what]

            def ends_of(odd: Odd, victim: int = victim) -> dict[int, End]:
                return sim_ranks(
                    RANKS, lambda transport, rank: train(name, odd, victim, transport, rank), timeout_s=_TIMEOUT_S
                )

            promised = expected if odd.like is None else ends_of(odd.like)[0].value
            yield _judge(f"{what} on rank {victim}", ends_of(odd), odd, victim, promised)


def _judge(fault: str, ends: dict[int, End], odd: Odd, victim: int, expected: object) -> Outcome:
    if odd.like is not None:
        return judge(fault, ends, Promise(), is_right=lambda rank, value: value == expected)
    if odd.harmless:  # rank 0's values count
        return judge(fault, ends, Promise(), is_right=lambda rank, value: value == expected or victim == 0)
    if all(end.what == "returned" for end in ends.values()):
        same = len({end.value for end in ends.values()}) == 1
        if same and all(end.value == expected for end in ends.values()):
            return Outcome(fault, AS_PROMISED, "no effect")
        return Outcome(fault, SILENT, "the replicas are the same" if same else "the replicas differ")
    if odd.steps > 1:
        # The others cannot know: its second step is their next one. It is left alone with its last.
        others = {rank: end for rank, end in ends.items() if rank != victim}
        told = judge(fault, {victim: ends[victim]}, Promise("Error: ", frozenset(), frozenset(others), _LATEST_S))
        same = len({end.value for end in others.values()}) == 1
        return told if told.verdict != AS_PROMISED or same else Outcome(fault, SILENT, "the replicas differ")
    # Ranks that are told what each of them has are all named; the odd one among them.
    everybody = frozenset(range(RANKS))
    return judge(fault, ends, Promise("Error: ", frozenset({victim}), everybody, _LATEST_S), victims={victim})


def cases() -> Iterator[Case]:
    for name in (name for name, kind in OPTIMIZERS.items() if not kind.is_dense):
        for when, table in (("at construction", AT_CONSTRUCTION), ("while it trains", DURING)):
            yield Case(
                f"{name}, {when}",
                "an error on every rank that names the odd one; where it does not matter, the same bits",
                "one rank, the first or the last of three, has another option, parameter, rate, state, number of steps",
                f"errors, or the parameters after {STEPS} steps; votes every {VOTE_EVERY}",
                partial(_run, name, table),
                is_quick=name == "OnebitAdam",
                cost_s=25.0,
            )
