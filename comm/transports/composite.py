"""A transport over all ranks, beside others over some of them: what two levels and two hops have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from .base import Channel, Transport, Work


class Composite(Transport):
    """Several transports as one. Its operations are those of the first; what concerns all of them is asked of all.

    Args:
        world: Transport over all ranks.
        *parts: Transports over some of these ranks, which this one owns.
    """

    def __init__(self, world: Transport, *parts: Transport):
        self.world, self._all = world, (world, *parts)
        self.rank, self.world_size = world.rank, world.world_size

    @property
    def timeout_s(self) -> float:
        """Timeout of every wait in seconds; setting it sets that of all parts."""
        return self.world.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        for transport in self._all:
            transport.timeout_s = timeout_s

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent to other ranks, over all parts."""
        return sum(transport.sent_bytes for transport in self._all)

    @property
    def has_failed(self) -> bool:
        """Whether a PeerError was raised."""
        return any(transport.has_failed for transport in self._all)

    @property
    def device(self) -> torch.device:
        return self.world.device

    def reaches(self, device: torch.device) -> bool:
        return all(transport.reaches(device) for transport in self._all)

    @property
    def has_network(self) -> bool:
        return self.world.has_network

    def naming_peers(self, what: str, *, is_counted: bool = True) -> AbstractContextManager[None]:
        return self.world.naming_peers(what, is_counted=is_counted)

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        return self.world.all_to_all(out_WB, in_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        return self.world.all_gather(out_WB, in_B)

    def all_reduce(self, x: Tensor) -> Work:
        return self.world.all_reduce(x)

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self.world.broadcast(x, src)

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        return self.world.shift(out_B, in_B, by)

    def split(self, ranks: Sequence[int]) -> Transport:
        return self.world.split(ranks)

    def new_channel(self) -> Channel:
        channels = [transport.new_channel() for transport in self._all]

        @contextmanager
        def in_channel() -> Iterator[None]:
            with ExitStack() as stack:
                for channel in channels:
                    stack.enter_context(channel())
                yield

        return in_channel

    def close(self) -> None:
        """Barriers, then release all parts, even if a barrier fails; `world` last. All ranks; idempotent."""
        with ExitStack() as closing:
            for transport in self._all:
                closing.callback(transport.close)

    def on_release(self, call: Callable[[], None]) -> None:
        """See `Transport`."""
        self.world.on_release(call)

    def abandon(self, why: str = "") -> None:
        """See `Transport`."""
        for transport in reversed(self._all):
            transport.abandon(why)
