"""The transport: what moves bytes between ranks, and nothing else.

A transport knows ranks and tensors; it does not know codecs, optimizers or the meaning of the bytes. One file each:
`torch_distributed.py` (process groups: Gloo, NCCL), `mpi.py` (mpi4py), `simulated.py` (threads of one
process). `launch.py` picks one from the environment.

Shape legend: W ranks, B bytes of one frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor


class PeerError(RuntimeError):
    """A peer died, fell silent or broke off: the collective cannot be completed.

    `ranks` holds the peers from which something was still missing when the wait ended (empty: not known).
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


class Work(Protocol):
    """A launched operation."""

    def wait(self) -> None:
        """Return once the outputs may be read on the current stream and the inputs may be overwritten.

        Raises `PeerError`, naming the ranks that are missing or out of step, within timeout_s and `edge.DIAGNOSIS_S`
        seconds more, and sooner where a connection breaks.
        """

    def is_ready(self) -> bool:
        """Whether `wait()` would wait for no other rank: all have launched it, as far as this one can tell yet.

        For NCCL, whose `wait()` never blocks the host, always.
        """


Channel: TypeAlias = Callable[[], AbstractContextManager[None]]
"""`with channel():` operations launched in here belong to it; see `Transport.new_channel`."""


def check_transport(transport: object, *, may_change: bool = False) -> None:
    """Raise TypeError unless this is a transport; ValueError if its ranks come and go, and may not."""
    if not isinstance(transport, Transport):
        example = f"backend={transport!r}" if isinstance(transport, str) else ""
        raise TypeError(f"transport must be a transport, got {transport!r}; make one with onebit.comm.init({example})")
    if transport.ranks_change and not may_change:
        raise ValueError(
            "the ranks of this transport come and go (onebit.membership), which only OnebitAdam and ZeroOneAdam go on "
            "through so far; take the transport of onebit.comm.init()"
        )


class Transport(ABC):
    """Moves tensors between `world_size` ranks.

    Every method is called by all ranks, in the same order (in each channel), with equal shapes and dtypes. Tensors are
    contiguous and
    must not be touched between the launch and the return of `wait()`. Several operations may be in flight; they may
    be waited for in any order. A world of one rank is an ordinary world.

    Ranks that launch different operations (another kind, number or size, or another source of a broadcast) never get
    each other's bytes. They end with a `PeerError` that says which rank launched what: after the timeout, or at once on
    the simulated network. NCCL cannot tell: its watchdog ends the process after the timeout.

    A launch may raise `PeerError` as well. Over Gloo a broadcast waits at its launch until all ranks have launched it:
    ranks with several transports must launch broadcasts in one order over all of them.

    timeout_s: of every wait, in seconds. sent_bytes: payload that this rank has handed to the network for other ranks
    since construction, without headers. The methods below the abstract ones have defaults; a transport overrides what
    it knows better.
    """

    rank: int
    world_size: int
    timeout_s: float
    ranks_change: ClassVar[bool] = False
    """Whether ranks come and go, so that rank and world_size are only those of now: see `onebit/membership/`."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int: ...

    @abstractmethod
    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        """out[j] on rank i ← in[i] of rank j. uint8 [W, B] both. Sends (W-1)·B bytes per rank."""

    @abstractmethod
    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        """out[j] ← in of rank j. uint8 [W, B] and [B]. Sends (W-1)·B bytes per rank."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Work:
        """x ← sum over ranks of x, in place: in rank order, but for NCCL, which has an order of its own.

        float32, any shape. Sends about 2·(W-1)/W·4 bytes per element and rank. The dense baseline's collective.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, src: int) -> Work:
        """x ← x of rank src, in place. Any dtype and shape; sent_bytes counts (W-1)·x.nbytes at src."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Transport:
        """A transport between these ranks of mine, ascending, this one among them. Called by them all, alike.

        It counts its own `sent_bytes`; a `PeerError` of its operations names ranks as they are numbered here. Close it
        before this one.
        """

    @abstractmethod
    def close(self) -> None:
        """Barrier, then release everything. All ranks; idempotent."""

    def new_channel(self) -> Channel:
        """A sequence of operations apart from all others, which need not be launched in one order with them.

        For operations that hooks launch, which on some ranks come later than on others. All ranks make their channels
        in the same order. Works of a transport without channels are always ready: NCCL's, which has one order for all
        that travels over a communicator.
        """
        return nullcontext

    @property
    def device(self) -> torch.device:
        """Whose memory small messages travel in."""
        return torch.device("cpu")

    def reaches(self, device: torch.device) -> bool:
        """Whether tensors there travel as they lie. Else through host memory: a launch waits for what is sent."""
        return True

    @property
    def has_network(self) -> bool:
        """Whether ranks are processes, with a network between them whose speed can be measured."""
        return True

    @property
    def reduces_in_ring(self) -> bool:
        """Whether a rank sends all of an all_reduce to the next one: only a node's last rank sends to another node."""
        return False

    @property
    def has_failed(self) -> bool:
        """Whether a PeerError was raised."""
        return False

    @property
    def intra_node(self) -> Transport | None:
        """To the ranks of this node, where the transport knows nodes, and they hold several ranks each."""
        return None

    @property
    def inter_node(self) -> Transport:
        """To one rank on each node; where nodes are not known, every rank is one."""
        return self

    @property
    def sent_bytes_inter_node(self) -> int:
        """Of sent_bytes, what went to other nodes: what a slow network carries."""
        return self.sent_bytes

    def describe(self) -> str:
        """What moves the bytes, for a log line."""
        return type(self).__name__

    def abandon(self, why: str = "") -> None:
        """Release without the others: for a rank that ends on an error of its own. Idempotent.

        why: the error, which the others are told if the transport can.
        """
        return

    def naming_peers(self, what: str, *, is_counted: bool = True) -> AbstractContextManager[None]:
        """Around operations that someone else sends over the same group: a failure becomes a PeerError."""
        return nullcontext()
