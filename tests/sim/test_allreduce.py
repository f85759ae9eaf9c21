"""The collective on simulated ranks: conservation, identical replicas, order and number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from onebit.comm import (
    Codec,
    ErrorFeedback,
    Exchange,
    ExchangeTask,
    IdentityCodec,
    PeerError,
    SignCodec,
    SimTransport,
    Wire,
    allreduce_mean,
    compressed_allreduce,
    interleave,
    run_ranks,
    wait_all,
)
from onebit.reference.codecs import compress

BLOCK = 64


def vector(seed: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sent_plus_owed_equals_input_over_rounds(world_size: int, blocks: int) -> None:
    """Σ rounds (mean of inputs) = Σ results + mean of worker errors + server errors; the same on all ranks."""
    n = world_size * blocks * BLOCK

    def work(transport: SimTransport) -> tuple[Tensor, Tensor, ErrorFeedback]:
        ef = ErrorFeedback.zeros(n, world_size)
        given, got = torch.zeros(n, dtype=torch.float64), []
        for k in range(10):
            x = vector(100 * k + transport.rank, n)
            given += x.double()
            assert allreduce_mean(x, ef, SignCodec(block=BLOCK), transport)
            got.append(x)
        return given, torch.stack(got), ef

    results = run_ranks(world_size, work)
    assert all(torch.equal(got, results[0][1]) for _, got, _ in results)
    given = torch.stack([g for g, _, _ in results]).mean(0)
    owed = torch.stack([ef.worker.double() for _, _, ef in results]).mean(0)
    owed += torch.cat([ef.server.double() for _, _, ef in results])
    torch.testing.assert_close(results[0][1].double().sum(0) + owed, given, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_textbook_recursion(world_size: int, scale: str) -> None:
    """Thirds are no binary fractions: with 3 ranks a sum that cancels has another sign in float32, so 2 rounds."""
    rounds = 2 if world_size == 3 else 6
    n = world_size * 2 * BLOCK
    blocks = [slice(k, k + BLOCK) for k in range(0, n, BLOCK)]

    def work(transport: SimTransport) -> list[np.ndarray]:
        ef, out = ErrorFeedback.zeros(n, world_size), []
        for k in range(rounds):
            x = vector(7 * k + transport.rank, n)
            allreduce_mean(x, ef, SignCodec(block=BLOCK, scale=scale), transport)
            out.append(x.double().numpy())
        return out

    results = run_ranks(world_size, work)
    worker, server = np.zeros((world_size, n)), np.zeros(n)
    for k in range(rounds):
        c = np.stack([vector(7 * k + rank, n).double().numpy() for rank in range(world_size)]) + worker
        q = np.stack([compress(row, blocks, scale) for row in c])
        worker = c - q
        a = q.mean(0) + server
        expected = compress(a, blocks, scale)
        server = a - expected
        for result in results:
            np.testing.assert_allclose(result[k], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_identity_gives_the_plain_mean(world_size: int) -> None:
    n = world_size * 4

    def work(transport: SimTransport) -> Tensor:
        x = vector(transport.rank, n)
        allreduce_mean(x, None, IdentityCodec(), transport)
        return x

    expected = sum((vector(rank, n) for rank in range(1, world_size)), vector(0, n)) * (1 / world_size)
    for result in run_ranks(world_size, work):
        assert torch.equal(result, expected)


def test_identity_travels_from_where_it_lies() -> None:
    def work(transport: SimTransport) -> bool:
        x, n = vector(transport.rank, 64), 64
        wire = Wire.empty(IdentityCodec(), n, 2, frames_WB=x.view(torch.uint8).view(2, -1))
        y = x.clone()
        interleave([compressed_allreduce(x, None, IdentityCodec(), transport, wire)])
        allreduce_mean(y, None, IdentityCodec(), transport)
        return torch.equal(x, y)

    assert run_ranks(2, work) == [True, True]


def test_ranks_may_change_places() -> None:
    """The result depends on the inputs, not on who holds them, to rounding."""
    n = 4 * BLOCK

    def result(order: list[int]) -> Tensor:
        def work(transport: SimTransport) -> Tensor:
            x = vector(order[transport.rank], n)
            allreduce_mean(x, ErrorFeedback.zeros(n, 4), SignCodec(block=BLOCK), transport)
            return x

        return run_ranks(4, work)[0]

    torch.testing.assert_close(result([0, 1, 2, 3]), result([2, 0, 3, 1]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("codec", [SignCodec(block=BLOCK), IdentityCodec()], ids=str)
def test_interleaved_equals_one_after_another(codec: Codec) -> None:
    sizes = [2 * BLOCK, 8 * BLOCK, 4 * BLOCK]

    def work(transport: SimTransport, run: Callable[[list], None]) -> list[Tensor]:
        xs = [vector(10 * k + transport.rank, n) for k, n in enumerate(sizes)]
        efs = [ErrorFeedback.zeros(n, 2) for n in sizes]
        wires = [Wire.empty(codec, n, 2) for n in sizes]
        run([compressed_allreduce(x, ef, codec, transport, w) for x, ef, w in zip(xs, efs, wires, strict=True)])
        return [w.frames_WB for w in wires] + xs

    def one_by_one(exchanges: list) -> None:
        for exchange in exchanges:
            interleave([exchange])

    together = run_ranks(2, lambda transport: work(transport, interleave))
    apart = run_ranks(2, lambda transport: work(transport, one_by_one))
    assert all(torch.equal(a, b) for x, y in zip(together, apart, strict=True) for a, b in zip(x, y, strict=True))


class NotedWork:
    """Phase `phase` of exchange `k`, which notes when it is launched and waited for."""

    def __init__(self, said: list[tuple[str, int, int]], k: int, phase: int):
        self._said, self._what = said, (k, phase)
        said.append(("launch", *self._what))

    def wait(self) -> None:
        self._said.append(("wait", *self._what))


def noted(said: list[tuple[str, int, int]], k: int, phases: int = 2) -> Exchange:
    for phase in range(phases):
        yield NotedWork(said, k, phase)
    said.append(("end", k, phases))


def order_of(said: list[tuple[str, int, int]], what: str) -> list[tuple[int, int]]:
    return [(k, phase) for act, k, phase in said if act == what]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_interleaved_works_are_waited_for_in_the_order_of_their_launch(window: int) -> None:
    """The wire carries them in that order: whoever waits for a later one leaves it idle where phase 2 could begin."""
    said: list[tuple[str, int, int]] = []
    interleave((noted(said, k) for k in range(7)), window)
    assert order_of(said, "wait") == order_of(said, "launch")
    assert order_of(said, "end") == [(k, 2) for k in range(7)]
    for k in range(7):
        before = said[: said.index(("launch", k, 0))]
        begun = {(j, 1) for act, j, phase in before if act == "launch" and phase == 0}
        assert len(begun - set(order_of(before, "wait"))) == min(k, window)


@pytest.mark.parametrize("ahead", [0, 2, 5])
def test_of_tasks_under_way_those_in_an_earlier_phase_go_on_first(ahead: int) -> None:
    """ahead: so many are in phase 2. What the others launch travels while these are waited for."""
    said: list[tuple[str, int, int]] = []
    tasks = [ExchangeTask(noted(said, k)) for k in range(5)]
    for task in tasks[:ahead]:
        task.advance()
    under_way = len(said)
    wait_all(tasks)
    behind = [(k, 0) for k in range(ahead, 5)]
    assert order_of(said[under_way:], "wait") == behind + [(k, 1) for k in range(5)]
    assert order_of(said, "end") == [(k, 2) for k in range(5)]


@pytest.mark.parametrize("codec", [SignCodec(block=BLOCK), IdentityCodec()], ids=str)
def test_a_bad_value_on_one_rank_is_seen_by_all_and_leaves_the_errors(codec: Codec) -> None:
    def work(transport: SimTransport) -> tuple[bool, bool]:
        n = 4 * BLOCK
        ef = ErrorFeedback(vector(1, n), vector(2, n // 2), torch.empty(n), torch.empty(n // 2))
        before = ef.worker.clone(), ef.server.clone()
        x = vector(transport.rank, n)
        if transport.rank == 1:
            x[3] = float("inf")
        good = allreduce_mean(x, ef, codec, transport)
        return good, torch.equal(ef.worker, before[0]) and torch.equal(ef.server, before[1])

    assert run_ranks(2, work) == [(False, True), (False, True)]


def test_sends_what_the_docstring_says() -> None:
    def work(transport: SimTransport) -> int:
        n = 4 * 6 * BLOCK
        allreduce_mean(vector(0, n), ErrorFeedback.zeros(n, 4), SignCodec(block=BLOCK), transport)
        return transport.sent_bytes

    assert set(run_ranks(4, work)) == {2 * 3 * SignCodec(block=BLOCK).frame_bytes(6 * BLOCK)}


@pytest.mark.parametrize("x", [torch.zeros(100), torch.zeros(128, dtype=torch.float64), torch.zeros(2, 64)])
def test_a_vector_that_does_not_fit_is_refused(x: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"rank 0: expected a float32 vector .* multiple of world_size·block = 1·64, got"
    ):
        allreduce_mean(x, None, SignCodec(block=BLOCK), SimTransport())


def test_a_simulated_rank_that_dies_or_hangs_is_named() -> None:
    def dies(transport: SimTransport) -> None:
        if transport.rank == 1:
            return
        allreduce_mean(torch.zeros(3 * BLOCK), None, SignCodec(block=BLOCK), transport)

    with pytest.raises(PeerError, match=r"rank 0: rank \[1\] ended before all_to_all") as caught:
        run_ranks(3, dies, timeout_s=5)
    assert caught.value.ranks == (1,)

    def raises(transport: SimTransport) -> None:
        if transport.rank == 2:
            raise KeyError("my own")
        dies(transport)

    with pytest.raises(KeyError, match="my own"):
        run_ranks(3, raises, timeout_s=5)
