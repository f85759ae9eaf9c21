"""The cost model: what it says of worlds where the answer is known."""

from __future__ import annotations

from itertools import pairwise

import pytest

from onebit.comm import SignCodec
from onebit.comm.cost import PIECE, CodecCost, LinkCost, exchange_s, messages, payload_bytes, wire_s

SIGN = CodecCost(SignCodec().frame_bytes(PIECE) / PIECE, 3e-9, 0.3)
DENSE = CodecCost(4.0, 2e-9, 0.1)
LINK = LinkCost(5e-5, 1e8 / 8)


def test_world_of_one_sends_nothing() -> None:
    assert payload_bytes(10**6, 1, SIGN) == messages(10**6, 1) == wire_s(10**6, 1, SIGN, LINK) == 0
    assert exchange_s(10**6, 1, SIGN, LINK) == 10**6 * SIGN.s_per_element
    assert exchange_s(0, 4, SIGN, LINK) == 0


def test_payload_is_that_of_the_frames() -> None:
    n, W = 1 << 20, 4
    assert payload_bytes(n, W, SIGN) == 2 * (W - 1) * SignCodec().frame_bytes(n // W)
    assert payload_bytes(n, W, DENSE) == 2 * (W - 1) / W * n * 4


def test_two_hops_send_fewer_messages_and_more_bytes() -> None:
    """32 rows of 32: 62 peers instead of 1,023. Frames of phase 1 travel twice, except to one's own row or column."""
    assert messages(PIECE, 1024, hops=2) == 2 * 62
    frame = payload_bytes(1024, 1024, DENSE) / (2 * 1023)
    assert payload_bytes(1024, 1024, DENSE, hops=2) == pytest.approx(frame * (1023 + 2 * 1024 - 64))
    assert exchange_s(10**7, 1024, SIGN, LINK, hops=2) < exchange_s(10**7, 1024, SIGN, LINK) / 3
    assert messages(PIECE, 1, hops=2) == payload_bytes(PIECE, 1, SIGN, hops=2) == 0


def test_messages_are_those_of_the_pieces() -> None:
    assert messages(PIECE, 4) == 6 and messages(PIECE + 1, 4) == 12
    assert messages(100 * PIECE, 4, piece=None) == 6


@pytest.mark.parametrize("codec", [SIGN, DENSE])
def test_time_grows_with_everything_that_costs(codec: CodecCost) -> None:
    by_size = [exchange_s(n, 4, codec, LINK) for n in (10**3, 10**6, 10**7, 10**8)]
    by_ranks = [exchange_s(10**7, W, codec, LINK) for W in (1, 2, 4, 8, 64, 1024)]
    by_rate = [exchange_s(10**7, 4, codec, LinkCost(5e-5, b)) for b in (float("inf"), 1e9, 1e8, 1e7)]
    by_share = [exchange_s(10**7, 4, codec, LINK, ranks_per_core=c) for c in (1, 2, 4)]
    for times in (by_size, by_ranks, by_rate, by_share):
        assert all(a < b for a, b in pairwise(times))


def test_an_exchange_pays_its_start_once_however_small() -> None:
    late = LinkCost(5e-5, float("inf"), start_s=3e-3)
    at_once = LinkCost(5e-5, float("inf"))
    for n in (1, 10**6, 10**8):
        added = exchange_s(n, 4, SIGN, late, ranks_per_core=2) - exchange_s(n, 4, SIGN, at_once, ranks_per_core=2)
        assert added == pytest.approx(2 * 3e-3)
    assert exchange_s(10**6, 1, SIGN, late) == exchange_s(10**6, 1, SIGN, at_once)
    assert exchange_s(0, 4, SIGN, late) == 0


def test_time_lies_between_perfect_overlap_and_none() -> None:
    n, W = 10**7, 4
    wire, work = wire_s(n, W, SIGN, LINK), n * SIGN.s_per_element + messages(n, W) * LINK.latency_s
    times = [exchange_s(n, W, CodecCost(SIGN.bytes_per_element, 3e-9, share), LINK) for share in (0.0, 0.3, 1.0)]
    assert times[0] == max(wire, work) and times[2] == pytest.approx(wire + work, rel=1e-12)
    assert times[0] < times[1] < times[2]


def test_should_compress_on_a_slow_link_only() -> None:
    slow, fast = LinkCost(5e-5, 1e8 / 8), LinkCost(5e-5, float("inf"))
    assert exchange_s(10**7, 4, SIGN, slow) < exchange_s(10**7, 4, DENSE, slow) / 10
    assert exchange_s(10**7, 4, SIGN, fast) > exchange_s(10**7, 4, DENSE, fast)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinkCost(-1.0, 1.0),
        lambda: LinkCost(0.0, 0.0),
        lambda: LinkCost(0.0, 1.0, -1.0),
        lambda: CodecCost(0.0, 0.0),
        lambda: CodecCost(1.0, 0.0, 1.1),
        lambda: exchange_s(1, 0, SIGN, LINK),
        lambda: exchange_s(1, 1, SIGN, LINK, ranks_per_core=0.5),
    ],
)
def test_impossible_numbers_are_refused(make) -> None:
    with pytest.raises(ValueError, match="got"):
        make()
