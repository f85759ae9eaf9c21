"""The contract of a transport, as checks on one rank's `transport`. All ranks of a world run the same check together.

`test_transport.py` applies all of it to every transport; `transport_ranks.py` runs it on real processes. The bytes that
travel are a formula of sender, receiver and position, so that every rank can tell what must arrive.

Shape legend: W ranks, B bytes of one row.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from onebit.comm import ErrorFeedback, SignCodec, Transport, Wire, Work, compressed_allreduce, interleave
from onebit.comm.transports.edge import Staged

SIZES = (0, 1, 7, 4096, 100_003)


def row(src: int, dst: int, B: int, salt: int = 0) -> Tensor:
    """uint8 [B]: what rank src has for rank dst."""
    return ((torch.arange(B, dtype=torch.int32) * 7 + 37 * src + 101 * dst + 13 * salt) % 251).to(torch.uint8)


def rows(src: int, W: int, B: int, salt: int = 0) -> Tensor:
    return torch.stack([row(src, dst, B, salt) for dst in range(W)])


def garbage(*shape: int) -> Tensor:
    return torch.full(shape, 255, dtype=torch.uint8)


def check_all_to_all_transposes(transport: Transport) -> None:
    """out[j] on rank i is in[i] of rank j, for 0, 1 and odd numbers of bytes."""
    W = transport.world_size
    for B in SIZES:
        out_WB = garbage(W, B)
        transport.all_to_all(out_WB, rows(transport.rank, W, B)).wait()
        assert torch.equal(out_WB, torch.stack([row(src, transport.rank, B) for src in range(W)]))


def check_all_gather_stacks(transport: Transport) -> None:
    """out[j] is in of rank j."""
    W = transport.world_size
    for B in SIZES:
        out_WB = garbage(W, B)
        transport.all_gather(out_WB, row(transport.rank, 0, B)).wait()
        assert torch.equal(out_WB, torch.stack([row(src, 0, B) for src in range(W)]))


def check_shift_passes_rows_on(transport: Transport) -> None:
    """out on rank r is in of rank r - by, for every distance; all are in flight together, and one row is sent each."""
    W, rank = transport.world_size, transport.rank
    for B in SIZES:
        before, outs = transport.sent_bytes, [garbage(B) for _ in range(W)]
        works = [transport.shift(out_B, row(rank, by, B), by) for by, out_B in enumerate(outs)]
        for work in reversed(works):
            work.wait()
        for by, out_B in enumerate(outs):
            assert torch.equal(out_B, row((rank - by) % W, by, B))
        assert transport.sent_bytes - before == (W - 1) * B
    out_B = garbage((rank - 1) % W + 5)  # every rank's row has another length
    transport.shift(out_B, row(rank, 0, rank + 5), 1 % W).wait()
    assert torch.equal(out_B, row((rank - 1) % W, 0, (rank - 1) % W + 5))
    for by in (-1, W):
        with contextlib.suppress(ValueError):
            transport.shift(garbage(3), garbage(3), by)
            raise AssertionError(f"a distance of {by} was taken")


def check_all_reduce_sums(transport: Transport) -> None:
    """Σ_r (r+1)·i mod 1000, integers below 2^24: exact in float32 in any order of summation."""
    W = transport.world_size
    for shape in ((0,), (1,), (3, 5), (100_003,)):
        base = (torch.arange(torch.Size(shape).numel()) % 1000).to(torch.float32).view(shape)
        x = base * (transport.rank + 1)
        transport.all_reduce(x).wait()
        assert torch.equal(x, base * (W * (W + 1) // 2))


def check_broadcast_copies_any_dtype_and_shape(transport: Transport) -> None:
    """x becomes src's, bit by bit, for every src."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8):
        for shape in ((), (0,), (3, 5)):
            for src in range(transport.world_size):
                expected = torch.full(shape, src + 1.0).to(dtype)
                x = expected.clone() if transport.rank == src else torch.zeros(shape, dtype=dtype)
                transport.broadcast(x, src).wait()
                assert torch.equal(x.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


@torch.no_grad()
def check_broadcast_into_a_parameter(transport: Transport) -> None:
    """Under no_grad, as in an optimizer, a leaf that requires a gradient is overwritten like any tensor."""
    x = torch.nn.Parameter(torch.full((5,), float(transport.rank)))
    transport.broadcast(x, transport.world_size - 1).wait()
    assert torch.equal(x.detach(), torch.full((5,), transport.world_size - 1.0))


def check_operations_in_flight_may_be_waited_for_in_reverse(transport: Transport) -> None:
    """Ten operations of all kinds and several sizes are launched, then waited for last to first."""
    W, rank = transport.world_size, transport.rank
    works, expectations = [], []
    for salt, B in enumerate((4096, 3, 0, 65_537)):
        gathered_WB, exchanged_WB = garbage(W, B), garbage(W, B)
        mine_WB, mine_B = rows(rank, W, B, salt), row(rank, 0, B, salt + 50)
        works += [transport.all_to_all(exchanged_WB, mine_WB), transport.all_gather(gathered_WB, mine_B)]
        expectations.append((exchanged_WB, torch.stack([row(src, rank, B, salt) for src in range(W)]), mine_WB))
        expectations.append((gathered_WB, torch.stack([row(src, 0, B, salt + 50) for src in range(W)]), mine_B))
    total, news = torch.full((1000,), rank + 1.0), torch.full((9,), float(rank))
    works += [transport.all_reduce(total), transport.broadcast(news, W - 1)]
    for work in reversed(works):
        work.wait()
    for got, expected, _ in expectations:
        assert torch.equal(got, expected)
    assert torch.equal(total, torch.full((1000,), W * (W + 1) / 2))
    assert torch.equal(news, torch.full((9,), W - 1.0))


def check_channels_need_no_common_order(transport: Transport) -> None:
    """Ranks launch the same operations of two channels, and of none, each in an order of its own."""
    W, rank, B = transport.world_size, transport.rank, 4096
    channels = [nullcontext, transport.new_channel(), transport.new_channel()]
    order = [(k + rank) % 3 for k in range(3)]
    works, gathered, shifted = {}, [garbage(W, B) for _ in order], [garbage(B) for _ in order]
    totals = [torch.full((1000,), rank + k + 1.0) for k in range(3)]
    for k in order:
        with channels[k]():
            works[k] = [transport.all_gather(gathered[k], row(rank, k, B)), transport.all_reduce(totals[k])]
            works[k].append(transport.shift(shifted[k], row(rank, k, B), W - 1))
    for k in range(3):
        for work in works[k]:
            work.wait()
        assert torch.equal(gathered[k], torch.stack([row(src, k, B) for src in range(W)]))
        assert torch.equal(totals[k], torch.full((1000,), W * (W + 1) / 2 + W * k))
        assert torch.equal(shifted[k], row((rank + 1) % W, k, B))


def check_works_are_ready_when_all_have_launched_them(transport: Transport) -> None:
    """And not before: the last rank launches when the others have seen that it has not."""
    W, rank, B = transport.world_size, transport.rank, 70_000
    channel = transport.new_channel()
    out_WB, gathered_WB, total = garbage(W, B), garbage(W, B), torch.full((5000,), rank + 1.0)

    def launch() -> list[Work]:
        with channel():
            exchanged = transport.all_to_all(out_WB, rows(rank, W, B))
            return [exchanged, transport.all_gather(gathered_WB, row(rank, 0, B)), transport.all_reduce(total)]

    works = launch() if rank < W - 1 else []
    assert not any(work.is_ready() for work in works)
    transport.all_gather(garbage(W, 1), row(rank, 0, 1)).wait()
    works = works or launch()
    deadline = time.monotonic() + 20.0
    while not all([work.is_ready() for work in works]):
        assert time.monotonic() < deadline, [work.is_ready() for work in works]
        time.sleep(0.001)
    for work in works:
        work.wait()
    assert torch.equal(out_WB, torch.stack([row(src, rank, B) for src in range(W)]))
    assert torch.equal(gathered_WB, torch.stack([row(src, 0, B) for src in range(W)]))
    assert torch.equal(total, torch.full((5000,), W * (W + 1) / 2))


def check_inputs_may_be_overwritten_after_wait(transport: Transport) -> None:
    """Also where the receiver is late."""
    W, B = transport.world_size, 300_001
    if transport.rank == W - 1:
        time.sleep(0.1)
    out_WB, in_WB = garbage(W, B), rows(transport.rank, W, B)
    transport.all_to_all(out_WB, in_WB).wait()
    in_WB.fill_(255)
    assert torch.equal(out_WB, torch.stack([row(src, transport.rank, B) for src in range(W)]))


def check_large_rows(transport: Transport) -> None:
    """1.2 MB per peer: beyond every eager limit; two exchanges at once."""
    W, B = transport.world_size, 1_200_001
    in_WB, outs = rows(transport.rank, W, B), [garbage(W, B), garbage(W, B)]
    for work in [transport.all_to_all(out_WB, in_WB) for out_WB in outs]:
        work.wait()
    for out_WB in outs:
        assert torch.equal(out_WB, torch.stack([row(src, transport.rank, B) for src in range(W)]))


def check_sent_bytes_counts_payload(transport: Transport) -> None:
    """(W-1)·B for the exchanges, 2·(W-1)/W·4 per element of an all_reduce, (W-1)·nbytes at the source alone."""
    W, B, n = transport.world_size, 1001, 240
    before = transport.sent_bytes
    transport.all_to_all(garbage(W, B), garbage(W, B)).wait()
    assert transport.sent_bytes - before == (W - 1) * B
    transport.all_gather(garbage(W, B), garbage(B)).wait()
    assert transport.sent_bytes - before == 2 * (W - 1) * B
    transport.all_reduce(torch.ones(n)).wait()
    assert transport.sent_bytes - before == 2 * (W - 1) * B + 2 * (W - 1) * 4 * n // W
    transport.broadcast(torch.ones(n), 0).wait()
    at_source = (W - 1) * 4 * n if transport.rank == 0 else 0
    assert transport.sent_bytes - before == 2 * (W - 1) * B + 2 * (W - 1) * 4 * n // W + at_source


def check_waiting_twice_is_harmless(transport: Transport) -> None:
    W = transport.world_size
    works = [transport.all_gather(garbage(W, 5), row(transport.rank, 0, 5)), transport.all_reduce(torch.ones(3))]
    for work in works * 2:
        work.wait()


def check_works_that_nobody_waits_for_hinder_no_others(transport: Transport) -> None:
    """As of an optimizer dropped with a step under way: the last rank launches them when the others' are gone."""
    W, rank, B = transport.world_size, transport.rank, 70_000
    if rank == W - 1:
        time.sleep(0.1)
    transport.all_to_all(garbage(W, B), rows(rank, W, B))
    transport.all_gather(garbage(W, B), row(rank, 0, B))
    check_all_gather_stacks(transport)


def check_host_staging_gives_the_same(transport: Transport) -> None:
    """The path of device tensors, forced on host tensors: both inputs and outputs go through copies."""
    staged = _Copying(transport)
    check_all_to_all_transposes(staged)
    check_all_gather_stacks(staged)
    check_all_reduce_sums(staged)
    check_broadcast_copies_any_dtype_and_shape(staged)
    check_operations_in_flight_may_be_waited_for_in_reverse(staged)


class _Copying(Staged):
    def __init__(self, transport: Transport):
        super().__init__(transport)
        self.rank, self.world_size = transport.rank, transport.world_size


CHECKS: dict[str, Callable[[Transport], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def digest_of_compressed_rounds(transport: Transport) -> str:
    """SHA-256 over 5 rounds of error-compensated SignCodec exchanges of two interleaved buckets: frames and residuals.

    The sums run in rank order on every transport, so the digest depends on W and rank alone.
    """
    W, codec, n = transport.world_size, SignCodec(block=64, kernel="reference"), transport.world_size * 64 * 5
    feedbacks = [ErrorFeedback.zeros(n, W) for _ in range(2)]
    wires = [Wire.empty(codec, n, W) for _ in range(2)]
    generator = torch.Generator().manual_seed(1000 + transport.rank)
    digest = hashlib.sha256()
    for _ in range(5):
        buckets = [torch.randn(n, generator=generator) for _ in range(2)]
        interleave(
            compressed_allreduce(x, ef, codec, transport, wire)
            for x, ef, wire in zip(buckets, feedbacks, wires, strict=True)
        )
        for ef, wire in zip(feedbacks, wires, strict=True):
            ef.commit()
            for tensor in (wire.frames_WB, ef.worker, ef.server):
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def run_checks(transport: Transport, names: tuple[str, ...] = tuple(CHECKS)) -> dict[str, str]:
    """{check: "" or what went wrong}. After the first failure the ranks may be out of step: the rest is not run."""
    outcome = {}
    for name in names:
        if any(outcome.values()):
            outcome[name] = "not run, because an earlier check failed"
            continue
        try:
            CHECKS[name](transport)
            outcome[name] = ""
        except Exception:
            outcome[name] = f"rank {transport.rank}: {traceback.format_exc()}"
    return outcome
