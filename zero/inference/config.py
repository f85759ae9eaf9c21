# ruff: noqa: RUF009  (`key` and `block` are dataclasses.field)
"""The keys of `init_inference`, by DeepSpeed's names; read by the same reader as the training configuration."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ..config.reader import Reading, read_block
from ..config.schema import ANYTHING, BOOL, INT, OBJECT, Inert, Kind, as_json, block, check_block, key

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_OTHER_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_ALIASES = {"mp_size": "tensor_parallel", "tp": "tensor_parallel", "max_tokens": "max_out_tokens"}
_ALIASES |= {"replace_with_kernel_inject": "kernel_inject"}


def _dtype(value: object) -> str:
    name = str(value).removeprefix("torch.").lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in DTYPES:
        raise TypeError
    return name


DTYPE = Kind('"fp32", "bf16", "fp16" or "int8"', _dtype)
_RANKS = "ranks are those of the transport: pass transport= to init_inference"


@dataclass(frozen=True)
class TensorParallel:
    """How many ranks compute each layer together."""

    inert: ClassVar[Mapping[str, Inert]] = {
        "enabled": Inert(BOOL, "tp_size says it", fine=(True,)),
        "mpu": Inert(ANYTHING, _RANKS, fine=(None,), refused=True),
        "tp_group": Inert(ANYTHING, _RANKS, fine=(None,), refused=True),
    }

    tp_size: int = key(1, INT, least=1)


@dataclass(frozen=True)
class Bits:
    """What travels through a product. num_bits: 8 is what is here."""

    inert: ClassVar[Mapping[str, Inert]] = {
        name: Inert(ANYTHING, "scales are by row, symmetric")
        for name in ("q_type", "q_groups", "quantized_initialization")
    }

    enabled: bool = key(True, BOOL)
    num_bits: int = key(8, INT, choices=(8,))


@dataclass(frozen=True)
class Activation(Bits):
    """Off unless it is asked for."""

    enabled: bool = key(False, BOOL)


@dataclass(frozen=True)
class Quant:
    """Weights in int8 by rows; on where the block is written. activation: inputs of products as well, if enabled."""

    inert: ClassVar[Mapping[str, Inert]] = {"qkv": Inert(OBJECT, "all linear layers are treated as one another")}

    enabled: bool = key(False, BOOL)
    weight: Bits = block(Bits)
    activation: Activation = block(Activation)


@dataclass(frozen=True)
class InferenceConfig:
    """What `init_inference` makes of a model.

    dtype: of weights and products; None: as the weights are; "int8": the same with "quant": weights in int8.
    kernel_inject: compile the decode step with torch.compile (a C++ compiler on a CPU). enable_cuda_graph: replay it as
    a CUDA graph. checkpoint: weights to load: an engine's folder, a .safetensors file or a folder of them; or
    {"path": ..., "tag": ...}. max_out_tokens: slots of the cache: prompt and answer of a row. injection_policy: tensor
    plan by name: {"h.*.mlp.up": "colwise", "h.*.mlp.down": "rowwise"}; or DeepSpeed's {Block: ("out", "mlp.down")}.
    """

    inert: ClassVar[Mapping[str, Inert]] = {
        name: Inert(ANYTHING, "the model's own forward is what runs")
        for name in (
            "triangular_masking",
            "replace_method",
            "return_tuple",
            "min_out_tokens",
            "use_triton",
            "triton_autotune",
        )
    }

    dtype: str | None = key(None, DTYPE, null=True)
    kernel_inject: bool = key(False, BOOL)
    enable_cuda_graph: bool = key(False, BOOL)
    checkpoint: object = key(None, ANYTHING)
    max_out_tokens: int = key(1024, INT, least=1)
    injection_policy: object = key(None, ANYTHING)
    tensor_parallel: TensorParallel = block(TensorParallel)
    quant: Quant = block(Quant)

    def __post_init__(self) -> None:
        check_block(self)
        if self.enable_cuda_graph and self.tensor_parallel.tp_size > 1:
            raise ValueError(
                "enable_cuda_graph with tp_size > 1: sums over ranks cannot be replayed; leave one of them out"
            )
        if self.quant.activation.enabled and not self.is_int8:
            raise ValueError('quant.activation needs weights in int8: write dtype "int8", or quant.enabled true')
        if self.enable_cuda_graph and not torch.cuda.is_available():
            raise ValueError("enable_cuda_graph needs CUDA, which is not here; kernel_inject compiles without it")

    @property
    def is_int8(self) -> bool:
        """Whether weights are kept in int8."""
        return self.dtype == "int8" or (self.quant.enabled and self.quant.weight.enabled)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """None: that of the weights."""
        return None if self.dtype in (None, "int8") else DTYPES[str(self.dtype)]


def read_inference_config(config: object = None, **keywords: object) -> InferenceConfig:
    """config: a dict, or a JSON file; keywords: the same keys. Raises ValueError and TypeError, which name the key."""
    if isinstance(config, InferenceConfig):
        if keywords:
            raise ValueError(f"init_inference: got a config and {', '.join(keywords)}; write them into one of both")
        return config
    if isinstance(config, str | os.PathLike):
        config = json.loads(Path(config).read_text())
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"init_inference: expected a dict or a JSON file as config, got {as_json(config)}")
    given: dict[str, object] = {}
    for name, value in [*(config or {}).items(), *keywords.items()]:
        known = _ALIASES.get(str(name), str(name))
        value = {"tp_size": value} if name == "mp_size" else value
        if known in given and given[known] != value:
            raise ValueError(f"init_inference: {name} is given twice: {as_json(given[known])} and {as_json(value)}")
        given[known] = value
    if isinstance(quant := given.get("quant"), Mapping):
        given["quant"] = {"enabled": True, **quant}
    reading = Reading("init_inference")
    read = read_block(InferenceConfig, given, "", reading)
    for warning in reading.warnings:
        log.warning("%s", warning)
    return read
