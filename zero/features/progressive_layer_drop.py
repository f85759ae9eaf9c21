"""Progressive layer dropping: the model skips more and more of its layers as training goes on.

θ(t) = (1 - θ)·exp(-γ·t) + θ is the share of layers that the forward passes of step t should keep, from 1 down to θ. The
model itself drops: its forward pass takes `progressive_layer_drop` and `pld_theta`, as models written for DeepSpeed do.

Source: Zhang and He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping"
(arXiv 2010.13369), equation 6, with the limit θ; DeepSpeed's last release with it is 0.19.7.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..config.sections import ProgressiveLayerDrop as Settings
from ..data_efficiency.efficiency import names_in
from ..feature import Asked, Feature, Training

_NAMES = {"progressive_layer_drop", "pld_theta"}


class ProgressiveLayerDrop(Feature):
    """Gives θ(t) to each forward pass in training. The same on all ranks; nothing is sent or kept.

    Args:
        settings: The block of the configuration.
    """

    blocks = ("progressive_layer_drop",)
    example: ClassVar[Mapping[str, object]] = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.5}}

    def __init__(self, settings: Settings):
        self._settings = settings

    @classmethod
    def of(cls, asked: Asked) -> ProgressiveLayerDrop | None:
        settings = asked.config.progressive_layer_drop
        if not settings.enabled:
            return None
        if asked.config.pipeline.ranks > 1:
            raise ValueError(
                "progressive_layer_drop: a pipeline's stages take no named arguments; train without stages"
            )
        names = inspect.signature(asked.outline.forward).parameters.values()
        takes_more = any(each.kind is each.VAR_KEYWORD for each in names)  # and looks it up, hands it on, or ignores it
        modules = asked.outline.modules() if takes_more else [asked.outline]
        if not any(names_in(module.forward) >= _NAMES for module in modules):
            raise ValueError(
                f"progressive_layer_drop: the forward pass of {type(asked.outline).__name__} takes no pld_theta; let "
                "it take progressive_layer_drop and pld_theta, and keep each layer with a probability that falls to "
                "pld_theta at the last one, or leave the block out"
            )
        return cls(settings)

    def theta(self, step: int) -> float:
        """Share of layers to keep in the step after `step` others, from 1 down to the block's theta."""
        least = self._settings.theta
        return (1.0 - least) * math.exp(-self._settings.gamma * step) + least

    def inputs(self, engine: Training, inputs: Sequence[object], named: Mapping[str, object]) -> Mapping[str, object]:
        return {**named, "progressive_layer_drop": True, "pld_theta": self.theta(engine.global_steps)}
