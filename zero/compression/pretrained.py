"""A cleaned model of transformers as a folder of transformers: its configuration gets the sizes that pruning has left.

1. Each size of the configuration (`_SIZES`) is raised by one, and the model built without memory: the parameters that
   grow are those that this size decides.
2. From the parameters that one size alone decides follows the size's new value, the same in all layers.
3. A model built from the new configuration must have the shapes of the cleaned one. Only then anything is written.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from ...comm import Transport
from ...comm.messages import raise_on_all_ranks
from ..parallel.model_plan import patterns
from .armed import activation_of, armed_in

_HEADS = "num_attention_heads"
_SIZES = (
    "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim",
    "ffn_hidden_size", _HEADS, "num_key_value_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
Place = tuple[str, int]
"""A parameter's name, and one of its dimensions."""


def export_pretrained(model: nn.Module, folder: str | os.PathLike[str], transport: Transport | None = None) -> None:
    """Write a cleaned model of transformers so that its class's `from_pretrained(folder)` reads it.

    The model's configuration, too, gets the sizes that pruning has left: `intermediate_size`, `num_attention_heads`
    with `head_dim`, `num_key_value_heads` and the names that other models have for them.

    Args:
        model: A model of transformers after `redundancy_clean`.
        folder: Where its weights and configuration are written.
        transport: If given, all ranks call, and rank 0 writes. Default None: this process writes.

    Raises:
        ValueError: The model was not cleaned, has quantized inputs, or sizes that its configuration cannot express:
            several for its layers, or fewer heads without `head_dim`. Nothing is written.
        TypeError: It is no model of transformers.
        OSError: The folder cannot be written. On all ranks.
    """
    if armed_in(model) is not None:
        raise ValueError("the model's compression is not permanent yet: call redundancy_clean(model, config) first")
    config = getattr(model, "config", None)
    if not (hasattr(model, "save_pretrained") and hasattr(config, "save_pretrained")):
        raise TypeError(f"expected a model of transformers, got {type(model).__name__}: use export_compressed")
    if name := next((name for name, module in model.named_modules() if activation_of(module) is not None), None):
        raise ValueError(f"{name} has quantized inputs, which transformers would not know: use export_compressed")
    for key, value in _new_sizes(model, config).items():
        setattr(config, key, value)
    problem = None
    if transport is None or transport.rank == 0:
        try:
            cast(Any, model).save_pretrained(folder)
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    if transport is not None:
        raise_on_all_ranks(transport, problem, OSError)
    elif problem is not None:
        raise OSError(problem)


def _new_sizes(model: nn.Module, config: Any) -> dict[str, int]:
    """The configuration's sizes that have changed. Raises ValueError if none give the model's shapes."""
    kind, own = type(model).__name__, _shapes_of(model)
    if own == (before := _built(model, config)):
        return {}
    if strange := sorted(own.keys() ^ before.keys()):
        raise ValueError(f"{kind} has other parameters than its configuration names, as {strange[0]}")
    names = dict.fromkeys(config.attribute_map.get(key, key) for key in _SIZES)  # T5 has d_ff in place of one of them
    start = {key: size for key in names if isinstance(size := getattr(config, key, None), int)}
    if getattr(config, "n_inner", 0) is None:  # GPT-2's default: four times the width
        start["n_inner"] = 4 * config.hidden_size
    heads, width = config.attribute_map.get(_HEADS, _HEADS), dict[str, int]()
    if heads in start and not getattr(config, "head_dim", None):
        width["head_dim"] = config.hidden_size // start[heads]  # or fewer heads would be wider ones
    decided: dict[Place, dict[str, int]] = {}  # by how much a parameter grows with a size
    for key, size in start.items():
        with contextlib.suppress(ValueError):  # a size that the model refuses, as heads that do not divide its width
            for name, shape in _built(model, config, {**width, key: size + 1}).items():
                for dim, (less, more) in enumerate(zip(before[name], shape, strict=True)):
                    if more != less:
                        decided.setdefault((name, dim), {})[key] = more - less
    found: dict[str, dict[float, list[str]]] = {}
    for (name, dim), of_keys in decided.items():
        if len(of_keys) == 1:
            ((key, step),) = of_keys.items()
            size = start[key] + (own[name][dim] - before[name][dim]) / step
            found.setdefault(key, {}).setdefault(size, []).append(name)
    for key, sizes in found.items():
        if len(sizes) > 1:
            each = "; ".join(f"{size:g} in {', '.join(names[:2])}" for size, names in sizes.items())
            raise ValueError(
                f"{kind} has one {key} for all layers, and pruning has left several ({each}): prune all layers to the "
                "same dense_ratio, or use export_compressed"
            )
    new = {key: int(size) for key, (size,) in found.items() if size != start[key]}
    if heads in new:
        new |= width
    after = _built(model, config, new)
    if wrong := [name for name, shape in own.items() if after[name] != shape]:
        raise ValueError(
            f"the configuration of {kind} cannot express what pruning has left of {patterns(wrong)}: {wrong[0]} has "
            f"shape {own[wrong[0]]}, and would have {after[wrong[0]]}; use export_compressed"
        )
    return new


def _built(
    model: nn.Module, config: Any, sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a new model with these sizes. Raises ValueError if the model refuses them."""
    changed = copy.deepcopy(config)
    for key, value in sizes.items():
        setattr(changed, key, value)
    with torch.device("meta"):
        return _shapes_of(type(model)(changed))


def _shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
