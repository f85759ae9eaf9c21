"""Losses by which a student learns from its teacher: from its logits, and from hidden states by a map of layers.

distillation = Distillation(student, teacher, temperature=2.0, layer_map={0: 1, 1: 3}, layers="blocks")
teacher_logits = distillation.teach(x)                  # before the student's forward pass
logits = student(x)
loss = (task_loss(logits, y) + distillation.loss(logits, teacher_logits)) / 2
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle


def logits_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T²·KL(teacher ‖ student) of softmax(logits / T), as a mean over all dimensions except the last.

    Computed in float32. T² keeps the gradient's size when T changes. Source: arXiv 1503.02531.

    Args:
        student: The student's logits, [..., classes].
        teacher: The teacher's logits, in the same shape; no gradient goes there.
        temperature: T. Default 1.

    Raises:
        ValueError: Shapes differ, or T is not above 0.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"the student's logits have shape {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}: both must "
            "have the same inputs and classes"
        )
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    own, its = (F.log_softmax(x.float().flatten(0, -2) / temperature, -1) for x in (student, teacher.detach()))
    return F.kl_div(own, its, reduction="batchmean", log_target=True) * temperature**2


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean squared difference of hidden states, in float32.

    Args:
        student: A hidden state of the student.
        teacher: A hidden state of the teacher, in the same shape; no gradient goes there.

    Raises:
        ValueError: Shapes differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"hidden states have shape {tuple(student.shape)} in the student, {tuple(teacher.shape)} in the teacher: "
            "layers of the same width are needed"
        )
    return F.mse_loss(student.float(), teacher.detach().float())


class Distillation:
    """Computes a distillation loss from logits, and from hidden states that hooks collect.

    Use it in a `with` block, or call `close` at the end. The teacher is set to eval().

    Args:
        student: The student.
        teacher: The teacher.
        temperature: As in `logits_loss`. Default 1.
        layer_map: For layers of the student, the layer of the teacher to match. Default None: only logits.
        layers: Name of the student's list of layers. Default "".
        teacher_layers: Name of the teacher's list of layers. Default None: as the student's.
        hidden_weight: Weight of the loss of hidden states. Default 1.

    Raises:
        ValueError: There are no such layers.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        *,
        temperature: float = 1.0,
        layer_map: Mapping[int, int] | None = None,
        layers: str = "",
        teacher_layers: str | None = None,
        hidden_weight: float = 1.0,
    ):
        self._teacher, self.temperature, self.hidden_weight = teacher.eval(), temperature, hidden_weight
        self._map = dict(layer_map or {})
        self._states: dict[tuple[str, int], Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for whose, model, name, chosen in (
            ("student", student, layers, self._map.keys()),
            ("teacher", teacher, layers if teacher_layers is None else teacher_layers, self._map.values()),
        ):
            for k in sorted(set(chosen)):
                layer = _layer(model, name, k, whose)
                self._handles.append(layer.register_forward_hook(partial(self._keep, whose, k)))

    def teach(self, *inputs: object, **named: object) -> Tensor:
        """Run the teacher without gradients, keep its hidden states for `loss`, and return its logits.

        Args:
            *inputs: Inputs of the teacher.
            **named: Named inputs of the teacher.
        """
        with torch.no_grad():
            return _logits(self._teacher(*inputs, **named))

    def loss(self, student: object, teacher: Tensor) -> Tensor:
        """The loss of logits and hidden states. Call it after `teach` and the student's forward pass.

        Args:
            student: The student's logits, or an output that has them.
            teacher: The teacher's logits, from `teach`.

        Raises:
            RuntimeError: A hidden state is missing.
        """
        loss = logits_loss(_logits(student), teacher, self.temperature)
        for own, its in self._map.items():
            if ("student", own) not in self._states or ("teacher", its) not in self._states:
                raise RuntimeError("a hidden state is missing: call teach(...), then the student, then loss(...)")
            pair = self._states["student", own], self._states["teacher", its]
            loss = loss + self.hidden_weight * hidden_loss(*pair) / len(self._map)
        self._states.clear()
        return loss

    def close(self) -> None:
        """Remove the hooks from both models."""
        for handle in self._handles:
            handle.remove()
        self._states.clear()

    def __enter__(self) -> Distillation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _keep(self, whose: str, k: int, module: nn.Module, args: object, output: object) -> None:
        state = output[0] if isinstance(output, tuple) else output
        assert isinstance(state, Tensor)
        self._states[whose, k] = state


def _layer(model: nn.Module, name: str, k: int, whose: str) -> nn.Module:
    try:
        layers = model.get_submodule(name)
    except AttributeError as wrong:
        raise ValueError(f"the {whose} has no module {name!r}; pass layers=, the name of its list of layers") from wrong
    if not isinstance(layers, nn.ModuleList | nn.Sequential) or not 0 <= k < len(layers):
        count = f"{len(layers)} layers" if isinstance(layers, nn.ModuleList | nn.Sequential) else "no list of layers"
        raise ValueError(f"layer_map names layer {k} of the {whose}, whose {name!r} is {count}")
    return layers[k]


def _logits(output: object) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise TypeError(f"expected logits, or an output with them, got {type(output).__name__}")
    return found
