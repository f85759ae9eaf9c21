"""LaProp on averaged gradients: `onebit.LaProp`. In the plan it counts as AdamW, with the same memory and traffic."""

from __future__ import annotations

import torch

from ....laprop import LaProp
from .base import AdamParams, BuildOptions, OptimizerEntry


def _build(p: AdamParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return LaProp(params, **p.options, bias_correction=p.bias_correction)


ENTRY = OptimizerEntry("LaProp", AdamParams, _build, flag="laprop")
