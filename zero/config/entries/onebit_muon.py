"""1-bit Muon: `onebit.OnebitMuon`. The plan counts all parameters as hidden matrices, which nearly all are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn

from ....arithmetic.muon import ADJUSTMENTS, hidden_matrices, with_use_muon
from ....arithmetic.schedule import DenseSteps
from ....onebit_muon import OnebitMuon
from ..schema import BOOL, FLOAT, INT, STEPS, TEXT, Inert, key
from .base import ONE_BIT_INERT, AdamParams, BuildOptions, Footprint, OptimizerEntry
from .muon import named_head


@dataclass(frozen=True)
class OnebitMuonParams(AdamParams):
    """See `onebit.OnebitMuon`; freeze_step as in `OnebitAdamParams`.

    head: name of the module that makes the outputs; its matrix takes AdamW's rule, like embeddings. "": there is none,
    or its matrix is an embedding's. null: the result of the model's get_output_embeddings() (transformers' models have
    it). Not needed for groups that have use_muon.
    """

    inert: ClassVar[Mapping[str, Inert]] = ONE_BIT_INERT

    freeze_step: int | str = key("auto", STEPS, fill="freeze_step", least=1)
    momentum: float = key(0.95, FLOAT, least=0, below=1)
    nesterov: bool = key(True, BOOL)
    ns_steps: int = key(5, INT, least=1)
    adjust_lr: str = key("match_rms_adamw", TEXT, choices=ADJUSTMENTS)
    head: str | None = key(None, TEXT, null=True)

    def head_of(self, model: nn.Module) -> nn.Module | None:
        """The module of the head. Raises ValueError if it is not known, or there is no module of this name."""
        if self.head is None and not hasattr(model, "get_output_embeddings"):
            raise ValueError(
                "optimizer.params.head: OneBitMuon must know which module makes the outputs, and "
                f'{type(model).__name__} has no get_output_embeddings(); write its name, "" if there is none or its '
                "matrix is an embedding's, or pass model_parameters in groups that say use_muon"
            )
        if self.head is None:
            return cast("nn.Module | None", model.get_output_embeddings())  # type: ignore[operator]
        return named_head(model, self.head)


def _build(p: OnebitMuonParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    if given.model is not None:
        hidden = hidden_matrices(given.model, head=p.head_of(given.model))
        params = with_use_muon(cast("Iterable[object]", params), hidden)
    return OnebitMuon(
        params,
        **p.options,
        momentum=p.momentum,
        nesterov=p.nesterov,
        ns_steps=p.ns_steps,
        adjust_lr=p.adjust_lr,
        freeze_step=p.freeze_step,
        warmup_codec=given.gradient_codec,
        bias_correction=p.bias_correction,
        variance_floor=given.variance_floor,
        **given.common,
    )


ENTRY = OptimizerEntry(
    "OneBitMuon",
    OnebitMuonParams,
    _build,
    is_one_bit=True,
    footprint=Footprint(
        moments=lambda frame: 4.0, sent=lambda frame: frame, dense_steps=DenseSteps().count, gradients="log4"
    ),
    flag="onebit-muon",
    flag_keys={"freeze_step": "warm-up steps, or auto"},
)
