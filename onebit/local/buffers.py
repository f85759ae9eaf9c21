"""BufferMean: rounds make module buffers, such as BatchNorm's statistics, equal. Rests on `usage/buffers.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm import Transport
from ..model_parallel import local
from ..step.stats import WaitClock
from ..usage.buffers import averaged_buffers, begin_equal, persistent_buffers, sync_tensors


class BufferMean:
    """A model's persistent buffers: running statistics become the mean over ranks, others become rank 0's.

    model: None: nothing is averaged or sent.
    """

    def __init__(self, model: nn.Module | None, transport: Transport, waited: WaitClock):
        self._model, self._transport, self._waited = model, transport, waited
        self._averaged: set[str] = set() if model is None else averaged_buffers(model)
        self._finite: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Give all ranks the buffers of rank 0. All ranks."""
        if self._model is not None:
            begin_equal(self._model, self._transport)
            self.remember()

    def named(self) -> list[tuple[str, Tensor]]:
        """The buffers that rounds make equal."""
        return [] if self._model is None else list(persistent_buffers(self._model))

    def average(self) -> None:
        """Make them equal. For a statistic that is not finite here, its last finite value counts. All ranks."""
        if self._model is None:
            return
        named = self.named()
        for name, buffer in named:
            if name in self._finite and not bool(torch.isfinite(local(buffer)).all()):
                local(buffer).copy_(self._finite[name])
        with self._waited.running():
            sync_tensors(named, self._averaged, self._transport)
        self.remember()

    def remember(self) -> None:
        """Keep a copy of the statistics, which are finite now."""
        self._finite = {name: local(buffer).detach().clone() for name, buffer in self.named() if name in self._averaged}
