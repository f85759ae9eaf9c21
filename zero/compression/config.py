# ruff: noqa: RUF009  (`key` and `block` are dataclasses.field)
"""The block "compression_training" of a DeepSpeed JSON, as frozen dataclasses.

Names are DeepSpeed's. `read_compression` sorts the techniques in the order of `TECHNIQUES`; their order in the file has
no effect. `plan.py` matches the patterns.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..config.compat import load
from ..config.reader import Reading, read_block, read_object, refuse_unknown
from ..config.schema import BOOL, FLOAT, INT, LIST, TEXT, Block, Inert, block, key, required_key

log = logging.getLogger(__name__)

KEY = "compression_training"
ALL_MODULES = "*"
_TYPES = ("symmetric", "asymmetric", "sym", "asym")


@dataclass(frozen=True)
class Mixed(Block):
    """w ← r·w + (1-r)·q(w); r is 1 when the bits fall, and falls by quantize_change_ratio with every step."""

    enabled: bool = key(False, BOOL)
    quantize_change_ratio: float = key(0.001, FLOAT, above=0, most=1)


@dataclass(frozen=True)
class WeightQuantization(Block):
    """Keys shared by all groups. quantize_groups: number of scales of a weight, which is cut along its outputs.

    quantization_period: 0: target_bits from the offset on.
    """

    inert: ClassVar[Mapping[str, Inert]] = {
        "quantizer_kernel": Inert(BOOL, "there is one quantizer, in torch", fine=(False,)),
        "quantize_verbose": Inert(BOOL, "the scheduler logs what it switches on", fine=(False,)),
        "quantize_weight_in_forward": Inert(
            BOOL, "weights are quantized in the forward pass, and what the optimizer trains stays whole", fine=(True,)
        ),
    }

    enabled: bool = key(False, BOOL)
    schedule_offset: int = key(0, INT, least=0)
    quantize_groups: int = key(1, INT, least=1)
    quantization_type: str = key("symmetric", TEXT, choices=_TYPES)
    rounding: str = key("nearest", TEXT, choices=("nearest", "stochastic"))
    quantization_period: int = key(1, INT, least=0)
    fp16_mixed_quantize: Mixed = block(Mixed)


@dataclass(frozen=True)
class WeightBits(Block):
    """Keys of a group. quantization_period: null: the shared one."""

    start_bits: int = required_key(INT, least=1, most=16)
    target_bits: int = required_key(INT, least=1, most=16)
    quantization_period: int | None = key(None, INT, null=True, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_bits > self.start_bits:
            raise ValueError(f"bits fall: target_bits {self.target_bits} is above start_bits {self.start_bits}")


@dataclass(frozen=True)
class ActivationQuantization(Block):
    """Keys shared by all groups. dynamic: a range for each token; static: the running range of training."""

    enabled: bool = key(False, BOOL)
    schedule_offset: int = key(0, INT, least=0)
    quantization_type: str = key("symmetric", TEXT, choices=_TYPES)
    range_calibration: str = key("dynamic", TEXT, choices=("dynamic", "static"))


@dataclass(frozen=True)
class ActivationBits(Block):
    """Keys of a group."""

    bits: int = required_key(INT, least=2, most=16)


@dataclass(frozen=True)
class Pruning(Block):
    """Keys shared by all groups of a pruning. schedule_offset_end: the density falls until this step, every stride
    steps; null: all at once.
    """

    enabled: bool = key(False, BOOL)
    schedule_offset: int = key(0, INT, least=0)
    schedule_offset_end: int | None = key(None, INT, null=True, least=0)
    schedule_offset_stride: int = key(1, INT, least=1)
    method: str = key("l1", TEXT, choices=("l1", "topk"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule_offset_end is not None and self.schedule_offset_end < self.schedule_offset:
            raise ValueError(
                f"schedule_offset_end {self.schedule_offset_end} is before schedule_offset {self.schedule_offset}"
            )


@dataclass(frozen=True)
class HeadPruning(Pruning):
    """num_heads: heads of every matched module, unless its group has another number."""

    num_heads: int | None = key(None, INT, null=True, least=1)


@dataclass(frozen=True)
class DenseRatio(Block):
    """Keys of a group. dense_ratio: the share that is kept."""

    dense_ratio: float = required_key(FLOAT, above=0, most=1)


@dataclass(frozen=True)
class HeadRatio(DenseRatio):
    """qkv_layout: order of the rows of a related module that computes q, k and v at once. "blocks": all of q, all of k,
    all of v, as in GPT-2; "heads": q, k and v of the first head, then of the next.
    """

    num_heads: int | None = key(None, INT, null=True, least=1)
    qkv_layout: str | None = key(None, TEXT, null=True, choices=("blocks", "heads"))


Shared = WeightQuantization | ActivationQuantization | Pruning
Params = WeightBits | ActivationBits | DenseRatio

TECHNIQUES: Mapping[str, tuple[type[Shared], type[Params]]] = {
    "weight_quantization": (WeightQuantization, WeightBits),
    "sparse_pruning": (Pruning, DenseRatio),
    "row_pruning": (Pruning, DenseRatio),
    "head_pruning": (HeadPruning, HeadRatio),
    "channel_pruning": (Pruning, DenseRatio),
    "activation_quantization": (ActivationQuantization, ActivationBits),
}
"""In the order in which they are stacked and made permanent: (class of shared keys, class of a group's keys)."""
_WITH_RELATED = ("row_pruning", "head_pruning", "channel_pruning")


@dataclass(frozen=True)
class Group:
    """A group. patterns: of modules. related: for each of these, patterns of the modules that shrink with it."""

    name: str
    params: Params
    patterns: tuple[str, ...]
    related: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Technique:
    """An enabled technique; name: a key of `TECHNIQUES`."""

    name: str
    shared: Shared
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class LayerReduction(Block):
    """Layer i of module_name_prefix is the teacher's teacher_layer[i]; the modules of other_module_name are copied."""

    enabled: bool = key(False, BOOL)
    keep_number_layer: int | None = key(None, INT, null=True, least=1)
    module_name_prefix: str = key("", TEXT)
    teacher_layer: tuple[int, ...] = key((), LIST)
    other_module_name: tuple[str, ...] = key((), LIST)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "teacher_layer", tuple(self.teacher_layer))
        object.__setattr__(self, "other_module_name", tuple(self.other_module_name))
        if not self.enabled:
            return
        if not all(isinstance(k, int) and not isinstance(k, bool) for k in self.teacher_layer):
            raise TypeError(f"teacher_layer: expected a list of integers, got {list(self.teacher_layer)}")
        if not all(isinstance(name, str) for name in self.other_module_name):
            raise TypeError(f"other_module_name: expected a list of strings, got {list(self.other_module_name)}")
        if not self.module_name_prefix or not self.teacher_layer:
            raise ValueError("layer_reduction needs module_name_prefix, the list of layers, and teacher_layer")
        if self.keep_number_layer not in (None, len(self.teacher_layer)):
            raise ValueError(
                f"keep_number_layer is {self.keep_number_layer} and teacher_layer names {len(self.teacher_layer)}"
            )


@dataclass(frozen=True)
class Compression:
    """The enabled techniques."""

    techniques: tuple[Technique, ...] = ()
    layer_reduction: LayerReduction | None = None

    def __bool__(self) -> bool:
        return bool(self.techniques) or self.layer_reduction is not None


def read_compression(given: object, reading: Reading) -> Compression:
    """Read the block "compression_training".

    Raises ValueError on an unknown key, a value out of range, an invalid regular expression, or an enabled technique
    without groups; TypeError on a wrong type.
    """
    data = read_object(given, KEY, reading)
    refuse_unknown(data, [*TECHNIQUES, "layer_reduction"], KEY, reading)
    found = [_technique(name, data[name], reading) for name in TECHNIQUES if data.get(name) is not None]
    reduction = read_block(LayerReduction, data.get("layer_reduction") or {}, f"{KEY}.layer_reduction", reading)
    enabled = tuple(one for one in found if one is not None)
    return Compression(enabled, reduction if reduction.enabled else None)


def _technique(name: str, given: object, reading: Reading) -> Technique | None:
    where = f"{KEY}.{name}"
    data = read_object(given, where, reading)
    refuse_unknown(data, ["shared_parameters", "different_groups"], where, reading)
    shared_type, params_type = TECHNIQUES[name]
    shared = read_block(shared_type, data.get("shared_parameters") or {}, f"{where}.shared_parameters", reading)
    if not shared.enabled:
        return None
    groups = read_object(data.get("different_groups") or {}, f"{where}.different_groups", reading)
    if not groups:
        raise ValueError(
            f"{reading.at(where)} is enabled and has no different_groups: write at least one, with its modules"
        )
    read = [_group(name, group, groups[group], params_type, reading) for group in sorted(groups)]
    return Technique(name, shared, tuple(read))


def _group(technique: str, name: str, given: object, params_type: type[Params], reading: Reading) -> Group:
    where = f"{KEY}.{technique}.different_groups.{name}"
    data = read_object(given, where, reading)
    refuse_unknown(data, ["params", "modules", "related_modules"], where, reading)
    params = read_block(params_type, data.get("params") or {}, f"{where}.params", reading)
    patterns = _patterns(data.get("modules", [ALL_MODULES]), f"{where}.modules", reading)
    if not patterns:
        raise ValueError(f'{reading.at(where)}.modules: expected patterns, got none; "{ALL_MODULES}" finds all modules')
    given_related = data.get("related_modules")
    if not given_related:
        return Group(name, params, patterns)
    if technique not in _WITH_RELATED:
        raise ValueError(f"{reading.at(where)}: {technique} keeps all shapes: related_modules has no meaning here")
    if not isinstance(given_related, list | tuple) or len(given_related) != len(patterns):
        raise ValueError(
            f"{reading.at(where)}.related_modules: expected a list with a list of patterns for each of the "
            f"{len(patterns)} in modules, got {given_related}"
        )
    related = tuple(_patterns(one, f"{where}.related_modules", reading) for one in given_related)
    return Group(name, params, patterns, related)


def _patterns(given: object, where: str, reading: Reading) -> tuple[str, ...]:
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list | tuple) or not all(isinstance(one, str) for one in patterns):
        raise TypeError(f"{reading.at(where)}: expected a list of regular expressions, got {given}")
    read = tuple(".*" if one == ALL_MODULES else one for one in patterns)
    for one in read:
        try:
            re.compile(one)
        except re.error as wrong:
            raise ValueError(f"{reading.at(where)}: {one!r} is no regular expression: {wrong}") from wrong
    return read


def compression_in(config: object) -> Compression:
    """The enabled techniques of a whole configuration: a `Config`, the content of a DeepSpeed JSON, or its file's name.

    Raises ValueError if it has no block "compression_training", and as `read_compression`.
    """
    if isinstance(config, str | os.PathLike):
        reading, data = Reading(Path(config).name), load(Path(config))
    else:
        reading, data = Reading("config"), config
    given = data.get(KEY) if isinstance(data, Mapping) else getattr(data, KEY, None)
    if given is None:
        is_inner = isinstance(data, Mapping) and any(name in data for name in (*TECHNIQUES, "layer_reduction"))
        advice = f'write {{"{KEY}": {{...}}}} around it' if is_inner else "write one"
        raise ValueError(f'{reading.source} has no block "{KEY}": {advice}')
    read = read_compression(given, reading)
    for warning in dict.fromkeys(reading.warnings):
        log.warning("%s", warning)
    return read
