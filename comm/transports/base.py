"""The transport: what moves bytes between ranks, and nothing else.

A transport knows ranks and tensors; it does not know codecs, optimizers or the meaning of the bytes. One file each:
`torch_distributed.py` (process groups: Gloo, NCCL), `mpi.py` (mpi4py), `simulated.py` (threads of one
process). `launch.py` picks one from the environment.

Shape legend: W ranks, B bytes of one frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor


class PeerError(RuntimeError):
    """A peer died, did not answer in time or broke off: the collective cannot complete. The transport is then unusable.

    Args:
        message: What happened on which rank, and where to look.
        ranks: Peers that are to blame, as far as known. Default (): not known.

    Attributes:
        ranks: The same, a tuple.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


class Work(Protocol):
    """A launched operation. Call `wait` before reading its outputs; several may be waited for in any order."""

    def wait(self) -> None:
        """Return once the outputs may be read on the current stream and the inputs may be overwritten.

        Raises:
            PeerError: Ranks are missing or out of step. Raised within timeout_s plus `edge.DIAGNOSIS_S` seconds, and
                sooner if a connection breaks.
        """

    def is_ready(self) -> bool:
        """Whether `wait` would return without waiting for another rank, as far as this rank can tell yet.

        Always True for NCCL, whose `wait` never blocks the host.
        """


Channel: TypeAlias = Callable[[], AbstractContextManager[None]]
"""`with channel():` operations launched inside the block belong to the channel; see `Transport.new_channel`."""


def check_transport(transport: object, *, may_change: bool = False) -> None:
    """Raise an error unless this is a `Transport`, with a hint how to make one.

    Args:
        transport: What a user passed as `transport`.
        may_change: Whether its ranks may come and go (`onebit.membership`). Default False.

    Raises:
        TypeError: It is something else, e.g. the name of a backend.
        ValueError: Its ranks come and go, and may not.
    """
    if not isinstance(transport, Transport):
        example = f"backend={transport!r}" if isinstance(transport, str) else ""
        raise TypeError(f"transport must be a transport, got {transport!r}; make one with onebit.comm.init({example})")
    if transport.ranks_change and not may_change:
        raise ValueError(
            "the ranks of this transport come and go (onebit.membership): take an optimizer that goes on through that, "
            "such as OnebitAdam, LocalSteps or AveragedSteps, or the transport of onebit.comm.init()"
        )


class Transport(ABC):
    """Moves tensors between `world_size` ranks. `onebit.comm.init` makes one; subclass it for another network.

    All ranks call every method, in the same order (within each channel), with equal shapes and dtypes. Tensors are
    contiguous and must not be touched between the launch and the return of `wait()`. Several operations may be in
    flight; they may be waited for in any order. World size 1 takes the same path as any other.

    If ranks launch different operations (another kind, number or size, or another source of a broadcast), no rank gets
    bytes of the wrong one. They raise a `PeerError` that names the operation of each rank: after the timeout, or at
    once on the simulated network. NCCL cannot tell: its watchdog ends the process after the timeout.

    A launch may raise `PeerError` as well. Over Gloo a broadcast waits at its launch until all ranks have launched it:
    ranks with several transports must launch broadcasts in one order over all of them.

    The methods below the abstract ones have defaults; a transport overrides those about which it knows more.

    Attributes:
        rank: This rank, 0 to world_size - 1.
        world_size: Number of ranks.
        timeout_s: Timeout of every wait, in seconds. May be set.
    """

    rank: int
    world_size: int
    timeout_s: float
    ranks_change: ClassVar[bool] = False
    """Whether ranks come and go, so that rank and world_size are only those of now: see `onebit/membership/`."""
    hops: ClassVar[int] = 1
    """Works that each of `all_to_all_in_hops` and `all_gather_in_hops` yields."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent to other ranks since construction, without headers."""

    @abstractmethod
    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        """out[j] on rank i ← in[i] of rank j. Sends (W-1)·B bytes per rank. All ranks.

        Args:
            out_WB: uint8 [W, B], overwritten.
            in_WB: uint8 [W, B], row j for rank j.
        """

    @abstractmethod
    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        """out[j] ← in of rank j. Sends (W-1)·B bytes per rank. All ranks.

        Args:
            out_WB: uint8 [W, B], overwritten.
            in_B: uint8 [B].
        """

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Work:
        """x ← sum of x over ranks, added in rank order, except over NCCL, which chooses the order. All ranks.

        Sends about 2·(W-1)/W·4 bytes per element and rank. The collective of the dense baseline.

        Args:
            x: float32, any shape, modified in place.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, src: int) -> Work:
        """x ← x of rank src. All ranks. sent_bytes counts (W-1)·x.nbytes on rank src, nothing elsewhere.

        Args:
            x: Any dtype and shape, the same on all ranks; modified in place on all but src.
            src: The rank that sends.
        """

    @abstractmethod
    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        """out ← in of rank r - by, modulo W, on each rank r. Sends in_B to one rank. All ranks, with the same `by`.

        Args:
            out_B: uint8, as long as in_B of that rank; overwritten.
            in_B: uint8 [B]; B may differ between ranks.
            by: Distance, 0 to W - 1; 0 copies, and sends nothing.
        """

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Transport:
        """A transport between some of these ranks. All of them call it with the same list, no others.

        It counts its own `sent_bytes`; a `PeerError` of its operations uses the rank numbers of this transport. Close
        it before this one.

        Args:
            ranks: Ranks of this transport, ascending; this rank is among them.

        Raises:
            ValueError: They are not ascending, or this rank is not among them.
            PeerError: One of them does not call it.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for all ranks, then release everything. All ranks; idempotent. Raises PeerError if a rank is missing."""

    def end(self) -> None:
        """As `close`, at the end of the process: release also what other transports of it would still use."""
        self.close()

    def all_to_all_in_hops(self, out_WB: Tensor, in_WB: Tensor) -> Generator[Work, None, None]:
        """As `all_to_all`, for an exchange: yields the Works, and the caller waits for each before it resumes."""
        yield self.all_to_all(out_WB, in_WB)

    def all_gather_in_hops(self, out_WB: Tensor, in_B: Tensor) -> Generator[Work, None, None]:
        """As `all_gather`, in the same way."""
        yield self.all_gather(out_WB, in_B)

    def new_channel(self) -> Channel:
        """A separate sequence of operations, whose order relative to other channels may differ between ranks.

        For operations that hooks launch, which run later on some ranks than on others. All ranks make their channels in
        the same order. A transport without channels, such as NCCL with its one order per communicator, has Works that
        are always ready.
        """
        return nullcontext

    @property
    def device(self) -> torch.device:
        """Device of the buffers of small messages. Default: the host."""
        return torch.device("cpu")

    def reaches(self, device: torch.device) -> bool:
        """Whether tensors on this device are sent directly. If not, a launch copies them to `device` and waits.

        Args:
            device: Device of a tensor to send.
        """
        return True

    @property
    def has_network(self) -> bool:
        """Whether ranks are processes with a network between them, so that its speed can be measured."""
        return True

    @property
    def reduces_in_ring(self) -> bool:
        """Whether an all_reduce is a ring: only the last rank of a node then sends to another node."""
        return False

    @property
    def has_failed(self) -> bool:
        """Whether a PeerError was raised: the transport is then unusable."""
        return False

    @property
    def intra_node(self) -> Transport | None:
        """Transport to the ranks of this node; None if nodes are not known or have one rank each."""
        return None

    @property
    def inter_node(self) -> Transport:
        """Transport to one rank of each node; this transport itself if nodes are not known."""
        return self

    @property
    def sent_bytes_inter_node(self) -> int:
        """The part of sent_bytes that went to other nodes, over the slow network."""
        return self.sent_bytes

    def describe(self) -> str:
        """Name of what moves the bytes, for a log line."""
        return type(self).__name__

    def abandon(self, why: str = "") -> None:
        """Release everything without waiting for the others, on a rank that ends on an error. Idempotent.

        Args:
            why: The error, for the messages of the other ranks, if the transport can tell them. Default "".
        """
        return

    def on_release(self, call: Callable[[], None]) -> None:
        """Call this once nothing is left to release at the end of the process. Default: never.

        Args:
            call: Called once, those added last first; not after a PeerError.
        """
        return

    def naming_peers(self, what: str, *, is_counted: bool = True) -> AbstractContextManager[None]:
        """Wrap operations that other libraries send over the same group: their network errors become PeerErrors.

        Args:
            what: Name of the operations, for the message.
            is_counted: Whether all ranks enter this block in the same order as their operations. Default True.
        """
        return nullcontext()
