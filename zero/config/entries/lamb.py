"""LAMB on averaged gradients: `onebit.Lamb`. In the plan it counts as AdamW, with the same memory and traffic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....lamb import Lamb
from ..schema import FLOAT, key
from .base import AdamParams, BuildOptions, OptimizerEntry


@dataclass(frozen=True)
class LambParams(AdamParams):
    """min_coeff, max_coeff: bounds of the trust ratio."""

    max_coeff: float = key(10.0, FLOAT, least=0)
    min_coeff: float = key(0.01, FLOAT, least=0)

    def check(self, name: str) -> None:
        super().check(name)
        if self.min_coeff > self.max_coeff:
            raise ValueError(f"expected min_coeff <= max_coeff, got {self.min_coeff:g} and {self.max_coeff:g}")


def _build(p: LambParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return Lamb(
        params,
        **p.options,
        max_coeff=p.max_coeff,
        min_coeff=p.min_coeff,
        bias_correction=p.bias_correction,
        model_parallel_group=given.common.get("model_parallel_group"),
    )


ENTRY = OptimizerEntry("Lamb", LambParams, _build, flag="lamb")
