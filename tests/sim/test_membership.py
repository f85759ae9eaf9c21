"""Members that come and go: replicas stay the same to the bit, no step is lost, residuals keep their weight."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from family import same
from faults import simulated
from faults.case import AS_PROMISED, Tools
from faults.member_runs import Hub, Killed, MortalTransport, Run, founded
from test_onebit_adam import SIZES, gradient, parameters, split, start
from torch import Tensor, nn
from torch.distributed import HashStore

import onebit
from onebit.agreement import replicas
from onebit.agreement.replicas import ReplicaError
from onebit.checkpoint import new_world
from onebit.checkpoint.new_world import carried
from onebit.comm import ErrorFeedback, ExchangeTask, IdentityCodec, PeerError, SimTransport
from onebit.comm.messages import gather_bytes
from onebit.comm.transports.notes import calling
from onebit.comm.transports.simulated import SimNetwork
from onebit.dense import Bucket, DenseAverager, average_gradients
from onebit.layout.flat import Layout, lay_out
from onebit.local.wrapped import local_state, with_shards
from onebit.membership import Buffers, Members, MembershipError, Patience, begin, copying, end, residuals
from onebit.membership.change import Change, _exchange, _meet_before, change
from onebit.membership.members import Standing
from onebit.membership.rendezvous import Rendezvous, Roster
from onebit.reference.codecs import compress
from onebit.reference.onebit_adam import OnebitAdam as OnebitAdamOracle
from onebit.step import link_probe
from onebit.step.link_probe import LinkProbe
from onebit.zero import ShardedOnebitAdam

INF = float("inf")
Make: TypeAlias = Callable[[nn.Module, Members], Any]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "compression": "always", "bucket_cap_mb": 0.001}


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 12))


def await_newcomers(members: Members, hub: Hub, newcomers: int) -> None:
    """Hold a run of founders until the newcomers have come, and its first member has seen it."""
    hub.holds.set()
    while members.world_size == hub.founders and (
        hub.store.add("here/2", 0) < newcomers or (members.rank == 0 and not members.is_awaited())
    ):
        time.sleep(0.005)


def adam(model: nn.Module, members: Members, **options: Any) -> onebit.OnebitAdam:
    return onebit.OnebitAdam(model.parameters(), transport=members, **{**OPTIONS, "freeze_step": 4, **options})


delayed = partial(adam, delay=1)


def averaged(model: nn.Module, members: Members, **options: Any) -> onebit.AveragedSteps:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return onebit.AveragedSteps(inner, transport=members, bucket_cap_mb=0.001, max_grad_norm=1.0, **options)


def measured(make: type) -> Make:
    """An optimizer that measures the network before its first step in one bit."""
    return lambda model, members: make(model.parameters(), lr=1e-2, transport=members, bucket_cap_mb=0.001)


def muon(model: nn.Module, members: Members, **options: Any) -> onebit.OnebitMuon:
    groups = onebit.muon_groups(model, head=model[2])
    return onebit.OnebitMuon(groups, transport=members, **OPTIONS, **options)


def lamb(model: nn.Module, members: Members, freeze_step: int = 20) -> onebit.OnebitLamb:
    return onebit.OnebitLamb(model.parameters(), transport=members, freeze_step=freeze_step, **OPTIONS)


def local(model: nn.Module, members: Members, lr: float = 1e-2, **options: Any) -> onebit.LocalSteps:
    inner = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1)
    return onebit.LocalSteps(inner, every=4, transport=members, bucket_cap_mb=0.001, **options)


def trained(
    members: Members,
    steps: int,
    make: Make = adam,
    before_step: Callable[[Any], None] = lambda optimizer: None,
    decay: float | None = None,
) -> tuple[nn.Module, Any]:
    """A model and its optimizer after `steps` steps of the run. decay: of a schedule that all members keep."""
    model = net()
    optimizer = make(model, members)
    inner = optimizer.inner if isinstance(optimizer, onebit.LocalSteps) else optimizer
    schedule = {"schedule": torch.optim.lr_scheduler.ExponentialLR(inner, decay)} if decay else {}
    begin(optimizer, **schedule)
    draw = torch.Generator().manual_seed(ord(members.rendezvous.name))
    while optimizer.steps_taken() < steps:
        before_step(optimizer)
        x = torch.randn(8, 12, generator=draw)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        for each in schedule.values():
            each.step()
        optimizer.zero_grad()
    return model, optimizer


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def finished(members: Members, *given: Any, **options: Any) -> Tensor:
    """As `trained`, to the end of the run, with all that is under way: the parameters."""
    model, optimizer = trained(members, *given, **options)
    if hasattr(optimizer, "sync"):
        optimizer.sync()
    end(optimizer)
    return parameters_of(model)


def assert_same_end(run: Run, names: str) -> None:
    """These members, and no others, have come to the end, all of them with the same."""
    first = run.results[names[0]]
    assert run.results.keys() == set(names) and all(same(found, first) for found in run.results.values())


def train(members: Members, steps: int, hub: Hub | None = None, make: Make = adam) -> tuple[int, Tensor]:
    """Steps taken, and the parameters. hub: a newcomer is waited for."""

    def before_step(optimizer: Any) -> None:
        if hub is not None and optimizer.steps_taken() == 8:
            await_newcomers(members, hub, 1)

    model, optimizer = trained(members, steps, make, before_step)
    if isinstance(optimizer, onebit.LocalSteps):
        optimizer.sync()
    optimizer.check_replicas()
    end(optimizer)
    return optimizer.steps_taken(), parameters_of(model)


def test_a_founder_that_was_silent_as_the_first_epoch_began_is_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine stood still: the others have begun without it, and it has not lost the run's state."""
    hub, are_gone = Hub(3, timeout_s=5.0), threading.Event()

    def exchange_late(members: Members, mine: Standing) -> list[Standing]:
        found = _exchange(members, mine)
        if members.rendezvous.name == "b" and members.roster.epoch == 1:
            beats = members.rendezvous._beats
            beat, beats.add = beats.add, lambda *args: are_gone.wait(20) and beat(*args)
            while not hub.store.check(["begun"]):
                time.sleep(0.01)
            are_gone.set()
        return found

    def work(members: Members) -> Tensor:
        def before_step(optimizer: Any) -> None:
            while members.world_size == 2 and (
                hub.store.add("here/3", 0) == 0 or (members.rank == 0 and not members.is_awaited())
            ):
                time.sleep(0.005)

        return finished(members, 12, before_step=before_step)

    monkeypatch.setattr("onebit.membership.change._exchange", exchange_late)
    assert_same_end(founded(hub, work).join(), "abc")
    assert max(hub.networks) >= 3


@pytest.mark.parametrize("make", [adam, delayed, local, averaged], ids=["adam", "delayed", "local", "averaged"])
def test_all_end_with_the_last_step_whoever_is_lost_in_it(make: Make) -> None:
    """Some have taken it then, and others have not."""

    def work(fuse: float, members: Members) -> Tensor:
        def before_step(optimizer: Any) -> None:
            if members.rendezvous.name == "b" and optimizer.steps_taken() == 7:
                members._now.fuse[0] = fuse

        model, optimizer = trained(members, 8, make, before_step)
        if make is delayed:
            optimizer.sync()
        end(optimizer)
        return parameters_of(model)

    for fuse in [0.5, 3.5, 7, 11.5, 14.5]:
        run = founded(Hub(3), partial(work, fuse)).join()
        first, *others = run.results.values()
        assert {"a", "c"} <= set(run.results) and all(torch.equal(first, other) for other in others)
        assert not {"a", "c"} & set(run.errors)


def test_one_that_does_not_come_to_the_end_is_left_behind() -> None:
    """It lives, and is stuck between its last step and end()."""
    have_ended = threading.Barrier(3)

    def work(members: Members) -> Tensor:
        model, optimizer = trained(members, 8)
        members.rendezvous.patience = replace(members.rendezvous.patience, busy_s=0.5)
        if members.rendezvous.name == "b":
            have_ended.wait(20)
            end(optimizer)
        else:
            end(optimizer)
            have_ended.wait(20)
        return parameters_of(model)

    assert_same_end(founded(Hub(3), work).join(), "abc")


@pytest.mark.parametrize("fuse", [0, 0.5])
@pytest.mark.parametrize(
    ("make", "call"),
    [
        (adam, "check_replicas"),
        (local, "check_replicas"),
        (averaged, "check_replicas"),
        (local, "adopt_parameters"),
        (partial(local, delay=1), "adopt_parameters"),  # with a round under way
    ],
)
def test_a_member_may_be_lost_while_replicas_are_compared(
    make: Make, call: str, fuse: float, caplog: pytest.LogCaptureFixture
) -> None:
    """In a call of the program's, between two steps; with .5 one member has the answer, and another none."""

    def work(members: Members) -> Tensor:
        def before_step(optimizer: Any) -> None:
            if optimizer.steps_taken() == 8:
                if call == "adopt_parameters":  # for which they must be the same
                    for p in optimizer.param_groups[0]["params"]:
                        p.data.fill_(0.5)
                if members.rendezvous.name == "b":
                    members._now.fuse[0] = fuse
                getattr(optimizer, call)()

        model, optimizer = trained(members, 16, make, before_step)
        if call == "adopt_parameters":
            optimizer.sync()
        optimizer.check_replicas()
        return parameters_of(model)

    assert_same_end(founded(Hub(3), work).join(), "ac")
    assert f"{call}() was given up, as a member is lost" in caplog.text


def steps_compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """By member: after which steps it compares its replica with the others'. Filled by the run."""
    compared, compare = defaultdict[str, list[int]](list), replicas.check_replicas

    def noted(transport: Members, tensors: object, names: object, step: int) -> None:
        compared[transport.rendezvous.name].append(step)
        compare(transport, tensors, names, step)

    monkeypatch.setattr(replicas, "check_replicas", noted)
    return compared


@pytest.mark.parametrize("steps", [1, 4, 8])
@pytest.mark.parametrize(
    ("make", "last"), [(partial(adam, freeze_step=3, overlap=False, bucket_cap_mb=25.0), 4.5), (averaged, 5.5)]
)
def test_a_step_that_others_have_taken_is_taken_over(
    make: Make, last: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member dies after these steps, and the next one's last message, which has this fuse, reaches one survivor.

    The schedule moves on by one as well. Replicas are compared after every third step, by all after the same ones.
    """
    changes: list[Change] = []
    compared = steps_compared(monkeypatch)
    monkeypatch.setattr("onebit.membership.change._report", lambda members, found, *_: changes.append(found))

    def work(members: Members) -> Tensor:
        calls: list[object] = []

        def before_step(optimizer: Any) -> None:
            calls.append(optimizer)
            if members.rendezvous.name == "b" and optimizer.steps_taken() == steps:
                members._now.fuse[0] = last

        model, _ = trained(members, 12, partial(make, check_replicas_every=3), before_step, decay=0.9)
        assert len(calls) == 12  # a step counts once, whoever took it
        return parameters_of(model)

    assert_same_end(founded(Hub(3), work).join(), "ac")
    assert all(step % 3 == 0 for steps in compared.values() for step in steps), compared
    assert sum(found.took_step for found in changes) == 1


@pytest.mark.parametrize(
    ("make", "last"), [(partial(adam, freeze_step=3, overlap=False, bucket_cap_mb=25.0), 4.5), (averaged, 5.5)]
)
def test_a_comparison_that_one_has_given_up_is_waited_for_by_none(
    make: Make, last: float, caplog: pytest.LogCaptureFixture
) -> None:
    """One survivor has the last step, and loses the member that dies in the comparison after it; another in the step.

    The first comes to the end with the other still in its step, which it takes over. Then it compares with nobody.
    """
    began = time.monotonic()

    def work(members: Members) -> Tensor:
        def before_step(optimizer: Any) -> None:
            if members.rendezvous.name == "b" and optimizer.steps_taken() == 7:
                members._now.fuse[0] = last

        model, optimizer = trained(members, 8, make, before_step)
        optimizer.check_replicas()
        end(optimizer)
        return parameters_of(model)

    assert_same_end(founded(Hub(3, timeout_s=30.0), work).join(), "ac")
    assert time.monotonic() - began < 20
    assert "check_replicas() was given up" in caplog.text


@pytest.mark.slow
def test_a_step_that_others_have_skipped_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fuses at which some know that all skip, and others hear of the loss: their schedules stay together."""
    changes: list[Change] = []
    monkeypatch.setattr("onebit.membership.change._report", lambda members, found, *_: changes.append(found))
    bad = {3, *range(8, 12)}  # calls in which one member's gradient is not finite

    def work(members: Members) -> tuple[int, int, Tensor]:
        model = net()
        optimizer = adam(model, members, freeze_step=3, overlap=False, bucket_cap_mb=25.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        begin(optimizer, schedule=schedule)
        for call in range(14):
            p = next(model.parameters())
            model(torch.randn(8, 12)).square().mean().backward()
            if call in bad and members.rendezvous.name == "a":
                p.grad = torch.full_like(p, torch.nan)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return optimizer.steps_taken(), optimizer.stats.skipped_steps, parameters_of(model)

    for _ in range(20):
        for fuse in (35.5, 46.5):
            first, second = founded(Hub(3), work, [INF, fuse, INF]).join().results.values()
            assert first[:2] == second[:2] == (14 - len(bad), len(bad)) and torch.equal(first[2], second[2])
            if any(found.took_step for found in changes):
                return
    pytest.fail("no survivor had missed that a step was skipped")


def random_changes(seed: int, make: Make) -> None:
    """Members die at random operations, also while others join, change or die; others come."""
    draw = torch.Generator().manual_seed(seed)

    def fuse() -> float:
        return INF if torch.rand((), generator=draw) < 0.3 else int(torch.randint(10, 500, (), generator=draw)) / 2

    run = founded(Hub(4), lambda members: train(members, 50, make=make), [INF, fuse(), fuse(), fuse()])
    for name in "wxyz":
        run.start(name, fuse())
    run.join()
    assert run.results
    params = [found for _, found in run.results.values()]
    assert all(torch.equal(params[0], other) for other in params)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("OnebitAdam, delayed", 0),
        ("LocalSteps", 0),
        *(pytest.param(kind, 1, marks=pytest.mark.thorough) for kind in ("ZeroOneAdam", "AdamW")),
    ],
)
def test_drawn_schedules_of_changes_end_as_promised(kind: str, seed: int, tmp_path: Path) -> None:
    """Kills, stops, cuts, joins, two at once, amid a join, amid a change, without the rendezvous.

    Of each step machine one optimizer; `scripts/faults.py` draws a hundred changes for every one.
    """
    outcomes = list(simulated.changes(kind, Tools(Random(seed), tmp_path), 12))
    assert len(outcomes) == 13 and {its.verdict for its in outcomes} == {AS_PROMISED}, outcomes[-1]


@pytest.mark.slow
def test_a_step_taken_alone_is_not_compared_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member stops before its last message, and finds the others' as it wakes; they have taken the step without it.

    In the step in which it is back, the others are done before it is.
    """
    launch, step = Bucket.launch, onebit.AveragedSteps.step
    run, armed, stopped_after = simulated.Run("AdamW", Random(0)), threading.Event(), list[int]()

    def launch_late(bucket: Bucket, *args: Any, **options: Any) -> None:
        is_last = any(p.shape == (32, 16) for p in bucket.params)
        if is_last and armed.is_set() and threading.current_thread().name == "m1.0":
            armed.clear()
            fate = run.lives["m1"].fate
            fate.kind, fate.seconds, fate.operations = "stop", 2.0, 1
            stopped_after.append(run.lives["m1"].steps)
        launch(bucket, *args, **options)

    def step_late(optimizer: onebit.AveragedSteps) -> None:
        before = optimizer.transport.roster
        step(optimizer)
        if stopped_after and optimizer.transport.roster != before and threading.current_thread().name == "m1.0":
            time.sleep(0.2)

    monkeypatch.setattr(Bucket, "launch", launch_late)
    monkeypatch.setattr(onebit.AveragedSteps, "step", step_late)
    for _ in range(3):
        run.start()
    assert run.settled() is None
    armed.set()
    while not stopped_after:
        time.sleep(0.005)
    assert run.settled() is None
    (last,), its, others = stopped_after, run.lives["m1"].digests[0], run.lives["m0"].digests[0]
    assert last in its and last + 1 not in its and {last, last + 1} <= others.keys()
    assert run.finish() is None


@pytest.mark.parametrize("make", [adam, local], ids=["adam", "local"])
def test_members_that_are_too_few_wait_for_others(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Two of three are left, and stand still until another has come. The step under way, not the round, is its too."""
    hub, sizes = Hub(3, min_members=3), []

    def work(members: Members) -> Tensor:
        params = train(members, 20, make=make)[1]
        sizes.append(members.world_size)
        return params

    run = founded(hub, work, [INF, 60, INF])
    run.threads[1].join(30)
    time.sleep(1.5)  # more than the survivors' patience
    assert max(hub.networks) == 1 and all(thread.is_alive() for thread in (run.threads[0], run.threads[2]))
    run.start("n")
    assert_same_end(run.join(), "acn")
    assert sizes == [3, 3, 3]
    assert "2 of min_members=3 members are here" in caplog.text


def test_a_group_that_does_not_reach_the_rendezvous_ends() -> None:
    """It forms no epoch, and trains no further; the group that reaches it goes on, whichever is larger."""

    def refused() -> HashStore:
        raise RuntimeError("connection refused")

    def work(members: Members) -> None:
        is_cut_off = members.rendezvous.name in "bc"

        def before_step(optimizer: Any) -> None:
            taken[members.rendezvous.name] = optimizer.steps_taken()
            if is_cut_off and optimizer.steps_taken() == 8:
                for store in (members.rendezvous._store, members.rendezvous._beats):
                    store._connect, store._store = refused, None
                members.rendezvous._store._away_s = 1.0
                members._now.network.leave(members.rank)

        finished(members, 16, before_step=before_step)

    taken = dict[str, int]()
    run = founded(Hub(3), work)
    run.wait()
    assert set(run.results) == {"a"}
    errors = [run.errors[name] for name in "bc"]
    assert all(isinstance(error, MembershipError) and "does not answer" in str(error) for error in errors)
    assert taken["b"] == taken["c"] == 8


def test_groups_that_reach_the_rendezvous_but_not_each_other_stand_still() -> None:
    """Epochs begin and do not connect; none trains alone. Once the network is repaired, the same members go on."""
    hub, are_apart, steps = Hub(4, timeout_s=2.0), threading.Event(), dict[str, list[int]]()

    def work(members: Members) -> Tensor:
        name, connect = members.rendezvous.name, members._connect

        def connect_if_whole(roster: Roster, rank: int) -> MortalTransport:
            members.rendezvous.confirm(roster, "present")
            if are_apart.is_set():
                raise PeerError(f"{name}: epoch {roster.epoch} does not connect")
            return connect(roster, rank)

        def before_step(optimizer: Any) -> None:
            steps.setdefault(name, []).append(optimizer.steps_taken())
            if name == "b" and optimizer.steps_taken() == 8 and not are_apart.is_set() and max(hub.networks) == 1:
                are_apart.set()
                members._now.network.leave(members.rank)

        members._connect = connect_if_whole
        params = finished(members, 16, before_step=before_step)
        assert members.world_size == 4
        return params

    run = founded(hub, work)
    assert are_apart.wait(30)
    while hub.store.add("here/5", 0) == 0:
        time.sleep(0.01)
    assert max(hub.networks) == 1 and {its[-1] for its in steps.values()} <= {7, 8, 9}
    are_apart.clear()
    assert_same_end(run.join(), "abcd")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.thorough) for k in (2, 3))])
def test_random_changes_leave_replicas_equal(seed: int) -> None:
    random_changes(seed, adam)


OTHERS: dict[str, Make] = {
    "muon": muon,
    "lamb": lamb,
    "measured": measured(onebit.OnebitAdam),
    "measured 0/1": measured(onebit.ZeroOneAdam),
    "local": local,
    "local, momentum": partial(local, outer_lr=0.7, outer_momentum=0.9, error_decay=0.9, codec=IdentityCodec()),
    "local, balanced": partial(local, balanced=True),
    "local, fragments": partial(local, fragments=3),
    "local, delayed": partial(local, fragments=3, delay=2, outer_momentum=0.5),
    "averaged": averaged,
    "delayed": delayed,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_random_changes_of_other_optimizers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    measures_by_messages(monkeypatch)
    random_changes(0, make)


def measures_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated ranks count as a network, in which measuring takes several operations, and compression pays."""

    def measure(transport: Members, *_: object) -> LinkProbe:
        for _ in range(20):
            gather_bytes(transport, bytes(8), torch.device("cpu"))
        return LinkProbe(1.0, 0.1, 10.0)

    monkeypatch.setattr(SimTransport, "has_network", True)
    monkeypatch.setattr("onebit.step.link_probe.measure", measure)


@pytest.mark.parametrize("fuse", [4, 9.5, 14.5, 19])
def test_a_member_may_be_lost_while_the_network_is_measured(fuse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have an answer then, others have none; the fuse counts the operations of measuring."""
    measures_by_messages(monkeypatch)
    measure, lost = link_probe.measure, []

    def mortal(transport: Members, *rest: object) -> LinkProbe:
        if transport.rendezvous.name == "b":
            transport._now.fuse[0] = fuse
            lost.append(transport)
        return measure(transport, *rest)

    monkeypatch.setattr(link_probe, "measure", mortal)
    make = measured(partial(onebit.OnebitAdam, freeze_step=4))
    run = founded(Hub(3), lambda members: train(members, 12, make=make)).join()
    assert_same_end(run, "ac")
    assert lost and run.results["a"][0] == 12


def test_a_loss_before_the_change_does_not_keep_newcomers_out() -> None:
    """It is lost after the round in which all have agreed to let them in, so no exchange misses it."""
    hub, entered = Hub(3), list[int]()

    def work(members: Members) -> Tensor:
        def before_step(optimizer: onebit.LocalSteps) -> None:
            if optimizer.steps_taken() == 7:
                await_newcomers(members, hub, 1)
            if members.rendezvous.name == "c" and optimizer.steps_taken() == 8:
                members._now.die()
            if members.rendezvous.name == "n":
                entered.append(optimizer.steps_taken())

        return finished(members, 16, local, before_step)

    began = time.monotonic()
    assert_same_end(founded(hub, work).joined_by("n"), "abn")
    assert entered[0] == 8 and time.monotonic() - began < 15.0


@pytest.mark.parametrize("make", [adam, delayed, local, averaged])
def test_the_others_do_not_wait_for_a_newcomers_warm_up(make: Make) -> None:
    hub, steps, last = Hub(2), [0], [INF]

    def work(members: Members) -> Tensor:
        model = net()
        optimizer = make(model, members)
        is_new, draw = members.rendezvous.name == "n", torch.Generator().manual_seed(ord(members.rendezvous.name))

        def backward() -> None:
            x = torch.randn(8, 12, generator=draw)
            (model(x) - x).square().mean().backward()

        def warm_up() -> None:
            backward()
            before = steps[0]
            while steps[0] < before + 4:  # the first member takes steps meanwhile
                time.sleep(0.001)

        if is_new:
            begin(optimizer, warm_up=warm_up)
            assert all(p.grad is None for p in model.parameters())
        else:
            begin(optimizer)
        while optimizer.steps_taken() < last[0]:
            if optimizer.steps_taken() == 8:
                hub.holds.set()
            backward()
            optimizer.step()
            optimizer.zero_grad()
            steps[0] += members.rank == 0
            if members.rank == 0 and members.world_size == 3 and last[0] == INF:
                last[0] = optimizer.steps_taken() // 4 * 4 + 12
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        optimizer.check_replicas()
        end(optimizer)
        assert members.world_size == 3
        return parameters_of(model)

    assert_same_end(founded(hub, work).joined_by("n"), "abn")


def test_a_slower_member_lets_newcomers_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it before they leave the epoch: all had agreed."""
    hub, close = Hub(2), Rendezvous._close
    monkeypatch.setattr(Rendezvous, "_close", lambda its, *rest: None if its.name == "a" else close(its, *rest))

    def work(members: Members) -> Tensor:
        def before_step(optimizer: onebit.LocalSteps) -> None:
            if optimizer.steps_taken() == 7:
                await_newcomers(members, hub, 1)
            if optimizer.steps_taken() == 8 and members.rendezvous.name == "b":
                time.sleep(0.3)

        return finished(members, 16, local, before_step)

    assert_same_end(founded(hub, work).joined_by("n"), "abn")
    assert max(hub.networks) == 2


@pytest.mark.parametrize("fuse", [96.5, 104, 110, 116, 125, 137])
@pytest.mark.parametrize(
    ("make", "least"),
    [(partial(local, fragments=2, delay=2), 1), (partial(local, fragments=2, delay=2), 3), (delayed, 1)],
    ids=["local", "local, too few", "adam"],
)
def test_a_newcomer_may_come_as_a_member_is_lost(
    make: Make, least: int, fuse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members notice the loss in other calls, some of them in sync(), and the newcomer's first call is step().

    least: with 3, those that are left are too few without it.
    """
    hub, die = Hub(3, min_members=least), MortalTransport.die

    def die_as_another_comes(transport: MortalTransport) -> None:
        if threading.current_thread() is transport.thread:
            run.start("n")
            deadline = time.monotonic() + 10
            while hub.store.add("here/2", 0) == 0 and time.monotonic() < deadline:
                time.sleep(0.001)
        die(transport)

    def work(members: Members) -> Tensor:
        model = net()
        optimizer = make(model, members)
        begin(optimizer)
        draw = torch.Generator().manual_seed(ord(members.rendezvous.name))
        while optimizer.steps_taken() < 40:
            while optimizer.steps_taken() == 32 and members.rank == 0 and not (members.joined or members.is_awaited()):
                time.sleep(0.001)
            x = torch.randn(8, 12, generator=draw)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.steps_taken() % 6 == 0:
                optimizer.sync()
        optimizer.sync()
        optimizer.check_replicas()
        end(optimizer)
        return parameters_of(model)

    monkeypatch.setattr(MortalTransport, "die", die_as_another_comes)
    run = founded(hub, work, [INF, INF, fuse])
    assert_same_end(run.join(), "abn")


def test_a_member_that_is_late_for_a_change_is_no_suspect() -> None:
    """Or it would be given up after `suspect_s`, sooner than a member that computes; one that has died is."""
    late = _meet_before(SimTransport(SimNetwork(2, timeout_s=0.2), 0))  # type: ignore[arg-type]
    network = SimNetwork(2, timeout_s=20.0)
    network.leave(1)
    lost = _meet_before(SimTransport(network, 0))  # type: ignore[arg-type]
    assert late is not None and not late.ranks
    assert lost is not None and list(lost.ranks) == [1]


def test_newcomers_that_come_with_a_loss_in_sync_come_once() -> None:
    """All had agreed to let them in before the next step: those that did so in sync() would change again, alone."""
    hub = Hub(3)

    def work(members: Members) -> int:
        def before_step(optimizer: Any) -> None:
            if optimizer.steps_taken() == 9:
                await_newcomers(members, hub, 1)
            if optimizer.steps_taken() == 10 and members.rendezvous.name != "n":
                if members.rendezvous.name == "c":
                    raise Killed
                optimizer.sync()

        finished(members, 20, delayed, before_step)
        assert members.roster is not None
        return members.roster.epoch

    run = founded(hub, work).joined_by("n")
    assert run.results == {"a": 2, "b": 2, "n": 2}


def test_a_newcomer_compares_anchors_with_the_others() -> None:
    """They have compared less recently than it came: it would leave out a comparison that is due in a round."""
    hub = Hub(2)
    make = partial(local, fragments=2, check_replicas_every=11)

    def work(members: Members) -> int:
        def before_step(optimizer: Any) -> None:
            if optimizer.steps_taken() == 11:  # rounds of the first fragment are after steps 10 and 14
                await_newcomers(members, hub, 1)

        finished(members, 20, make, before_step)
        assert members.roster is not None
        return members.roster.epoch

    run = founded(hub, work).joined_by("n")
    assert run.results == {"a": 2, "b": 2, "n": 2}


def test_parameters_are_the_anchor_after_a_round_that_could_not_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a `sync()` has followed: what is remembered of the parameters as they were sent goes with the round.

    The other member had sent that round, and this one takes over its count.
    """
    launch, fails = ExchangeTask.__init__, list[threading.Thread]()

    def launch_or_fail(task: ExchangeTask, exchange: Any) -> None:
        launch(task, exchange)
        if threading.current_thread() in fails:
            fails.clear()
            raise PeerError("rank 0: another member is lost")

    def work(members: Members) -> Tensor:
        def before_step(optimizer: Any) -> None:
            if optimizer.steps_taken() == 11 and members.rank == 0:
                fails.append(threading.current_thread())

        return finished(members, 12, partial(local, lr=0.3, delay=2), before_step)

    monkeypatch.setattr(ExchangeTask, "__init__", launch_or_fail)
    assert_same_end(founded(Hub(2), work).join(), "ab")
    assert not fails


# ---------------------------------------------------------------- an oracle


class ElasticOracle(OnebitAdamOracle):
    """The textbook loop, whose workers change as the module's arithmetic has it, written anew in float64."""

    names: list[str]
    sent: np.ndarray
    kept: np.ndarray

    def change(self, names: list[str], owner_before: np.ndarray, owner_now: np.ndarray) -> None:
        """owner_before, owner_now: the rank that averages each element."""
        before, was = self.names, self.workers
        errors, server = np.zeros((len(names), len(self.x))), np.zeros_like(self.x)
        for rank, name in enumerate(names):
            if name not in before:
                continue
            errors[rank] = self.worker_error[before.index(name)] * len(names) / was
            mine = np.where(owner_before == before.index(name), self.server_error, 0.0)
            server += np.where(owner_now == rank, mine, 0.0)
            errors[rank] += len(names) * np.where(owner_now == rank, 0.0, mine)
        self.names, self.workers, self.worker_error, self.server_error = names, len(names), errors, server

    def send(self, grads: np.ndarray) -> None:
        """The first half of a compressed step, which `land` ends; workers may change in between."""
        beta1 = self.betas[0]
        self.sent, self.kept = np.zeros_like(grads), np.zeros_like(grads)
        for i in range(self.workers):
            g = self.normalised(grads[i], self.t + 1)
            c = beta1 * self.update + (1 - beta1) * g + self.worker_error[i]
            self.sent[i] = compress(c, self.blocks, self.scale)
            self.kept[i] = c - self.sent[i]

    def lose(self, names: list[str], owner_before: np.ndarray, owner_now: np.ndarray) -> None:
        """As `change`, between `send` and `land`: the others count with what they have sent."""
        stay, before = [self.names.index(name) for name in names], self.worker_error
        self.change(names, owner_before, owner_now)
        self.sent, self.kept = self.sent[stay], self.kept[stay] + self.worker_error - before[stay]

    def land(self, lr: float) -> None:
        self.t += 1
        self.worker_error = self.kept
        a = self.sent.mean(0) + self.server_error
        self.update = compress(a, self.blocks, self.scale)
        self.server_error = a - self.update
        self.x = self.x - lr * (self.update / (1 - self.betas[0] ** self.t) + self.weight_decay * self.x)

    def share(self, name: str, owner: np.ndarray) -> np.ndarray:
        """What a member's residuals add to the mean."""
        rank = self.names.index(name)
        return self.worker_error[rank] / self.workers + np.where(owner == rank, self.server_error, 0.0)

    def residual(self, owner: np.ndarray) -> np.ndarray:
        """What all residuals add to it."""
        return sum(self.share(name, owner) for name in self.names)


def owners(optimizer: onebit.OnebitAdam) -> np.ndarray:
    """The rank that averages each element of the parameters."""
    found = {}
    for bucket in optimizer.buckets:
        flat = torch.arange(bucket.layout.numel) // bucket.layout.chunk
        found |= dict(zip(bucket.params, bucket.layout.views(flat), strict=True))
    return torch.cat([found[p].view(-1) for p in optimizer.param_groups[0]["params"]]).numpy()


FREEZE, STEPS, LR = 12, 34, 0.03


def run_of_changes(
    founders: int,
    leaves: dict[str, int],
    newcomers: str,
    make: Callable[[list[nn.Parameter], Members], tuple[Any, Any]],
    *,
    steps: int = 24,
    joins_at: int = 10,
) -> tuple[list[tuple[str, ...]], list[np.ndarray], np.ndarray, Any]:
    """Of the longest run: the members of each step, who averaged what in it, the parameters after the last, the stats.

    make: an optimizer and its schedule or None. leaves: after how many steps a member dies. All who stay end the same.
    A step counts from when it was sent, and lands at the end.
    """
    hub = Hub(founders)

    def work(members: Members) -> tuple[list[tuple[str, ...]], list[np.ndarray], np.ndarray, Any]:
        name, params = members.rendezvous.name, parameters()
        optimizer, schedule = make(params, members)
        begin(optimizer, **({"schedule": schedule} if schedule else {}))
        rosters, owned = [], []
        while (step := max(optimizer.steps_taken(), optimizer.progress()[0])) < leaves.get(name, steps):
            if newcomers and step == joins_at:
                await_newcomers(members, hub, len(newcomers))
            x = torch.cat([p.detach() for p in params]).double().numpy()
            for p, g in zip(params, split(torch.from_numpy(gradient(x, step, ord(name) - 97)).float()), strict=True):
                p.grad = g.clone()
            optimizer.step()
            if schedule:
                schedule.step()
            assert members.roster is not None
            rosters.append(members.roster.names)
            owned += [owners(optimizer)] if isinstance(optimizer, onebit.OnebitAdam) else []
        if name in leaves:
            raise Killed
        if isinstance(optimizer, onebit.OnebitAdam | onebit.LocalSteps):
            optimizer.sync()
        optimizer.check_replicas()
        return rosters, owned, torch.cat([p.detach() for p in params]).double().numpy(), optimizer.stats

    run = founded(hub, work)
    run.joined_by(newcomers)
    stayed = list(run.results.values())
    longest = max(stayed, key=lambda its: len(its[0]))
    assert len(set(longest[0])) == 2 and all(np.array_equal(longest[2], its[2]) for its in stayed)
    return longest


def textbook(params: list[nn.Parameter], members: Members, delay: int = 0) -> tuple[onebit.OnebitAdam, None]:
    options = {"freeze_step": FREEZE, "warmup_codec": IdentityCodec(), "compression": "always"}
    return onebit.OnebitAdam(params, lr=LR, transport=members, delay=delay, **options), None


@pytest.mark.parametrize(
    ("founders", "leaves", "newcomers", "delay"),
    [
        *((4, {"b": 18, "c": 18}, "", 0), (2, {}, "cd", 0), (1, {}, "b", 0), (2, {"a": 22}, "", 0)),
        *((4, {"b": 18, "c": 18}, "", 1), (2, {}, "cd", 1)),
    ],
)
def test_equals_the_textbook_loop_whose_workers_change(
    founders: int, leaves: dict[str, int], newcomers: str, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_equals_the_textbook_loop`; powers of two alone, as sums of thirds cancel to another sign.

    Residuals are carried over but for those of the lost, whose size is that of their last vote: they die after a step,
    so it is that before this step. With a delay the others' part of the step under way counts at a loss, and newcomers
    come once it has landed.
    """
    monkeypatch.setattr(residuals, "PARTS", 1)  # each vote measures all
    make, joins_at = partial(textbook, delay=delay), 18 if delay else 20
    rosters, owned, found, stats = run_of_changes(founders, leaves, newcomers, make, steps=STEPS, joins_at=joins_at)
    oracle = ElasticOracle(start(), len(rosters[0]), SIZES, dense=lambda step: step < FREEZE)
    oracle.names, norms = list(rosters[0]), dict[str, float]()
    ahead, elements, norm = np.zeros_like(oracle.x), 0, 0.0
    for step, names in enumerate(rosters):
        seen, change = oracle.x - ahead, (list(names), owned[step - 1], owned[step])
        if gone := [name for name in oracle.names if name not in names]:
            elements = sum(len(seen) + np.count_nonzero(owned[step - 1] == oracle.names.index(n)) for n in gone)
            norm = sum(norms[name] for name in gone)
            rest = oracle.residual(owned[step - 1]) - sum(oracle.share(name, owned[step - 1]) for name in gone)
            (oracle.lose if delay else oracle.change)(*change)
            np.testing.assert_allclose(oracle.residual(owned[step]), rest, atol=1e-12, rtol=0)
        if delay and step > FREEZE:
            oracle.land(LR)
        x_of = {name: seen if name in oracle.names else oracle.x for name in names}
        if list(names) != oracle.names:
            rest = oracle.residual(owned[step - 1])
            oracle.change(*change)
            np.testing.assert_allclose(oracle.residual(owned[step]), rest, atol=1e-12, rtol=0)
        norms = {name: float(np.linalg.norm(oracle.share(name, owned[step]))) for name in names}
        grads = np.stack([gradient(x_of[name], step, ord(name) - 97) for name in names])
        if delay and step >= FREEZE:
            oracle.freeze()
            oracle.send(grads)
            beta1 = oracle.betas[0]
            ahead = LR * beta1 * compress(oracle.update, oracle.blocks, "rms") / (1 - beta1**oracle.t)
        else:
            oracle.step(grads, LR)
    if delay:
        oracle.land(LR)
    np.testing.assert_allclose(found, oracle.x, atol=2e-4, rtol=0)
    assert stats.lost_residuals == elements
    np.testing.assert_allclose(stats.lost_residual_norm, norm, rtol=2e-3)  # float32 against float64


@pytest.mark.parametrize(("founders", "leaves", "newcomers"), [(3, {"b": 8}, ""), (2, {}, "cd"), (2, {"a": 10}, "")])
def test_local_steps_are_those_of_the_members_of_each_round(
    founders: int, leaves: dict[str, int], newcomers: str
) -> None:
    """In full precision a round leaves the mean of its members' parameters; a loop in float64 takes the same steps."""

    def make(params: list[nn.Parameter], members: Members) -> tuple[onebit.LocalSteps, None]:
        inner = torch.optim.SGD(params, lr=LR, weight_decay=0.1)
        return onebit.LocalSteps(inner, every=4, codec=IdentityCodec(), transport=members), None

    rosters, _, found, _ = run_of_changes(founders, leaves, newcomers, make)
    x = start()
    for k, names in enumerate(rosters[3::4]):
        each = []
        for name in names:
            w = x.copy()
            for step in range(4 * k, 4 * k + 4):
                w -= LR * (gradient(w, step, ord(name) - 97) + 0.1 * w)
            each.append(w)
        x = np.mean(each, axis=0)
    np.testing.assert_allclose(found, x, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("founders", "leaves", "newcomers"), [(3, {"b": 9}, ""), (2, {}, "cd"), (2, {"a": 14}, "")])
@pytest.mark.parametrize("delay", [0, 2])
def test_fragments_are_those_of_the_members_of_each_round(
    founders: int, leaves: dict[str, int], newcomers: str, delay: int
) -> None:
    """As before, by fragments that land later; a loss puts them off to their next round. Newcomers weigh less."""
    every, elements = 6, []

    def make(params: list[nn.Parameter], members: Members) -> tuple[onebit.LocalSteps, None]:
        inner = torch.optim.SGD(params, lr=LR, weight_decay=0.1)
        options = {"every": every, "fragments": 2, "delay": delay, "bucket_cap_mb": 0.0005}
        optimizer = onebit.LocalSteps(inner, codec=IdentityCodec(), transport=members, **options)
        kinds = {p: k for k, fragment in enumerate(optimizer.fragments) for p in fragment.params}
        elements.append(np.concatenate([np.full(p.numel(), kinds[p]) for p in params]))
        return optimizer, None

    rosters, _, found, stats = run_of_changes(founders, leaves, newcomers, make, steps=25)
    parts, theta = [elements[0] == k for k in range(2)], start()
    assert all(part.any() for part in parts)
    w, tokens = {name: theta.copy() for name in rosters[0]}, {name: [0, 0] for name in rosters[0]}
    under_way: dict[int, tuple[int, np.ndarray, dict[str, np.ndarray], dict[str, int]]] = {}
    missed = 0

    def send(k: int, names: tuple[str, ...], step: int) -> None:
        counted = {name: tokens[name][k] for name in names}
        weights = {name: counted[name] * len(names) / sum(counted.values()) for name in names}
        mean = sum(weights[name] * (theta - w[name]) for name in names) / len(names)
        under_way[k] = step + delay, mean, {name: w[name].copy() for name in names}, counted
        for name in names:
            tokens[name][k] = 0

    def land(k: int) -> None:
        _, mean, sent, _ = under_way.pop(k)
        theta[parts[k]] -= mean[parts[k]]
        for name, at_send in sent.items():
            w[name][parts[k]] += (theta - at_send)[parts[k]]

    for step, names in enumerate(rosters, 1):
        for name in set(names) - set(w):
            for k in [*under_way]:
                land(k)
            w[name], tokens[name] = theta.copy(), [0, 0]
        for name in names:
            w[name] -= LR * (gradient(w[name], step - 1, ord(name) - 97) + 0.1 * w[name])
            tokens[name] = [count + 1 for count in tokens[name]]
        if set(w) - set(names):
            w = {name: w[name] for name in names}
            for k in [*under_way]:
                counted, missed = under_way.pop(k)[3], missed + 1
                for name in names:
                    tokens[name][k] += counted[name]
        for k in range(2):
            if k in under_way and under_way[k][0] == step:
                land(k)
        for k in range(2):
            if step % every == (k + 1) * every // 2 % every:
                send(k, names, step)
                if delay == 0:
                    land(k)
    for k in [*under_way]:
        land(k)
    for k in range(2):
        send(k, names, step)
        land(k)
    np.testing.assert_allclose(found, theta, atol=1e-5, rtol=0)
    assert stats.missed_rounds == missed == (delay > 0 and "b" in leaves)


def test_members_meet_from_unlike_calls() -> None:
    """One has the last step, and is in sync(); another has not."""

    def work(members: Members) -> int:
        _, optimizer = trained(members, 4)
        with calling("optimizer.sync()") if members.rendezvous.name == "a" else nullcontext():
            assert change(optimizer, members, PeerError("lost")).lost == ()
        end(optimizer)
        return members.roster.epoch

    assert set(founded(Hub(2), work).join().results.values()) == {2}


@pytest.mark.parametrize("sizes", [[], [1], [5, 64], [3] * 40])
def test_a_running_norm_is_the_norm_after_sixteen_votes(sizes: list[int]) -> None:
    """And at first: of a rank's worker errors of W chunks, and its server error of one."""
    W, draw = 3, torch.Generator().manual_seed(0)
    errors = [ErrorFeedback.zeros(W * n, W) for n in sizes]
    buckets = [Mock(ef=ef, rank=1, layout=Mock(world_size=W, chunk=n)) for ef, n in zip(errors, sizes, strict=True)]
    for ef in errors:
        ef.worker.normal_(generator=draw), ef.server.normal_(generator=draw)
    shares = [ef.worker.view(W, -1) / W for ef in errors]
    for share, ef in zip(shares, errors, strict=True):
        share[1] += ef.server
    expected = pytest.approx(float(torch.cat([torch.zeros(1), *(share.view(-1) for share in shares)]).norm()), rel=1e-5)
    running = residuals.RunningResidualNorm()
    first = running(buckets)
    assert first == expected and residuals.residual_norm(buckets) == expected
    for ef in errors:
        ef.worker.mul_(2), ef.server.mul_(2)
    norms = [running(buckets) for _ in range(16)]
    assert norms[-1] == pytest.approx(2 * first, rel=1e-5) and norms == sorted(norms)
    assert not sizes or norms[0] < 1.5 * first


def test_the_residuals_of_a_member_that_is_lost_between_rounds_are_counted() -> None:
    """As the last vote had them: nothing is sent between rounds. The lost one computes its own."""

    def work(members: Members) -> tuple[int, float]:
        def before_step(optimizer: onebit.LocalSteps) -> None:
            if optimizer.steps_taken() == 11:  # when the round of step 8 has landed
                errors = [(bucket.ef.worker.clone(), bucket.ef.server.clone()) for bucket in optimizer.buckets]
                own[members.rendezvous.name] = members.rank, errors
            if members.rendezvous.name == "b" and optimizer.steps_taken() == 14:
                raise Killed

        stats = trained(members, 20, local, before_step)[1].stats
        return stats.lost_residuals, stats.lost_residual_norm

    own: dict[str, tuple[int, list[tuple[Tensor, Tensor]]]] = {}
    run = founded(Hub(2), work).join()
    ((elements, norm),) = run.results.values()
    squares, (rank, errors) = 0.0, own["b"]
    for worker, server in errors:
        share = worker.double() / 2
        share.view(2, -1)[rank] += server.double()
        squares += float(share.square().sum())
    numel = sum(p.numel() for p in net().parameters())
    assert numel < elements <= 2 * numel and norm == pytest.approx(squares**0.5, rel=1e-4) and norm > 0


def test_a_newcomer_has_the_learning_rate_of_the_others() -> None:
    """It comes between two rounds' steps; a schedule and a weight decay are compared in each round."""
    hub = Hub(2)

    def work(members: Members) -> tuple[list[float], Tensor]:
        rates = []

        def before_step(optimizer: onebit.LocalSteps) -> None:
            if optimizer.steps_taken() == 6:
                await_newcomers(members, hub, 1)
            rates.append(optimizer.inner.param_groups[0]["lr"])

        model, optimizer = trained(members, 20, local, before_step, decay=0.9)
        optimizer.check_replicas()
        return rates, parameters_of(model)

    run = founded(hub, work).joined_by("n")
    rates, params = run.results["a"]
    new_rates, new_params = run.results["n"]
    assert new_rates == rates[-len(new_rates) :] and len(new_rates) == 12 and torch.equal(params, new_params)


def test_a_newcomer_may_come_as_another_is_lost_within_a_step() -> None:
    """Its schedule lags one step, as the others' moves after the step; rates that differ more are told."""
    hub = Hub(3)

    def work(members: Members) -> Tensor:
        def before_step(optimizer: onebit.LocalSteps) -> None:
            if optimizer.steps_taken() == 7:
                await_newcomers(members, hub, 1)
                if members.rendezvous.name == "b":
                    raise Killed
            while optimizer.steps_taken() == 9 and members.rank == 0 and not (members.joined or members.is_awaited()):
                time.sleep(0.001)

        model, optimizer = trained(members, 20, local, before_step, decay=0.9)
        optimizer.check_replicas()
        return parameters_of(model)

    assert_same_end(founded(hub, work).joined_by("n"), "acn")


@pytest.mark.parametrize(("founders", "leaves", "newcomers"), [(3, {"b": 8}, ""), (2, {}, "cd"), (2, {"a": 10}, "")])
def test_a_dense_optimizer_steps_with_the_mean_of_the_members_of_each_step(
    founders: int, leaves: dict[str, int], newcomers: str
) -> None:
    """A loop in float64, with momentum, a schedule and decay, takes the same steps; newcomers get both."""

    def make(params: list[nn.Parameter], members: Members) -> tuple[onebit.AveragedSteps, Any]:
        inner = torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.1)
        return onebit.AveragedSteps(inner, transport=members), torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)

    rosters, _, found, _ = run_of_changes(founders, leaves, newcomers, make)
    x, velocity = start(), np.zeros_like(start())
    for step, names in enumerate(rosters):
        mean = np.mean([gradient(x, step, ord(name) - 97) for name in names], axis=0)
        velocity = 0.9 * velocity + mean + 0.1 * x
        x = x - LR * 0.9**step * velocity
    np.testing.assert_allclose(found, x, atol=1e-5, rtol=0)


def drawn(layout: Layout) -> Tensor:
    """Random values of the parameters; zeros in the padding."""
    flat = torch.zeros(layout.numel)
    for view in layout.views(flat):
        view.normal_()
    return flat


@pytest.mark.parametrize("seed", range(8))
def test_residuals_are_carried_over(seed: int) -> None:
    """The mean of worker errors plus server errors, but for those of the lost; any sizes, any who stay, any order."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shapes = [torch.Size([int(n)]) for n in draw.integers(1, 300, size=int(draw.integers(1, 4)))]
    W, new_W = (int(draw.integers(1, 7)) for _ in range(2))
    before, now = (lay_out(shapes, 8, size) for size in (W, new_W))
    stay = draw.permutation(W)[: int(draw.integers(1, min(W, new_W) + 1))]
    residual, carried_over = torch.zeros(before.numel).double(), torch.zeros(now.numel).double()
    for rank, old in enumerate(stay):
        worker, owned = drawn(before), torch.zeros(before.numel)
        server = owned.view(W, -1)[old]
        server.copy_(drawn(before).view(W, -1)[old])
        residual += worker.double() / W + owned.double()
        bucket = Mock(device=torch.device("cpu"), layout=now, rank=rank)
        errors, kept = carried(bucket, before, (worker, server), int(old))
        carried_over += errors.double() / new_W
        carried_over.view(new_W, -1)[rank] += kept.double()
    for was, its in zip(before.views(residual), now.views(carried_over), strict=True):
        torch.testing.assert_close(its, was, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [onebit.OnebitAdam, onebit.OnebitLamb, onebit.ZeroOneAdam])
def test_a_change_frees_a_bucket_before_the_next_one_gets_memory(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, model = SimTransport(), net()
    options = {} if kind is onebit.ZeroOneAdam else {"freeze_step": 2}
    optimizer = kind(
        model.parameters(), lr=1e-2, transport=transport, compression="always", bucket_cap_mb=0.001, **options
    )
    for _ in range(4):
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
    old = [
        [weakref.ref(x) for x in (*bucket.flat.values(), bucket.ef.worker, bucket.ef.worker_next)]
        for bucket in optimizer.buckets
    ]
    restore, alive = new_world.restore_bucket, []

    def watched(owner: Any, bucket: Any, *rest: Any) -> None:
        alive.append(sum(x() is not None for one in old[: bucket.index] for x in one))
        restore(owner, bucket, *rest)

    monkeypatch.setattr(new_world, "restore_bucket", watched)
    state = new_world.leave(optimizer, [True] * len(old))
    transport.world_size = 2
    new_world.enter(optimizer, state)
    assert alive == [0] * len(old) and len(old) > 2


def test_a_run_that_nobody_carries_on_is_told_apart_from_a_start() -> None:
    """Its state is gone: a newcomer may not take its own initial values for the run's."""

    def work(members: Members) -> None:
        optimizer = onebit.OnebitAdam(net().parameters(), lr=1e-2, transport=members, compression="always")
        begin(optimizer)

    hub = Hub(1, wait_s=1.0)
    lost = hub.members("a", [INF])
    work(lost)
    lost.abandon()
    run = founded(hub, work, [])
    run.start("n")
    run.threads[0].join(30)
    assert isinstance(run.errors["n"], MembershipError) and "no member of epoch 1 (a) has come" in str(run.errors["n"])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda p, t: onebit.ZeroOneAdam(p, lr=1e-2, transport=t, compression="always", local_step_clipper=4),
            "local_step_clipper=1",
        ),
        (lambda p, t: ShardedOnebitAdam(p, lr=1e-2, transport=t), "the only copy"),
        (lambda p, t: onebit.LocalSteps(torch.optim.AdamW(p), every="auto", transport=t), "give a number of steps"),
        (lambda p, t: DenseAverager(p, t), "AveragedSteps"),
        (lambda p, t: onebit.Lamb(p, lr=1e-2).step() or average_gradients(p, t), "AveragedSteps"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(make: Callable[..., object], why: str) -> None:
    params = list(net().parameters())
    for p in params:
        p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match=why):
        make(params, Hub(1).members("a", [INF]))


def test_a_step_before_begin_is_refused() -> None:
    """Alone it would train, and nobody would say so."""
    model = net()
    optimizer = onebit.OnebitAdam(
        model.parameters(), lr=1e-2, transport=Hub(1).members("a", [INF]), compression="always"
    )
    model(torch.ones(2, 12)).sum().backward()
    with pytest.raises(RuntimeError, match="begin\\(optimizer\\) before step"):
        optimizer.step()


@pytest.mark.parametrize("strangers", ["token", "model", "options"])
def test_strangers_are_not_let_in(strangers: str) -> None:
    """Whoever has another token, another model or other options; all members are told, before anything is written."""
    hub = Hub(2, wait_s=3.0)

    def work(members: Members) -> None:
        is_strange = members.rendezvous.name == "b"
        if is_strange and strangers == "token":
            members.rendezvous._token = "guessed"
        model = nn.Linear(12, 13 if is_strange and strangers == "model" else 12)
        floor = 0.5 if is_strange and strangers == "options" else 0.01
        optimizer = onebit.OnebitAdam(
            model.parameters(), lr=1e-2, transport=members, variance_floor=floor, compression="always"
        )
        begin(optimizer)

    run = founded(hub, work)
    run.wait()
    said = [str(error) for error in run.errors.values()]
    assert said and all("token" in text if strangers == "token" else "differ between ranks" in text for text in said)


@pytest.mark.parametrize("freeze_step", [4, 20], ids=["before it copies the state", "at the change"])
def test_a_newcomer_with_another_model_is_refused_and_the_others_go_on(
    freeze_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, sent = Hub(2), list[Any]()
    monkeypatch.setattr(copying, "send_state", lambda link, state, *rest: sent.append(state))

    def before_step(optimizer: Any) -> None:
        members = optimizer.transport
        while optimizer.steps_taken() == 8 and "n" not in run.errors:
            hub.holds.set()
            if hub.store.add("here/2", 0) > 0 and (members.rank > 0 or members.is_awaited()):
                break
            time.sleep(0.005)

    def work(members: Members) -> Tensor:
        if members.rendezvous.name != "n":
            model, _ = trained(members, 20, partial(adam, freeze_step=freeze_step), before_step)
            return parameters_of(model)
        begin(onebit.OnebitAdam(nn.Linear(3, 3).parameters(), lr=1e-2, transport=members, compression="always"))
        raise AssertionError("let in")

    run = founded(hub, work)
    assert hub.holds.wait(30)
    run.start("n")
    run.wait()
    assert torch.equal(run.results["a"], run.results["b"])
    assert isinstance(run.errors["n"], ValueError) and "entry 0 is parameter 0" in str(run.errors["n"])
    assert not sent


@pytest.mark.parametrize("make", [adam, averaged])
def test_members_compare_replicas_after_the_same_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every three steps, taken or skipped; from a change on they count anew, as a newcomer has seen none skipped."""
    hub, compared, joined_after = Hub(3), steps_compared(monkeypatch), list[int]()

    def work(members: Members) -> Tensor:
        skips = members.rendezvous.name == "c"

        def before_step(optimizer: Any) -> None:
            step = optimizer.steps_taken()
            if step == 8:
                await_newcomers(members, hub, 1)
            if members.rendezvous.name == "n" and not joined_after:
                joined_after.append(step)
            if members.rendezvous.name == "b" and step == 14:
                raise Killed

        model = net()
        optimizer = make(model, members, check_replicas_every=3)
        begin(optimizer)
        while optimizer.steps_taken() < 22:
            before_step(optimizer)
            model(torch.ones(2, 12)).square().mean().backward()
            if skips and optimizer.steps_taken() == 4:
                skips, model[0].weight.grad[0, 0] = False, float("inf")
            optimizer.step()
            optimizer.zero_grad()
        end(optimizer)
        return parameters_of(model)

    assert_same_end(founded(hub, work).joined_by("n"), "acn")
    assert compared["a"] == compared["c"] and compared["a"][:2] == [3, 5]  # one of the first six was skipped
    (start,) = joined_after
    assert compared["n"] == [step for step in compared["a"] if step > start] != []
    assert set(compared["b"]) <= set(compared["a"]) and all(step % 3 == 0 for step in compared["n"])


@pytest.mark.parametrize("make", [adam, averaged])
def test_replicas_that_differ_are_found_without_a_call(make: Make) -> None:
    def work(members: Members) -> None:
        def before_step(optimizer: Any) -> None:
            if members.rendezvous.name == "b" and optimizer.steps_taken() == 4:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0][0, 0] += 1.0
            assert optimizer.steps_taken() < 6

        trained(members, 8, partial(make, check_replicas_every=3), before_step)

    run = founded(Hub(2), work)
    run.wait()
    assert set(run.errors) == {"a", "b"} and all(isinstance(error, ReplicaError) for error in run.errors.values())


def test_how_often_replicas_are_compared_is_the_same_on_all_members() -> None:
    """Else one would wait for a comparison that the other does not make."""

    def work(members: Members) -> None:
        begin(averaged(net(), members, check_replicas_every=3 if members.rendezvous.name == "a" else 4))

    run = founded(Hub(2), work)
    run.wait()
    assert set(run.errors) == {"a", "b"} and all("check_replicas_every" in str(e) for e in run.errors.values())
    with pytest.raises(ValueError, match="check_replicas_every must be at least 0"):
        averaged(net(), Hub(1).members("n", [INF]), check_replicas_every=-1)


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [0, 0.5, 1])
@pytest.mark.parametrize("make", [adam, averaged])
def test_a_loss_within_a_vote_on_replicas_is_survived(make: Make, fuse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the step was written: the members meet before the next one, and no step is taken twice."""
    compare = replicas.check_replicas

    def mortal(transport: Members, tensors: object, names: object, step: int) -> None:
        if transport.rendezvous.name == "b" and step == 8:
            transport._now.fuse[0] = fuse
        compare(transport, tensors, names, step)

    monkeypatch.setattr(replicas, "check_replicas", mortal)
    run = founded(Hub(3), lambda members: train(members, 12, make=partial(make, check_replicas_every=1)))
    assert_same_end(run.join(), "ac")
    assert run.results["a"][0] == 12


@pytest.mark.slow
def test_a_copy_may_take_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces come within it; the third member waits for signs of life, not for a message."""
    hub, piece, sent = Hub(2, timeout_s=1.0), 1 << 11, []
    monkeypatch.setattr("onebit.membership.change.PIECE_BYTES", piece)
    broadcast = SimTransport.broadcast

    def slow(transport: SimTransport, x: Tensor, src: int) -> object:
        if x.numel() == piece and transport.rank == src:
            sent.append(x)
            time.sleep(0.5)
        return broadcast(transport, x, src)

    monkeypatch.setattr(SimTransport, "broadcast", slow)
    assert_same_end(founded(hub, lambda members: train(members, 20, hub)).joined_by("n"), "abn")
    assert len(sent) >= 3 and max(hub.networks) == 2


def test_a_stranger_does_not_end_the_run_of_others() -> None:
    """It comes without the token, or writes into the store by itself: the others pass it over."""
    hub = Hub(2)

    def work(members: Members) -> Tensor:
        if members.rendezvous.name == "n":
            members.rendezvous._token = "guessed"
        return train(members, 20, hub)[1]

    run = founded(hub, work)
    assert hub.holds.wait(30)
    run.start("n")
    run.threads[-1].join(30)
    assert isinstance(run.errors["n"], MembershipError) and "not written with this run's token" in str(run.errors["n"])
    hub.store.set("here/2/1", 'forged {"name": "n", "missed": []}')
    hub.store.add("here/2", 1)
    run.start("w")
    run.wait()
    assert_same_end(run, "abw")
    assert max(hub.networks) == 2


AWAY = Mock(add=Mock(side_effect=MembershipError("cut off")))  # beats of a member that does not reach the store


@contextmanager
def met(hub: Hub) -> Iterator[tuple[ThreadPoolExecutor, Roster, Rendezvous, Rendezvous]]:
    """A pool, the first epoch of the members a and b, and both, the first one first. Its end is that of the run."""
    both = [hub.members(name, [INF]).rendezvous for name in "ab"]
    with ThreadPoolExecutor() as pool:
        roster, same = pool.map(lambda one: one.meet(None), both)
        assert roster == same
        try:
            yield pool, roster, *sorted(both, key=lambda one: one.name != roster.names[0])
        finally:
            hub.store.set("ended", "yes")
            for one in both:
                one.leave()


def forget(hub: Hub, *members: Rendezvous) -> None:
    """The rendezvous comes back empty, and these members are connected to it."""
    hub.store = HashStore()
    for one in members:
        one._store._store = one._beats._store = hub.store


def test_nobody_waits_for_a_member_that_has_given_the_epoch_up() -> None:
    """a has moved on to the next epoch and waits there for b, which lives."""
    with met(Hub(2)) as (pool, roster, a, b):
        next_of_a = pool.submit(a.meet, roster)
        with pytest.raises(PeerError, match=f"{a.name} gave up epoch 1"):
            b.confirm(roster, "ready")
        assert b.meet(roster) == next_of_a.result(10) and set(next_of_a.result().names) == {"a", "b"}


def test_a_run_begins_with_its_members_and_not_with_their_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first member looks into the store between the roster and its number, which another one writes late."""
    hub = Hub(2)
    a, b = (hub.members(name, [INF]).rendezvous for name in "ab")
    write = b._write

    def write_late(key: str, value: dict[str, object]) -> None:
        while key == "newest" and not hub.store.check(["newest"]):  # the first member's look
            time.sleep(0.01)
        write(key, value)

    monkeypatch.setattr(a, "_close", lambda *args: None)
    monkeypatch.setattr(b, "_write", write_late)
    with ThreadPoolExecutor() as pool:
        of_a = pool.submit(a.meet, None)
        while hub.store.add("here/1", 0) == 0:
            time.sleep(0.01)
        roster = b.meet(None)
        assert of_a.result(10) == roster and roster.names == ("a", "b") and not a.has_begun(roster)
    a.leave(), b.leave()


def test_a_member_that_waits_comes_again_if_the_rendezvous_comes_back_empty() -> None:
    """What it had written is gone, and it lives: the others would wait for it until `busy_s`."""
    hub = Hub(2)
    with met(hub) as (pool, roster, a, b):
        next_of_a = pool.submit(a.meet, roster)
        while hub.store.add("here/2", 0) == 0:
            time.sleep(0.01)
        forget(hub, a, b)
        next_of_b = pool.submit(b.meet, roster)
        assert next_of_a.result(10) == next_of_b.result(10) and set(next_of_a.result().names) == {"a", "b"}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("founders", [1, 2])
def test_a_newcomer_finds_the_run_that_the_rendezvous_had_forgotten(epochs: int, founders: int) -> None:
    """It came to the empty one before the members did, and would have been a founder; at once, if one is enough."""
    hub = Hub(2)
    with met(hub) as (pool, last, *both):
        for _ in range(epochs - 1):
            last, _ = pool.map(partial(Rendezvous.meet, last=last), both)
        first = next(one for one in both if one.name == last.names[0])  # it looks for newcomers
        first.begin()
        forget(hub)
        hub.founders = founders
        n = hub.members("n", [INF]).rendezvous
        of_n = pool.submit(n.meet, None)
        while hub.store.add("here/1", 0) == 0:
            time.sleep(0.001)
        for one in both:
            one._store._store = one._beats._store = hub.store
        try:
            assert first.is_awaited.wait(10) and not of_n.done()
            assert {roster.epoch for roster in pool.map(partial(Rendezvous.meet, last=last), both)} == {epochs + 1}
            assert set(of_n.result(10).names) == {"a", "b", "n"}
        finally:
            hub.store.set("ended", "yes")
            n.leave()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_member_that_was_cut_off_does_not_hide_the_run_from_an_empty_rendezvous(is_first: bool) -> None:
    """It reaches the store first, and tells of the epoch that it was in. Both would be the run's only members."""
    hub, refused = Hub(2), Mock(side_effect=RuntimeError("still connecting"))
    with met(hub) as (pool, roster, *both):
        a, b = both if is_first else reversed(both)
        a.begin(), b.begin()
        beats, a._beats = a._beats, AWAY
        alone = b.meet(roster, {a.name})
        for store in (b._store, b._beats):
            store._connect, store._store = refused, None
        forget(hub, a)
        beats._store = hub.store
        a._beats = beats
        back = pool.submit(a.meet, roster)
        time.sleep(0.3)  # as long as several looks
        for store in (b._store, b._beats):
            store._connect = lambda: hub.store
        assert b.is_awaited.wait(10)
        assert b.meet(alone) == back.result(10) == Roster(3, (b.name, a.name))


def test_a_member_that_was_left_is_in_no_epoch_until_it_is_back() -> None:
    """Else it would tell a rendezvous that comes back empty of an epoch that is over. It finds the run there."""
    hub = Hub(2)

    def forgotten() -> None:
        forget(hub, first)
        second._store._store = hub.store
        time.sleep(0.3)  # as long as several looks
        assert not hub.store.check(["newest"])
        second._beats = beats
        while not hub.store.check(["newest"]):
            time.sleep(0.01)

    with met(hub) as (pool, roster, first, second):
        first.begin(), second.begin()
        here, first._beats = first._beats, AWAY
        alone = second.meet(roster, {first.name})
        first._beats, beats, second._beats = here, second._beats, AWAY
        beats._store = None  # it connects anew, to the other store
        found = pool.submit(first.meet, roster, when_left=forgotten)
        deadline = time.monotonic() + 10
        while hub.store.add("here/3", 0) == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert second.meet(alone) == found.result(10) == Roster(3, (second.name, first.name))


def test_a_newcomer_that_asks_for_a_copy_asks_again_if_the_rendezvous_comes_back_empty() -> None:
    """Its question is gone, and the numbers of questions begin anew."""
    hub, giver = Hub(1), Mock()
    giver.answer.return_value = None  # others get one now
    a, n = (hub.members(name, [INF]).rendezvous for name in "an")
    assert n.ask() is None  # there is no run yet
    a.gives(giver)
    a.meet(None)
    a.begin()
    with ThreadPoolExecutor() as pool:
        found = pool.submit(n.ask)
        while not giver.answer.called:
            time.sleep(0.01)
        forget(hub, a, n)
        giver.answer.return_value = ""
        try:
            assert found.result(10) == Roster(-1, ("a", "n"))
        finally:
            hub.store.set("ended", "yes")
            a.leave(), n.leave()


def test_a_newcomer_asks_whoever_is_the_first_member() -> None:
    """The one that it has asked is lost, or has no copy for it."""
    hub, giver = Hub(2), Mock()
    giver.answer.return_value = "it has none"
    n = hub.members("n", [INF]).rendezvous
    with met(hub) as (pool, roster, first, second):
        first.begin()
        first.leave()  # without an answer
        second.gives(giver)
        found = pool.submit(n.ask)
        assert second.meet(roster, {first.name}).names == (second.name,)
        assert found.result(10) is None and giver.answer.call_args[0][0].names == (second.name, "n")
    n.leave()


def test_a_rendezvous_that_keeps_no_names_is_an_error() -> None:
    """Something else overwrites them: a member must not write, and let the others read, for ever."""

    class Overwritten(HashStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, "x" if key.startswith("here/") else value)

    alone = Rendezvous(Overwritten, "a")
    try:
        with pytest.raises(MembershipError, match="keeps no name for epoch 1"):
            alone.meet(None)
    finally:
        alone.leave()


@pytest.mark.parametrize(("missed", "least_s", "most_s"), [(["b"], 0.0, 0.6), ([], 1.2, 9.0)], ids=["broken", "silent"])
def test_a_member_that_died_long_ago_is_not_waited_for(missed: list[str], least_s: float, most_s: float) -> None:
    """It died between two exchanges, as with local steps: the first member has heard of it since."""
    store = HashStore()
    patience = Patience(beat_s=0.02, suspect_s=0.8, silent_s=1.2, look_s=0.02)
    a, b = (Rendezvous(lambda: store, name, founders=2, patience=patience) for name in "ab")
    try:
        with ThreadPoolExecutor() as pool:
            rosters = [each.result() for each in [pool.submit(its.meet, None) for its in (a, b)]]
        assert rosters[0] == rosters[1]
        if rosters[0].names[0] == "b":
            a, b = b, a
        b.leave()
        time.sleep(1.0)
        began = time.monotonic()
        assert a.meet(rosters[0], [b.name] if missed else []).names == (a.name,)
        assert least_s < time.monotonic() - began < most_s
    finally:
        a.leave()
        b.leave()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_dense_step_is_clipped_as_by_torch(dtype: torch.dtype) -> None:
    def work(members: Members) -> tuple[Tensor, Tensor]:
        ours, theirs = (nn.Parameter(torch.arange(5.0).to(dtype)) for _ in range(2))
        optimizer = onebit.AveragedSteps(torch.optim.SGD([ours], lr=0.1), transport=members, max_grad_norm=1.0)
        begin(optimizer)
        ours.grad, theirs.grad = torch.full_like(ours, 3.0), torch.full_like(ours, 3.0)
        optimizer.step()
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        torch.optim.SGD([theirs], lr=0.1).step()
        end(optimizer)
        return ours.detach(), theirs.detach()

    for ours, theirs in founded(Hub(2), work).join().results.values():
        torch.testing.assert_close(ours, theirs)


def test_what_an_optimizer_adds_to_its_state_travels() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    inner.register_state_dict_post_hook(lambda _, state: {**state, "added": 7})
    assert with_shards(inner, local_state(inner)) == inner.state_dict()


def test_a_name_is_taken_once() -> None:
    hub = Hub(1)
    hub.members("a", [INF]).abandon()
    with pytest.raises(ValueError, match="is or was called a"):
        hub.members("a", [INF])


@pytest.mark.parametrize("steps", [0, 5])
def test_founders_begin_as_the_one_that_has_loaded_a_checkpoint(steps: int) -> None:
    """Parameters, state, schedule and buffers; without one, as the first."""

    def work(members: Members) -> tuple[int, Tensor]:
        torch.manual_seed(ord(members.rendezvous.name))
        model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12))
        optimizer = onebit.OnebitAdam(
            model.parameters(), lr=1e-2, transport=members, compression="always", freeze_step=3
        )
        if members.rendezvous.name == "b" and steps:
            alone = onebit.OnebitAdam(
                [nn.Parameter(p.detach().clone()) for p in model.parameters()],
                lr=1e-2, transport=SimTransport(), compression="always", freeze_step=3,
            )  # fmt: skip
            for _ in range(steps):
                for p in alone.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p)
                alone.step()
            optimizer.load_state_dict(alone.state_dict())
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
        for _ in range(steps * (members.rendezvous.name == "b")):
            schedule.step()
        model[1].running_mean.fill_(float(ord(members.rendezvous.name)))
        begin(optimizer, schedule=schedule, buffers=Buffers(model))
        assert float(model[1].running_mean[0]) == ord("b" if steps else members.roster.names[0])
        assert optimizer.steps_taken() == steps
        for _ in range(3):
            model(torch.randn(4, 12)).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        optimizer.check_replicas()
        return schedule.last_epoch, parameters_of(model)

    run = founded(Hub(2), work).join()
    (first, a), (second, b) = run.results.values()
    assert first == second == steps + 3 and torch.equal(a, b)


def test_what_cannot_travel_is_told() -> None:
    """A state is tensors and plain values: nothing of another process is run here."""

    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"made": Hub}

        def load_state_dict(self, state_dict: object) -> None:
            raise AssertionError("loaded")

    def work(members: Members) -> None:
        optimizer = onebit.OnebitAdam(net().parameters(), lr=1e-2, transport=members, compression="always")
        begin(optimizer, odd=Odd())

    run = founded(Hub(2), work)
    run.wait()
    assert any("must have a state_dict of tensors" in str(error) for error in run.errors.values())


def test_members_that_meet_again_and_again_are_told_why(caplog: pytest.LogCaptureFixture) -> None:
    def work(members: Members) -> None:
        optimizer = adam(net(), members)
        begin(optimizer)
        for _ in range(6):
            change(optimizer, members, PeerError("in another operation"))

    founded(Hub(2), work).join()
    assert "these 2 members have met 6 times without taking a step" in caplog.text
    assert "(in another operation)" in caplog.text
