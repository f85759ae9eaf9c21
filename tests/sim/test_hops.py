"""Two hops: exchanges in rows and columns do what exchanges between all do, to the bit, and send what they should.

Shape legend: W = R·C ranks, in R rows of C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import transport_contract as contract
from family import make, model, train
from torch import Tensor

import onebit
from onebit.comm import (
    ErrorFeedback,
    Hierarchy,
    Int8Codec,
    SignCodec,
    SimTransport,
    Transport,
    TwoHopTransport,
    allreduce_mean,
    hierarchical,
    in_hops,
    run_ranks,
)
from onebit.comm.hops import FROM, rows_of
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb

pytestmark = pytest.mark.slow

T = TypeVar("T")

WORLDS = [4, 6, 9, 16]


def in_both(W: int, work: Callable[[Transport], T]) -> tuple[list[T], list[T]]:
    """The results of all ranks in one hop, and in two."""
    one, two = (run_ranks(W, lambda transport, hops=hops: work(in_hops(transport, hops))) for hops in (1, 2))
    return one, two


def drive(works: object) -> None:
    for work in works:  # type: ignore[attr-defined]
        work.wait()


# -------------------------------------------------------------------------------- the transport


def test_rows_are_the_largest_divisor_up_to_the_root() -> None:
    for W in range(1, 300):
        R = rows_of(W)
        assert W % R == 0 and R * R <= W
        assert not any(W % r == 0 for r in range(R + 1, math.isqrt(W) + 1))


def test_it_is_a_transport() -> None:
    def work(transport: SimTransport) -> list[dict[str, str]]:
        hops = in_hops(transport, 2)
        assert isinstance(hops, TwoHopTransport)
        names = tuple(name for name in contract.CHECKS if name != "large_rows")
        return [contract.run_checks(part, names) for part in (hops, hops.row, hops.column)]

    for outcomes in run_ranks(6, work):
        assert all(set(outcome.values()) == {""} for outcome in outcomes)


@pytest.mark.parametrize("B", [0, 1, 7])
@pytest.mark.parametrize("W", [1, *WORLDS])
def test_hops_bring_what_one_operation_brings_and_send_the_bytes_of_the_formula(W: int, B: int) -> None:
    def work(transport: SimTransport) -> tuple[int, int]:
        hops = in_hops(transport, 2)
        mine = torch.randint(0, 255, (W, B), generator=torch.Generator().manual_seed(transport.rank)).byte()
        expected, found = torch.empty_like(mine), torch.empty_like(mine)
        transport.all_to_all(expected, mine).wait()
        before = hops.sent_bytes
        drive(hops.all_to_all_in_hops(found, mine))
        sent = [hops.sent_bytes - before]
        assert torch.equal(found, expected)
        transport.all_gather(expected, mine[0].contiguous()).wait()
        before = hops.sent_bytes
        found[transport.rank] = mine[0]
        drive(hops.all_gather_in_hops(found, found[transport.rank]))  # from a row of the output, as in `exchange`
        assert torch.equal(found, expected)
        return sent[0], hops.sent_bytes - before

    R = rows_of(W)
    assert run_ranks(W, work) == [((2 * W - R - W // R) * B, (W - 1) * B)] * W


@pytest.mark.parametrize("hops", [0, 3, "two"])
def test_other_numbers_of_hops_are_refused(hops: object) -> None:
    with pytest.raises(ValueError, match='hops must be 1, 2 or "auto"'):
        in_hops(SimTransport(), hops)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='hops must be 1, 2 or "auto"'):
        onebit.comm.init(hops=hops)  # type: ignore[arg-type]


def test_a_prime_number_of_ranks_has_no_rows() -> None:
    def work(transport: SimTransport) -> str:
        assert in_hops(transport, "auto") is transport
        with pytest.raises(ValueError) as caught:
            in_hops(transport, 2)
        return str(caught.value)

    message = "5 ranks cannot be in rows and columns, 5 is prime; use hops=1"
    assert run_ranks(5, work) == [f"rank {rank}: {message}" for rank in range(5)]


def test_ranks_that_do_not_fit_are_refused() -> None:
    def work(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=r"expected rank = row·2 \+ column"):
            TwoHopTransport(transport, transport.split([0, 1]), transport.split([0, 1]))

    run_ranks(2, work)


def test_auto_is_two_hops_from_many_ranks_on() -> None:
    assert all(in_hops(transport, "auto") is transport for transport in [SimTransport()])

    def work(transport: SimTransport) -> bool:
        return isinstance(in_hops(transport, "auto"), TwoHopTransport)

    assert run_ranks(FROM, work) == [True] * FROM
    assert run_ranks(FROM // 2, work) == [False] * (FROM // 2)


# -------------------------------------------------------------------------------- the exchange


@pytest.mark.parametrize("W", WORLDS)
@pytest.mark.parametrize("codec", [Int8Codec(64), SignCodec(64)])
def test_an_exchange_has_the_bits_of_one_hop(W: int, codec: SignCodec) -> None:
    def work(transport: Transport) -> list[Tensor]:
        n = 3 * W * codec.block
        ef = ErrorFeedback.zeros(n, W)
        found = []
        for step in range(3):
            x = torch.randn(n, generator=torch.Generator().manual_seed(100 * step + transport.rank))
            assert allreduce_mean(x, ef, codec, transport)
            found += [x, ef.worker.clone(), ef.server.clone()]
        return found

    one, two = in_both(W, work)
    for ours, theirs in zip(two, one, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_two_levels_and_two_hops() -> None:
    """2 ranks on each of 4 nodes, which are in 2 rows and 2 columns."""

    def work(transport: SimTransport, hops: int) -> list[Tensor]:
        levels = hierarchical(transport, 2, hops)
        assert Hierarchy.of(levels).phases == 2 + 2 * hops
        net = model()
        return train(levels, range(10), net, make("OnebitAdam", net, levels))  # type: ignore[arg-type]

    one, two = (run_ranks(8, lambda transport, hops=hops: work(transport, hops)) for hops in (1, 2))
    assert all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(two, one, strict=True))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LAMB, clipped": lambda net, t: make("OnebitLamb", net, t, max_grad_norm=0.1),
    "local": lambda net, t: make("ZeroOneAdam", net, t),
    "delay": lambda net, t: make("OnebitAdam", net, t, delay=1),
    "small buckets": lambda net, t: make("OnebitAdam", net, t, bucket_cap_mb=1e-3),
    "LocalSteps": lambda net, t: onebit.LocalSteps(
        torch.optim.AdamW(net.parameters(), lr=1e-2), every=2, delay=1, transport=t
    ),
    "sharded": lambda net, t: ShardedOnebitAdam(net.parameters(), warmup_steps=3, transport=t),
    "sharded, stage 2": lambda net, t: ShardedOnebitLamb(net.parameters(), warmup_steps=3, stage=2, transport=t),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_the_same_steps(name: str) -> None:
    def work(transport: Transport) -> list[Tensor]:
        net = model()
        return train(transport, range(10), net, OPTIMIZERS[name](net, transport))  # type: ignore[arg-type]

    one, two = in_both(4, work)
    assert all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(two, one, strict=True))
