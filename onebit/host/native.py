"""Adam on a flat chunk in C++: the same bits as `reference.py`.

The code is csrc/host_adam.cpp, built by setup.py into `_host.so` beside this file and loaded with ctypes on first use;
a call releases the GIL and allocates nothing. Arguments were checked in `operands.py`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path

import torch
from torch import Tensor

from ..comm.kernels.library import ISA_TITLES, ISAS, Load, open_library
from .operands import AdamChunk, AdamConstants
from .variance import EightBitVariance

ABI_VERSION = 1
# Below this many elements per thread a second thread gains less than it costs to wake.
ELEMENTS_PER_THREAD = 32768

_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4}
_log = logging.getLogger(__name__)
_load_lock = threading.Lock()


def is_built() -> bool:
    """Whether the C++ library is there and fits this version of the package."""
    return _load().library is not None


def why_not() -> str:
    """One sentence: what is missing and what to do. Empty where the library is built."""
    return _load().problem


def describe() -> str:
    """What runs, e.g. "C++, AVX-512, up to 2 threads"."""
    threads = torch.get_num_threads() if _library().onebit_host_has_openmp() else 1
    return f"C++, {ISA_TITLES[available_isas()[-1]]}, up to {threads} thread{'s' if threads > 1 else ''}"


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, slowest first."""
    return ISAS[1 : 1 + _library().onebit_host_best_isa()]


def adam_(chunk: AdamChunk, c: AdamConstants, offset: int, isa: str = "auto") -> None:
    """One step; arguments were checked."""
    if isa not in ISAS:
        raise ValueError(f"isa must be one of {', '.join(ISAS)}; got {isa!r}")
    n, v = chunk.master.numel(), chunk.v
    values, scales = v if isinstance(v, EightBitVariance) else (v, None)
    constants = (c.grad_scale, c.keep, c.l2, c.lerp, c.beta2, 1.0 - c.beta2, c.eps, c.move)
    unavailable = _library().onebit_host_adam(
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
        ISAS.index(isa),
        max(1, min(torch.get_num_threads(), n // ELEMENTS_PER_THREAD)),
    )
    if unavailable:
        raise ValueError(f'isa "{isa}" is not available on this machine, which has {", ".join(available_isas())}')


def _typed(x: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if x is None else (x.data_ptr(), _KINDS[x.dtype])


def _library() -> ctypes.CDLL:
    load = _load()
    if load.library is None:
        raise ImportError(load.problem)
    return load.library


def _load() -> Load:
    with _load_lock:
        return _load_once()


@functools.cache
def _load_once() -> Load:
    load = _open(Path(__file__).parent)
    if load.library is None:
        _log.warning("Adam on the host runs on the pure-torch reference, ten times slower: %s", load.problem)
    return load


def _open(folder: Path) -> Load:
    load = open_library(folder / "_host.so", "onebit_host_abi_version", ABI_VERSION)
    if load.library is not None:
        _declare(load.library)
    return load


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    typed = (pointer, flag)
    constants = ctypes.POINTER(ctypes.c_double)
    library.onebit_host_adam.argtypes = (
        pointer, *typed, *typed, *typed, pointer, *typed, size, size, constants, flag, ctypes.c_uint32, flag, flag,
    )  # fmt: skip
