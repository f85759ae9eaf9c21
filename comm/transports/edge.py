"""Shared parts of the real transports: checks of tensors, staging through host memory, the text of a `PeerError`.

Rests on torch alone. Read `networked.py` next.

Shape legend: W ranks, B bytes of one frame.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .base import PeerError, Work
from .notes import Conclusion, Operation, names_of

ROLL_CALL_S = 2.0
"""How long a rank whose library collective failed waits for the others to answer before it names the silent ones."""

NOTES_S = 2.0
"""How long a rank that failed waits for the notes of the ranks that it misses."""

ANSWER_S = 1.0
"""How much longer than that the group's store may take to answer before it counts as hanging."""

STORE_S = 6.0
"""How long the store may take to answer a rank at the rendezvous before it counts as gone.

torch's store looks up the host name of each client that connects and serves no other meanwhile: 5 s if the resolver
does not answer.
"""

DIAGNOSIS_S = ROLL_CALL_S + NOTES_S + ANSWER_S
"""How long after its timeout an operation that cannot complete may still take to find out which ranks are missing."""


class DoneWork:
    """The Work of an operation that was complete at its launch."""

    def wait(self) -> None:
        return

    def is_ready(self) -> bool:
        return True


def check_all_to_all(rank: int, world_size: int, out_WB: Tensor, in_WB: Tensor) -> None:
    """Raise ValueError unless both are contiguous [W, B] of one dtype and device."""
    if out_WB.shape != in_WB.shape or out_WB.dim() != 2 or len(out_WB) != world_size:
        raise ValueError(
            f"rank {rank}: all_to_all expects two [world_size={world_size}, B] tensors, got out {tuple(out_WB.shape)} "
            f"and in {tuple(in_WB.shape)}"
        )
    _check_alike(rank, "all_to_all", out_WB, in_WB)


def check_all_gather(rank: int, world_size: int, out_WB: Tensor, in_B: Tensor) -> None:
    """Raise ValueError unless they are contiguous [W, B] and [B] of one dtype and device."""
    if in_B.dim() != 1 or tuple(out_WB.shape) != (world_size, len(in_B)):
        raise ValueError(
            f"rank {rank}: all_gather expects out [world_size={world_size}, B] and in [B], got out "
            f"{tuple(out_WB.shape)} and in {tuple(in_B.shape)}"
        )
    _check_alike(rank, "all_gather", out_WB, in_B)


def check_shift(rank: int, world_size: int, out_B: Tensor, in_B: Tensor, by: int) -> None:
    """Raise ValueError unless both are contiguous, flat, of one dtype and device, and the distance is below W."""
    if in_B.dim() != 1 or out_B.dim() != 1 or (by == 0 and len(out_B) != len(in_B)):
        raise ValueError(
            f"rank {rank}: shift by {by} expects flat out and in, of one length if it is 0, got out "
            f"{tuple(out_B.shape)} and in {tuple(in_B.shape)}"
        )
    if not 0 <= by < world_size:
        raise ValueError(f"rank {rank}: shift expects a distance of 0 to {world_size - 1}, got {by}")
    _check_alike(rank, "shift", out_B, in_B)


def check_split(rank: int, world_size: int, ranks: Sequence[int]) -> None:
    """Raise ValueError unless these are ascending ranks of this world, this rank among them."""
    if list(ranks) != sorted(set(ranks)) or rank not in ranks or not 0 <= ranks[0] <= ranks[-1] < world_size:
        raise ValueError(
            f"rank {rank}: split expects ascending ranks below world_size={world_size}, {rank} among them, got "
            f"{list(ranks)}"
        )


def check_contiguous(rank: int, operation: str, *tensors: Tensor) -> None:
    """Raise ValueError unless all of them are contiguous."""
    if not all(x.is_contiguous() for x in tensors):
        raise ValueError(f"rank {rank}: {operation} moves contiguous tensors only; pass x.contiguous()")


def _check_alike(rank: int, operation: str, out: Tensor, in_: Tensor) -> None:
    if out.dtype != in_.dtype or out.device != in_.device:
        raise ValueError(
            f"rank {rank}: {operation} got out {out.dtype} on {out.device} and in {in_.dtype} on {in_.device}; "
            "give both the same dtype and device"
        )
    check_contiguous(rank, operation, out, in_)


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [nbytes]: every backend moves bytes, not every one float8."""
    return x.detach().view(-1).view(torch.uint8)


class _HasCollectives(Protocol):
    rank: int

    @property
    def device(self) -> torch.device: ...
    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work: ...
    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work: ...
    def all_reduce(self, x: Tensor) -> Work: ...
    def broadcast(self, x: Tensor, src: int) -> Work: ...
    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work: ...


class Staged:
    """The operations of `transport` for tensors that it cannot send: copied at launch to the device of its small
    messages, back in `wait()`. So Gloo sends CUDA tensors from host memory, and NCCL the host's from the GPU.

    The copy waits for the current stream, so a launch blocks until the input has been computed. The copy back is
    ordered by the stream that is current in `wait()`.
    """

    def __init__(self, transport: _HasCollectives):
        self._transport = transport

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        staged_WB = self._empty(out_WB)
        return _CopyBack(self._transport.all_to_all(staged_WB, self._copy(in_WB)), staged_WB, out_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        staged_WB = self._empty(out_WB)
        return _CopyBack(self._transport.all_gather(staged_WB, self._copy(in_B)), staged_WB, out_WB)

    def all_reduce(self, x: Tensor) -> Work:
        staged = self._copy(x)
        return _CopyBack(self._transport.all_reduce(staged), staged, x)

    def broadcast(self, x: Tensor, src: int) -> Work:
        staged = self._copy(x) if self._transport.rank == src else self._empty(x)
        return _CopyBack(self._transport.broadcast(staged, src), staged, x)

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        staged_B = self._empty(out_B)
        return _CopyBack(self._transport.shift(staged_B, self._copy(in_B), by), staged_B, out_B)

    def _empty(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=self._transport.device, pin_memory=x.is_cuda)

    def _copy(self, x: Tensor) -> Tensor:
        return self._empty(x).copy_(x.detach())


class _CopyBack:
    def __init__(self, work: Work, staged: Tensor, out: Tensor):
        self._work: Work | None = work
        self._staged, self._out = staged, out

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            # On CUDA the current stream orders the copy, and the host does not wait: torch's allocator of pinned memory
            # does not reuse the staged copy until the copy has read it. Elsewhere the copy is done when it returns.
            self._out.detach().copy_(self._staged, non_blocking=self._out.is_cuda)

    def is_ready(self) -> bool:
        return self._work is None or self._work.is_ready()


def reason(error: BaseException) -> str:
    """The first line of torch's message, without the place in its source and its general advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^(\[[^\]]*/[^\]]*\] *)+|\. This is typically.*|\.$", "", lines[0])


def peer_error(rank: int, operation: Operation, what: str, conclusion: Conclusion, hint: str) -> PeerError:
    """The PeerError that every transport raises: which rank, in which operation, what happened, which ranks are to
    blame, where to look.
    """
    whom = conclusion.text or "The backend does not say which rank is missing; look for the first rank with an error"
    advice = (
        f". If it is alive, {hint}, and whether it waits in a collective that the script itself calls: all ranks must "
        "call those, backward() and step() in the same order"
    )
    advice = advice if conclusion.is_silence else ""
    return PeerError(f"rank {rank}: {operation}: {what}. {whom}{advice}", conclusion.ranks)


def failed_before(rank: int, operation: Operation, first: Operation, blamed: Sequence[int]) -> PeerError:
    """The PeerError of every operation after the one that failed; it names the same ranks."""
    whom = f" because of {names_of(blamed)}" if blamed else ""
    return PeerError(
        f"rank {rank}: {operation}: the transport has failed before, in {first}{whom}; end this process, and start all "
        "ranks again",
        blamed,
    )
