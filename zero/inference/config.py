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
from ..config.schema import ANYTHING, BOOL, INT, OBJECT, Block, Inert, Kind, as_json, block, key

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "int4": torch.uint8}
_OTHER_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_ALIASES = {"mp_size": "tensor_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel"}
_ALIASES |= {"max_tokens": "max_out_tokens"}
_ALIASES |= {"replace_with_kernel_inject": "kernel_inject"}


def _dtype(value: object) -> str:
    name = str(value).removeprefix("torch.").lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in DTYPES:
        raise TypeError
    return name


PACKED = {"int8": 8, "int4": 4}
"""Bits of weights, by the dtypes that are none of products."""
DTYPE = Kind('"fp32", "bf16", "fp16", "int8" or "int4"', _dtype)
_RANKS = "ranks are those of the transport: pass transport= to init_inference"


@dataclass(frozen=True)
class TensorParallel(Block):
    """How many ranks compute each layer together: tp_size, 1 by default."""

    inert: ClassVar[Mapping[str, Inert]] = {
        "enabled": Inert(BOOL, "tp_size decides it", fine=(True,)),
        "mpu": Inert(ANYTHING, _RANKS, fine=(None,), refused=True),
        "tp_group": Inert(ANYTHING, _RANKS, fine=(None,), refused=True),
    }

    tp_size: int = key(1, INT, least=1)


@dataclass(frozen=True)
class PipelineParallel(Block):
    """Among how many ranks the layers are divided, each of which computes its own whole: pp_size, 1 by default."""

    pp_size: int = key(1, INT, least=1)


_ROUNDED = {
    "q_type": Inert(ANYTHING, "8 bits are symmetric, 4 bits go from the least weight to the greatest"),
    "q_groups": Inert(ANYTHING, "8 bits have a scale for each row, 4 bits for each 128 inputs of a row"),
    "quantized_initialization": Inert(ANYTHING, "weights are quantized when they are served"),
}


@dataclass(frozen=True)
class Weight(Block):
    """The bits of a product's weights: 8 or 4; null (default) for those of dtype, otherwise 8."""

    inert: ClassVar[Mapping[str, Inert]] = _ROUNDED

    enabled: bool = key(True, BOOL)
    num_bits: int | None = key(None, INT, choices=(8, 4), null=True)


@dataclass(frozen=True)
class Activation(Block):
    """The bits of a product's inputs, only 8; off by default."""

    inert: ClassVar[Mapping[str, Inert]] = _ROUNDED

    enabled: bool = key(False, BOOL)
    num_bits: int = key(8, INT, choices=(8,))


@dataclass(frozen=True)
class Quant(Block):
    """Weights in few bits, on if the block is present; with activation.enabled also the inputs of products."""

    inert: ClassVar[Mapping[str, Inert]] = {"qkv": Inert(OBJECT, "all linear layers are treated in the same way")}

    enabled: bool = key(False, BOOL)
    weight: Weight = block(Weight)
    activation: Activation = block(Activation)


@dataclass(frozen=True)
class InferenceConfig(Block):
    """The options of `init_inference`, by DeepSpeed's names.

    Args:
        dtype: Of weights and products: "fp32", "bf16" or "fp16"; "int8" and "int4" keep the weights in
            that, and compute in their dtype. None (default) keeps the weights' dtype, or a compressed file's codes.
        kernel_inject: Whether to compile the decode step with torch.compile; on a CPU it needs a C++ compiler. False
            by default.
        enable_cuda_graph: Whether to replay the decode step as a CUDA graph; False by default.
        checkpoint: Weights to load: an engine's checkpoint folder, a .safetensors file or a folder of them, or
            {"path": ..., "tag": ...}. The codes of a compressed file are served as they are, unless dtype is one of
            floats or the ranks divide the matrices. None (default) keeps the model's.
        max_out_tokens: Slots of the cache: the most tokens of a prompt with its answer; 1,024 by default.
        injection_policy: The tensor plan by name, as {"h.*.mlp.up": "colwise", "h.*.mlp.down": "rowwise"}, or
            DeepSpeed's {Block: ("out", "mlp.down")}. None (default) for the model's own.
        tensor_parallel: {"tp_size": N}: how many ranks compute each layer together, 1 by default.
        pipeline_parallel: {"pp_size": N}: among how many ranks the layers of a decoder of transformers are divided, 1
            by default. Not with tp_size above 1.
        quant: Weights in few bits for any dtype: {"weight": {"num_bits": 8}} as dtype "int8", 4 as "int4"; with
            {"activation": {"enabled": true}} also the inputs of products, in int8.

    Raises:
        ValueError: A value is out of range, or values exclude each other.
        TypeError: A value has the wrong type.
    """

    inert: ClassVar[Mapping[str, Inert]] = {
        name: Inert(ANYTHING, "the model's own forward runs")
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
    pipeline_parallel: PipelineParallel = block(PipelineParallel)
    quant: Quant = block(Quant)

    def __post_init__(self) -> None:
        super().__post_init__()
        tp_size, pp_size = self.tensor_parallel.tp_size, self.pipeline_parallel.pp_size
        if self.enable_cuda_graph and tp_size * pp_size > 1:
            raise ValueError(
                f"enable_cuda_graph with {'tp_size' if tp_size > 1 else 'pp_size'} > 1: what ranks send each other "
                "cannot be replayed; remove one of them"
            )
        if min(tp_size, pp_size) > 1:
            raise ValueError(
                f"tp_size {tp_size} with pp_size {pp_size}: ranks divide either rows or layers; remove one"
            )
        given = self.quant.weight.num_bits if self.quant.enabled and self.quant.weight.enabled else None
        if given is not None and PACKED.get(str(self.dtype), given) != given:
            raise ValueError(f"dtype {self.dtype!r} and quant.weight.num_bits {given} exclude each other: remove one")
        if self.quant.activation.enabled and self.weight_bits != 8:
            raise ValueError('quant.activation needs weights in int8: write dtype "int8", or quant.enabled true')
        if self.enable_cuda_graph and not torch.cuda.is_available():
            raise ValueError("enable_cuda_graph needs CUDA, which is not available; kernel_inject compiles without it")

    @property
    def weight_bits(self) -> int | None:
        """Bits of the weights, 8 or 4; None: they are in floats."""
        if (bits := PACKED.get(str(self.dtype))) is not None:
            return bits
        is_quantized = self.quant.enabled and self.quant.weight.enabled
        return (self.quant.weight.num_bits or 8) if is_quantized else None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of products; None for that of the weights."""
        return None if self.dtype is None or self.dtype in PACKED else DTYPES[self.dtype]


def read_inference_config(config: object = None, **keywords: object) -> InferenceConfig:
    """Read the options of `init_inference`.

    Args:
        config: A dict or the path of a JSON file; None (default) for none.
        **keywords: The same keys, which must not contradict `config`.

    Raises:
        ValueError: A key is unknown, out of range or given twice.
        TypeError: A value has the wrong type.
    """
    if isinstance(config, InferenceConfig):
        if keywords:
            raise ValueError(
                f"init_inference: got a config and {', '.join(keywords)}; put all options into one of them"
            )
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
