"""onebit.LocalSteps on ranks that are threads: the recursion, what it keeps, who may be away, and when."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from local_runs import BLOCK, BLOCKS, Run, flat, make_params, noise, set_gradients, start, targets
from torch import nn

import onebit
from onebit import Auto
from onebit.agreement.replicas import ReplicaError
from onebit.agreement.step_vote import DesyncError
from onebit.comm import IdentityCodec, Int8Codec, PeerError, SignCodec, SimTransport, hierarchical, run_ranks
from onebit.local.intervals import Fixed, interval_of
from onebit.local.round_vote import weights_of
from onebit.model_parallel import ModelParallelGroup
from onebit.reference.codecs import compress
from onebit.reference.local_steps import LocalSteps as LocalStepsOracle
from onebit.zero.given import check_optimizer

# ---------------------------------------------------------------- the recursion


@dataclass(frozen=True)
class Case:
    """How a run of rounds of three steps differs from the plainest one of `workers` ranks."""

    workers: int
    options: dict[str, Any] = field(default_factory=dict)
    decay: float = 0.0
    ranks_per_node: int = 1
    away: range = range(0)  # rounds that the last worker misses
    tokens: tuple[int, ...] = ()  # of each worker in each step
    weights: tuple[float, ...] = ()


CASES = {
    "one rank": Case(1),
    "momentum": Case(2, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    "decay": Case(3, {"error_decay": 0.9}, decay=0.3),
    "corrected": Case(3, {"correction_steps": 24, "outer_lr": 0.7}, decay=0.3),
    "away": Case(3, away=range(1, 4)),
    "tokens": Case(2, tokens=(100, 300), weights=(0.5, 1.5)),
    "nodes": Case(2, ranks_per_node=2),
    "nodes, corrected": Case(2, {"correction_steps": 20}, ranks_per_node=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_oracles_loop(case: Case) -> None:
    """In float64. Signs of float32 sums may differ where a sum is a rounding away from zero: none here.

    Differences of a rank that is away are owed, and arrive in the rounds after; they weigh by tokens. A node is one
    worker, with the mean of its ranks' gradients.
    """
    steps, ranks = range(18), range(case.workers * case.ranks_per_node)

    def ours(transport: SimTransport) -> tuple[list[np.ndarray], Any]:
        levels = hierarchical(transport, case.ranks_per_node) if case.ranks_per_node > 1 else transport
        run, found = Run(levels, every=3, inner_options={"weight_decay": case.decay}, **case.options), []
        for step in steps:
            run.optimizer.is_away = step // 3 in case.away and transport.rank == ranks[-1]
            if case.tokens:
                run.optimizer.add_tokens(case.tokens[transport.rank])
            set_gradients(run.params, step, run.rank)
            pulls = [p.grad for p in run.params]
            run.optimizer.zero_grad()
            sum((p * g).sum() for p, g in zip(run.params, pulls, strict=True)).backward()  # type: ignore[union-attr]
            run.optimizer.step()
            found += [run.w, run.theta]
        return found, run.optimizer.stats

    oracle = LocalStepsOracle(
        np.repeat(start().astype(np.float64)[None], case.workers, 0),
        lambda c: compress(c, BLOCKS),
        lr=0.01,
        decay=case.decay,
        **case.options,
    )
    results = run_ranks(len(ranks), ours)
    for step in steps:
        grads = np.stack([oracle.w[i // case.ranks_per_node] - targets(i) + noise(step, i) for i in ranks])
        oracle.step(grads.reshape(case.workers, case.ranks_per_node, -1).mean(1))
        if step % 3 == 2:
            oracle.round(
                away=[case.workers - 1] if step // 3 in case.away else [],
                weights=list(case.weights) if case.weights else None,
            )
        for i, (found, _) in enumerate(results):
            expected = oracle.w[i // case.ranks_per_node], oracle.theta
            for mine, its in zip(found[2 * step : 2 * step + 2], expected, strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-5, atol=2e-6, err_msg=f"{step}, rank {i}")
    for i, (_, stats) in enumerate(results):
        assert stats.missed_rounds == (len(case.away) if i == ranks[-1] else 0)
        assert not case.weights or stats.weight == case.weights[i]
        assert case.ranks_per_node == 1 or stats.sent_bytes_inter_node < stats.sent_bytes


def test_ranks_without_tokens_weigh_the_same() -> None:
    assert weights_of([3.0, 3.0]) == weights_of([0.0, 0.0]) == [1.0, 1.0]


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor])
def test_one_rank_without_compression_is_the_inner_optimizer_to_the_bit(inner: Any) -> None:
    params = make_params()
    plain = inner(params, lr=0.01, weight_decay=0.1)
    for step in range(8):
        set_gradients(params, step, 0)
        plain.step()

    def ours(transport: SimTransport) -> np.ndarray:
        return (
            Run(transport, inner, every=1, codec=IdentityCodec(), inner_options={"weight_decay": 0.1}).train(range(8)).w
        )

    np.testing.assert_array_equal(run_ranks(1, ours)[0], flat(params))


@pytest.mark.parametrize("codec", [SignCodec(block=BLOCK), Int8Codec(block=BLOCK), IdentityCodec()])
def test_all_ranks_agree_on_the_anchor_to_the_bit(codec: Any) -> None:
    def ours(transport: SimTransport) -> list[bytes]:
        run, found = Run(transport, every=2, codec=codec, check_replicas_every=1), []
        for step in range(8):
            run.train([step])
            found.append(run.theta.tobytes())
        assert run.theta.tobytes() == run.w.tobytes()
        return found

    first, *others = run_ranks(3, ours)
    assert all(each == first for each in others) and len(set(first)) == 5


def test_a_drifting_anchor_is_found() -> None:
    def ours(transport: SimTransport) -> None:
        run = Run(transport, every=2, check_replicas_every=2).train(range(2))
        if transport.rank == 1:
            run.optimizer.buckets[0].anchor[3] += 1e-3
        refused(ReplicaError, "the anchor of", run.train, range(2, 6))

    run_ranks(2, ours)


@pytest.mark.parametrize("delay", (0, 1, 2))
def test_adopted_parameters_begin_anew(delay: int) -> None:
    """As in a run that begins with them: nothing remains of a round under way, nor of decay since a round.

    They must be the same on all ranks, which between rounds they are not.
    """
    memoryless = {"betas": (0.0, 0.0), "weight_decay": 0.3}

    def ours(transport: SimTransport) -> tuple[list[np.ndarray], list[np.ndarray]]:
        found = []
        for before in (0, 4):
            run = Run(transport, every=4, delay=delay, inner_options=memoryless).train(range(before))
            for p in run.params:
                p.data.fill_(1.0)
            run.optimizer.adopt_parameters()
            begun = run.theta
            run.train(range(4, 14))
            refused(ReplicaError, r"call sync\(\) first", run.optimizer.adopt_parameters)
            found.append([begun, run.theta, run.w])
        return found[0], found[1]

    for fresh, again in run_ranks(2, ours):
        np.testing.assert_array_equal(fresh, again)
        assert (again[0] == 1.0).all()


def test_no_part_of_a_model_adopts_parameters_if_another_part_differs() -> None:
    """Two replicas of two stages each, of which the first stages differ."""

    def ours(transport: SimTransport) -> bool:
        replica, stage = divmod(transport.rank, 2)
        stages = transport.split([2 * replica, 2 * replica + 1])
        parts = ModelParallelGroup(SimTransport(), stages=stages)
        run = Run(transport.split([stage, stage + 2]), every=4, model_parallel_group=parts)
        with torch.no_grad():
            run.params[0].fill_(float(replica) if stage == 0 else 1.0)
        before = run.theta
        refused(ReplicaError, "must be the same on all ranks", run.optimizer.adopt_parameters)
        return bool((run.theta == before).all())

    assert all(run_ranks(4, ours))


def test_the_bytes_are_those_of_one_bit_rounds() -> None:
    """2.125/H·(n-1)/n bits per parameter and step, within 2 %: scales, the vote and padding."""

    def ours(transport: SimTransport) -> tuple[float, float]:
        p = nn.Parameter(torch.zeros(400, 256))
        optimizer = onebit.LocalSteps(
            torch.optim.SGD([p], lr=1.0), every=8, transport=transport, check_replicas_every=0
        )
        before = transport.sent_bytes
        for step in range(32):
            p.grad = torch.full_like(p, float(step + transport.rank))
            optimizer.step()
        return 8 * (transport.sent_bytes - before) / p.numel() / 32, optimizer.stats.mean_bits_per_parameter

    for counted, said in run_ranks(4, ours):
        assert counted == pytest.approx(2.125 / 8 * 3 / 4, rel=0.02)
        assert said == pytest.approx(counted, rel=1e-6)


# ---------------------------------------------------------------- weight decay, untouched parameters


def test_what_no_gradient_has_touched_does_not_move() -> None:
    """Not by frames of scale 0, and not by a decay that the inner optimizer does not apply to it."""

    def ours(transport: SimTransport) -> tuple[np.ndarray, np.ndarray]:
        run = Run(transport, every=3, inner_options={"weight_decay": 0.5})
        for step in range(9):
            set_gradients(run.params, step, run.rank)
            run.params[1].grad = None
            if transport.rank == 1:
                run.params[3].grad = None  # touched on one rank: it moves, everywhere
            run.optimizer.step()
        return run.params[1].detach().numpy().copy(), run.params[3].detach().numpy().copy()

    began = make_params()
    for untouched, touched in run_ranks(2, ours):
        np.testing.assert_array_equal(untouched, began[1].detach().numpy())
        assert not np.array_equal(touched, began[3].detach().numpy())


def test_decay_travels_in_no_frame() -> None:
    """Where gradients are zero, AdamW only decays: the anchor decays exactly, and nothing is owed."""

    def ours(transport: SimTransport) -> tuple[np.ndarray, np.ndarray, float]:
        run = Run(transport, every=4, inner_options={"weight_decay": 0.5})
        for _ in range(8):
            for p in run.params:
                p.grad = torch.zeros_like(p)
            run.optimizer.step()
        return run.theta, run.by_parameter("worker"), run.optimizer.stats.bits_per_parameter

    for theta, owed, _ in run_ranks(2, ours):
        np.testing.assert_allclose(theta, start() * (1 - 0.01 * 0.5) ** 8, rtol=1e-5, atol=1e-7)
        assert np.abs(owed).max() < 1e-6


# ---------------------------------------------------------------- who takes part


def test_a_gradient_that_is_not_finite_freezes_its_rank_and_counts_it_out() -> None:
    def ours(transport: SimTransport) -> tuple[list[np.ndarray], np.ndarray, Any]:
        run, found = Run(transport, every=4, inner_options={"weight_decay": 0.0}), []
        for step in range(8):
            set_gradients(run.params, step, run.rank)
            if step == 1 and transport.rank == 1:
                run.params[0].grad[0, 0] = float("nan")  # type: ignore[index]
            run.optimizer.step()
            found.append(run.w)
        return found, run.by_parameter("worker"), run.optimizer.stats

    (healthy, _, fine), (frozen, _, stats) = run_ranks(2, ours)
    np.testing.assert_array_equal(frozen[0], frozen[1])  # at its last finite point
    np.testing.assert_array_equal(frozen[1], frozen[2])
    np.testing.assert_array_equal(frozen[3], healthy[3])  # behind the round all are where the others have gone
    assert not np.array_equal(healthy[2], healthy[3]) and not np.array_equal(frozen[4], frozen[3])
    assert (stats.skipped_steps, stats.missed_rounds, fine.missed_rounds) == (3, 1, 0)


def test_finite_gradients_whose_sum_is_not_are_taken() -> None:
    def ours(transport: SimTransport) -> int:
        p = nn.Parameter(torch.zeros(64))
        optimizer = onebit.LocalSteps(torch.optim.SGD([p], lr=1e-38), 2, transport=transport)
        p.grad = torch.full((64,), 1e38)
        optimizer.step()
        return optimizer.stats.skipped_steps

    assert run_ranks(1, ours) == [0]


def test_parameters_that_are_not_finite_come_back_from_the_anchor() -> None:
    def ours(transport: SimTransport) -> tuple[np.ndarray, np.ndarray]:
        run = Run(transport, every=4)
        run.train(range(6))
        if transport.rank == 0:
            with torch.no_grad():
                run.params[2].fill_(float("inf"))
        run.train(range(6, 16))
        return run.theta, run.w

    (theta, w), (other, _) = run_ranks(2, ours)
    np.testing.assert_array_equal(theta, other)
    assert np.isfinite(w).all()


def test_ranks_with_different_numbers_of_batches_end_with_the_same_parameters() -> None:
    def ours(transport: SimTransport) -> tuple[np.ndarray, int]:
        run = Run(transport, every=4, inner_options={"weight_decay": 0.1})
        with run.optimizer.join():
            run.train(range(6 + 5 * transport.rank))
        return run.w, run.optimizer.stats.shadow_rounds

    results = run_ranks(3, ours)
    for w, _ in results[1:]:
        np.testing.assert_array_equal(w, results[0][0])
    assert [shadow for _, shadow in results] == [3, 2, 0]


def test_buffers_are_averaged_at_rounds_and_one_that_is_not_finite_is_left_out() -> None:
    def ours(transport: SimTransport) -> list[float]:
        norm = nn.BatchNorm1d(3)
        optimizer = onebit.LocalSteps(torch.optim.SGD(norm.parameters(), lr=0.1), 2, model=norm, transport=transport)
        found = []
        for step in range(4):
            assert norm.running_mean is not None
            norm.running_mean.fill_(float(transport.rank + step))
            if step == 3 and transport.rank == 1:
                norm.running_mean.fill_(float("nan"))
            for p in norm.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            found.append(float(norm.running_mean[0]))
        return found

    assert run_ranks(2, ours) == [[0.0, 1.5, 2.0, 2.25], [1.0, 1.5, 3.0, 2.25]]


# ---------------------------------------------------------------- when


def test_intervals_by_a_table_a_start_and_the_learning_rate() -> None:
    def rounds(transport: SimTransport, steps: int, lr_at: Any = None, **options: Any) -> list[int]:
        run, found = Run(transport, **options), []
        for step in range(steps):
            for group in run.optimizer.param_groups:
                group["lr"] = 0.01 if lr_at is None else lr_at(step)
            run.train([step])
            if run.optimizer.stats.phase == "round":
                found.append(step + 1)
        return found

    assert run_ranks(1, lambda t: rounds(t, 14, every={0: 2, 4: 5}))[0] == [2, 4, 9, 14]
    assert run_ranks(1, lambda t: rounds(t, 20, every=8, start_steps=5, start_every=2))[0] == [2, 4, 6, 14]
    qsr = onebit.QSR(scale=0.02, least=2, most=9)
    falling = run_ranks(1, lambda t: rounds(t, 26, lambda step: 0.01 if step < 8 else 0.0072, every=qsr))[0]
    assert falling == [4, 8, 12, 19, 26]
    assert qsr.steps(0, 0.1) == 2 and qsr.steps(0, 1e-9) == qsr.steps(0, 0.0) == 9


def test_auto_is_the_least_interval_that_the_network_allows() -> None:
    auto = Auto(least=2, most=50, share=0.1)
    assert auto.steps(0, 1.0) == 2
    assert auto.decide(compute_s=0.1, exchange_s=0.255) == 26 == auto.steps(5, 1.0)
    assert auto.decide(compute_s=0.1, exchange_s=9.0) == 50 and auto.decide(compute_s=0.1, exchange_s=1e-5) == 2
    assert auto.decide(compute_s=0.0, exchange_s=1e-5) == 50
    (run,) = run_ranks(1, lambda t: Run(t, every=Auto(least=4, most=6)).train(range(19)))
    assert run.optimizer.interval.chosen == 6  # no network to measure here
    assert interval_of(3) == Fixed(3)
    for wrong in ({"least": 0}, {"least": 9, "most": 8}, {"share": 0.0}):
        refused(ValueError, f"{next(iter(reversed(wrong)))} must be ", Auto, **wrong)


def test_a_lost_rank_is_an_error_without_members() -> None:
    optimizer = onebit.LocalSteps(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]), transport=SimTransport())
    with pytest.raises(PeerError, match="it is gone"), optimizer._survives_losses():
        raise PeerError("it is gone")


def test_a_step_that_is_left_out_decays_parameters_that_have_a_gradient_alone() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    inner = torch.optim.AdamW(params, lr=0.5, weight_decay=0.5)
    optimizer = onebit.LocalSteps(inner, every=8, transport=SimTransport())
    params[0].grad = torch.full((3,), torch.inf)
    optimizer.step()
    assert [p.tolist() for p in params] == [[0.75] * 3, [1.0] * 3]


@pytest.mark.parametrize("delay", [1, 3])
def test_fragments_take_turns_and_land_later(delay: int) -> None:
    """By hand, without compression: a fragment lands `delay` steps after it was sent, and what w gained since stays."""

    def ours(transport: SimTransport) -> list[list[np.ndarray]]:
        run = Run(transport, torch.optim.SGD, lr=0.05, every=6, fragments=2, delay=delay, codec=IdentityCodec())
        assert [len(f.buckets) for f in run.optimizer.fragments] == [2, 1]
        found = []
        for step in range(18):
            run.train([step])
            found.append([p.detach().numpy().copy() for p in run.params])
        return found

    results = run_ranks(2, ours)
    w = [[p.detach().numpy().copy() for p in make_params()] for _ in range(2)]
    members = [[3, 2, 1], [0]]  # the last parameters are in the first buckets
    sent: dict[int, list[list[np.ndarray]]] = {}
    for step in range(1, 19):
        for i in range(2):
            g = np.concatenate([x.reshape(-1) for x in w[i]]) - targets(i) + noise(step - 1, i)
            pieces = np.split(g, np.cumsum([x.size for x in w[i]])[:-1])
            w[i] = [x - np.float32(0.05) * piece.reshape(x.shape) for x, piece in zip(w[i], pieces, strict=True)]
        for k, due in enumerate((3, 6)):
            if step - delay in range(due, 19, 6):
                for j in members[k]:
                    mean = (sent[k][0][j] + sent[k][1][j]) / 2
                    for i in range(2):
                        w[i][j] = w[i][j] + (mean - sent[k][i][j])
            if step in range(due, 19, 6):
                sent[k] = [[x.copy() for x in w[i]] for i in range(2)]
        for i, j in itertools.product(range(2), range(4)):
            np.testing.assert_allclose(
                results[i][step - 1][j], w[i][j], rtol=1e-4, atol=1e-5, err_msg=f"{step} {i} {j}"
            )


# ---------------------------------------------------------------- as a torch optimizer


def test_it_is_a_torch_optimizer() -> None:
    def ours(transport: SimTransport) -> None:
        run = Run(transport, every=2)
        optimizer, inner = run.optimizer, run.optimizer.inner
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"mine": 1})
        for step in range(4):
            run.train([step])
            schedule.step()
        assert calls == ["before", "after"] * 4 and inner.param_groups[0]["lr"] == 0.01 / 4
        state = optimizer.state_dict()
        assert state["mine"] == 1 and "parameters" not in state["onebit"]  # w = θ: the half of it
        assert optimizer.step(lambda: 7.0) == 7.0
        assert "parameters" in optimizer.state_dict()["onebit"]
        optimizer.zero_grad()
        assert all(p.grad is None for p in run.params)
        new = nn.Parameter(torch.ones(5))
        optimizer.add_param_group({"params": [new]})
        assert inner.param_groups[-1]["params"] == [new]
        new.grad = torch.ones(5)
        optimizer.step()
        assert optimizer.stats.phase == "round" and not torch.equal(new.detach(), torch.ones(5))
        refused(TypeError, "neither copied nor pickled", copy.deepcopy, optimizer)

    run_ranks(2, ours)


class Full(SignCodec):
    """No memory for a frame."""

    def encode(self, *operands: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_that_cannot_be_sent_is_the_same_error_when_it_is_tried_again(delay: int) -> None:
    """And not one of the step machine, which would say nothing of the cause."""

    def ours(transport: SimTransport) -> None:
        run = Run(transport, torch.optim.SGD, every=2, delay=delay, codec=Full(block=64))
        for _ in range(2):
            refused(RuntimeError, "out of memory", run.train, range(2))
            run.optimizer.fragments[0].due = run.optimizer.steps + 1

    run_ranks(2, ours)


def test_a_group_may_come_while_a_fragment_is_under_way() -> None:
    def ours(transport: SimTransport) -> tuple[np.ndarray, ...]:
        run = Run(transport, every=6, fragments=2, delay=3).train(range(7))
        assert run.optimizer.fragments[1].is_under_way
        new = nn.Parameter(torch.full((5,), float(transport.rank)))
        run.optimizer.add_param_group({"params": [new]})  # rank 0's values
        for step in range(7, 20):
            new.grad = torch.full((5,), 1.0 + transport.rank)
            run.train([step])
        run.optimizer.sync()
        return run.w, new.detach().numpy().copy()

    (w, new), (other_w, other_new) = run_ranks(2, ours)
    np.testing.assert_array_equal(w, other_w)
    np.testing.assert_array_equal(new, other_new)
    assert (new < -0.05).all()


def test_a_loss_scale_is_taken_out_and_an_overflow_skips_one_step_of_one_rank() -> None:
    def ours(transport: SimTransport, is_scaled: bool) -> np.ndarray:
        run = Run(transport, torch.optim.SGD, lr=0.05, every=3)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=8.0, growth_interval=1000, backoff_factor=0.5, enabled=is_scaled
        )
        for step in range(7):
            set_gradients(run.params, step, run.rank)
            grads = [p.grad.clone() for p in run.params if p.grad is not None]
            for p in run.params:
                p.grad = None
            loss = sum((p * g).sum() for p, g in zip(run.params, grads, strict=True))
            if step == 4 and transport.rank == 1:
                loss = loss * float("inf")
                if not is_scaled:
                    run.optimizer.grad_scale = 1.0  # type: ignore[attr-defined]
            scaler.scale(loss).backward()  # type: ignore[arg-type,union-attr]
            scaler.step(run.optimizer)
            scaler.update()
            if not is_scaled and hasattr(run.optimizer, "grad_scale"):
                del run.optimizer.grad_scale
        assert run.optimizer.stats.skipped_steps == (transport.rank == 1) and run.optimizer.stats.missed_rounds == 0
        return run.w

    scaled, plain = (run_ranks(2, lambda t, on=on: ours(t, on)) for on in (True, False))
    np.testing.assert_array_equal(scaled, plain)


# ---------------------------------------------------------------- wrong uses


def test_wrong_uses_are_refused_with_the_remedy() -> None:
    def ours(transport: SimTransport) -> None:
        def make(inner: Any = None, **options: Any) -> onebit.LocalSteps:
            inner = torch.optim.SGD(make_params(), lr=0.1) if inner is None else inner
            return onebit.LocalSteps(inner, transport=transport, **options)

        refused(TypeError, r"LocalSteps\(torch\.optim\.AdamW", make, make_params())
        with pytest.raises(TypeError, match="exchanges with other ranks itself"):
            make(onebit.OnebitAdam(make_params(), transport=transport))
        refused(TypeError, r"differences travel in a Codec, .* SignCodec\(\); got 'sign'", make, codec="sign")
        refused(TypeError, "closure several times", make, torch.optim.LBFGS(make_params()))
        with pytest.raises(TypeError, match=r"parameter 0 of group 0 is torch.float64; .* takes float32"):
            make(torch.optim.SGD([nn.Parameter(torch.zeros(3, dtype=torch.float64))], lr=0.1))
        refused(ValueError, "at least 1", make, every=0)
        refused(ValueError, "from step 0 on", make, every={5: 3})
        refused(ValueError, 'or "auto"', make, every="soon")
        refused(ValueError, "lower delay", make, every=4, delay=4)
        refused(ValueError, "smaller bucket_cap_mb", make, every=8, fragments=3)
        refused(ValueError, "outer_momentum", make, outer_momentum=1.0)
        for name in ("outer_lr", "outer_momentum", "error_decay"):
            refused(TypeError, f"LocalSteps: {name} must be a number, got None", make, **{name: None})
        refused(TypeError, r"pass its SGD alone, .*\"local_steps\": .*without the engine", check_optimizer, make())
        with pytest.raises(ValueError, match="this optimizer is local steps around SGD"):
            make().load_state_dict(onebit.OnebitAdam(make_params(), transport=transport).state_dict())

    run_ranks(1, ours)


def test_other_options_on_one_rank_are_an_error_on_all() -> None:
    def options(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=r"option every = Fixed\(every=4\) on rank 0 and .*every=5"):
            Run(transport, every=4 + transport.rank)

    def rates(transport: SimTransport) -> None:
        run = Run(transport, every=2, inner_options={"weight_decay": 0.1})
        run.optimizer.param_groups[0]["lr"] = 0.01 * (1 + transport.rank)
        refused(DesyncError, "different weight decay", run.train, range(4))

    def steps(transport: SimTransport) -> None:
        run = Run(transport, every=2)
        run.optimizer.steps += transport.rank
        run.optimizer.fragments[0].due += transport.rank
        refused(DesyncError, "different steps since the start", run.train, range(4))

    for wrong in (options, rates, steps):
        run_ranks(2, wrong)


def test_a_parameter_that_was_frozen_and_trains_is_an_error() -> None:
    def ours(transport: SimTransport) -> None:
        frozen, p = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
        optimizer = onebit.LocalSteps(torch.optim.SGD([frozen, p], lr=0.1), every=2, transport=transport)
        frozen.requires_grad_(True)
        frozen.grad, p.grad = torch.ones(3), torch.ones(3)
        refused(RuntimeError, "was frozen when", optimizer.step)

    run_ranks(1, ours)


def test_sync_and_the_model_as_all_agree_on_it() -> None:
    def ours(transport: SimTransport) -> tuple[np.ndarray, np.ndarray, bool]:
        run = Run(transport, every=4).train(range(6))
        between, anchor = run.w, run.theta
        run.optimizer.sync()
        sent = transport.sent_bytes
        run.optimizer.sync()
        assert transport.sent_bytes == sent  # nothing has moved since
        synced = run.w
        run.train(range(6, 10))
        assert run.optimizer.stats.phase == "round"  # the next round is `every` steps behind
        return anchor, synced, np.array_equal(between, synced)

    (anchor, synced, moved), (other_anchor, other_synced, _) = run_ranks(2, ours)
    np.testing.assert_array_equal(anchor, other_anchor)
    np.testing.assert_array_equal(synced, other_synced)
    assert not moved and not np.array_equal(anchor, synced)


def test_a_short_round_by_sync_is_no_sign_of_standing_still() -> None:
    """One step after a round of 128 a sync moves parameters by a hundredth of it: the inner state must remain."""

    def work(transport: SimTransport) -> int:
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = onebit.LocalSteps(torch.optim.AdamW([p], lr=1e-2), every=128, transport=transport)
        for _ in range(129):
            p.grad = torch.full_like(p, 1.0 + transport.rank)
            optimizer.step()
        optimizer.sync()
        return optimizer.stats.dropped_states

    assert run_ranks(2, work) == [0, 0]
