"""Buffers of a model, which no optimizer knows: a newcomer gets them beside the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..usage.buffers import persistent_buffers


class Buffers:
    """The buffers of a model that its state_dict holds, such as BatchNorm's statistics.

    `begin(optimizer, buffers=Buffers(model))` gives a newcomer those of the member that gives it the state.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """By name."""
        return {name: buffer.detach() for name, buffer in persistent_buffers(self._model)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy these into the model's buffers. Raises KeyError if one is missing."""
        for name, buffer in persistent_buffers(self._model):
            buffer.copy_(state_dict[name])
