"""Adam and AdamW of torch, on gradients that are already averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.optim.optimizer import ParamsT

from ....lamb import Lamb
from .base import AdamParams, BuildOptions, Footprint, OptimizerEntry


@dataclass(frozen=True)
class DenseAdamParams(AdamParams):
    """adam_w_mode: decay as AdamW does (the default), or by an L2 term in the gradient; "AdamW" knows the first."""

    def check(self, name: str) -> None:
        if name == "AdamW" and not self.adam_w_mode:
            raise ValueError(
                '"AdamW" with "adam_w_mode": false contradicts itself; "Adam" with it decays by an L2 term'
            )
        if not self.adam_w_mode and not self.bias_correction:
            raise ValueError('"Adam" with "adam_w_mode": false has no form without bias correction; leave out one')
        if not self.bias_correction and self.amsgrad:
            raise ValueError("amsgrad has no form without bias correction; leave out one")


def _build(p: DenseAdamParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    if not p.bias_correction:
        # torch's AdamW always corrects. LAMB whose trust ratios are all 1 is AdamW, and need not.
        group = given.common.get("model_parallel_group")
        return Lamb(
            params, **p.options, max_coeff=1.0, min_coeff=1.0, bias_correction=False, model_parallel_group=group
        )
    # torch's also where shards are offloaded: HostAdam is faster there (docs/memory.md), but differs in last bits, and
    # offloaded training ends in the bits of resident training. initialize(optimizer=DeepSpeedCPUAdam(...)) asks for it.
    kind = torch.optim.AdamW if p.adam_w_mode else torch.optim.Adam
    return kind(cast(ParamsT, params), **p.options, amsgrad=p.amsgrad)


_FOOTPRINT = Footprint(moments=lambda frame: 8.0, sent=lambda frame: 4.0)

ADAM = OptimizerEntry("Adam", DenseAdamParams, _build)
ADAMW = OptimizerEntry("AdamW", DenseAdamParams, _build, footprint=_FOOTPRINT, flag="adamw")
