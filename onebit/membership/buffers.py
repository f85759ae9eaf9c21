"""Buffers of a model, which no optimizer knows: a newcomer gets them together with the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..usage.buffers import persistent_buffers


class Buffers:
    """Gives a newcomer the buffers that a model's state_dict contains, such as BatchNorm's statistics.

    Pass it to `begin(optimizer, buffers=Buffers(model))`: a newcomer gets the buffers of the member that sends it the
    state.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """The buffers by name. Tensors are not copied."""
        return {name: buffer.detach() for name, buffer in persistent_buffers(self._model)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy these values into the model's buffers. Raises KeyError if one is missing."""
        for name, buffer in persistent_buffers(self._model):
            buffer.copy_(state_dict[name])
