"""OnebitAdam(delay=1): equal to a delayed textbook loop, hidden, skipped, saved, resumed and landed as it should be."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from errors import error_of
from family import FREEZE, flat, fresh, loss_of, make, model, same, snapshot, train
from test_onebit_adam import SIZES, gradient, parameters, start, trajectory_of
from torch import Tensor, nn

import onebit
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates
from onebit.comm import IdentityCodec, PeerError, SimTransport, hierarchical, run_ranks
from onebit.onebit_adam import AdamRule
from onebit.optimizer import CompressedOptimizer
from onebit.reference.codecs import compress
from onebit.reference.onebit_adam import OnebitAdam as OnebitAdamOracle

STEPS = 24
MANY = {"bucket_cap_mb": 0.004}


def late(transport: SimTransport, **options: object) -> tuple[nn.Module, CompressedOptimizer]:
    return fresh(transport, delay=1, **MANY, **options)


# -------------------------------------------------------------------------------- what is computed


def delayed_oracle(
    workers: int, dense: Callable[[int], bool], lrs: list[float], *, guarded: int = 0, undelayed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """1-bit Adam whose compressed steps move parameters one step later; (x after each step, x once all has landed).

    The textbook's recursion of the momentum, by hand around it: a move waits, and so does its weight decay. While it
    waits x is seen where β1 of the last momentum, as it was sent, would take it.
    """
    oracle = OnebitAdamOracle(start(), workers, SIZES, dense=dense, guarded=guarded)
    x, waiting, trajectory = start(), None, []
    beta1 = oracle.betas[0]
    for step, lr in enumerate(lrs):
        grads = np.stack([gradient(x, step, worker) for worker in range(workers)])
        if waiting is not None:
            late_lr, update = waiting
            x, waiting = x - late_lr * (update + oracle.weight_decay * x), None
        ahead = np.zeros_like(x)
        if not dense(step):
            oracle.freeze()
        is_at_once = dense(step) or step < undelayed
        if not is_at_once:
            ahead = lrs[step - 1] * beta1 * compress(oracle.update, oracle.blocks, "rms") / (1 - beta1**oracle.t)
        update = oracle.advance(grads)
        if is_at_once:
            x = x - lr * (update + oracle.weight_decay * x)
        else:
            waiting = lr, update
        trajectory.append(x - ahead)
    landed = x if waiting is None else x - waiting[0] * (waiting[1] + oracle.weight_decay * x)
    return np.stack(trajectory), landed


def trajectory(transport: SimTransport, lrs: list[float], **options: object) -> tuple[np.ndarray, np.ndarray]:
    optimizer = onebit.OnebitAdam(parameters(), transport=transport, warmup_codec=IdentityCodec(), delay=1, **options)
    seen, _ = trajectory_of(optimizer, lrs, [transport.rank])
    optimizer.param_groups[0]["lr"] = 1e9  # a scheduler's next one: the step that lands was sent with its own
    optimizer.sync()
    optimizer.sync()
    assert optimizer.steps_taken() == len(lrs)
    return seen, torch.cat([p.detach() for p in optimizer.param_groups[0]["params"]]).double().numpy()


@pytest.mark.parametrize(("world_size", "bucket_cap_mb"), [(1, 0.002), (2, 16.0), (4, 0.002)])
def test_equals_the_delayed_textbook_loop(world_size: int, bucket_cap_mb: float) -> None:
    """Error feedback, momentum, bias correction, decay, learning rates: float32 against float64, as without delay."""
    lrs = [0.05 * (1 - k / 60) for k in range(STEPS)]
    expected, landed = delayed_oracle(world_size, lambda step: step < 8, lrs)
    results = run_ranks(
        world_size, lambda transport: trajectory(transport, lrs, freeze_step=8, bucket_cap_mb=bucket_cap_mb)
    )
    for seen, last in results:
        np.testing.assert_array_equal(seen, results[0][0])
        np.testing.assert_array_equal(last, results[0][1])
    np.testing.assert_allclose(results[0][0], expected, atol=2e-4, rtol=0)
    np.testing.assert_allclose(results[0][1], landed, atol=2e-4, rtol=0)


@pytest.fixture
def no_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """p - 0·m/D is p, to the bit."""
    monkeypatch.setattr(AdamRule, "ahead", lambda rule, bucket: 0.0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("undelayed", [0, 8, 14])
def test_a_refresh_lands_the_step_before_and_is_not_delayed(
    world_size: int, undelayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are the first steps, of whatever kind."""
    rule = DenseSteps("auto", warmup=6, refreshes=VarianceUpdates(2), undelayed=undelayed)
    assert [step for step in range(STEPS) if rule.is_dense(step)] == [0, 1, 2, 3, 4, 5, 6, 10, 14, 22]
    monkeypatch.setattr("onebit.onebit_adam.DenseSteps", lambda _: rule)
    lrs = [0.02] * STEPS
    expected, landed = delayed_oracle(world_size, rule.is_dense, lrs, guarded=64, undelayed=undelayed)
    seen, last = run_ranks(world_size, lambda transport: trajectory(transport, lrs))[0]
    differs = np.abs(np.concatenate([seen, last[None]]) - np.concatenate([expected, landed[None]])) > 5e-4
    assert differs.mean(axis=1).max() <= 0.01  # as without delay: a sum that cancels has another sign in float32


@pytest.mark.usefixtures("no_look_ahead")
@pytest.mark.parametrize("ranks_per_node", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_landing_every_step_is_the_optimizer_without_delay(ranks_per_node: int) -> None:
    """On two nodes; replicas are identical in the steps after it too, which do not land."""

    def ours(transport: SimTransport) -> tuple[bool, Tensor, Tensor]:
        levels = hierarchical(transport, ranks_per_node) if ranks_per_node > 1 else transport
        (net, optimizer), (plain_net, plain) = late(levels), fresh(levels, **MANY)  # type: ignore[arg-type]
        is_same = True
        for step in range(12):
            train(levels, range(step, step + 1), net, optimizer)  # type: ignore[arg-type]
            optimizer.sync()
            train(levels, range(step, step + 1), plain_net, plain)  # type: ignore[arg-type]
            states = snapshot(optimizer), snapshot(plain)
            for state in states:
                del state["onebit"]["ahead"]
            is_same &= torch.equal(flat(net), flat(plain_net)) and same(*states)
        moved = train(levels, range(12, 15), net, optimizer)[-1]  # type: ignore[arg-type]
        optimizer.sync()
        return is_same, moved, flat(net)

    results = run_ranks(2 * ranks_per_node, ours)
    assert all(same(result, results[0]) and result[0] for result in results)
    assert not torch.equal(*results[0][1:])


# -------------------------------------------------------------------------------- what is hidden


class Recorder(SimTransport):
    """A SimTransport that notes when its larger operations are launched, and waited for."""

    def __init__(self, transport: SimTransport):
        super().__init__(transport.network, transport.rank)
        self.events: list[str] = []

    def _launch(self, name: str, nbytes: int, *rest: object):  # type: ignore[no-untyped-def]
        work = super()._launch(name, nbytes, *rest)  # type: ignore[arg-type]
        self.events.append(name)
        wait = work.wait

        def waiting() -> None:
            self.events.append(f"wait for {name}")
            wait()

        work.wait = waiting
        return work


@pytest.mark.parametrize("ends_with", ["step", "sync"])
def test_a_step_waits_for_nothing_that_it_has_sent_and_moves_parameters_meanwhile(
    ends_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step() every wait comes before the first launch, and parameters move after the last one.

    Second phases leave in the next backward pass. If no step follows, parameters move all the same.
    """

    def ours(transport: SimTransport) -> tuple[list[str], list[str], int]:
        recorder = Recorder(transport)
        net, optimizer = late(recorder, check_replicas_every=0)
        apply = optimizer.placement.apply

        def noted(*given: object) -> None:
            recorder.events.append("move")
            apply(*given)

        monkeypatch.setattr(optimizer.placement, "apply", noted)
        train(recorder, range(FREEZE + 2), net, optimizer)
        recorder.all_reduce(torch.zeros(1)).wait()  # hooks launch what all ranks have sent: here all of it
        recorder.events.clear()
        optimizer.zero_grad()
        loss_of(net, 50, transport.rank).backward()
        in_backward, recorder.events[:] = list(recorder.events), []
        getattr(optimizer, ends_with)()
        return in_backward, recorder.events, len(optimizer.buckets)

    for in_backward, events, buckets in run_ranks(2, ours):
        assert buckets > 2
        assert in_backward == ["wait for all_to_all", "all_gather"] * buckets
        moves, landed = ["move"] * buckets, ["wait for all_gather"] * (buckets + 1)
        sent = ["all_to_all"] * buckets + ["all_gather"]  # the vote, which is read when it lands
        if ends_with == "step":  # look back, land, and look ahead
            assert [event for event in events if event != "move"] == [*landed, *sent]
            assert [event for event in events if event not in landed] == [*moves, *sent, *moves, *moves]
        else:
            assert [event for event in events if event not in landed] == [*moves, *moves]


def test_nothing_keeps_gradients_while_they_travel() -> None:
    def ours(transport: SimTransport) -> bool:
        net, optimizer = late(transport)
        train(transport, range(FREEZE + 2), net, optimizer)
        held = [weakref.ref(p.grad) for p in net.parameters() if p.grad is not None]
        optimizer.zero_grad()
        return bool(held) and all(ref() is None for ref in held)

    assert run_ranks(2, ours) == [True, True]


# -------------------------------------------------------------------------------- skipped


@pytest.mark.usefixtures("no_look_ahead")
@pytest.mark.parametrize(("max_grad_norm", "of", "bad"), [(0.0, 1, math.nan), (0.0, 0, math.inf), (1.0, 1, math.nan)])
def test_a_skipped_step_is_neither_taken_nor_taken_twice(
    max_grad_norm: float, of: int, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank's gradient of step 9 is not finite: as if all ranks had only landed step 8 in its place, to the bit.

    Clipping knows at once, while step 8 is under way; without it the verdict comes when step 9 lands.
    """

    def ours(transport: SimTransport, *, spoils: bool) -> tuple[int, Tensor, dict]:
        net, optimizer = late(transport, max_grad_norm=max_grad_norm)
        for step in range(14):
            if step == 9 and not spoils:
                optimizer.sync()
                continue
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            if step == 9 and transport.rank == of:
                net[2].weight.grad[3, 3] = bad  # type: ignore[index]
            optimizer.step()
            assert step != 9 or max_grad_norm or "under_way" in optimizer.state_dict()["onebit"]
        optimizer.sync()
        assert optimizer.steps_taken() == 13
        state = snapshot(optimizer)
        return state["onebit"].pop("skipped_steps"), flat(net), state

    with caplog.at_level(logging.WARNING):
        spoilt = run_ranks(2, lambda transport: ours(transport, spoils=True))
    assert any(f"rank {of}: gradient not finite in parameter" in message for message in caplog.messages)
    landed = run_ranks(2, lambda transport: ours(transport, spoils=False))
    assert [skipped for skipped, *_ in (*spoilt, *landed)] == [1, 1, 0, 0]
    assert all(torch.equal(moved, landed[0][1]) for _, moved, _ in (*spoilt, *landed))
    assert all(same(one, other) for (*_, one), (*_, other) in zip(spoilt, landed, strict=True))


def test_too_many_skipped_steps_are_an_error_that_names_the_parameter() -> None:
    def ours(transport: SimTransport) -> str:
        net, optimizer = late(transport, max_consecutive_skips=3)
        train(transport, range(FREEZE + 2), net, optimizer)
        for steps in range(1, 9):
            optimizer.zero_grad()
            loss_of(net, steps, transport.rank).backward()
            net[0].bias.grad[0] = math.nan  # type: ignore[index]
            try:
                optimizer.step()
            except onebit.SkippedStepsError as error:
                return f"{steps}: {error}"
        return ""

    for rank, said in enumerate(run_ranks(2, ours)):
        assert said.startswith("4: ")  # the verdict of a step is one step late
        assert f"rank {rank}: 3 steps in a row" in said and "parameter 1 of group 0" in said


def test_a_grad_scaler_is_taken_out_of_what_is_sent() -> None:
    """As without a scaler, to the bit: scales are powers of two, also of a step that was sent under another one."""

    def ours(transport: SimTransport, *, scales: bool) -> Tensor:
        net, optimizer = late(transport)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scales)
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, step, transport.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.sync()
        return flat(net)

    plain = run_ranks(2, lambda transport: ours(transport, scales=False))
    scaled = run_ranks(2, lambda transport: ours(transport, scales=True))
    assert all(torch.equal(each, plain[0]) for each in (*plain, *scaled))


# -------------------------------------------------------------------------------- gradients, groups, ranks that end


def test_a_rank_that_ends_earlier_takes_part() -> None:
    """join(): with fewer batches on one rank, replicas stay identical, and what was under way is taken."""

    def ours(transport: SimTransport) -> tuple[Tensor, int, int]:
        net, optimizer = late(transport)
        with optimizer.join():
            for step in range(12 - 3 * transport.rank):
                optimizer.zero_grad()
                loss_of(net, step, transport.rank).backward()
                optimizer.step()
        assert optimizer.step_under_way is not None
        optimizer.sync()
        return flat(net), optimizer.steps_taken(), optimizer.stats.shadow_steps

    results = run_ranks(3, ours)
    assert all(torch.equal(moved, results[0][0]) and taken == 12 for moved, taken, _ in results)
    assert [shadows for *_, shadows in results] == [0, 3, 6]


@pytest.mark.usefixtures("no_look_ahead")
def test_a_step_without_gradients_lands_the_one_before_it() -> None:
    def ours(transport: SimTransport) -> tuple[bool, bool, Tensor]:
        net, optimizer = late(transport)
        train(transport, range(FREEZE + 2), net, optimizer)
        before = flat(net)
        optimizer.zero_grad()
        optimizer.step()
        landed = flat(net)
        optimizer.sync()
        return torch.equal(before, landed), torch.equal(landed, flat(net)), flat(net)

    results = run_ranks(2, ours)
    assert [(still, unmoved) for still, unmoved, _ in results] == [(False, True)] * 2
    assert torch.equal(results[0][2], results[1][2])


def test_passes_and_edits_change_nothing_that_travels() -> None:
    """Buckets leave in step(): two passes, edited gradients and a lr tensor of a scheduler's are as without overlap."""

    def ours(transport: SimTransport, *, overlap: bool) -> Tensor:
        net, optimizer = late(transport, overlap=overlap, lr=torch.tensor(0.01))
        for step in range(12):
            optimizer.zero_grad()
            for half in range(1 + step % 2):
                (loss_of(net, 2 * step + half, transport.rank) / 2).backward()
            for p in net.parameters():
                p.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.param_groups[0]["lr"].mul_(0.9)
        optimizer.sync()
        assert optimizer.stats.resent_steps <= 2 * FREEZE
        return flat(net)

    results = [run_ranks(2, lambda transport, overlap=overlap: ours(transport, overlap=overlap)) for overlap in (0, 1)]
    assert all(torch.equal(each, results[0][0]) for one in results for each in one)


def test_no_group_is_delayed_in_its_own_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = DenseSteps("auto", warmup=2, refreshes=VarianceUpdates(2), undelayed=6)
    monkeypatch.setattr("onebit.onebit_adam.DenseSteps", lambda _: rule)
    net = model()
    optimizer = onebit.OnebitAdam(net[0].parameters(), lr=0.01, delay=1, transport=SimTransport())
    delayed = []
    for step in range(24):
        if step == 9:
            optimizer.add_param_group({"params": list(net[2].parameters())})
        optimizer.zero_grad()
        loss_of(net, step, 0).backward()
        optimizer.step()
        if optimizer.step_under_way is not None:
            delayed.append(step)
    assert delayed[0] < 9  # the first group's seventh step or later
    after = [step for step in delayed if step >= 9]
    assert after and after[0] >= 9 + 6


def test_a_new_group_lands_what_is_under_way_and_warms_up_without_delay() -> None:
    def ours(transport: SimTransport) -> tuple[bool, Tensor]:
        net, optimizer = late(transport)
        train(transport, range(FREEZE + 2), net, optimizer)
        before, more = flat(net), nn.Parameter(torch.ones(40))
        optimizer.add_param_group({"params": [more]})
        moved = not torch.equal(before, flat(net)) and optimizer.step_under_way is None
        for step in range(FREEZE + 4):
            optimizer.zero_grad()
            (loss_of(net, step, transport.rank) + (more * (1 + transport.rank)).sum()).backward()
            was_dense = step < FREEZE
            optimizer.step()
            assert (optimizer.step_under_way is None) == was_dense
        optimizer.sync()
        return moved, torch.cat([flat(net), more.detach()])

    results = run_ranks(2, ours)
    assert all(moved for moved, _ in results) and torch.equal(results[0][1], results[1][1])


def test_masks_and_masters_land_with_their_step() -> None:
    """Elements that may not move stay; bfloat16 parameters are their masters, rounded; replicas identical."""

    def ours(transport: SimTransport) -> tuple[Tensor, bool, bool]:
        net = model(dtype=torch.bfloat16)
        first = net[0].weight.detach().clone()
        mask = torch.ones(33, 20)
        mask[:, :7] = 0.0
        rest = [p for p in net.parameters() if p is not net[0].weight]
        groups = [{"params": [net[0].weight], "exp_avg_mask": mask}, {"params": rest}]
        optimizer = onebit.OnebitAdam(
            groups, lr=0.01, freeze_step=FREEZE, weight_decay=0.0, transport=transport, delay=1
        )
        train(transport, range(12), net, optimizer)
        optimizer.sync()
        masters = [optimizer.state[p]["master"] for p in net.parameters()]
        rounded = all(torch.equal(m.bfloat16(), p) for m, p in zip(masters, net.parameters(), strict=True))
        stays = torch.equal(net[0].weight[:, :7], first[:, :7]) and not torch.equal(net[0].weight, first)
        return flat(net), rounded, stays

    results = run_ranks(2, ours)
    assert all(torch.equal(x, results[0][0]) and rounded and stays for x, rounded, stays in results)


# -------------------------------------------------------------------------------- states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_per_node", "options"),
    [(1, {}), (1, {"max_grad_norm": 0.5}), (1, {"error_dtype": torch.bfloat16}), (2, {})],
    ids=str,
)
def test_a_state_saved_with_a_step_under_way_resumes_to_the_bit(ranks_per_node: int, options: dict) -> None:
    """At every place around the freeze, and between backward and step; saving sends nothing and changes nothing."""

    def ours(transport: SimTransport) -> list[bool]:
        levels = hierarchical(transport, ranks_per_node) if ranks_per_node > 1 else transport
        net, optimizer = late(levels, **options)  # type: ignore[arg-type]
        saved = []
        for step in range(10):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            if step > FREEZE:
                before = transport.sent_bytes
                saved.append((step, copy.deepcopy(net.state_dict()), snapshot(optimizer)))
                assert transport.sent_bytes == before
            optimizer.step()
        optimizer.sync()
        found = []
        for step, weights, state in saved:
            assert "under_way" in state["onebit"]
            other_net, other = late(levels, **options)  # type: ignore[arg-type]
            other.load_state_dict(state)
            other_net.load_state_dict(weights)
            train(levels, range(step, 10), other_net, other)  # type: ignore[arg-type]
            other.sync()
            found.append(torch.equal(flat(other_net), flat(net)) and same(snapshot(other), snapshot(optimizer)))
        return found

    assert run_ranks(2 * ranks_per_node, ours) == [[True] * 4] * 2 * ranks_per_node


def test_loading_drops_what_was_under_way() -> None:
    def ours(transport: SimTransport) -> bool:
        net, optimizer = late(transport)
        train(transport, range(FREEZE + 1), net, optimizer)
        optimizer.sync()
        weights, state = copy.deepcopy(net.state_dict()), snapshot(optimizer)
        train(transport, range(30, 33), net, optimizer)
        optimizer.load_state_dict(state)
        net.load_state_dict(weights)
        assert optimizer.step_under_way is None
        return same(snapshot(optimizer), state)

    assert run_ranks(2, ours) == [True, True]


def owed_in(state: dict) -> Tensor:
    """The worker errors of a state, in the order of the parameters. A copy."""
    return torch.cat([state["state"][key]["worker_error"].flatten() for key in sorted(state["state"])])


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4])
def test_another_number_of_ranks_owes_what_was_under_way(after: int) -> None:
    """Conserved: what ranks owe then, on average, is what they owed and (1-β1)·g/D of the step that had not landed."""

    def before(transport: SimTransport) -> tuple[dict, dict, Tensor, dict]:
        net, optimizer = late(transport)
        train(transport, range(FREEZE + 2), net, optimizer)
        optimizer.sync()
        landed = snapshot(optimizer)
        D = torch.cat([optimizer.state[p]["denominator"].flatten() for p in net.parameters()])
        optimizer.zero_grad()
        loss_of(net, 40, transport.rank).backward()
        g = torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore[union-attr]
        optimizer.step()
        own = (1.0 - 0.999) / transport.world_size  # of a variance that is frozen for good
        return snapshot(optimizer), landed, 0.1 * g / (D.square() + own * g.square()).sqrt(), net.state_dict()

    saved = run_ranks(3, before)
    owed = [owed_in(one) for _, one, *_ in saved]
    expected = sum(e + y for e, (*_, y, _) in zip(owed, saved, strict=True)) / 3

    def ours(transport: SimTransport) -> tuple[Tensor, Tensor]:
        net, optimizer = late(transport)
        net.load_state_dict(saved[0][3])
        optimizer.load_state_dicts([state for state, *_ in saved])
        assert optimizer.step_under_way is None
        owes = owed_in(optimizer.state_dict())
        train(transport, range(50, 53), net, optimizer)
        return owes, flat(net)

    results = run_ranks(after, ours)
    for owes, moved in results:
        torch.testing.assert_close(owes, expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(moved, results[0][1])


# -------------------------------------------------------------------------------- refused, broken off


def test_a_peer_that_ends_while_a_step_is_under_way_is_named() -> None:
    """And what was under way is in a state that is saved then."""
    states: dict[int, dict] = {}

    def ours(transport: SimTransport) -> None:
        net, optimizer = late(transport)
        train(transport, range(FREEZE + 2), net, optimizer)
        if transport.rank == 1:
            raise RuntimeError("rank 1 is gone")
        loss_of(net, 20, 0).backward()
        try:
            optimizer.sync()
        finally:
            states[transport.rank] = snapshot(optimizer)

    with pytest.raises((PeerError, RuntimeError), match="rank 1"):
        run_ranks(2, ours, timeout_s=20.0)
    assert "under_way" in states[0]["onebit"]


def test_ranks_in_different_steps_are_told_before_anything_is_written() -> None:
    def ours(transport: SimTransport) -> tuple[str, bool, Tensor]:
        net, optimizer = late(transport)
        train(transport, range(FREEZE + 2), net, optimizer)
        optimizer.sync()
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + transport.rank)
        before = snapshot(optimizer)
        train(transport, range(20, 21), net, optimizer)
        try:
            train(transport, range(21, 22), net, optimizer)
        except onebit.DesyncError as error:
            return str(error), same(optimizer.state_dict()["state"], before["state"]), flat(net)
        raise AssertionError

    results = run_ranks(2, ours)
    for said, is_unmoved, seen in results:  # parameters look ahead by the last step's lr, on which ranks agreed
        assert "different values of lr" in said and is_unmoved and torch.equal(seen, results[0][2])


@pytest.mark.parametrize("name", ["OnebitLamb", "ZeroOneAdam", "OnebitMuon"])
def test_optimizers_without_delay_refuse_it_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no delay"):
        make(name, model(), SimTransport(), delay=1)


def test_other_delays_and_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="delay must be 0 or 1"):
        make("OnebitAdam", model(), SimTransport(), delay=2)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(make("OnebitAdam", model(), SimTransport(), delay=1))


def test_ranks_with_another_delay_are_refused_at_construction() -> None:
    refused = run_ranks(2, lambda transport: error_of(ValueError, fresh, transport, delay=transport.rank))
    assert all("option delay" in said for said in refused)
