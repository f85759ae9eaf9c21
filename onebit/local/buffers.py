"""BufferMean: module buffers, such as BatchNorm's statistics, which rounds average. Rests on `usage/buffers.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm import Transport
from ..model_parallel import local
from ..step.stats import WaitClock
from ..usage.buffers import persistent_buffers, sync_tensors


class BufferMean:
    """The mean over ranks of a model's persistent buffers. model: None: nothing is averaged or sent."""

    def __init__(self, model: nn.Module | None, transport: Transport, waited: WaitClock):
        self._model, self._transport, self._waited = model, transport, waited
        self._finite: dict[str, Tensor] = {}

    def named(self) -> list[tuple[str, Tensor]]:
        """Those that rounds average."""
        return [] if self._model is None else list(persistent_buffers(self._model))

    def average(self) -> None:
        """They become their mean over ranks. One that is not finite here counts as it last was. All ranks."""
        if self._model is None:
            return
        named = self.named()
        for name, buffer in named:
            if name in self._finite and not bool(torch.isfinite(local(buffer)).all()):
                local(buffer).copy_(self._finite[name])
        with self._waited.running():
            sync_tensors(named, self._transport)
        self.remember()

    def remember(self) -> None:
        """Keep what they are now, which is finite."""
        self._finite = {name: local(buffer).detach().clone() for name, buffer in self.named()}
