"""Muon on averaged gradients: `onebit.Muon`. It has at most the state of AdamW, so the plan has no row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ....arithmetic.muon import ADJUSTMENTS, hidden_matrices, with_use_muon
from ....muon import Muon
from ..schema import BOOL, FLOAT, INT, TEXT, Inert, key
from .base import AdamParams, BuildOptions, OptimizerEntry


@dataclass(frozen=True)
class MuonParams(AdamParams):
    """See `onebit.Muon`. muon_lr, adam_lr: rates of hidden matrices and of the rest. null: lr. adjust_lr: DeepSpeed's
    is Jordan's, "original".

    head: name of the module that makes the outputs; its matrix takes AdamW's rule, like embeddings. "": there is none.
    null: the result of the model's get_output_embeddings(), if it has one.
    """

    inert: ClassVar[Mapping[str, Inert]] = {
        **AdamParams.inert,
        "ns_method": Inert(TEXT, "there is one way to compute the iteration", fine=("standard", "gram")),
        "per_head_muon": Inert(BOOL, "whole matrices are orthogonalised", fine=(False,), refused=True),
    }

    muon_lr: float | None = key(None, FLOAT, null=True, least=0)
    adam_lr: float | None = key(None, FLOAT, null=True, least=0)
    momentum: float = key(0.95, FLOAT, least=0, below=1)
    nesterov: bool = key(True, BOOL)
    ns_steps: int = key(5, INT, least=1)
    adjust_lr: str = key("original", TEXT, choices=ADJUSTMENTS)
    head: str | None = key(None, TEXT, null=True)

    def check(self, name: str) -> None:
        super().check(name)
        if not self.bias_correction:
            raise ValueError(f"{name} has no form without bias_correction; leave it out")


def named_head(model: nn.Module, name: str) -> nn.Module | None:
    """The module of this name, None for "". Raises ValueError if there is no such module."""
    try:
        return model.get_submodule(name) if name else None
    except AttributeError as missing:
        raise ValueError(f"optimizer.params.head: {missing}; write a name of model.named_modules()") from missing


def _matrices(model: nn.Module, head: str | None) -> set[Tensor]:
    """The parameters that take Muon's rule: hidden matrices, without those that DeepSpeed leaves out by their names."""
    last: nn.Module | None
    if head is not None:
        last = named_head(model, head)
    else:
        last = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    named = model.named_parameters(remove_duplicate=False)
    by_name = {p for name, p in named if any(word in name.lower() for word in ("embed", "lm_head"))}
    return hidden_matrices(model, head=last) - by_name


def _build(p: MuonParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    groups = list(cast("Iterable[Any]", params))
    if given.model is not None:
        groups = with_use_muon(groups, _matrices(given.model, p.head))
    rates: dict[Any, float | None] = {True: p.muon_lr, False: p.adam_lr}
    for k, group in enumerate(groups):  # in a pipeline, the caller's; `Muon` refuses those without use_muon
        if isinstance(group, dict) and (lr := rates.get(group.get("use_muon"))) is not None:
            groups[k] = {"lr": lr} | group
    return Muon(
        groups,
        **p.options,
        momentum=p.momentum,
        nesterov=p.nesterov,
        ns_steps=p.ns_steps,
        adjust_lr=p.adjust_lr,
    )


ENTRY = OptimizerEntry("Muon", MuonParams, _build, flag="muon")
