"""Copies between a device and host memory, on streams of their own beside its computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Moment(Protocol):
    """A point in what a device has been given to do."""

    def is_over(self) -> bool:
        """Whether the device has passed it."""

    def wait(self) -> None:
        """The host waits for it."""

    def hold(self) -> None:
        """What the device is given to compute from here on waits for it; the host does not."""


class Streams(Protocol):
    """One stream for copies to the device, one for those from it; each does its copies in order."""

    def mark(self) -> Moment:
        """Over once the device has computed all that it was given so far."""

    def copy(self, source: Tensor, into: Tensor, after: Sequence[Moment]) -> Moment:
        """Begin a copy that waits for `after`. The caller keeps both tensors until it is over."""


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
    """`Streams` of CUDA, and of what else torch has streams for."""

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
    """None: what lies in host memory, or nowhere yet, needs no copies."""
    return None if device.type in ("cpu", "meta") else DeviceStreams(device)
