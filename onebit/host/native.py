"""Adam on a flat chunk in C++: the same bits as `reference.py`.

The code is csrc/host_adam.cpp, built by setup.py into `_host.so` beside this file and loaded with ctypes on first use;
a call releases the GIL and allocates nothing. Arguments were checked in `operands.py`.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch
from torch import Tensor

from ..comm.kernels.library import SharedLibrary
from .operands import AdamChunk, AdamConstants
from .variance import EightBitVariance

_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4}


def adam_(chunk: AdamChunk, c: AdamConstants, offset: int, isa: str = "auto") -> None:
    """One step. Arguments have been checked."""
    n, v = chunk.master.numel(), chunk.v
    values, scales = v if isinstance(v, EightBitVariance) else (v, None)
    constants = (c.grad_scale, c.keep, c.l2, c.lerp, c.beta2, 1.0 - c.beta2, c.eps, c.move)
    _library.run(
        "adam",
        chunk.master.data_ptr(),
        *_typed(chunk.grad),
        *_typed(chunk.m),
        *_typed(values),
        None if scales is None else scales.data_ptr(),
        *_typed(chunk.out),
        n,
        offset,
        (ctypes.c_double * len(constants))(*constants),
        c.from_grad,
        c.seed,
        isa=isa,
        elements=n,
    )


def _typed(x: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if x is None else (x.data_ptr(), _KINDS[x.dtype])


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    typed = (pointer, flag)
    constants = ctypes.POINTER(ctypes.c_double)
    library.onebit_host_adam.argtypes = (
        pointer, *typed, *typed, *typed, pointer, *typed, size, size, constants, flag, ctypes.c_uint32, flag, flag,
    )  # fmt: skip


_library = SharedLibrary(
    Path(__file__).with_name("_host.so"),
    prefix="onebit_host",
    abi_version=1,
    declare=_declare,
    log=logging.getLogger(__name__),
    without="Adam on the host, and 1-bit Adam's warm-up there, run on the pure-torch reference, ten times slower",
)
is_built, why_not, describe, available_isas = (
    _library.is_built,
    _library.why_not,
    _library.describe,
    _library.available_isas,
)
