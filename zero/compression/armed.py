"""A model under compression: its techniques, their step, and the masks that are computed between steps.

`arm` installs the techniques of a plan in a model; the scheduler advances the resulting `Armed`, and cleaning reads it.
The step is the model's buffer `compression_step`, so a state dict contains the whole state of the techniques.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...model_parallel import gathered
from .config import Compression
from .matrices import Form, is_compressible
from .plan import Plan, Pruned
from .techniques import (
    ACTIVATIONS,
    ActivationQuantization,
    Pruning,
    RelatedInputs,
    Units,
    WeightQuantization,
    quantize_inputs,
)

log = logging.getLogger(__name__)

STEP = "compression_step"
ARMED = "_onebit_compression"
"""Its name in the `__dict__` of a model that has an `Armed`."""

Technique = WeightQuantization | Pruning | RelatedInputs | ActivationQuantization


@dataclass
class Armed:
    """The techniques that `arm` has installed in a model. step: optimizer steps done."""

    model: nn.Module
    compression: Compression
    plan: Plan
    pruning: list[tuple[Pruned, Pruning]] = field(default_factory=list)
    step: int = 0

    def techniques(self) -> Iterator[Technique]:
        """All of them."""
        for module in self.model.modules():
            if isinstance(module, Technique):
                yield module

    def is_due(self, step: int) -> bool:
        """Whether the next step chooses new masks: replicas that differ must be synchronised before it."""
        return any(pruning.is_due(self.step, step) for _, pruning in self.pruning)

    def advance(self, step: int) -> None:
        """Advance to `step` steps, one more than before. All ranks if weights are sharded: masks need them whole."""
        before, self.step = self.step, step
        self._choose(before)
        self._tell()
        self._step_buffer().fill_(step)

    def resume(self) -> None:
        """Take step and masks from the model's buffers, after these were loaded."""
        self.step = int(self._step_buffer())
        self._tell()

    def begin(self) -> None:
        """Choose the masks of techniques that are on from the start."""
        self._choose(None)
        self._tell()

    def original(self, name: str) -> Tensor:
        """The weight that the optimizer trains."""
        weight = self.model.get_submodule(f"{name}.parametrizations.weight").original
        assert isinstance(weight, Tensor)
        return weight

    def _choose(self, before: int | None) -> None:
        for one, pruning in self.pruning:
            if pruning.is_due(before, self.step):
                pruning.reach(self.step)
                weight = self.original(one.name).detach()
                pruning.choose(gathered(weight).to(pruning.mask.device))

    def _tell(self) -> None:
        for technique in self.techniques():
            technique.reach(self.step)

    def _step_buffer(self) -> Tensor:
        return self.model.get_buffer(STEP)


def armed_in(model: nn.Module) -> Armed | None:
    """The `Armed` of this model, or of the model inside a wrapper; None: there is none."""
    return next((m.__dict__[ARMED] for m in model.modules() if ARMED in m.__dict__), None)


def arm(model: nn.Module, compression: Compression, plan: Plan) -> Armed:
    """Install the techniques of the plan in the model, in place."""
    armed = Armed(model, compression, plan)
    stacks = _stacks(armed)
    order = [name for name, _ in model.named_modules()]
    for name in sorted(stacks, key=order.index):
        module = model.get_submodule(name)
        for technique in stacks[name]:
            parametrize.register_parametrization(module, "weight", technique)
        for technique in stacks[name]:
            if isinstance(technique, Pruning):
                technique.read_from(module.get_submodule("parametrizations.weight"))
    for each in plan.activations:
        module = model.get_submodule(each.name)
        device = next(module.parameters()).device
        quantization = ActivationQuantization(
            each.bits, each.kind, is_static=each.is_static, offset=each.offset, device=device
        )
        quantization.without(tuple(_dropping(armed, each.name)))
        quantize_inputs(module, quantization)
    model.register_buffer(STEP, torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device))
    model.__dict__[ARMED] = armed
    model.register_load_state_dict_post_hook(_resume)
    armed.begin()
    return armed


def _stacks(armed: Armed) -> dict[str, list[nn.Module]]:
    """The parametrizations of each weight, in the order in which they are stacked."""
    model, stacks = armed.model, dict[str, list[nn.Module]]()
    for one in armed.plan.quantized:
        form = Form.of(model.get_submodule(one.name))
        stacks.setdefault(one.name, []).append(
            WeightQuantization(form, one.schedule, one.kind, one.tiles, name=one.name, is_stochastic=one.is_stochastic)
        )
    later: list[tuple[str, nn.Module]] = []
    for each in armed.plan.pruned:
        module = model.get_submodule(each.name)
        weight = module.weight
        assert isinstance(weight, Tensor)
        pruning = Pruning(Units(Form.of(module), each.unit, each.heads), each.schedule, each.method, weight)
        stacks.setdefault(each.name, []).append(pruning)
        armed.pruning.append((each, pruning))
        for other in each.readers:
            if is_compressible(model.get_submodule(other)):
                later.append((other, RelatedInputs(Form.of(model.get_submodule(other)), pruning)))
    for name, technique in later:
        stacks.setdefault(name, []).append(technique)
    return stacks


def _dropping(armed: Armed, name: str) -> Iterator[Pruning]:
    """The prunings that drop inputs of this module."""
    for one, pruning in armed.pruning:
        if (one.unit == "head" and one.name == name) or name in one.readers:
            yield pruning


def disarm(armed: Armed) -> None:
    """Remove step and record from a model without techniques."""
    delattr(armed.model, STEP)
    del armed.model.__dict__[ARMED]
    hooks = armed.model._load_state_dict_post_hooks
    for number in [k for k, hook in hooks.items() if hook is _resume]:
        del hooks[number]


def _resume(module: nn.Module, incompatible: object) -> None:
    """A hook after load_state_dict."""
    armed: Armed | None = module.__dict__.get(ARMED)
    if armed is not None:
        armed.resume()


def activation_of(module: nn.Module) -> ActivationQuantization | None:
    """The quantization of a module's inputs; None: there is none."""
    found = module._modules.get(ACTIVATIONS)
    return found if isinstance(found, ActivationQuantization) else None
