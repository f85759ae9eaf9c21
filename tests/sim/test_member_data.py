"""The data of members that come and go: each sample is seen once, but for those that the log names as in flight."""

from __future__ import annotations

import logging
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from faults.member_runs import Hub, Killed, Run, founded
from test_membership import await_newcomers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import onebit
from onebit.comm import IdentityCodec
from onebit.membership import Members, MemberSampler, MemberStream, Roster, begin
from onebit.membership.members import Standing

INF = float("inf")
NAMES = 26
CLOCK = threading.local()  # each member's clock goes by its micro-batches
NAMED = re.compile(r"positions ([\dto, ]+)(?:; indices \[([\d, ]+)\])?")
SERVER = multiprocessing.get_context("forkserver")  # a fork of a process with threads may hang; the server has none
SERVER.set_forkserver_preload(["torch", "onebit"])


class Numbers(Dataset[int]):
    """A dataset whose samples are their indices."""

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same without indices. begins: the position at which each reading began, if it can skip."""

    def __init__(self, samples: int, first: int = 0):
        self.samples, self.first = samples, first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.samples))


class Skipping(Stream):
    def skip(self, n: int) -> Skipping:
        return Skipping(self.samples, n)


@dataclass
class Data:
    """How the members of a test read, and how many steps they take.

    The gradient of a sample is 1 at its index, so without momentum of steps before it, the momentum of a committed step
    tells which samples were in it: an oracle that neither asks the sampler nor trusts those that died.
    """

    samples: int = 29
    batch_size: int = 3
    micro_batches: int = 1
    speeds: str = ""  # of balanced members, by the first letters of the alphabet; others have speed 1
    steps: int = 24
    workers: int = 0
    source: Callable[[int], Iterable[int]] = Numbers
    loader: Callable[..., DataLoader[Any]] = DataLoader
    options: dict[str, Any] = field(default_factory=dict)
    newcomers: int = 0
    leaves: dict[str, int] = field(default_factory=dict)
    stops: dict[str, int] = field(default_factory=dict)

    def open(self, members: Members) -> tuple[MemberSampler, DataLoader[Any]]:
        mean = {"micro_batches": self.micro_batches, "balanced": bool(self.speeds)}
        sampler = MemberSampler(members, self.samples, self.batch_size, seed=5, **mean)
        source, options = self.source(self.samples), {"num_workers": self.workers, **self.options}
        if self.workers:
            options["multiprocessing_context"] = SERVER
        if isinstance(source, Numbers):
            return sampler, self.loader(source, batch_sampler=sampler, **options)
        return sampler, self.loader(MemberStream(source, sampler), batch_size=self.batch_size, **options)

    def train(self, members: Members, hub: Hub) -> tuple[dict[int, Tensor], int]:
        """How often each sample was in each step, and the position after the last."""
        CLOCK.now = 0.0
        sampler, loader = self.open(members)
        p = nn.Parameter(torch.zeros(self.samples + NAMES))
        optimizer = onebit.OnebitAdam(
            [p], lr=1e-3, betas=(0.0, 0.9), transport=members, freeze_step=10**6,
            warmup_codec=IdentityCodec(), compression="always",
        )  # fmt: skip
        begin(optimizer, sampler=sampler)
        batches = sampler.batches(loader)
        try:
            return self._steps(members, hub, optimizer, sampler, batches), sampler.position
        finally:  # workers that are left to the garbage collector take 5 s each to end
            batches.close()
            loader._iterator = None

    def _is_back(self, members: Members, hub: Hub) -> bool:
        return members.world_size == hub.founders or members.is_awaited()

    def _steps(
        self, members: Members, hub: Hub, optimizer: onebit.OnebitAdam, sampler: MemberSampler, batches: Iterator[Any]
    ) -> dict[int, Tensor]:
        (p,), name, seen = optimizer.param_groups[0]["params"], members.rendezvous.name, dict[int, Tensor]()
        while (step := optimizer.steps_taken()) < self.leaves.get(name, self.steps):
            if self.newcomers and step == 8:
                await_newcomers(members, hub, self.newcomers)
            while self.stops and step == 20 and members.rank == 0 and not self._is_back(members, hub):
                time.sleep(0.005)
            for batch in sampler.step_batches(batches):
                (p[batch].sum() / self.micro_batches).backward()
                CLOCK.now += 1.0 / dict(zip("abcdefgh", map(float, self.speeds), strict=False)).get(name, 1.0)
            p[self.samples + ord(name) - ord("a")].backward()
            if step == self.stops.get(name):
                stop(members)
            optimizer.step()
            mean = optimizer.state[p]["exp_avg"]
            world_size = 1 / mean[self.samples :].max()  # of the step, over the factor of its gradients
            assert mean[: self.samples].sum().item() == pytest.approx(self.batch_size)  # the mean over samples
            counts = mean[: self.samples] * world_size * self.micro_batches
            assert torch.allclose(counts, counts.round(), atol=1e-4)
            seen[optimizer.steps_taken()] = counts.round().long()
            optimizer.zero_grad()
        if name in self.leaves:
            raise Killed
        return seen


def stop(members: Members) -> None:
    """The process gives no signs of life, until the others have gone on."""
    assert members.roster is not None
    members.rendezvous.leave()
    while not members.rendezvous._store.check([f"roster/{members.roster.epoch + 1}"]):
        time.sleep(0.01)
    members.rendezvous._ended.clear()
    threading.Thread(target=members.rendezvous._live, daemon=True).start()


class OneOfThree(Members):
    """Without any transport."""

    rank, world_size, node = 0, 3, None

    def __init__(self, rank: int):
        self.rank, self.roster = rank, Roster(1, ("a", "b", "c"))


def run(data: Data, fuses: list[float], newcomers: dict[str, float] | None = None, timeout_s: float = 20.0) -> Run:
    hub = Hub(len(fuses), timeout_s)
    data.newcomers = data.newcomers and len(newcomers or ())
    its = founded(hub, lambda members: data.train(members, hub), fuses)
    while not hub.networks:
        time.sleep(0.005)  # newcomers must not come as founders
    assert not data.newcomers or hub.holds.wait(60)
    for name, fuse in (newcomers or {}).items():
        its.start(name, fuse)
    return its.join()


def lost(caplog: pytest.LogCaptureFixture) -> tuple[list[int], list[int]]:
    """The positions and the indices that were named."""
    found = [NAMED.search(record.getMessage()) for record in caplog.records if "in flight" in record.getMessage()]
    ranges = [text.split(" to ") for m in found if m for text in m[1].split(", ")]
    positions = [k for first, last in ranges for k in range(int(first), int(last) + 1)]
    return positions, [int(k) for m in found if m and m[2] for k in m[2].split(", ")]


def check(data: Data, its: Run, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Each sample once per epoch, seen or named; the positions that were named."""
    seen, position = its.results["a"]
    assert sorted(seen) == list(range(1, data.steps + 1))
    for others, its_position in its.results.values():
        assert its_position == position and all(torch.equal(seen[step], counts) for step, counts in others.items())
    positions, indices = lost(caplog)
    if data.source is not Numbers:
        indices = [k % data.samples for k in positions]
    total = sum(seen.values()) + torch.bincount(torch.tensor(indices, dtype=torch.long), minlength=data.samples)
    epochs, rest = divmod(position, data.samples)
    assert sorted(total.tolist()) == [epochs] * (data.samples - rest) + [epochs + 1] * rest
    whole = data.batch_size * (1 if data.speeds else data.micro_batches)
    assert len(positions) == len(set(positions)) and len(positions) % whole == 0
    return positions


@pytest.fixture(autouse=True)
def _hear(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.WARNING, "onebit.membership.sampler")
    monkeypatch.setattr("onebit.membership.sampler.time", SimpleNamespace(monotonic=lambda: CLOCK.now))


@pytest.mark.parametrize("source", [Numbers, Stream, Skipping])
def test_balanced_members_take_what_their_speeds_allow(
    source: Callable[[int], Iterable[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of a member of speed v goes by 1/v per micro-batch: c takes half of all, a and b a quarter each."""
    data = Data(samples=600, source=source, micro_batches=4, speeds="224", batch_size=1)
    its = run(data, [INF] * 3)
    assert check(data, its, caplog) == [] and its.results["a"][1] == 24 * 3 * 4


def test_without_changes_each_epoch_has_each_sample_once(caplog: pytest.LogCaptureFixture) -> None:
    data = Data()
    its = run(data, [INF, INF])
    assert check(data, its, caplog) == [] and its.results["a"][1] == 24 * 2 * 3


@pytest.mark.parametrize("fuse", [61, *(pytest.param(k, marks=pytest.mark.slow) for k in (3, 62, 60.5))])
def test_a_lost_member_leaves_one_share_that_is_named(fuse: float, caplog: pytest.LogCaptureFixture) -> None:
    data = Data()
    its = run(data, [INF, fuse, INF])
    assert len(check(data, its, caplog)) in (0, data.batch_size)


@pytest.mark.parametrize("source", [Numbers, Stream, Skipping])
def test_a_newcomer_draws_after_the_shares_of_the_step(
    source: Callable[[int], Iterable[int]], caplog: pytest.LogCaptureFixture
) -> None:
    data = Data(source=source, micro_batches=2, newcomers=2)
    its = run(data, [INF, INF], {"w": INF, "x": INF})
    assert check(data, its, caplog) == []
    assert its.results["a"][1] == (9 * 2 + 15 * 4) * 6  # all agree in step 9


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2)),
             *(pytest.param(k, marks=pytest.mark.thorough) for k in range(3, 6))]
)  # fmt: skip
def test_random_changes_show_each_sample_once(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Members die at random operations, also while others join, change or die; others come. Tiny datasets too."""
    draw = np.random.default_rng(seed)

    def fuse() -> float:
        return INF if draw.random() < 0.2 else int(draw.integers(10, 500)) / 2

    data = Data(
        samples=int(draw.choice([1, 2, 29, 100])),
        batch_size=int(draw.choice([1, 3])),
        micro_batches=int(draw.choice([1, 2])),
        source=[Numbers, Stream, Skipping][draw.integers(3)],
        steps=50,
        speeds=["", "3152"][draw.integers(2)],
    )
    its = run(data, [INF, fuse(), fuse(), fuse()], {name: fuse() for name in "wxyz"})
    check(data, its, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("source", [Numbers, Stream])
def test_a_member_that_comes_back_reads_on_with_the_others(
    source: Callable[[int], Iterable[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its share of the step in which it was away is in flight, and it has none in the step in which it is back."""
    data = Data(source=source, stops={"b": 10})
    its = run(data, [INF, INF, INF], timeout_s=1.0)
    assert len(check(data, its, caplog)) == data.batch_size and set(its.results) == set("abc")
    assert max(its.hub.networks) == 3 and len(its.results["b"][0]) < data.steps


def three_that_draw(ahead: int) -> list[MemberSampler]:
    """Of three members, each of which has drawn the batch of a step, and this one that of the next."""
    three = [OneOfThree(rank) for rank in range(3)]
    samplers = [MemberSampler(members, 100, 2) for members in three]
    draws = [sampler.batches(DataLoader(Numbers(100), batch_sampler=sampler)) for sampler in samplers]
    for members, sampler in zip(three, samplers, strict=True):
        members.travels = {"sampler": sampler}
    for batches in (*draws, *draws[ahead : ahead + 1]):
        next(batches)
    return samplers


def test_a_step_that_some_have_skipped_and_others_take_again(caplog: pytest.LogCaptureFixture) -> None:
    """a has skipped a step and drawn the next one when c is lost; b has not, and takes it with a's new gradients."""
    a, b, _ = three_that_draw(ahead=0)
    told = [Standing(7, [7], True, False, sampler.leave_world()) for sampler in (a, b)]
    for sampler in (a, b):
        sampler.enter_world(told)
    assert (a.leave_world()[:3], b.leave_world()[:3]) == ([6, 12, 6], [6, 12, -1])
    assert a.position == b.position == 12 and lost(caplog)[0] == [8, 9, 10, 11]


def test_a_member_that_is_back_in_the_step_in_which_it_went_has_no_share(caplog: pytest.LogCaptureFixture) -> None:
    a, b, _ = three_that_draw(ahead=3)
    a.enter_world([Standing(7, [7], True, False, a.leave_world())])
    told = [Standing(7, [7], True, False, a.leave_world()), Standing(7, [7], False, False, b.leave_world())]
    b.load_state_dict(a.state_dict())
    for sampler in (a, b):
        sampler.enter_world(told)
    assert (a.leave_world()[:3], b.leave_world()[:3]) == ([0, 6, 0], [0, 6, -1])
    assert a.position == b.position == 6 and lost(caplog)[0] == [2, 3, 4, 5]


def test_samples_of_a_member_that_is_several_steps_slower_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Local steps: a is in its fourth when c is lost, b in its first. b goes on with its second share, 8 and 9."""
    a, b = (MemberSampler(OneOfThree(rank), 100, 2) for rank in range(2))
    for sampler, steps in ((a, 4), (b, 1)):
        sampler._members.travels = {"sampler": sampler}
        batches = sampler.batches(DataLoader(Numbers(100), batch_sampler=sampler))
        for _ in range(steps):
            next(batches)
    told = [Standing(4, [0], True, False, a.leave_world()), Standing(1, [0], True, False, b.leave_world())]
    for sampler in (a, b):
        sampler.enter_world(told)
    assert b.leave_world()[:3] == [18, 24, 8] and lost(caplog)[0] == [20, 21, 22, 23]
    assert "are of steps that members took over and are not seen: positions 14 to 15; indices" in caplog.text


@pytest.mark.processes
def test_what_workers_have_drawn_ahead_is_drawn_again(caplog: pytest.LogCaptureFixture) -> None:
    """Of a stream; the loader of indices is the one whose workers go on, below."""
    data = Data(workers=2, source=Stream, newcomers=1, leaves={"b": 14})
    its = run(data, [INF, INF], {"w": INF})
    assert len(check(data, its, caplog)) == data.batch_size


@pytest.mark.processes
def test_persistent_workers_may_go_on(caplog: pytest.LogCaptureFixture) -> None:
    data = Data(workers=2, options={"persistent_workers": True, "prefetch_factor": 4}, leaves={"b": 14})
    assert len(check(data, run(data, [INF, INF]), caplog)) == data.batch_size


@pytest.mark.processes
@pytest.mark.parametrize(("source", "workers"), [(Numbers, 2), (Stream, 0)])
def test_torchdatas_loader_reads_the_same(
    source: Callable[[int], Iterable[int]], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    data = Data(workers=workers, source=source, loader=torchdata.StatefulDataLoader, newcomers=1, leaves={"b": 14})
    its = run(data, [INF, INF], {"w": INF})
    assert len(check(data, its, caplog)) == data.batch_size


def test_a_state_of_torchdatas_loader_is_refused() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    members, sampler = alone(10, 2)
    enter(members, sampler)
    loader = torchdata.StatefulDataLoader(Numbers(10), batch_sampler=sampler)
    next(sampler.batches(loader))
    loader.load_state_dict(loader.state_dict())
    refused(ValueError, "load the sampler's state alone", sampler.batches, loader)
    members.close()


# ---------------------------------------------------------------- one member, no steps


def alone(samples: int | None, batch_size: int, **options: Any) -> tuple[Members, MemberSampler]:
    members = Hub(1).members("a", [INF])
    return members, MemberSampler(members, samples, batch_size, **options)


def enter(members: Members, sampler: MemberSampler) -> None:
    p = nn.Parameter(torch.zeros(3))
    begin(onebit.OnebitAdam([p], lr=1e-3, transport=members, compression="always"), sampler=sampler)


def test_a_resumed_order_is_the_uninterrupted_one() -> None:
    """Also in another batch size: the position counts samples."""
    members, sampler = alone(10, 2)
    enter(members, sampler)
    batches = sampler.batches(DataLoader(Numbers(10), batch_sampler=sampler))
    order = torch.cat([next(batches) for _ in range(3)])
    assert sampler.position == 6 and sampler.data_epoch == 0
    saved = sampler.state_dict()
    order = torch.cat([order, *(next(batches) for _ in range(9))])
    assert sampler.data_epoch == 2 and sorted(order[:10].tolist()) == sorted(order[10:20].tolist()) == list(range(10))
    assert not torch.equal(order[:10], order[10:20])
    members.close()
    members, sampler = alone(10, 3)
    sampler.load_state_dict(saved)
    enter(members, sampler)
    batches = sampler.batches(DataLoader(Numbers(10), batch_sampler=sampler))
    assert torch.equal(torch.cat([next(batches) for _ in range(6)]), order[6:])
    members.close()


def test_a_position_within_a_step_is_that_of_its_beginning() -> None:
    members, sampler = alone(10, 2, micro_batches=2, shuffle=False)
    enter(members, sampler)
    batches = sampler.batches(DataLoader(Numbers(10), batch_sampler=sampler))
    positions = [(next(batches).tolist(), sampler.position) for _ in range(4)]
    assert positions == [([0, 1], 0), ([2, 3], 4), ([4, 5], 4), ([6, 7], 8)]
    sampler.load_state_dict({**sampler.state_dict(), "position": 1})
    assert next(batches).tolist() == [1, 2]
    members.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"samples": 0}, "samples must be an integer of at least 1, got 0; give len"),
        ({"samples": 2.5}, "samples must be an integer of at least 1, got 2.5"),
        ({"batch_size": True}, "batch_size must be an integer of at least 1, got True"),
        ({"micro_batches": 0}, "micro_batches must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_an_option_that_does_not_fit_is_told(options: dict[str, Any], why: str) -> None:
    refused(ValueError, why, alone, **{"samples": 10, "batch_size": 2, **options})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda s: DataLoader(Numbers(10), batch_size=2), "batch_sampler=sampler"),
        (lambda s: DataLoader(Numbers(11), batch_sampler=s), "the dataset has 11 samples, the sampler 10"),
        (lambda s: DataLoader(Stream(10), batch_size=2), "MemberStream"),
        (lambda s: DataLoader(MemberStream(Stream(10), s), batch_size=3), "the loader batch_size=3; make both"),
        (lambda s: DataLoader(MemberStream(Stream(10), alone(9, 2)[1]), batch_size=2), "its MemberStream samples=9"),
        (
            lambda s: DataLoader(MemberStream(Stream(10), s), batch_size=2, num_workers=1, persistent_workers=True),
            "persistent_workers=False",
        ),
        (lambda s: DataLoader(Numbers(10), batch_sampler=s, num_workers=1, in_order=False), "in_order=True"),
    ],
)
def test_a_loader_that_does_not_fit_is_told(make: Callable[[MemberSampler], DataLoader[Any]], why: str) -> None:
    members, sampler = alone(10, 2)
    enter(members, sampler)
    refused(ValueError, why, sampler.batches, make(sampler))
    members.close()


def test_balanced_members_draw_their_own_samples() -> None:
    members, sampler = alone(10, 2)
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1e-3)
    with pytest.raises(ValueError, match="a MemberSampler gives each member as many batches"):
        begin(onebit.LocalSteps(inner, transport=members, balanced=True), sampler=sampler)


def test_a_step_under_way_has_no_balanced_shares() -> None:
    members, _ = alone(10, 2)
    sampler = MemberSampler(members, 10, 2, micro_batches=2, balanced=True)
    with pytest.raises(ValueError, match=r"keeps the shares with which it was sent.*use delay=0, or balanced=False"):
        begin(onebit.OnebitAdam([nn.Parameter(torch.zeros(3))], transport=members, delay=1), sampler=sampler)


def test_misuse_is_told() -> None:
    members, sampler = alone(10, 2, micro_batches=2)
    loader = DataLoader(Numbers(10), batch_sampler=sampler)
    refused(RuntimeError, "begin\\(optimizer, sampler=sampler\\)", next, sampler.batches(loader))
    refused(RuntimeError, r"sampler.batches\(loader\)", list, loader)
    stream = MemberStream(Stream(9), sampler)
    refused(RuntimeError, r"sampler.batches\(loader\)", list, DataLoader(stream, batch_size=2))
    refused(TypeError, "read again from its beginning", MemberStream, iter(range(10)), sampler)
    with pytest.raises(TypeError, match="expected the Members"):
        MemberSampler("members", 10, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed=1, and this sampler has seed=0"):
        sampler.load_state_dict({**sampler.state_dict(), "seed": 1})
    with pytest.raises(ValueError, match="expected one MemberSampler"):
        begin(onebit.OnebitAdam([nn.Parameter(torch.ones(1))], transport=members, compression="always"),
              one=sampler, other=MemberSampler(members, 10, 2))  # fmt: skip
    enter(members, sampler)
    batches = sampler.batches(DataLoader(stream, batch_size=2))
    with pytest.raises(ValueError, match="ended after 9 samples, expected 10"):
        for _ in range(5):
            next(batches)
    next(sampler.batches(loader))
    refused(ValueError, "after 1 of 2 micro-batches; take all from", sampler.leave_world)
    members.close()


def test_an_endless_stream_has_one_epoch() -> None:
    members, sampler = alone(None, 2)
    enter(members, sampler)
    batches = sampler.batches(DataLoader(MemberStream(Stream(10**9), sampler), batch_size=2))
    assert torch.cat([next(batches) for _ in range(20)]).tolist() == list(range(40)) and sampler.data_epoch == 0
    members.close()


def test_a_newcomer_with_another_order_is_refused() -> None:
    def work(members: Members) -> None:
        enter(members, MemberSampler(members, 10, 2, seed=int(members.rendezvous.name == "b")))

    its = founded(Hub(2), work)
    for thread in its.threads:
        thread.join(30)
    assert its.errors and all("differ between ranks" in str(error) for error in its.errors.values())
