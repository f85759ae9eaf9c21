"""Decides which module gets which technique, and which modules shrink with it; reports all errors before any change.

A pattern finds, by `re.search` and in the order of the model, modules of the classes that `matrices.py` supports, not
their containers. The k-th module that a pattern finds belongs to the k-th of each of its related patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .config import (
    TECHNIQUES,
    ActivationBits,
    ActivationQuantization,
    Compression,
    DenseRatio,
    Group,
    HeadPruning,
    HeadRatio,
    Pruning,
    Technique,
    WeightBits,
    WeightQuantization,
)
from .matrices import Form, is_compressible, is_convolution
from .quantizers import Grid
from .schedule import BitSchedule, DensitySchedule

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHOWN = 4  # names in a message
_GATES = (("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"))
"""Layers whose outputs are multiplied with each other, by the last part of their names: Llama's, Mixtral's, T5's."""
_ATTENTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"))
"""Layers that compute queries, keys and values, by the last part of their names: Llama's and OPT's, BERT's, Meta's."""


@dataclass(frozen=True)
class Quantized:
    """The weight of a module, in few bits."""

    name: str
    schedule: BitSchedule
    kind: str
    tiles: int
    is_stochastic: bool


@dataclass(frozen=True)
class Pruned:
    """The weight of a module, pruned by "element", "row" or "head".

    related: for rows, modules whose inputs are these outputs, norms between, and the gate with which they are
    multiplied; for heads, modules that compute q, k or v. heads: the units, each a head of keys and values with its
    `queries` heads of queries. layout: the order of q, k and v in a module that computes all three.
    """

    name: str
    technique: str
    unit: str
    schedule: DensitySchedule
    method: str
    heads: int = 1
    related: tuple[str, ...] = ()
    layout: str | None = None
    queries: int = 1

    @property
    def readers(self) -> tuple[str, ...]:
        """Of rows: the related modules that lose inputs; a gate loses outputs."""
        return tuple(name for name in self.related if name != gate_of(self.name)) if self.unit == "row" else ()


@dataclass(frozen=True)
class Activations:
    """The inputs of a module, in few bits."""

    name: str
    offset: int
    bits: int
    kind: str
    is_static: bool


@dataclass
class Plan:
    """The plan, in the order in which techniques are stacked, then of the model."""

    quantized: list[Quantized] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    activations: list[Activations] = field(default_factory=list)


def plan_of(model: nn.Module, compression: Compression) -> Plan:
    """The plan of a configuration for a model. Raises ValueError, naming technique, group and module, if impossible."""
    modules, made = dict(model.named_modules()), Plan()
    for technique in compression.techniques:
        taken: dict[str, str] = {}
        for group in technique.groups:
            where = f"{technique.name}, group {group.name!r}"
            for name, related in _matches(modules, group, where):
                if name in taken:
                    raise ValueError(
                        f"{technique.name}: {name} is in the groups {taken[name]!r} and {group.name!r}; a module is in "
                        "one group of a technique: make their patterns apart"
                    )
                taken[name] = group.name
                _add(made, modules, technique, group, name, related, f"{where}: {name}")
    order = {name: k for k, name in enumerate(modules)}
    for each in (made.quantized, made.activations):
        each.sort(key=lambda one: order[one.name])
    stacked = list(TECHNIQUES)
    made.pruned.sort(key=lambda one: (stacked.index(one.technique), order[one.name]))
    _check_apart(made)
    _check_ties(model, made)
    _check_plain(modules, made)
    return made


def _matches(modules: dict[str, nn.Module], group: Group, where: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, its related modules), each module once per group."""
    seen: set[str] = set()
    for k, pattern in enumerate(group.patterns):
        found = _found(modules, pattern, where)
        columns: list[list[str]] = []
        for other in group.related[k] if group.related else ():
            related = _found(modules, other, f"{where}, related_modules", norms=True)
            if len(related) != len(found):
                raise ValueError(
                    f"{where}: modules {pattern!r} finds {len(found)} ({_some(found)}), related_modules {other!r} "
                    f"finds {len(related)} ({_some(related)}); each must have its own"
                )
            columns.append(related)
        for name, *others in zip(found, *columns, strict=True):
            if name not in seen:
                seen.add(name)
                yield name, tuple(others)


def _found(modules: dict[str, nn.Module], pattern: str, where: str, *, norms: bool = False) -> list[str]:
    named = [name for name in modules if re.search(pattern, name)]
    found = [n for n in named if is_compressible(modules[n]) or (norms and isinstance(modules[n], _NORMS))]
    if not found and named:
        kinds = sorted({type(modules[name]).__name__ for name in named})
        raise ValueError(
            f"{where}: {pattern!r} finds {_some(named)} alone ({', '.join(kinds)}): no Linear, Conv, Conv1D, Embedding"
        )
    if not found:
        known = [name for name, module in modules.items() if is_compressible(module)]
        raise ValueError(f"{where}: {pattern!r} finds no module; there are {_some(known)}")
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _add(
    made: Plan,
    modules: dict[str, nn.Module],
    technique: Technique,
    group: Group,
    name: str,
    related: tuple[str, ...],
    where: str,
) -> None:
    module, shared, params = modules[name], technique.shared, group.params
    if isinstance(shared, WeightQuantization):
        made.quantized.append(_quantized(module, shared, cast(WeightBits, params), name, where))
    elif isinstance(shared, ActivationQuantization):
        if isinstance(module, nn.Embedding):
            raise ValueError(f"{where} is an Embedding, which reads whole numbers: leave it to weight_quantization")
        made.activations.append(
            Activations(
                name,
                shared.schedule_offset,
                cast(ActivationBits, params).bits,
                _kind(shared.quantization_type),
                shared.range_calibration == "static",
            )
        )
    else:
        made.pruned.append(_pruned(modules, technique.name, shared, cast(DenseRatio, params), name, related, where))


def _kind(given: str) -> str:
    return "asymmetric" if given.startswith("asym") else "symmetric"


def _quantized(module: nn.Module, shared: WeightQuantization, params: WeightBits, name: str, where: str) -> Quantized:
    form, mixed = Form.of(module), shared.fp16_mixed_quantize
    period = shared.quantization_period if params.quantization_period is None else params.quantization_period
    try:
        Grid.of(form.rows, form.columns, shared.quantize_groups)
    except ValueError as wrong:
        raise ValueError(f"{where}: quantize_groups {shared.quantize_groups}: {wrong}") from wrong
    schedule = BitSchedule(
        shared.schedule_offset,
        params.start_bits,
        params.target_bits,
        period,
        mixed.quantize_change_ratio if mixed.enabled else None,
    )
    kind, is_stochastic = _kind(shared.quantization_type), shared.rounding == "stochastic"
    return Quantized(name, schedule, kind, shared.quantize_groups, is_stochastic)


def _pruned(
    modules: dict[str, nn.Module],
    technique: str,
    shared: Pruning,
    params: DenseRatio,
    name: str,
    related: tuple[str, ...],
    where: str,
) -> Pruned:
    module = modules[name]
    schedule = DensitySchedule(
        shared.schedule_offset, params.dense_ratio, shared.schedule_offset_end, shared.schedule_offset_stride
    )
    if technique == "sparse_pruning":
        return Pruned(name, technique, "element", schedule, shared.method)
    if isinstance(module, nn.Embedding):
        raise ValueError(f"{where} is an Embedding, whose rows are words; name Linear, Conv or Conv1D modules")
    if is_convolution(module) and getattr(module, "groups", 1) != 1:
        raise ValueError(f"{where} is a convolution in {module.groups} groups, whose channels are not free")
    if technique == "head_pruning":
        assert isinstance(shared, HeadPruning) and isinstance(params, HeadRatio)
        return _heads(modules, shared, params, schedule, name, related, where)
    if technique == "channel_pruning" and not is_convolution(module):
        raise ValueError(f"{where} is a {type(module).__name__}; channels are a convolution's: write row_pruning")
    rows, gate = Form.of(module).rows, gate_of(name)
    if related and gate is not None and gate not in related and _is_like(modules.get(gate), module):
        raise ValueError(
            f"{where}: its outputs are multiplied with those of {gate}, which would keep all of them, and the model "
            f"could not run; name {gate.rpartition('.')[2]} in related_modules, too"
        )
    for other in related:
        if other != gate:
            _check_inputs(modules[other], rows, other, where)
        elif Form.of(modules[other]).rows != rows:
            raise ValueError(f"{where} has {rows} outputs, and {other}, their gate, {Form.of(modules[other]).rows}")
    return Pruned(name, technique, "row", schedule, shared.method, related=related)


def _is_like(gate: nn.Module | None, module: nn.Module) -> bool:
    return gate is not None and is_compressible(gate) and Form.of(gate).shape == Form.of(module).shape


def gate_of(name: str) -> str | None:
    """The name of the layer with whose outputs those of this one are multiplied, if it is named like half of a pair.

    Args:
        name: Of a module.
    """
    parent, dot, last = name.rpartition(".")
    other = next((b if last == a else a for a, b in _GATES if last in (a, b)), None)
    return None if other is None else f"{parent}{dot}{other}"


def _check_inputs(module: nn.Module, rows: int, name: str, where: str) -> None:
    if isinstance(module, _NORMS):
        if module.num_features != rows:
            raise ValueError(
                f"{where} has {rows} outputs, and its related module {name} normalises {module.num_features}"
            )
        return
    form = Form.of(module)
    if isinstance(module, nn.Embedding) or getattr(module, "groups", 1) != 1 or form.inputs != rows:
        raise ValueError(
            f"{where} has {rows} outputs, and its related module {name} ({type(module).__name__}) has "
            f"{form.inputs} inputs: it must take these outputs, and no others"
        )


def _heads(
    modules: dict[str, nn.Module],
    shared: HeadPruning,
    params: HeadRatio,
    schedule: DensitySchedule,
    name: str,
    related: tuple[str, ...],
    where: str,
) -> Pruned:
    form, heads = Form.of(modules[name]), params.num_heads or shared.num_heads
    if is_convolution(modules[name]):
        raise ValueError(f"{where} is a convolution: head_pruning names the matrix behind attention")
    if heads is None:
        raise ValueError(f'{where}: write "num_heads" into shared_parameters, or into the group\'s params')
    if form.inputs % heads:
        raise ValueError(f"{where}: {heads} heads do not divide its {form.inputs} inputs")
    related, layout = _with_siblings(modules, related, where), params.qkv_layout
    for other in related:
        if not is_compressible(modules[other]) or isinstance(modules[other], nn.Embedding):
            raise ValueError(f"{where}: its related module {other} computes no q, k or v")
        its = Form.of(modules[other])
        if its.rows == 3 * form.inputs:
            if layout is None and its.is_transposed:
                layout = "blocks"  # GPT-2
            if layout is None:
                raise ValueError(
                    f"{where}: its related module {other} computes q, k and v at once, and its rows may lie in two "
                    'ways; write "qkv_layout" into the group\'s params: "blocks" (all of q, then k, then v) or "heads" '
                    "(q, k and v of the first head, then of the next)"
                )
    queries = _queries(modules, related, form.inputs, heads, where)
    return Pruned(name, "head_pruning", "head", schedule, shared.method, heads // queries, related, layout, queries)


def _with_siblings(modules: dict[str, nn.Module], related: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The related modules, and those beside them that compute the rest of q, k and v: none may keep a dropped head."""
    found = dict.fromkeys(related)
    for name in related:
        parent, dot, last = name.rpartition(".")
        for names in _ATTENTIONS:
            if last in names:
                found |= dict.fromkeys(f"{parent}{dot}{other}" for other in names)
    if missing := [name for name in found if name not in modules]:
        raise ValueError(f"{where}: there is no {missing[0]} beside its related module {related[0]}")
    return tuple(found)


def _queries(modules: dict[str, nn.Module], related: tuple[str, ...], inputs: int, heads: int, where: str) -> int:
    """Heads of queries for each head of keys and values, which are pruned together. Raises ValueError."""
    width = inputs // heads
    found = {other: Form.of(modules[other]).rows for other in related}
    found = {other: rows for other, rows in found.items() if rows not in (inputs, 3 * inputs)}
    if not found:
        return 1
    keys = next(iter(found.values()))
    for other, rows in found.items():
        if rows != keys or rows % width or inputs % rows:
            raise ValueError(
                f"{where} has {inputs} inputs, {heads} heads of {width}, and its related module {other} has {rows} "
                f"outputs: expected {inputs}, or {3 * inputs} of a module that computes q, k and v; of grouped keys "
                "and values the same whole number of heads that divides those of queries"
            )
    return inputs // next(iter(found.values()))


def _check_apart(made: Plan) -> None:
    """Raise ValueError if two prunings would shrink the same side of a module."""
    rows: dict[str, str] = {}
    inputs: dict[str, str] = {}
    for one in made.pruned:
        pruning = f"{one.technique} of {one.name}"
        sides = {"row": (rows, inputs), "head": (inputs, rows)}.get(one.unit)
        if sides is None:
            continue
        for name in (one.name, *one.related):
            # A gate loses its outputs with the layer whose outputs it multiplies.
            is_own = name == one.name or (one.unit == "row" and name == gate_of(one.name))
            side = sides[0 if is_own else 1]
            if name in side:
                which, what = "outputs" if side is rows else "inputs", "own" if is_own else "related"
                raise ValueError(f"the {which} of {name} are pruned twice: by {side[name]} and by {pruning} ({what})")
            side[name] = pruning


def _check_ties(model: nn.Module, made: Plan) -> None:
    """Raise ValueError if a weight that several modules share would not stay shared."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None) if is_compressible(module) else None
        if isinstance(weight, nn.Parameter):
            holders.setdefault(id(weight), []).append(name)
    shared = {name: names for names in holders.values() if len(names) > 1 for name in names}
    quantized = {one.name: (one.schedule, one.kind, one.tiles, one.is_stochastic) for one in made.quantized}
    touched = [one.name for one in made.pruned] + [name for one in made.pruned for name in one.related]
    for name in touched:
        if name in shared:
            raise ValueError(f"{_some(shared[name])} share one weight: it can be quantized, but not pruned")
    for name in quantized:
        if name not in shared:
            continue
        unlike = [other for other in shared[name] if quantized.get(other) != quantized[name]]
        if unlike or quantized[name][3]:
            raise ValueError(
                f"{_some(shared[name])} share one weight: quantize all of them the same way, rounding to the nearest, "
                "or none"
            )


def _check_plain(modules: dict[str, nn.Module], made: Plan) -> None:
    """Raise ValueError if a weight is not a plain parameter."""
    pruned = [name for one in made.pruned for name in (one.name, *one.related)]
    for name in [*(one.name for one in made.quantized), *pruned]:
        module = modules[name]
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"{name} has parametrizations already; compress the model before others are added, and once"
            )
        weight = module.weight
        if isinstance(module, _NORMS):
            continue
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise ValueError(f"{name} has no weight of floating-point numbers")
        if hasattr(weight, "placements"):
            raise ValueError(f"{name} is sharded: call init_compression before initialize() or fully_shard()")
