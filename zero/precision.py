"""Computing in low precision: casts of inputs, and the loss scale of float16 training, with its rule.

    scale = loss_scale(config.fp16)
    (loss * scale.value).backward(); optimizer.grad_scale = torch.tensor(scale.value); optimizer.step()
    scale = scale.after(overflowed)             # overflowed: the same on all ranks

Only the rule is here. All ranks must agree whether a step overflowed. The frames of a one-bit optimizer carry that
vote: `stats.skipped_steps` grows on all ranks or on none, except in the local steps of 0/1 Adam, which send nothing:
there each rank counts its own, and the engine keeps them until the next synchronisation. Around a dense optimizer the
engine casts the vote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from .config.sections import Fp16

_FACTOR = 2.0

T = TypeVar("T")


class ScaleState(TypedDict):
    """The state of a loss scale; see `LossScale`."""

    value: float
    patience: int
    clean_steps: int


def cast_floats(tree: T, dtype: torch.dtype) -> T:
    """The tree with its floating-point tensors in this dtype. Other leaves stay as they are."""
    low: T = tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
    return low


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters that have dims, in place. Buffers and scalars stay as they are."""
    for p in model.parameters():
        if p.is_floating_point() and p.dim() > 0:
            p.data = p.data.to(dtype)


def meets_activations(module: nn.Module, name: str, width: int | None, dtype: torch.dtype) -> bool:
    """Whether a buffer that no checkpoint has is to have the dtype of the activations that it meets.

    A table of positions, as wide as the model, is added to embeddings (M2M-100, XGLM). A mask is multiplied with scores
    (OpenAI GPT): it has dims, and the dtype holds its values exactly. Frequencies of rotations, in which angles are
    computed, and statistics stay in float32.

    Args:
        module: The module that has the buffer.
        name: The buffer's name.
        width: Of the model's embeddings. None: not known.
        dtype: Of the activations.
    """
    buffer = module._buffers[name]
    if buffer is None or not buffer.is_floating_point() or name not in module._non_persistent_buffers_set:
        return False
    is_table = buffer.dim() == 2 and buffer.shape[1] == width
    is_mask = buffer.dim() > 2 and not buffer.is_meta and torch.equal(buffer.to(dtype).to(buffer.dtype), buffer)
    return is_table or is_mask


def cast_tables(model: nn.Module, dtype: torch.dtype) -> None:
    """Put buffers that meet activations into this dtype, in place: see `meets_activations`."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    for module in model.modules():
        for name in module._buffers:
            if meets_activations(module, name, width, dtype):
                module._buffers[name] = module._buffers[name].to(dtype)  # type: ignore[union-attr]


_NARROW = "_narrow_parameters"


def widen_batch_norms(model: nn.Module) -> None:
    """Let batch norms with running statistics compute with float32 parameters, in place; their inputs stay low.

    The statistics are buffers, and stay float32. torch takes low inputs with parameters and statistics both in float32,
    or both in the inputs' dtype, in which a running mean would lose most of what each step adds.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and module.track_running_stats and _NARROW not in module.__dict__:
            module.__dict__[_NARROW] = {}
            module.register_forward_pre_hook(_widen)
            module.register_forward_hook(_narrow, prepend=True, always_call=True)  # before FSDP2 shards them again


def _widen(module: nn.Module, inputs: object) -> None:
    narrow = {name: p for name, p in module._parameters.items() if p is not None}
    module.__dict__[_NARROW] = narrow
    for name, p in narrow.items():
        module._parameters[name] = p.float()  # type: ignore[assignment]  # a step of autograd's, no parameter


def _narrow(module: nn.Module, inputs: object, output: object) -> None:
    module._parameters.update(module.__dict__[_NARROW])
    module.__dict__[_NARROW] = {}


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss, and DeepSpeed's rule for changing it. The same on all ranks.

    - An overflow uses up one unit of `patience`; if only one is left, it halves the value, but not below `least`.
    - `window` + 1 clean steps after an overflow, and then every `window` steps, the value doubles and the patience is
      reset to `hysteresis`; with is_consecutive every clean step resets it.

    window 0: static, the value never changes. clean_steps: steps since the last overflow.
    """

    value: float
    window: int = 0
    hysteresis: int = 1
    is_consecutive: bool = False
    least: float = 1.0
    patience: int = 1
    clean_steps: int = 0

    def after(self, overflowed: bool) -> LossScale:
        """The scale for the next step.

        Raises OverflowError if the value would have to go below `least`. As in DeepSpeed, it does so at the first
        overflow without patience left: such a step would be skipped for ever.
        """
        if self.window == 0:
            return self
        if overflowed:
            return replace(self._lowered(), clean_steps=0)
        doubles = self.clean_steps > 0 and self.clean_steps % self.window == 0
        return replace(
            self,
            value=self.value * _FACTOR if doubles else self.value,
            patience=self.hysteresis if doubles or self.is_consecutive else self.patience,
            clean_steps=self.clean_steps + 1,
        )

    def _lowered(self) -> LossScale:
        if self.patience > 1:
            return replace(self, patience=self.patience - 1)
        if self.value <= self.least:
            raise OverflowError(
                f"gradients overflow at the least loss scale, {self.value:g}, {self.clean_steps} steps after the last "
                "overflow: look for NaN in the loss or the data; otherwise lower the learning rate or "
                "fp16.min_loss_scale, clip gradients, or train in bf16"
            )
        return replace(self, value=max(self.value / _FACTOR, self.least))

    def state_dict(self) -> ScaleState:
        """The changing part, as plain numbers; the rule comes from the configuration."""
        return {"value": self.value, "patience": self.patience, "clean_steps": self.clean_steps}

    def with_state(self, state_dict: ScaleState) -> LossScale:
        """This rule, continued from a `state_dict`. A static scale keeps its value."""
        if self.window == 0:
            return self
        value, patience, clean_steps = state_dict["value"], state_dict["patience"], state_dict["clean_steps"]
        if not (0.0 < value < float("inf") and patience >= 1 and clean_steps >= 0):
            raise ValueError(f"expected a value above 0, patience of 1 or more, clean_steps of 0 or more: {state_dict}")
        return replace(self, value=max(value, self.least), patience=patience, clean_steps=clean_steps)


def loss_scale(fp16: Fp16) -> LossScale:
    """The scale at the start of training: static and 1 if float16 is not enabled."""
    if not fp16.enabled or fp16.loss_scale > 0:
        return LossScale(fp16.loss_scale if fp16.enabled else 1.0)
    return LossScale(
        _FACTOR**fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.hysteresis,
        fp16.consecutive_hysteresis,
        fp16.min_loss_scale,
        patience=fp16.hysteresis,
    )
