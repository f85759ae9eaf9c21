"""The error-compensated compressed all-reduce: a mean over ranks that sends each element about once, compressed.

Two phases. Each rank owns one of W equal chunks. Phase 1 (all_to_all): each rank sends every owner its frame of that
chunk. Phase 2 (all_gather): the owner averages, compresses the average and sends it to all ranks. What a compression
leaves out is added to the input of the next one: the worker error for phase 1, the server error for phase 2.

If the transport has two levels (`hierarchy.py`), these are the phases between nodes, on the rows of this rank's
share; before them the ranks of a node add up that share in full precision, after them they give each other the frames.

`compressed_allreduce` is a generator that yields each launched Work, so that several buckets share the wire
(`interleave`); `exchange` is what follows its first encoding, `allreduce_mean` the plain call. Sources: 1-bit Adam
(arXiv 2102.02888), Algorithm 1 and Figure 3.

Shape legend: W ranks, H of them that exchange compressed (W in a flat world, one per node in two levels), N elements of
a chunk, B bytes of its frame, J blocks of a chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .codecs.base import Codec
from .hierarchy import Hierarchy
from .kernels.operands import EncodeOutput
from .transports.base import Transport, Work, check_transport

Exchange = Generator[Work, None, None]


@dataclass
class ErrorFeedback:
    """The residuals of compression on this rank, which the next exchange adds to its input.

    An exchange reads worker and server and writes worker_next and server_next; `commit` swaps them. So a step can be
    abandoned after its traffic without a trace. Because the tensors change places, keep no reference to them.

    Attributes:
        worker: Residual of phase 1, [H·N], float32 or bfloat16.
        server: Residual of phase 2, [N], of the same dtype.
        worker_next: Residual that the exchange under way leaves, like worker.
        server_next: The same, like server.
    """

    worker: Tensor
    server: Tensor
    worker_next: Tensor
    server_next: Tensor

    @classmethod
    def zeros(
        cls,
        n: int,
        world_size: int,
        *,
        local_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ErrorFeedback:
        """Residuals of zero.

        Args:
            n: Elements of the bucket on all ranks together, a multiple of world_size.
            world_size: Number of ranks.
            local_size: Ranks on each node, in two levels. Default 1.
            dtype: torch.float32 (default) or torch.bfloat16.
            device: Device of the tensors. Default "cpu".
        """
        worker, server = (torch.zeros(m, dtype=dtype, device=device) for m in (n // local_size, n // world_size))
        return cls(worker, server, torch.zeros_like(worker), torch.zeros_like(server))

    def commit(self) -> None:
        """Take over the residuals of the last exchange."""
        self.worker, self.worker_next = self.worker_next, self.worker
        self.server, self.server_next = self.server_next, self.server


@dataclass
class Wire:
    """The buffers of one bucket's exchange. Between steps only the last frames are kept, on request.

    Attributes:
        frames_WB: Frames of the averages, after an exchange. uint8.
        received_HB: All ranks' frames of this rank's chunk. uint8.
        own: Rows of frames_WB that this rank exchanges across nodes; all of them in a flat world.
        mean: Place for the residual of the second encoding, [N], float32 or bfloat16, without error feedback.
            Default None: made when needed.
        is_inside: Whether the frames are in the memory of the tensor that is exchanged. Its values are overwritten when
            they are encoded: decode a copy of the frames into it. Default False.
    """

    frames_WB: Tensor
    received_HB: Tensor
    own: slice
    mean: Tensor | None = None
    is_inside: bool = False

    @property
    def sent_HB(self) -> Tensor:
        """My frames, one per owner. A view of frames_WB: the averages replace them after they have been sent."""
        return self.frames_WB[self.own]

    @classmethod
    def empty(
        cls,
        codec: Codec,
        n: int,
        world_size: int,
        *,
        hierarchy: Hierarchy | None = None,
        frames_WB: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Wire:
        """New buffers.

        Args:
            codec: Format of the frames.
            n: Elements of the bucket, a multiple of world_size·codec.block.
            world_size: Number of ranks.
            hierarchy: The two levels, if any. Default None: flat.
            frames_WB: Memory of the frames, so that a lossless codec can send the bucket in place. Default: new.
            device: Device of the buffers. Default "cpu".
        """
        own = slice(0, world_size) if hierarchy is None else hierarchy.own
        if frames_WB is None:
            B = codec.frame_bytes(n // world_size)
            frames_WB = torch.empty(world_size, B, dtype=torch.uint8, device=device)
        return cls(frames_WB, torch.empty_like(frames_WB[own]), own)

    @classmethod
    def inside(
        cls, memory: Tensor, codec: Codec, world_size: int, *, hierarchy: Hierarchy, mean: Tensor | None = None
    ) -> Wire | None:
        """Buffers inside the memory of the tensor to exchange, without error feedback; None if they do not fit.

        For codecs that do not send in place.

        Args:
            memory: The tensor to exchange, float32 [W·N].
            codec: Format of the frames.
            world_size: Number of ranks, W.
            hierarchy: The two levels of the transport; `Hierarchy.of` also describes a flat one.
            mean: Place for the unused residual of the second encoding. Default None: in `memory` if it fits.
        """
        own, n = hierarchy.own, memory.numel() // world_size
        B, H = codec.frame_bytes(n), own.stop - own.start
        room = memory.view(torch.uint8)
        first, second = world_size * B, (world_size + H) * B
        if second > len(room):
            return None
        if mean is None and second + 4 * n <= len(room):
            mean = room[second : second + 4 * n].view(torch.float32)
        return cls(room[:first].view(world_size, B), room[first:second].view(H, B), own, mean, is_inside=True)


def compressed_allreduce(
    x: Tensor, ef: ErrorFeedback | None, codec: Codec, transport: Transport, wire: Wire, counts: Tensor | None = None
) -> Exchange:
    """Average x over all ranks. Afterwards every rank holds the same frames of the mean in `wire.frames_WB`.

    A generator: it yields each launched Work, and the caller waits for it before it resumes (`interleave` does). In two
    levels a Work of `Hierarchy.sum_intra_node` comes first; then see `exchange`. All ranks, buckets in the same order.

    Args:
        x: float32 [W·N], padded to whole blocks. Modified: its own rows become the worker residual.
        ef: Residuals, added to x; `ef.commit()` makes the new ones current. None: no error feedback.
        codec: Format of the frames.
        transport: Connection to the other ranks.
        wire: Buffers, from `Wire.empty`.
        counts: int32 [W, J], real elements of each block. Default None: all are real.
    """
    hierarchy = Hierarchy.of(transport)
    yield from hierarchy.sum_intra_node(x)
    x_HN = hierarchy.rows(x)
    if hierarchy.local_size > 1:
        x_HN.mul_(1.0 / hierarchy.local_size)
    yield from average_nodes(x_HN, ef, codec, hierarchy, wire, counts)


def average_nodes(
    x_HN: Tensor, ef: ErrorFeedback | None, codec: Codec, hierarchy: Hierarchy, wire: Wire, counts: Tensor | None = None
) -> Exchange:
    """Average over nodes what is the same on all ranks of a node: `compressed_allreduce` without its first sum.

    Args:
        x_HN: This rank's own rows, float32. Modified: they become the worker residual.
        ef: As for `compressed_allreduce`, like the following.
        codec: Format of the frames.
        hierarchy: Transports to the other ranks.
        wire: Buffers.
        counts: Real elements of each block. Default None: all are real.
    """
    worker_HN = None if ef is None else ef.worker.view(x_HN.shape)
    made_HB = torch.empty_like(wire.sent_HB) if wire.is_inside else wire.sent_HB
    codec.encode(x_HN, worker_HN, made_HB, None if counts is None else hierarchy.rows(counts))
    if wire.is_inside:
        wire.sent_HB.copy_(made_HB)
    del made_HB  # all buckets wait below with what they hold
    if ef is not None and ef.worker_next.data_ptr() != x_HN.data_ptr():
        ef.worker_next.view(x_HN.shape).copy_(x_HN)
    yield from exchange(ef, codec, hierarchy, wire, x_HN.shape[1], counts)


def exchange(
    ef: ErrorFeedback | None, codec: Codec, hierarchy: Hierarchy, wire: Wire, n: int, counts: Tensor | None = None
) -> Exchange:
    """Both phases, from frames that are already encoded into `wire.sent_HB`.

    Yields two Works, in two hops (`hops.py`) four, in two levels one more; the caller waits for each before it resumes.
    Sends 2·(H-1)·B bytes per rank across nodes, nearly 3·H·B in two hops, and (L-1)·H·B inside.

    Args:
        ef: Residuals; the server error is used here. None: no error feedback.
        codec: Format of the frames.
        hierarchy: Transports to the other ranks.
        wire: Buffers, with this rank's frames in sent_HB.
        n: Elements of a chunk, N.
        counts: int32 [W, J], real elements of each block. Default None: all are real.
    """
    across, frames_HB = hierarchy.inter_node, wire.sent_HB
    yield from across.all_to_all_in_hops(wire.received_HB, frames_HB)

    mine = slice(across.rank, across.rank + 1)
    counts_1J = None if counts is None else counts[hierarchy.owner].unsqueeze(0)
    if ef is not None:
        server_1N, residual_1N = ef.server.view(1, -1), ef.server_next.view(1, -1)
    else:
        if wire.mean is None:
            wire.mean = torch.empty(n, device=frames_HB.device, dtype=torch.float32)
        server_1N, residual_1N = None, wire.mean.view(1, -1)
    codec.encode_mean(wire.received_HB, EncodeOutput(server_1N, frames_HB[mine], counts_1J, residual_1N))
    yield from across.all_gather_in_hops(frames_HB, frames_HB[across.rank])

    if hierarchy.intra_node is not None:
        yield hierarchy.intra_node.all_gather(wire.frames_WB.view(hierarchy.local_size, -1), frames_HB.view(-1))


# Exchanges under way when the next one begins. 25 M elements on 4 hosts at 100 Mbit/s over Gloo, times payload over
# bandwidth, medians of 7 (2026-11): pieces of 1 M take 1.09 with 3 or 4, 1.11 with 6, 1.15 with 8; pieces of 2 M take
# 1.15 with 3, 1.19 with 4 or 6.
WINDOW = 3


def interleave(exchanges: Iterable[Exchange], window: int = WINDOW) -> None:
    """Run exchanges side by side.

    Works are waited for in the order of their launch, in which the wire carries them: a second phase begins as soon as
    its first is over. The order of launches depends on the number of phases only, so it is the same on every rank.

    Args:
        exchanges: Generators of Works, taken from the iterable as they start. The code of one after its last Work runs
            while others are under way.
        window: Exchanges under way at a time. Default 3.
    """
    under_way: deque[ExchangeTask] = deque()
    for exchange in exchanges:
        under_way.append(ExchangeTask(exchange))
        while len(under_way) > window:
            _advance_first(under_way)
    while under_way:
        _advance_first(under_way)


class ExchangeTask:
    """An exchange under way: its generator and the Work that it yielded last. The constructor launches the first Work.

    Args:
        exchange: Generator of Works, e.g. from `compressed_allreduce`.

    Attributes:
        phase: Number of Works that are complete.
    """

    def __init__(self, exchange: Exchange):
        self.phase = 0
        self._exchange = exchange
        self._work: Work | None = next(exchange, None)

    def is_ready(self) -> bool:
        """Whether `advance` would return without waiting for another rank."""
        return self._work is None or self._work.is_ready()

    def advance(self) -> bool:
        """Wait for the Work under way and launch the next one. Returns False when there is none left."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = next(self._exchange, None)
        self.phase += 1
        return self._work is not None


def wait_all(tasks: Sequence[ExchangeTask]) -> None:
    """Complete these exchanges, which are under way. Those in an earlier phase go first."""
    under_way = deque(sorted(tasks, key=lambda task: task.phase))
    while under_way:
        _advance_first(under_way)


def _advance_first(under_way: deque[ExchangeTask]) -> None:
    """Advance the first task by one phase, and move it to the end of the queue unless it is complete."""
    task = under_way.popleft()
    if task.advance():
        under_way.append(task)


def allreduce_mean(
    x: Tensor, ef: ErrorFeedback | None, codec: Codec, transport: Transport, wire: Wire | None = None
) -> bool:
    """Replace x by its compressed mean over all ranks. The blocking form, for one tensor. All ranks call it.

    Sends 2·(W-1)·codec.frame_bytes(n/W) bytes per rank; in two levels, see `exchange`.

    Args:
        x: float32 [n], n a multiple of world_size·codec.block. Modified in place.
        ef: Residuals, added to x and replaced by the new ones. None: no error feedback.
        codec: Format of the frames.
        transport: Connection to the other ranks.
        wire: Buffers to use again. Default None: new ones.

    Returns:
        True; False on all ranks if x is not finite on any. Then ef is unchanged and x undefined.

    Raises:
        ValueError: x or ef has another shape or dtype.
    """
    check_transport(transport)
    W = transport.world_size
    if x.dtype != torch.float32 or x.dim() != 1 or x.numel() % (W * codec.block):
        raise ValueError(
            f"rank {transport.rank}: expected a float32 vector whose length is a multiple of world_size·block = "
            f"{W}·{codec.block}, got {x.dtype} {tuple(x.shape)}; pad it"
        )
    if ef is not None and ef.worker.numel() * Hierarchy.of(transport).local_size != x.numel():
        raise ValueError(
            f"rank {transport.rank}: the worker error has {ef.worker.numel()} elements for {x.numel()} and local_size="
            f"{Hierarchy.of(transport).local_size}; make it with ErrorFeedback.zeros(n, world_size, local_size=...)"
        )
    if wire is None:
        wire = Wire.empty(codec, x.numel(), W, hierarchy=Hierarchy.of(transport), device=x.device)
    interleave([compressed_allreduce(x, ef, codec, transport, wire)])
    if not bool(codec.is_finite(wire.frames_WB, x.numel() // W)):
        return False
    if ef is not None:
        ef.commit()
    codec.decode(wire.frames_WB, x.view(W, -1))
    return True
