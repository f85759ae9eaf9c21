"""The contract of a sharding: what the ranks that hold one replica divide among them, and when they exchange it.

A form has one. This base divides nothing. `partitioned.py` is of stages 1 and 2, `fsdp.py` of stage 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn


class Sharding:
    """Leaves the model whole. The engine calls it around forward and backward passes and steps.

    Args:
        model: The model, or this rank's stages of a pipeline.

    Attributes:
        model: The same.
        held: The model with the parameters that the optimizer has: this rank's shards.
    """

    divides_parameters: ClassVar[bool] = False
    """Whether the model's own parameters are shards between steps."""
    reduces_in_pipeline: ClassVar[bool] = False
    """Whether gradients are reduced with each micro-batch of a pipeline."""

    def __init__(self, model: nn.Module):
        self.model = self.held = model

    @property
    def scalars(self) -> Mapping[str, Tensor]:
        """The 0-dim parameters of the model that `held` has in another shape, by all their names."""
        return {}

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the shards that this optimizer, made of parameters of `held`, does not have. Called once."""

    def begin_forward(self, *, is_last: bool) -> None:
        """Prepare a forward pass. is_last: whether it is the last of its step, or without a backward pass."""

    def begin_pipeline(self, *, reduces_each: bool) -> None:
        """Prepare the passes of a pipeline. reduces_each: whether gradients are reduced with each micro-batch."""

    def backward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap a backward pass. is_last: whether it is the last of its step."""
        return nullcontext()

    @property
    def passes(self) -> int:
        """Number of backward passes that reduced or kept gradients; 0 if passes are not counted."""
        return 0

    def stand_in(self, *, is_last: bool) -> None:
        """Take part in the other ranks' exchange in the place of a backward pass without gradients."""

    def reduce(self, *, is_last: bool) -> float:
        """Complete the exchange of a micro-batch's gradients. All ranks of the replica.

        Args:
            is_last: Whether it is the last of its step: the optimizer's parameters then have their gradients.

        Returns:
            Milliseconds of waiting for the network.
        """
        return 0.0

    def gather(self) -> None:
        """Give the model the values that the optimizer's parameters have. All ranks of the replica."""

    def adopt(self) -> None:
        """Give the optimizer's parameters the values that were written into the model, the same on all ranks."""

    def release(self) -> None:
        """Free gathered parameters, before model.parameters() are read or changed."""

    def drop_gradients(self) -> None:
        """Drop gradients that an optimizer's zero_grad() does not reach."""

    def resident(self, p: Tensor) -> Tensor:
        """Return the parameter that the model has between steps for one that it has now."""
        return p

    def shard_of(self, p: Tensor) -> Tensor:
        """Return the optimizer's parameter for one that the model has between steps."""
        return p

    def trained(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        """Return the model's parameters that this optimizer has."""
        return [p for group in optimizer.param_groups for p in group["params"]]


class ZeroGrad:
    """Replaces model.zero_grad(): torch's does not reach reduced gradients. Copies of the model get torch's."""

    def __init__(self, sharding: Sharding):
        self._model, self._sharding = sharding.model, weakref.ref(sharding)

    def __call__(self, set_to_none: bool = True) -> None:
        nn.Module.zero_grad(self._model, set_to_none)
        if (sharding := self._sharding()) is not None:
            sharding.drop_gradients()

    def __reduce__(self) -> tuple[object, ...]:
        return partial, (nn.Module.zero_grad, self._model)
