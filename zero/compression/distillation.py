"""Losses by which a student learns from its teacher: what it says, and its hidden states by a map of layers.

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
    """T²·KL(teacher ‖ student) of softmax(logits / T), mean over all but the last dimension; arXiv 1503.02531.

    Computed in float32. T² keeps the gradient's size where T changes. Raises ValueError on other shapes, and unless T
    is above 0.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"the student's logits have shape {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}: both must "
            "say as much about the same inputs"
        )
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    own, its = (F.log_softmax(x.float().flatten(0, -2) / temperature, -1) for x in (student, teacher.detach()))
    return F.kl_div(own, its, reduction="batchmean", log_target=True) * temperature**2


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean squared difference, in float32. Raises ValueError on other shapes."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"hidden states have shape {tuple(student.shape)} in the student, {tuple(teacher.shape)} in the teacher: "
            "layers of the same width are needed"
        )
    return F.mse_loss(student.float(), teacher.detach().float())


class Distillation:
    """The teacher, and what both of them computed last. Leave it with `close`, or use it in a `with`.

    layers, teacher_layers: names of the lists of layers; the teacher's is the student's by default. layer_map: which
    layer of the teacher each of the student's is like; None: hidden states have no part. The teacher is set to eval().
    Raises ValueError where there are no such layers.
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
        """The teacher's logits; its hidden states are kept for `loss`."""
        with torch.no_grad():
            return _logits(self._teacher(*inputs, **named))

    def loss(self, student: object, teacher: Tensor) -> Tensor:
        """Of what the student gave (logits, or an output that has them) after `teach`, logits and hidden states."""
        loss = logits_loss(_logits(student), teacher, self.temperature)
        for own, its in self._map.items():
            if ("student", own) not in self._states or ("teacher", its) not in self._states:
                raise RuntimeError("a hidden state is missing: call teach(...), then the student, then loss(...)")
            pair = self._states["student", own], self._states["teacher", its]
            loss = loss + self.hidden_weight * hidden_loss(*pair) / len(self._map)
        self._states.clear()
        return loss

    def close(self) -> None:
        """Take the hooks out of both models."""
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
