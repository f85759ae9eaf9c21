"""Kernels: the frames in C++, for host tensors. The same bytes and the same floats as `reference.py`.

The code is csrc/kernels.cpp, built by setup.py into `_kernels.*.so` beside this file and loaded with ctypes on
first use; calls release the GIL. Arguments are checked in `edge.py`, once.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from .edge import INT8, SIGN, Edge, Frame, check_scale

ABI_VERSION = 2
EDGE = Edge("cpu")
ISAS = ("auto", "portable", "avx2", "avx512")
_ISA_TITLES = {"portable": "portable", "avx2": "AVX2", "avx512": "AVX-512"}
_ERROR_KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2}

# Below this many elements per thread a second thread gains less than it costs to wake (scripts/bench_kernels.py).
ELEMENTS_PER_THREAD = 32768

_REINSTALL = (
    "install a C++ compiler and reinstall onebit (pip install --force-reinstall --no-deps, or pip install -e .)"
)
_log = logging.getLogger(__name__)
_load_lock = threading.Lock()


@dataclass(frozen=True)
class _Load:
    library: ctypes.CDLL | None
    problem: str = ""


def is_built() -> bool:
    """Whether the C++ library is there and fits this version of the package."""
    return _load().library is not None


def why_not_built() -> str:
    """One sentence: what is missing and what to do. Empty where the library is built."""
    return _load().problem


def describe() -> str:
    """What runs, e.g. "C++, AVX-512, up to 2 threads"."""
    threads = torch.get_num_threads() if _library().onebit_has_openmp() else 1
    return f"C++, {_ISA_TITLES[available_isas()[-1]]}, up to {threads} thread{'s' if threads > 1 else ''}"


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, slowest first."""
    return ISAS[1 : 1 + _library().onebit_best_isa()]


def encode(
    x_KN: Tensor,
    error_KN: Tensor | None,
    frames_KB: Tensor,
    counts_KJ: Tensor | None,
    *,
    block: int,
    scale: str,
    isa: str = "auto",
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32 in place; error float32/bfloat16, read only.

    One pass over memory. Rows may lie apart (a slice of a wider tensor); elements of a row may not.
    """
    check_scale(scale)
    _encode(SIGN, x_KN, error_KN, frames_KB, counts_KJ, scale == "mean_abs", block=block, isa=isa)


def decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float, isa: str = "auto") -> None:
    """out ← keep·out + weight·values; out float32 [K, N]. With keep = 0 the old content of out is not read."""
    _decode(SIGN, frames_KB, out_KN, block=block, weight=weight, keep=keep, isa=isa)


def decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int, isa: str = "auto") -> None:
    """out ← mean over the K frames; out float32 [N], written once."""
    _decode_mean(SIGN, frames_KB, out_N, block=block, isa=isa)


def int8_encode(
    x_KN: Tensor,
    error_KN: Tensor | None,
    frames_KB: Tensor,
    counts_KJ: Tensor | None,
    *,
    block: int,
    isa: str = "auto",
) -> None:
    """`encode` for int8 frames."""
    _encode(INT8, x_KN, error_KN, frames_KB, counts_KJ, block=block, isa=isa)


def int8_decode(
    frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float, isa: str = "auto"
) -> None:
    """`decode` for int8 frames."""
    _decode(INT8, frames_KB, out_KN, block=block, weight=weight, keep=keep, isa=isa)


def int8_decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int, isa: str = "auto") -> None:
    """`decode_mean` for int8 frames."""
    _decode_mean(INT8, frames_KB, out_N, block=block, isa=isa)


def _encode(
    frame: Frame,
    x_KN: Tensor,
    error_KN: Tensor | None,
    frames_KB: Tensor,
    counts_KJ: Tensor | None,
    *options: object,
    block: int,
    isa: str,
) -> None:
    K, J = EDGE.check_encode(frame, x_KN, error_KN, frames_KB, counts_KJ, block=block)
    _call(
        f"{frame.name}_encode",
        x_KN.data_ptr(),
        x_KN.stride(0),
        None if error_KN is None else error_KN.data_ptr(),
        0 if error_KN is None else error_KN.stride(0),
        _ERROR_KINDS[None if error_KN is None else error_KN.dtype],
        frames_KB.data_ptr(),
        frames_KB.stride(0),
        frames_KB.shape[1],
        None if counts_KJ is None else counts_KJ.data_ptr(),
        0 if counts_KJ is None else counts_KJ.stride(0),
        K,
        J,
        block,
        *options,
        isa=isa,
        elements=x_KN.numel(),
    )


def _decode(
    frame: Frame, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float, isa: str
) -> None:
    K, J = EDGE.check_decode(frame, frames_KB, out_KN, block=block)
    _call(
        f"{frame.name}_decode",
        frames_KB.data_ptr(),
        frames_KB.stride(0),
        out_KN.data_ptr(),
        out_KN.stride(0),
        K,
        J,
        block,
        weight,
        keep,
        isa=isa,
        elements=out_KN.numel(),
    )


def _decode_mean(frame: Frame, frames_KB: Tensor, out_N: Tensor, *, block: int, isa: str) -> None:
    K, J = EDGE.check_decode_mean(frame, frames_KB, out_N, block=block)
    _call(
        f"{frame.name}_decode_mean",
        frames_KB.data_ptr(),
        frames_KB.stride(0),
        K,
        out_N.data_ptr(),
        J,
        block,
        isa=isa,
        elements=out_N.numel(),
    )


def _call(name: str, *args: object, isa: str, elements: int) -> None:
    if isa not in ISAS:
        raise ValueError(f"isa must be one of {', '.join(ISAS)}; got {isa!r}")
    threads = max(1, min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD))
    if getattr(_library(), f"onebit_{name}")(*args, ISAS.index(isa), threads):
        raise ValueError(f'isa "{isa}" is not available on this machine, which has {", ".join(available_isas())}')


def _library() -> ctypes.CDLL:
    load = _load()
    if load.library is None:
        raise ImportError(load.problem)
    return load.library


def _load() -> _Load:
    with _load_lock:
        return _load_once()


@functools.cache
def _load_once() -> _Load:
    load = _open(Path(__file__).parent)
    if load.library is None:
        _log.warning("the codecs run on the pure-torch reference, about ten times slower: %s", load.problem)
    return load


def _open(folder: Path) -> _Load:
    paths = [path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_kernels{suffix}").exists()]
    if not paths:
        return _Load(None, f"the C++ kernel is not built; {_REINSTALL}")
    try:
        library = ctypes.CDLL(str(paths[0]))  # torch is imported by now: the library shares its OpenMP threads
        version = library.onebit_abi_version()
    except (OSError, AttributeError) as error:
        return _Load(None, f"{paths[0].name} cannot be loaded ({error}); {_REINSTALL}")
    if version != ABI_VERSION:
        return _Load(None, f"{paths[0].name} has ABI {version} and this package needs {ABI_VERSION}; {_REINSTALL}")
    _declare(library)
    return _Load(library)


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, flag, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
    rows = (pointer, size)
    encode = (*rows, *rows, flag, *rows, size, *rows, size, size, size)
    library.onebit_sign_encode.argtypes = (*encode, flag, flag, flag)
    library.onebit_int8_encode.argtypes = (*encode, flag, flag)
    for frame in (SIGN, INT8):
        decode, decode_mean = (getattr(library, f"onebit_{frame.name}_{name}") for name in ("decode", "decode_mean"))
        decode.argtypes = (*rows, *rows, size, size, size, real, real, flag, flag)
        decode_mean.argtypes = (*rows, size, pointer, size, size, flag, flag)
