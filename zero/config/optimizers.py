"""The registry of optimizers, and the block "optimizer" of a file: its name and parameters.

    choice = config.optimizer
    optimizer = build_optimizer(choice, model.parameters(), transport=transport, **config.optimizer_options())

The configuration, the forms, the plan, the training script and tests read `OPTIMIZERS`. To add an optimizer, write its
file in `entries/`, and a line here.

Hyper-parameters act by their names: Adam with `adam_w_mode` (the default) decays as AdamW does, without it by an L2
term in the gradient; `bias_correction` acts in all of them. The one-bit optimizers' decay is decoupled (so is
DeepSpeed's, whatever its documentation says), so `"adam_w_mode": false` is refused there: the decay would be averaged
into the momentum and compressed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...comm import Codec
from .entries import adagrad, adam, lamb, laprop, lion, muon, onebit_adam, onebit_lamb, onebit_muon, sgd, zero_one_adam
from .entries.base import BuildOptions, OptimizerEntry, OptimizerParams
from .reader import Reading, read_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...optimizer import CommonOptions

_ENTRIES: tuple[OptimizerEntry[Any], ...] = (
    adam.ADAM,
    adam.ADAMW,
    lamb.ENTRY,
    laprop.ENTRY,
    lion.ENTRY,
    muon.ENTRY,
    sgd.ENTRY,
    adagrad.ENTRY,
    onebit_adam.ENTRY,
    zero_one_adam.ENTRY,
    onebit_lamb.ENTRY,
    onebit_muon.ENTRY,
)
OPTIMIZERS = {entry.name: entry for entry in _ENTRIES}

_HANDED_OVER = "pass initialize(optimizer=lambda params: {}), and leave the block out"
ELSEWHERE = {name: _HANDED_OVER.format(f"mup.{name}(params)") for name in ("MuAdam", "MuAdamW", "MuSGD")}
"""Optimizers of DeepSpeed's files that are not here, each with what to do instead."""


def optimizer_flags() -> dict[str, OptimizerEntry[Any]]:
    """The optimizers of the training script, by its names."""
    return {entry.flag: entry for entry in OPTIMIZERS.values() if entry.flag is not None}


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer by name, with its parameters. Raises ValueError if the two do not fit."""

    type: str
    params: OptimizerParams

    def __post_init__(self) -> None:
        if self.type not in OPTIMIZERS or type(self.params) is not self.entry.params:
            raise ValueError(f"optimizer.type {self.type!r} does not go with {type(self.params).__name__}")
        self.params.check(self.type)

    @property
    def entry(self) -> OptimizerEntry[Any]:
        """Its entry in the registry."""
        return OPTIMIZERS[self.type]

    @property
    def is_one_bit(self) -> bool:
        """Whether the optimizer does the data-parallel traffic itself; if not, its caller averages gradients first."""
        return self.entry.is_one_bit


def read_optimizer(given: object, reading: Reading) -> OptimizerChoice:
    """Read the block "optimizer"."""
    said = given.get("type") if isinstance(given, Mapping) else None
    for name, advice in ELSEWHERE.items():
        if isinstance(said, str) and said.lower() == name.lower():
            raise ValueError(f"{reading.at('optimizer')}: there is no {name} here: {advice}")
    name, params = read_choice(given, "optimizer", {name: e.params for name, e in OPTIMIZERS.items()}, reading)
    try:
        return OptimizerChoice(name, params)
    except ValueError as wrong:
        raise ValueError(f"{reading.at('optimizer')}: {wrong}") from wrong


def build_optimizer(
    choice: OptimizerChoice,
    params: object,
    *,
    gradient_codec: Codec | None = None,
    variance_floor: float = 0.01,
    model: nn.Module | None = None,
    **common: Unpack[CommonOptions],
) -> torch.optim.Optimizer:
    """Construct the chosen optimizer. For one-bit ones, all ranks together, with the same arguments.

    gradient_codec: codec of gradients in warm-up and variance steps; None: eight bits. common: see
    `onebit.optimizer.CommonOptions`, e.g. the transport. model: the model of the parameters, after sharding, for
    optimizers whose step depends on a parameter's role. Dense optimizers ignore these, except that Lamb
    takes the model_parallel_group: they step on the gradients they find, which the caller averages and clips before
    (`onebit.dense`).
    """
    return choice.entry.build(choice.params, params, BuildOptions(gradient_codec, variance_floor, common, model))
