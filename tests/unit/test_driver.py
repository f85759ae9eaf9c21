"""The driver of buckets' steps: when they exchange, where they meet, and what an error leaves behind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from onebit.comm import SimTransport
from onebit.step.bucket_step import BucketStep, Decision, Ready
from onebit.step.driver import TRANSITIONS, Driver, StepState, moved
from onebit.step.stats import WaitClock

CPU = torch.device("cpu")


@dataclass
class FakeBucket:
    index: int
    device: torch.device = CPU


class FakeWork:
    def __init__(self, said: list[str], name: str, is_ready: bool = True):
        self._said, self._name, self._is_ready = said, name, is_ready
        said.append(f"launch {name}")

    def wait(self) -> None:
        self._said.append(f"wait {self._name}")

    def is_ready(self) -> bool:
        return self._is_ready


def exchanging(said: list[str], index: int, works: int, *, fails: bool = False) -> BucketStep:
    """Meets the others first, then exchanges."""
    decision = yield Ready()
    said.append(f"{index} hears {decision.clip_factor}")
    for k in range(works):
        yield FakeWork(said, f"{index}.{k}")
    if fails:
        raise RuntimeError("spoilt")


def test_buckets_exchange_behind_the_decision_a_few_at_a_time() -> None:
    """A bucket hears of the decision when it is its turn: what it encodes is not held longer than needed."""
    said: list[str] = []
    driver: Driver = Driver(SimTransport(), 2, WaitClock())
    driver.begin()
    for index in range(5):
        driver.launch(FakeBucket(index), exchanging(said, index, 2))
    assert said == [] and len(driver.tasks) == 5
    driver.commit(Decision([], 0.5))
    assert len(driver.tasks) == 0
    heard = [said.index(f"{index} hears 0.5") for index in range(5)]
    assert heard == sorted(heard) and said.index("wait 0.0") < heard[4]
    for index in range(5):
        order = [f"launch {index}.0", f"wait {index}.0", f"launch {index}.1", f"wait {index}.1"]
        assert [each for each in said if each in order] == order


def test_steps_that_meet_nobody_are_brought_to_their_end() -> None:
    said: list[str] = []

    def alone(index: int) -> BucketStep:
        for k in range(index):
            yield FakeWork(said, f"{index}.{k}")

    driver: Driver = Driver(SimTransport(), 2, WaitClock())
    driver.begin()
    for index in range(3):
        driver.launch(FakeBucket(index), alone(index))
    assert said == ["launch 1.0", "launch 2.0", "wait 1.0"]  # the bucket before goes on when the next begins
    driver.finish()
    assert len(driver.tasks) == 0 and said[3:] == ["wait 2.0", "launch 2.1", "wait 2.1"]


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_a_phase_is_launched_with_the_first_of_the_bucket_so_many_behind(phases: int) -> None:
    """The first is still on the wire then, so that it carries something while the next phase is made."""
    said: list[str] = []

    def step(index: int) -> BucketStep:
        for k in range(phases):
            yield FakeWork(said, f"{index}.{k}")

    driver: Driver = Driver(SimTransport(), phases, WaitClock())
    driver.begin()
    for index in range(4):
        driver.launch(FakeBucket(index), step(index))
    launched = [each.removeprefix("launch ") for each in said if each.startswith("launch")]
    assert launched == [f"{index - k}.{k}" for index in range(4) for k in range(min(phases, index + 1))]


@pytest.mark.parametrize("works", [0, 1])
def test_a_step_that_fails_leaves_nothing_launched(works: int) -> None:
    """Otherwise its optimizer could take in no checkpoint."""
    driver: Driver = Driver(SimTransport(), 2, WaitClock())
    driver.begin()
    for index in range(2):
        driver.launch(FakeBucket(index), exchanging([], index, works, fails=index == 1))
    with pytest.raises(RuntimeError, match="spoilt"):
        driver.commit(Decision([]))
    assert len(driver.tasks) == 0


def test_the_documentation_shows_every_transition_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    state, shown, meanings = "", {}, {}
    for cells in re.findall(r"^\| (.*?) ?\| `(\w+)` \| `([A-Z]+)` \|", page, re.MULTILINE):
        if cells[0]:
            state, meaning = re.fullmatch(r"`([A-Z]+)`: (.*)", cells[0]).groups()
            meanings[state] = meaning
        shown[StepState[state], cells[1]] = StepState[cells[2]]
    assert shown == TRANSITIONS
    assert meanings == {state.name: state.value for state in StepState}


def test_every_state_is_left_and_reached_and_nothing_is_written_on_the_way_to_a_skip() -> None:
    for state in StepState:
        assert state in {before for before, _ in TRANSITIONS} and state in TRANSITIONS.values()
    assert {after for (_, event), after in TRANSITIONS.items() if event in ("skip", "commit")} == {StepState.IDLE}


@pytest.mark.parametrize("event", ["launch", "meet", "commit", "suspend", "resume", "resend"])
def test_what_is_not_in_the_table_is_refused(event: str) -> None:
    with pytest.raises(AssertionError, match=f"cannot {event} when none has begun"):
        moved(StepState.IDLE, event)
