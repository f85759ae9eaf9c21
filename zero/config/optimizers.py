"""The registry of optimizers and the block "optimizer" of a file: which of them, with what.

    choice = config.optimizer
    optimizer = build_optimizer(choice, model.parameters(), transport=transport, **config.optimizer_options())

`OPTIMIZERS` is what this configuration, the forms, the plan, the training script and the tests over it read. To add an
optimizer write its file in `entries/`, and its line here.

Hyper-parameters mean what their names say: Adam under `adam_w_mode` (the default) decays as AdamW does, without it by
an L2 term in the gradient; `bias_correction` acts in all of them. The one-bit optimizers' decay is decoupled, as the
peer's is whatever its documentation says, so `"adam_w_mode": false` is refused there: the decay would be averaged into
the momentum and be compressed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...comm import Codec
from .entries import adam, lamb, laprop, onebit_adam, onebit_lamb, onebit_muon, zero_one_adam
from .entries.base import AdamParams, BuildOptions, OptimizerEntry
from .reader import Reading, read_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...optimizer import CommonOptions

_ENTRIES: tuple[OptimizerEntry[Any], ...] = (
    adam.ADAM,
    adam.ADAMW,
    lamb.ENTRY,
    laprop.ENTRY,
    onebit_adam.ENTRY,
    zero_one_adam.ENTRY,
    onebit_lamb.ENTRY,
    onebit_muon.ENTRY,
)
OPTIMIZERS = {entry.name: entry for entry in _ENTRIES}


def optimizer_flags() -> dict[str, OptimizerEntry[Any]]:
    """The optimizers that the training script knows, by its names."""
    return {entry.flag: entry for entry in OPTIMIZERS.values() if entry.flag is not None}


@dataclass(frozen=True)
class OptimizerChoice:
    """Which optimizer, with what. Raises ValueError where the two cannot go together."""

    type: str
    params: AdamParams

    def __post_init__(self) -> None:
        if self.type not in OPTIMIZERS or type(self.params) is not self.entry.params:
            raise ValueError(f"optimizer.type {self.type!r} does not go with {type(self.params).__name__}")
        self.params.check(self.type)

    @property
    def entry(self) -> OptimizerEntry[Any]:
        """What the registry knows of it."""
        return OPTIMIZERS[self.type]

    @property
    def is_one_bit(self) -> bool:
        """Whether the optimizer does the data-parallel traffic itself; otherwise whoever steps it averages first."""
        return self.entry.is_one_bit


def read_optimizer(given: object, reading: Reading) -> OptimizerChoice:
    """The block "optimizer"."""
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
    """The optimizer of the choice. One-bit ones: all ranks construct it together, with the same arguments.

    gradient_codec: what gradients travel in, in warm-up and variance steps (None: eight bits). common: see
    `onebit.optimizer.CommonOptions`, the transport among them. model: whose parameters they are, as it is now (sharded,
    if it will be): for optimizers whose step depends on what a parameter is for. Adam, AdamW, LaProp and Lamb take none
    of these, but Lamb the model_parallel_group: they step on the gradients they find, which whoever steps them averages
    and clips before (`onebit.dense`).
    """
    return choice.entry.build(choice.params, params, BuildOptions(gradient_codec, variance_floor, common, model))
