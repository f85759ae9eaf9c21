"""Layer reduction: a student with some of its teacher's layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import LayerReduction


def student_initialization(student: nn.Module, teacher: nn.Module, reduction: LayerReduction) -> None:
    """Copy layer teacher_layer[i] of the teacher to layer i of the student, and the other named modules completely.

    The student has one layer per entry of teacher_layer, and the teacher's widths. Raises ValueError before anything is
    copied.
    """
    prefix, chosen = reduction.module_name_prefix, reduction.teacher_layer
    own, its = _layers(student, prefix, "the student"), _layers(teacher, prefix, "the teacher")
    if len(own) != len(chosen):
        raise ValueError(
            f"layer_reduction: teacher_layer names {len(chosen)} layers, the student's {prefix} has {len(own)}; build "
            f"the student with {len(chosen)} layers"
        )
    if bad := [k for k in chosen if not 0 <= k < len(its)]:
        raise ValueError(f"layer_reduction: teacher_layer names layer {bad[0]}, the teacher's {prefix} has {len(its)}")
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for i, k in enumerate(chosen):
        pairs += _pairs(own[i], its[k], f"{prefix}.{i}", f"{prefix}.{k}")
    for name in reduction.other_module_name:
        pairs += _pairs(_module(student, name, "the student"), _module(teacher, name, "the teacher"), name, name)
    with torch.no_grad():
        for _, to, source in pairs:
            to.copy_(source)


def _layers(model: nn.Module, prefix: str, whose: str) -> nn.ModuleList | nn.Sequential:
    layers = _module(model, prefix, whose)
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        raise ValueError(f"layer_reduction: {prefix} of {whose} is a {type(layers).__name__}, no list of layers")
    return layers


def _module(model: nn.Module, name: str, whose: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as wrong:
        children = ", ".join(child for child, _ in model.named_children())
        raise ValueError(f"layer_reduction: {whose} has no module {name!r}; it has {children}") from wrong


def _pairs(own: nn.Module, its: nn.Module, own_name: str, its_name: str) -> list[tuple[str, Tensor, Tensor]]:
    """(name, student's, teacher's) of all parameters and buffers. Raises ValueError if they do not fit."""
    to, source = own.state_dict(keep_vars=True), its.state_dict(keep_vars=True)
    if unlike := sorted(to.keys() ^ source.keys()):
        where = "teacher" if unlike[0] in to else "student"
        name = its_name if where == "teacher" else own_name
        raise ValueError(f"layer_reduction: the {where}'s {name} has no {unlike[0]}")
    for name, x in to.items():
        if x.shape != source[name].shape:
            raise ValueError(
                f"layer_reduction: {own_name}.{name} of the student has shape {tuple(x.shape)}, {its_name}.{name} of "
                f"the teacher {tuple(source[name].shape)}: a teacher of the same widths is needed"
            )
    return [(f"{own_name}.{name}", x, source[name]) for name, x in to.items()]
