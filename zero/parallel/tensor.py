"""Tensor parallelism: the ranks of the tensor axis compute each layer together. Plain functions on a plain model.

    grid = onebit.zero.grid.start(tensor=2)
    tensor.parallelize(model, grid, {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    fsdp.shard(model, grid, stage=2)    # for stages 1 to 3
    groups = {"transport": grid.transport, "model_parallel_group": grid.model_parallel_group}
    optimizer = onebit.OnebitAdam(model.parameters(), **groups)

A plan gives styles to modules by name. The styles are those of torch.distributed.tensor.parallel and `styles.py`, and
`split_sequence` and `join_sequence` at the two ends of a stretch with sequence-parallel norms. Parameters under a style
become DTensors over the tensor axis, divided or replicated; all others stay plain and are replicated. The ranks of a
tensor group read the same batches and step with the same bits, each over its own replica transport
(`onebit.model_parallel_group`).

Traffic is torch's, in the computing dtype: for a column-wise and a row-wise layer together one all-gather and one
reduce-scatter of the activations in forward, and the same in backward.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ...agreement.replicas import make_equal
from ...comm import torch_versions
from ..grid import Grid
from .divided import is_divided
from .styles import Cut, OwnStyle

# From patterns of module names to styles. The parts between dots are matched by fnmatch, so * matches one part.
Plan: TypeAlias = Mapping[str, ParallelStyle]

_WHOLE, _ALIKE = "leave it as it is", "replicate it"


def parallelize(model: nn.Module, grid: Grid, plan: Plan, *, is_stage: bool = False) -> nn.Module:
    """Divide a model's layers among the ranks of the grid's tensor axis, in place. All ranks call it.

    Call it before `fsdp.shard` and before the optimizer is made. All ranks get the values of the axis's first rank.
    Modules that share a parameter still share it. With one rank on the axis the plan is only checked.

    Args:
        model: The model, the same on all ranks.
        grid: The grid of ranks, from `onebit.zero.grid.start`.
        plan: From patterns of module names to styles, as {"layers.*.up": ColwiseParallel()}.
        is_stage: Whether the model is a pipeline stage, so that patterns may name modules of other stages; False by
            default.

    Returns:
        The model.

    Raises:
        ValueError: Before anything is changed: a pattern matches no module, a style does not fit a module, the ranks do
            not divide a dimension, styles contradict each other for one parameter, or a parameter is a DTensor already.
        TypeError: Likewise: the plan has something else in place of a style.
    """
    ranks = grid.shape.size("tensor")
    found = resolve(model, plan, ranks, is_stage=is_stage)
    if ranks == 1:
        return model
    torch_versions.keep_masks_apart()
    mesh, transport = grid.mesh["tensor"], grid.transports["tensor"]
    tensors = [x for x in (*model.parameters(), *model.buffers()) if not x.is_meta]
    make_equal(transport, tensors, are_parameters=False)
    ties = [places for places in _holders(model).values() if len(places) > 1]
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for _, module, style in found:
        parallelize_module(module, mesh, style, **torch_versions.without_sending())
    for (_, first, its_name), *others in ties:
        for _, module, name in others:
            module.register_parameter(name, first._parameters[its_name])
    for name, p in model.named_parameters(remove_duplicate=False):
        p.requires_grad_(trained[name])  # SequenceParallel makes new parameters, which require gradients
    for p in model.parameters():
        if isinstance(p, DTensor) and p.requires_grad:
            place_gradients(p)
    return model


def resolve(
    model: nn.Module, plan: Plan, ranks: int, *, is_stage: bool = False
) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """The modules that a plan names, with their names and styles, in the plan's order. Changes nothing.

    Raises:
        ValueError: As `parallelize`.
        TypeError: As `parallelize`.
    """
    modules = list(model.named_modules())
    found = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"the tensor plan's {pattern!r} has {style!r}; expected a style, an instance as ColwiseParallel() or "
                "RowwiseParallel() of torch.distributed.tensor.parallel"
            )
        matched = [(name, module, style) for name, module in modules if _matches(name, pattern)]
        if not matched and not is_stage:
            raise ValueError(
                f"the tensor plan's {pattern!r} matches no module; the parts of a name are matched one by one, as in "
                f"{next((name for name, _ in modules if '.' in name), 'layers.*.up')!r}"
            )
        found += matched
    if placed := [name for name, p in model.named_parameters() if isinstance(p, DTensor) and not is_divided(p)]:
        raise ValueError(f"{placed[0]} is a DTensor already; parallelize the plain model, once, and shard it then")
    placements: dict[tuple[nn.Module, str], str] = {}
    for name, module, style in found:
        for holder, p_name, placement in _placements(name, module, style, ranks):
            if (holder, p_name) in placements:
                raise ValueError(f"two patterns of the tensor plan place the parameters of {name!r}; remove one")
            placements[holder, p_name] = placement
    for places in _holders(model).values():
        cuts = [(name, placements.get((module, p_name), _WHOLE)) for name, module, p_name in places]
        if len({placement for _, placement in cuts}) > 1:
            (first, its), (other, others) = cuts[0], next(one for one in cuts if one[1] != cuts[0][1])
            raise ValueError(
                f"{first} and {other} are one parameter: the tensor plan would {its} in the one and {others} in the "
                "other; give both modules the same style, or neither"
            )
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _holders(model: nn.Module) -> dict[Tensor, list[tuple[str, nn.Module, str]]]:
    """The places of each parameter: (full name, module, name in the module)."""
    holders: dict[Tensor, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                holders.setdefault(p, []).append((f"{prefix}.{name}" if prefix else name, module, name))
    return holders


def _placements(name: str, module: nn.Module, style: ParallelStyle, ranks: int) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, parameter, what the style does with it) for each parameter that the style changes.

    Raises:
        ValueError: The style does not fit the module, or the ranks do not divide a dimension.
    """
    if isinstance(style, _LEAVES_PARAMETERS):
        return
    if isinstance(style, ColwiseParallel | RowwiseParallel | OwnStyle):
        cuts = _cuts(module, style)
        if cuts is None:
            fits = style.fits if isinstance(style, OwnStyle) else "Linear and Embedding"
            raise ValueError(
                f"the tensor plan gives {name!r} {type(style).__name__}, which is for {fits}; it is a "
                f"{type(module).__name__}"
            )
        for p_name, cut in cuts.items():
            if module._parameters.get(p_name) is None:
                continue
            if cut is not None and (size := cut.odd_size(ranks)):
                stacked = "" if len(cut.sizes) == 1 else f" for one of {len(cut.sizes)} matrices"
                raise ValueError(
                    f"{name}.{p_name}: dimension {cut.dim} has {size} elements{stacked}, which {ranks} tensor ranks "
                    "cannot divide; use a number of ranks that divides it, or leave the module out of the plan"
                )
            yield module, p_name, _ALIKE if cut is None else f"cut it along dimension {cut.dim}"
        return
    what = _ALIKE if isinstance(style, SequenceParallel) else f"place it by {type(style).__name__}"
    for holder in module.modules():
        for p_name in holder._parameters:
            yield holder, p_name, what


def undivided(module: nn.Module, style: ParallelStyle, ranks: int) -> bool:
    """Whether the style would cut a parameter along a dimension that the ranks do not divide."""
    cuts = _cuts(module, style) or {}
    held = [cut for name, cut in cuts.items() if module._parameters.get(name) is not None]
    return any(cut is not None and cut.odd_size(ranks) for cut in held)


def _cuts(module: nn.Module, style: ParallelStyle) -> Mapping[str, Cut | None] | None:
    """How each parameter is divided (None: replicated); None if the style does not fit the module."""
    if isinstance(style, OwnStyle):
        return style.cuts(module)
    by_column = isinstance(style, ColwiseParallel)
    if not isinstance(module, nn.Linear | nn.Embedding):
        return None
    # The weight of an Embedding is [words, features]: its columns are features.
    dim = int(not by_column if isinstance(module, nn.Linear) else by_column)
    cuts: dict[str, Cut | None] = {"weight": Cut(dim, (module.weight.shape[dim],))}
    if isinstance(module, nn.Linear):
        cuts["bias"] = Cut(0, (module.out_features,)) if by_column else None
    return cuts


def place_gradients(p: DTensor) -> None:
    """Give each gradient of p the placements of p before it is added up.

    Replicated parameters that are used on parts of a sequence (norms, a row-wise bias) get a Partial gradient, which is
    all-reduced over the tensor axis once per backward pass. FSDP2, with its own parameters, does this itself.
    """
    placements = p.placements
    p.register_hook(lambda g: g if g.placements == placements else g.redistribute(placements=placements))


# -------------------------------------------------------------------------------- where a cut sequence begins and ends


def split_sequence(dim: int = 1) -> ParallelStyle:
    """A style that splits a module's first input along `dim`: whole on all tensor ranks before, a part on each after.

    A forward pass raises ValueError if the ranks do not divide the dimension, which torch would not notice. Backward
    gathers the gradient, so earlier layers get the same bits on all ranks.
    """
    return _Rearranged(Replicate(), Shard(dim))


def join_sequence(dim: int = 1) -> ParallelStyle:
    """A style that joins the parts of a module's first input along `dim`: a part on each rank before, whole after.

    Later layers do the same work on all ranks. Backward gives each rank the gradient of its part.
    """
    return _Rearranged(Shard(dim), Replicate())


class _Rearranged(ParallelStyle):
    """torch's PrepareModuleInput for the first of any number of inputs, which stays a plain tensor."""

    def __init__(self, given: Shard | Replicate, wanted: Shard | Replicate):
        self._given, self._wanted = given, wanted

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (self._rearrange(inputs[0], device_mesh), *inputs[1:]))
        return module

    def _rearrange(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ranks = mesh.size()
        if isinstance(self._wanted, Shard) and x.shape[self._wanted.dim] % ranks:
            raise ValueError(
                f"rank {torch.distributed.get_rank()}: an input of shape {tuple(x.shape)} cannot be divided along "
                f"dimension {self._wanted.dim} among {ranks} tensor ranks; pad it to a multiple of {ranks}"
            )
        given = DTensor.from_local(x, mesh, (self._given,), run_check=False)
        return given.redistribute(placements=(self._wanted,)).to_local()


def splits_sequence(plan: Plan) -> bool:
    """Whether a plan makes each tensor rank hold a part of the sequence."""
    return any(isinstance(style, _Rearranged) and isinstance(style._wanted, Shard) for style in plan.values())


# Styles that do not change a module's parameters.
_LEAVES_PARAMETERS = (*torch_versions.styles_of_inputs_and_outputs(), _Rearranged)
