"""A newcomer copies the state while the others train: the same run as without, and the change is short."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from faults.member_runs import Hub, Killed, Run
from hypothesis import given
from hypothesis import strategies as st
from test_member_nodes import INF, KINDS, LAYOUTS, check, run_of
from test_membership import OPTIONS, Make, adam, delayed, lamb, local, muon, net, parameters_of
from torch import Tensor, nn

import onebit
from onebit.comm import IdentityCodec
from onebit.membership import Members, MembershipError, Rendezvous, Roster, begin, change, copying, end

STEPS, CUT, ASKS, JOINS = 24, 6, 10, 16
"""Of a run; the newcomer copies before step ASKS + 1, and comes in with step JOINS + 2. CUT: who comes back leaves."""

ONE_AT_A_TIME = threading.Lock()  # of random weights, as the generator is the process's


@pytest.fixture(autouse=True)
def _newcomers_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a member may seem silent, and a newcomer then comes without a copy."""
    ask = Rendezvous.ask

    def patient(rendezvous: Rendezvous) -> Roster | None:
        return next((pair for _ in range(20) if (pair := ask(rendezvous)) is not None), None)

    monkeypatch.setattr(Rendezvous, "ask", patient)


def bf16(model: nn.Module, members: Members) -> onebit.OnebitAdam:
    return adam(model.bfloat16(), members)


def zero_one(model: nn.Module, members: Members) -> onebit.ZeroOneAdam:
    return onebit.ZeroOneAdam(model.parameters(), transport=members, var_freeze_step=8, **OPTIONS)


def plain(model: nn.Module, members: Members, **options: Any) -> onebit.LocalSteps:
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)
    return onebit.LocalSteps(inner, every=4, transport=members, bucket_cap_mb=0.001, **options)


def bf16_local(model: nn.Module, members: Members) -> onebit.LocalSteps:
    return local(model.bfloat16(), members)


def cut_off(members: Members, until: threading.Event) -> None:
    """This member reaches neither the others nor the store, and then does again, and sees that they have gone on."""
    members._now.network.leave(members.rank)
    beats, away = members.rendezvous._beats, Mock(add=Mock(side_effect=MembershipError("cut off")))
    members.rendezvous._beats = away
    assert until.wait(30)
    members.rendezvous._beats = beats
    assert members.rendezvous.is_over.wait(30)  # else it would take a local step or two more, as it looks now and then


class Joined:
    """A run with a newcomer, "n", that asks for a copy before step ASKS + 1. The founders wait for it to have all.

    is_back: the newcomer is the founder "n", which is cut off after step CUT, and comes back.

    Attributes:
        params: By name, the parameters after the last step.
        left: Bytes of the state, and those of it that were sent at the change.
        errors: By name, what members died of.
    """

    def __init__(
        self,
        make: Make,
        monkeypatch: pytest.MonkeyPatch,
        *,
        copies: bool = True,
        joins: int = JOINS,
        leaves: dict[str, int] | None = None,
        is_back: bool = False,
    ):
        self.left, self._joins = [0, 0], joins
        self._make, self._leaves, self._founders = make, leaves or {}, 2 + len(leaves or {}) + is_back
        self._hub = Hub(self._founders)
        self._is_copied, self.may_come = threading.Event(), threading.Event()
        copy_state = copying.copy_state

        def less(state: Any, *rest: Any) -> Any:
            found = copying.without(state, *rest)
            self.left = [copying.bytes_of(its) for its in (state, found)]
            return found

        def copied(optimizer: Any, members: Members, *rest: Any) -> Any:
            if members.rendezvous.name != "n" or (is_back and members.roster is None):
                return None
            try:
                found = copy_state(optimizer, members, *rest) if copies else None
            finally:
                self._is_copied.set()
            assert self.may_come.wait(20)
            return found

        monkeypatch.setattr(change, "copy_state", copied)
        monkeypatch.setattr(change, "without", less)
        run = Run(self._hub, self._work)
        for rank, name in enumerate("abn" if is_back else "abcd"[: self._founders]):
            run.start(name)  # in this order: which residuals a rank has depends on it
            while self._hub.store.add("here/1", 0) == rank:
                time.sleep(0.002)
        assert self._hub.holds.wait(30)
        if not is_back:
            run.start("n")
        self.params, self.errors = run.join().results, run.errors

    def _work(self, members: Members) -> Tensor:
        name = members.rendezvous.name
        with ONE_AT_A_TIME:
            model = net()
        optimizer = self._make(model, members)
        inner = getattr(optimizer, "inner", optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.99)
        begin(optimizer, schedule=schedule)
        draw = torch.Generator().manual_seed(ord(name))
        while (step := max(optimizer.steps_taken(), optimizer.progress()[0])) < STEPS:
            if step == self._leaves.get(name):
                raise Killed
            if step == CUT and name == "n":
                cut_off(members, self._hub.holds)
            if step == ASKS and name != "n":
                self._hub.holds.set()
                assert self._is_copied.wait(20)
            while step == self._joins and name != "n" and members.rank == 0 and not self._has_come(members):
                self.may_come.set()  # by the one that asks for all: one that is ahead would be too early
                time.sleep(0.002)
            x = torch.randn(8, 12, generator=draw).to(next(model.parameters()).dtype)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            while self._has_more_to_give(members, len(optimizer.buckets)):
                time.sleep(0.002)  # what a step has spoilt is sent again before a change comes
        optimizer.sync()
        optimizer.check_replicas()
        end(optimizer)
        return parameters_of(model)

    def _has_more_to_give(self, members: Members, count: int) -> bool:
        assert members.giver is not None
        return any(not giving._ended and len(giving._given) < count for giving in members.giver._living())

    def _has_come(self, members: Members) -> bool:
        assert members.roster is not None
        return members.is_awaited() or "n" in members.roster.names


def equal(*runs: Joined) -> bool:
    first, *others = (params for run in runs for params in run.params.values())
    return all(torch.equal(first, params) for params in others)


COPIED: dict[str, tuple[Make, float]] = {
    "adam": (adam, 0.12),
    "delayed": (delayed, 0.12),
    "bf16": (bf16, 0.12),
    "lamb": (partial(lamb, freeze_step=4), 0.12),
    "zero_one": (zero_one, 0.12),
    "muon": (partial(muon, freeze_step=4), 0.4),
    "local": (plain, 0.12),
    "local, AdamW": (local, 0.72),
    "local, momentum": (partial(local, outer_lr=0.7, outer_momentum=0.9, error_decay=0.9), 0.54),
    "local, in full with momentum": (partial(local, outer_lr=0.7, outer_momentum=0.9, codec=IdentityCodec()), 0.54),
    "local, in full": (partial(local, codec=IdentityCodec()), 0.72),
    "local, fragments with a delay": (partial(local, fragments=3, delay=2, outer_momentum=0.5), 0.54),
    "local, bf16": (bf16_local, 0.72),
}


@pytest.mark.parametrize(("make", "most"), COPIED.values(), ids=COPIED)
def test_a_run_is_that_of_a_copy_at_the_change(make: Make, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have followed the copy. most: the share of the state that is sent at the change."""
    with monkeypatch.context() as patch:
        early = Joined(make, patch)
    with monkeypatch.context() as patch:
        late = Joined(make, patch, copies=False)
    assert equal(early, late) and len(early.params) == len(late.params) == 3
    assert late.left == [0, 0] and 0 < early.left[1] < most * early.left[0]


def test_a_step_that_exchanges_gradients_makes_buckets_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three come between the copy and the change. If each bucket may be sent once, the copy is given up."""
    sent = list[Any]()
    send = copying.send_state

    def noted(link: Any, message: Any, *rest: Any) -> None:
        sent.append(message)
        send(link, message, *rest)

    monkeypatch.setattr(copying, "send_state", noted)
    monkeypatch.setattr(copying, "TRIES", 9)
    run = Joined(partial(adam, freeze_step="auto"), monkeypatch, joins=18)
    assert equal(run) and run.left[1] < 0.12 * run.left[0]
    indices = [message["bucket"]["index"] for message in sent if message["bucket"] is not None]
    assert len(indices) >= 2 * len(set(indices))
    monkeypatch.setattr(copying, "TRIES", 1)
    run = Joined(partial(adam, freeze_step="auto"), monkeypatch)
    assert equal(run) and run.left[1] > 0.9 * run.left[0]


@pytest.mark.parametrize(
    ("kind", "most", "layout"),
    [
        *(("1-bit", 0.12, layout) for layout in LAYOUTS),
        *(("delayed", 0.12, "stages"), ("LAMB", 0.3, "shards"), ("local", 0.75, "stages of shards")),
    ],
)
def test_a_new_node_copies_all_parts(kind: str, most: float, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank those of the rank at its place in the first node, which all begin to give in the same step."""
    sizes, without = list[tuple[int, int]](), copying.without

    def less(state: Any, *rest: Any) -> Any:
        found = without(state, *rest)
        sizes.append((copying.bytes_of(state), copying.bytes_of(found)))
        return found

    monkeypatch.setattr(change, "without", less)
    hub, (stages, ranks) = Hub(2), LAYOUTS[layout]
    run = run_of(hub, [[INF] * ranks, [INF] * ranks], steps=6, newcomer=True, kind=KINDS[kind], stages=stages)
    assert hub.holds.wait(30)
    run.start_node("n", [INF] * ranks)
    assert check(run, ranks) == ["a", "b", "n"]
    assert len(sizes) == ranks and sum(found for _, found in sizes) < most * sum(whole for whole, _ in sizes), sizes


def test_a_question_that_is_not_written_yet_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer takes a number, then writes its question. The first member may look in between."""
    write = Rendezvous._write

    def late(rendezvous: Rendezvous, key: str, value: Any) -> None:
        if key.startswith("copy/"):
            time.sleep(0.5)  # 20 looks
        write(rendezvous, key, value)

    monkeypatch.setattr(Rendezvous, "_write", late)
    run = Joined(adam, monkeypatch)
    assert equal(run) and run.left[1] < 0.12 * run.left[0]


@pytest.mark.parametrize("make", [adam, plain, delayed], ids=["adam", "local", "delayed"])
def test_a_member_that_comes_back_copies_as_a_newcomer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        early = Joined(make, patch, is_back=True)
    with monkeypatch.context() as patch:
        late = Joined(make, patch, is_back=True, copies=False)
    assert equal(early, late) and len(early.params) == len(late.params) == 3
    assert late.left == [0, 0] and 0 < early.left[1] < 0.12 * early.left[0]


@pytest.mark.parametrize("make", [adam, plain], ids=["adam", "local"])
def test_a_member_that_is_lost_meanwhile_leaves_the_copy_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames have other rows from then on."""
    run = Joined(make, monkeypatch, leaves={"c": 13})
    assert equal(run) and set(run.params) == {"a", "b", "n"} and run.left[1] < 0.12 * run.left[0]


def test_a_round_in_full_fits_into_the_frames_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as the parameters, and comes at once; the bound of a small model would hide it."""
    monkeypatch.setattr(copying, "LEAST_LOG_BYTES", 0)
    run = Joined(partial(plain, codec=IdentityCodec()), monkeypatch)
    assert equal(run) and run.left[1] < 0.12 * run.left[0]


def test_frames_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A network that is too slow: the copy is given up, and the parameters are sent at the change."""
    caplog.set_level(logging.INFO)
    send, waiting = copying.send_state, list[int]()

    def slow(link: Any, message: Any, *rest: Any) -> None:
        if message["steps"]:
            assert run.may_come.wait(20)
        send(link, message, *rest)

    def note(giving: Any, *rest: Any) -> None:
        giving._most_bytes = most
        remember(giving, *rest)
        waiting.append(giving._log_bytes)

    remember, most = copying._Giving.note, 1000
    monkeypatch.setattr(copying, "send_state", slow)
    monkeypatch.setattr(copying._Giving, "note", note)
    run = Joined.__new__(Joined)
    run.__init__(adam, monkeypatch)
    assert equal(run) and run.left[1] > 0.4 * run.left[0]
    assert "steps make frames faster than they can be sent" in caplog.text
    assert max(waiting) < 2 * most


def test_a_newcomer_comes_once_no_less_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps make frames about as fast as they are sent: each message has as many as the one before."""
    monkeypatch.setattr(copying, "PIECE_BYTES", 0)
    optimizer, frames = Mock(), torch.zeros(2, 500, dtype=torch.uint8)
    optimizer.buckets = [Mock(index=0, layout=Mock(parameter_numel=10_000))]
    optimizer.common.return_value = [torch.zeros(10_000)], frames
    giving, sent = copying._Giving(optimizer, Mock(), Mock(names=("a", "n")), []), list[Any]()
    for steps in (20, 10, 6, 6, 6):
        sent.append(giving._next())
        with giving.changed:
            giving._log_bytes -= copying._bytes_of(sent[-1]["steps"])
            for number in range(steps):
                giving.note(0, frames + 20 * len(sent) + number, {})
    assert [len(message["steps"]) for message in sent] == [0, 20, 10, 6, 6]
    assert [message["is_ready"] for message in sent] == [False, False, False, False, True]


def test_a_member_that_has_left_gives_no_copy() -> None:
    optimizer, pair = Mock(), Mock(names=("a", "n"))
    optimizer.buckets, optimizer.why_not_repeated.return_value = [], ""
    giver, giving = copying.Giver(optimizer, Mock(node=None), list), copying._Giving(optimizer, Mock(), pair, [])
    giving.thread = Mock()
    giver._givings.append(giving)  # one that is under way is given up
    giver.stop()
    last = giving._next()
    assert last["is_end"] and "has left" in last["why"]
    giving.is_over = True
    assert "has left" in (giver.answer(pair) or "")
    assert not giver._living()


@pytest.mark.parametrize(
    ("make", "who", "messages"),
    [
        *((adam, who, messages) for who in ("giver", "newcomer") for messages in (0, 1, 3)),
        *((plain, who, messages) for who in ("giver", "newcomer") for messages in (0, 3)),
        *((plain, "giver to one that is back", messages) for messages in (1, 3)),
        *((adam, "one that is back", messages) for messages in (0, 1)),
    ],
)
def test_either_may_be_lost_amid_the_copy(make: Make, who: str, messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on. If the giver is lost, another one gives, or the state is sent at the change."""
    is_giver, is_back = who.startswith("giver"), who.endswith("back")
    name = "send_state" if is_giver else "receive_state"
    done, count = getattr(copying, name), list[None]()

    def dies(link: Any, *rest: Any) -> Any:
        if len(count) == messages:
            link.fuse[0] = 0.0
        count.append(None)
        return done(link, *rest)

    monkeypatch.setattr(copying, name, dies)
    hub = Hub(3 + is_back)

    def work(members: Members) -> Tensor:
        model = net()
        optimizer = make(model, members)
        begin(optimizer)
        draw = torch.Generator().manual_seed(ord(members.rendezvous.name))
        while (step := optimizer.steps_taken()) < 40:
            if step == CUT and is_back and members.rendezvous.name == "n":
                cut_off(members, hub.holds)
            while step == 8 and len(count) <= messages and members.rendezvous.name != "n":
                hub.holds.set()
                time.sleep(0.002)
            while step == 30 and not is_giver and members.rank == 0 and not (run.errors or members.is_awaited()):
                time.sleep(0.002)  # it dies at the change, if it has not yet
            x = torch.randn(8, 12, generator=draw)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
        optimizer.check_replicas()
        end(optimizer)
        return parameters_of(model)

    run = Run(hub, work)
    for each in "abcn"[: hub.founders]:
        run.start(each)
    assert hub.holds.wait(30)
    if not is_back:
        run.start("n")
    run.join()
    died = [each for each, error in run.errors.items() if isinstance(error, Killed)]
    assert len(died) == 1 and (died == ["n"]) != is_giver
    first, *others = run.results.values()
    assert len(others) >= 1 and all(torch.equal(first, params) for params in others)


states = st.recursive(
    st.integers(0, 2).map(lambda seed: torch.full((100,), float(seed))) | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    | st.tuples(inner, inner),
)  # fmt: skip


@given(states, st.sets(st.integers(0, 2)))
def test_what_is_left_out_is_filled_in(state: Any, held: set[int]) -> None:
    tensors = [torch.full((100,), float(seed)) for seed in held]
    pool = dict(zip(copying.digests_of(tensors), tensors, strict=True))
    sent = copying.without(state, copying.digested(state), pool)
    assert not any(float(x[0]) in held for x in copying._tensors(sent))
    assert str(copying.filled(sent, pool)) == str(state)


def test_tensors_that_differ_have_other_digests() -> None:
    x = torch.zeros(64)
    others = [x.half(), x.view(8, 8), torch.zeros(65), -x, x.clone().fill_(1e-45)]
    assert len(set(copying.digests_of([x, x.clone(), *others]))) == 6
