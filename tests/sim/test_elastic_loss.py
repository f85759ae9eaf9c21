"""4 -> 2 -> 8 ranks: the loss goes on as if nothing had happened, and it would not if what is owed were lost.

All ranks read the same batches. What is sent and what is owed is then the same whatever the number of ranks (but for
what an own gradient weighs in its denominator), so that a run of 4 ranks and one that changes to 2 and to 8 differ in
what the change does to the state. Where ranks read apart they also differ in the noise of compression, by more than
the bound: as two runs of 4 ranks do to which the same batches are dealt otherwise.
"""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
from study.catalog import load_task

import onebit
from onebit.comm import SimTransport, run_ranks

pytestmark = pytest.mark.slow

STEPS, CUTS = 150, (0, 68, 108, 150)
PEAK = 4e-3


def lr_at(step: int) -> float:
    """Linear over the first tenth, then a cosine to a tenth of the peak."""
    warmup = STEPS // 10
    if step < warmup:
        return PEAK * (step + 1) / warmup
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))))


@cache
def run(worlds: tuple[int, ...], forgets: bool = False) -> tuple[dict, list[dict], list[float]]:
    """(weights, states, losses) after as many parts of the run as there are worlds. forgets: drops what is owed."""
    weights, states, losses = run(worlds[:-1], forgets) if len(worlds) > 1 else ({}, [], [])
    if forgets:
        states = copy.deepcopy(states)
        for entry in (entry for state in states for entry in state["state"].values()):
            if "worker_error" in entry:
                entry["worker_error"].zero_()
    span = range(CUTS[len(worlds) - 1], CUTS[len(worlds)])

    def work(transport: SimTransport) -> tuple[dict, dict, list[float]]:
        task = load_task("digits")
        model = task.build(0)
        optimizer = onebit.OnebitAdam(model.parameters(), freeze_step=40, transport=transport)
        if weights:
            model.load_state_dict(weights)
            optimizer.load_state_dicts(states)
        seen = []
        for step in span:
            optimizer.param_groups[0]["lr"] = lr_at(step)
            loss = task.loss(model, task.batch(0, step, 0, 64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), seen

    ranks = run_ranks(worlds[-1], work)
    return ranks[0][0], [state for _, state, _ in ranks], losses + ranks[0][2]


def gap(worlds: tuple[int, ...], forgets: bool = False) -> float:
    """Of the mean loss from the first change on, against the run of four ranks."""
    losses, uninterrupted = (run(*of)[2] for of in ((worlds, forgets), ((4, 4, 4),)))
    assert sum(uninterrupted[-10:]) < 0.5 * sum(uninterrupted[:10])
    return sum(losses[CUTS[1] :]) / sum(uninterrupted[CUTS[1] :]) - 1.0


def test_4_to_2_to_8_ranks_is_the_uninterrupted_run_to_a_tenth_of_a_percent() -> None:
    """Measured: -0.009 % (2026-11); 0/1 Adam +0.047 %, LAMB +0.005 %."""
    assert abs(gap((4, 2, 8))) < 1e-3


def test_it_would_be_seen_if_what_is_owed_were_lost() -> None:
    """Measured: +2.0 % (2026-11)."""
    assert gap((4, 4, 4), forgets=True) > 5e-3
