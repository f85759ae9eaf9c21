"""States of onebit.LocalSteps on ranks that are threads: within a round, in another world, of the inner optimizer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from local_runs import Run, flat, make_params, noise, set_gradients, targets

from onebit.comm import IdentityCodec, SimTransport, hierarchical, run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 2, "delay": 2, "outer_momentum": 0.5},
        {"correction_steps": 20},
        {"fragments": 2, "delay": 2, "correction_steps": 20},
    ],
)
def test_a_kill_at_any_step_of_a_round_leaves_the_same_bits(options: dict[str, Any]) -> None:
    """A saved model is rank 0's: between rounds the others have other parameters, which the state holds."""

    def ours(transport: SimTransport) -> list[bool]:
        straight, saved = Run(transport, every=5, **options), {}
        for step in range(17):
            if step >= 6:
                saved[step] = copy.deepcopy(straight.optimizer.state_dict())
            straight.train([step])
        same = []
        for step in range(6, 12):
            resumed = Run(transport, every=5, **options)
            with torch.no_grad():
                for p in resumed.params:
                    p.fill_(9.0)
            resumed.optimizer.load_state_dict(saved[step])
            resumed.train(range(step, 17))
            same.append(np.array_equal(resumed.w, straight.w) and np.array_equal(resumed.theta, straight.theta))
        return same

    assert run_ranks(2, ours) == [[True] * 6] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"fragments": 2, "delay": 2}, {"codec": IdentityCodec(), "outer_momentum": 0.5}, {"correction_steps": 20}],
)
def test_four_ranks_then_two_then_eight_keep_anchors_and_sums(options: dict[str, Any]) -> None:
    """Anchors stay to the bit; what is owed, and the mean of what moved since, keep their means."""
    options = {"inner_options": {"weight_decay": 0.0}} | options

    def books(run: Run) -> tuple[np.ndarray, ...]:
        return run.theta, run.w, run.by_parameter("worker"), run.by_parameter("server")

    def first(transport: SimTransport) -> tuple[Any, tuple[np.ndarray, ...]]:
        run = Run(transport, every=5, **options).train(range(13))
        return copy.deepcopy(run.optimizer.state_dict()), books(run)

    def go_on(transport: SimTransport, states: list[Any]) -> tuple[Any, tuple[np.ndarray, ...], np.ndarray]:
        run = Run(transport, every=5, **options)
        run.optimizer.load_state_dicts(copy.deepcopy(states))
        found = books(run)
        run.train(range(13, 18))
        return copy.deepcopy(run.optimizer.state_dict()), found, run.theta

    def total(all_books: list[tuple[np.ndarray, ...]]) -> np.ndarray:
        """What is still to come off the anchor, per rank on average."""
        difference = [theta.astype(np.float64) - w for theta, w, _, _ in all_books]
        worker, server = ([book[k].astype(np.float64) for book in all_books] for k in (2, 3))
        return np.mean(difference, 0) + np.mean(worker, 0) + np.sum(server, 0)

    def check(world_size: int, states: list[Any], then: list[tuple[np.ndarray, ...]]) -> list[Any]:
        after = run_ranks(world_size, lambda transport: go_on(transport, states))
        if "delay" not in options:  # where frames are under way, what they said is owed again
            np.testing.assert_allclose(total([book for _, book, _ in after]), total(then), atol=1e-6)
        for _, book, theta in after:
            np.testing.assert_array_equal(book[0], then[0][0])
            np.testing.assert_array_equal(theta, after[0][2])
        return [state for state, *_ in after]

    def read(transport: SimTransport, states: list[Any]) -> tuple[np.ndarray, ...]:
        run = Run(transport, every=5, **options)
        run.optimizer.load_state_dict(copy.deepcopy(states[transport.rank]))
        return books(run)

    began = run_ranks(4, first)
    of_two = check(2, [state for state, _ in began], [book for _, book in began])
    check(8, of_two, run_ranks(2, lambda transport: read(transport, of_two)))


def test_nodes_of_two_ranks_then_two_ranks_alone_keep_anchors_and_sums() -> None:
    """A rank of a node keeps what is owed of its own rows; all ranks of a flat world of all rows."""

    def books(run: Run) -> tuple[np.ndarray, ...]:
        worker = {}
        for bucket in run.optimizer.buckets:
            rows = torch.zeros(bucket.layout.world_size, bucket.layout.chunk)
            rows[bucket.hierarchy.own] = bucket.ef.worker.view(-1, bucket.layout.chunk)
            worker.update(zip(bucket.params, bucket.layout.views(rows.view(-1)), strict=True))
        return run.theta, run.w, flat([worker[p] for p in run.params]), run.by_parameter("server")

    def in_nodes(transport: SimTransport) -> tuple[Any, tuple[np.ndarray, ...]]:
        run = Run(hierarchical(transport, 2), every=5, inner_options={"weight_decay": 0.0})
        for step in range(13):
            pull = torch.from_numpy(flat(run.params) - targets(run.rank) + noise(step, run.rank))
            pieces = pull.split([p.numel() for p in run.params])
            sum((p.view(-1) * g).sum() for p, g in zip(run.params, pieces, strict=True)).backward()  # type: ignore[union-attr]
            run.optimizer.step()
            run.optimizer.zero_grad()
        return copy.deepcopy(run.optimizer.state_dict()), books(run)

    def flat_world(transport: SimTransport) -> tuple[np.ndarray, ...]:
        run = Run(transport, every=5, inner_options={"weight_decay": 0.0})
        run.optimizer.load_state_dicts(copy.deepcopy([state for state, _ in saved]))
        return books(run)

    def total(all_books: Sequence[tuple[np.ndarray, ...]]) -> np.ndarray:
        """Two workers each time."""
        moved, worker, server = ([book[k].astype(np.float64) for book in all_books] for k in (1, 2, 3))
        return all_books[0][0] - np.mean(moved, 0) + np.sum(worker, 0) / 2 + np.sum(server, 0)

    saved = run_ranks(4, in_nodes)
    after = run_ranks(2, flat_world)
    np.testing.assert_array_equal(after[0][0], saved[0][1][0])
    np.testing.assert_allclose(total(after), total([book for _, book in saved]), atol=1e-6)


def test_a_state_of_the_inner_optimizer_begins_local_steps() -> None:
    params = make_params()
    plain = torch.optim.AdamW(params, lr=0.01)
    for step in range(3):
        set_gradients(params, step, 0)
        plain.step()
    state = plain.state_dict()

    def ours(transport: SimTransport) -> tuple[np.ndarray, float]:
        run = Run(transport, every=4)
        with torch.no_grad():
            for p, q in zip(run.params, params, strict=True):
                p.copy_(q)
        run.optimizer.load_state_dict(copy.deepcopy(state))
        return run.theta, float(run.optimizer.state[run.params[0]]["step"])

    for theta, steps in run_ranks(2, ours):
        np.testing.assert_array_equal(theta, flat(params))
        assert steps == 3


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.timeout(60)
@pytest.mark.parametrize("new", [2, 3])
@pytest.mark.parametrize("step", [10, 13, 16])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 2, "outer_momentum": 0.5}, {"correction_steps": 20}])
def test_what_rank_0_alone_has_saved_is_enough(
    options: dict[str, Any], step: int, new: int, caplog: pytest.LogCaptureFixture
) -> None:
    def first(transport: SimTransport) -> Any:
        return copy.deepcopy(Run(transport, every=5, **options).train(range(step)).optimizer.state_dict())

    def go_on(transport: SimTransport, state: Any) -> tuple[np.ndarray, ...]:
        run = Run(transport, every=5, **options)
        run.optimizer.load_state_dict(copy.deepcopy(state))
        taken, owed = run.w.copy(), run.by_parameter("worker")
        run.train(range(step, step + 12))
        return taken, owed, run.theta

    state = run_ranks(2, first)[0]
    after = run_ranks(new, lambda transport: go_on(transport, state))
    for rank, (taken, owed, anchors) in enumerate(after):
        assert (
            np.array_equal(taken, after[0][0]) and np.array_equal(anchors, after[0][2]) and np.isfinite(anchors).all()
        )
        is_own = (rank, new) == (0, 2)
        assert is_own or not owed.any()
        assert (f"rank {rank}: this optimizer state is that of rank 0 of 2" in caplog.text) != is_own


@pytest.mark.timeout(60)
def test_copies_of_one_ranks_state_are_refused_on_all_ranks() -> None:
    def first(transport: SimTransport) -> Any:
        return copy.deepcopy(Run(transport, every=5).train(range(7)).optimizer.state_dict())

    def work(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=r"rank 1: .* number 1 is that of rank 0 of 2"):
            Run(transport, every=5).optimizer.load_state_dicts([copy.deepcopy(state) for _ in range(2)])

    state = run_ranks(2, first)[0]
    run_ranks(2, work)
