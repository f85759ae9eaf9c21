"""Copies between a device and host memory on separate streams, overlapped with computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Moment(Protocol):
    """A point in a device's queue of work."""

    def is_over(self) -> bool:
        """Whether the device has passed it."""

    def wait(self) -> None:
        """Make the host wait for it."""

    def hold(self) -> None:
        """Make later work of the device wait for it; the host goes on."""


class Streams(Protocol):
    """One stream for copies to the device, and one for copies from it. Each copies in order."""

    def mark(self) -> Moment:
        """The moment at which the device has finished all work queued so far."""

    def copy(self, source: Tensor, into: Tensor, after: Sequence[Moment]) -> Moment:
        """Begin a copy that waits for `after`. The caller must keep both tensors alive until it is over."""


class _Event:
    def __init__(self, event: Any, device: torch.device):
        self._event, self._device = event, device

    def is_over(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self) -> None:
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)


class DeviceStreams:
    """`Streams` for CUDA and any other device with torch streams."""

    def __init__(self, device: torch.device):
        self.device, self._module = device, torch.get_device_module(device)
        self._there, self._back = (self._module.Stream(device) for _ in range(2))

    def mark(self) -> _Event:
        return self._recorded(self._module.current_stream(self.device))

    def copy(self, source: Tensor, into: Tensor, after: Sequence[Moment]) -> _Event:
        stream = self._back if into.device.type == "cpu" else self._there
        with self._module.stream(stream):
            for moment in after:
                moment.hold()
            into.copy_(source, non_blocking=True)
        return self._recorded(stream)

    def _recorded(self, stream: Any) -> _Event:
        event = self._module.Event()
        event.record(stream)
        return _Event(event, self.device)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for the host and for "meta", which need no copies."""
    return None if device.type in ("cpu", "meta") else DeviceStreams(device)
