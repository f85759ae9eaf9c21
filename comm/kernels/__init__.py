"""Kernels: the same few functions in several implementations, the same bytes from each.

`BACKENDS` is the registry: the codecs' option `kernel`, `describe`, the contract tests and scripts/gpu_check.py read
it. To add a backend, write its file (`contract.py` lists its contents) and a line here. `reference.py`,
`int4_reference.py` and `log4_reference.py` are the specification; `cpu.py` is the C++ backend (built by setup.py from
csrc/), `cupy.py` the one for CUDA tensors, compiled at run time, and `triton/` another.

`select` gives the functions of a frame for tensors of a device, `describe` tells which backends run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Literal, overload

import torch

from . import cpu, cupy, reference, triton
from .contract import Backend, Int4Kernel, Int8Kernel, Log4Kernel, SignKernel

# "auto" takes the first that serves the device, computes the frame and is installed.
_BACKENDS: tuple[Backend, ...] = (
    cpu,
    cupy,
    triton,
    reference,
)
BACKENDS: Mapping[str, Backend] = {backend.NAME: backend for backend in _BACKENDS}

_TITLES = {"cpu": "host tensors", "cuda": "CUDA tensors"}


def check_name(name: str, frame: str = "sign") -> None:
    """Raise ValueError unless `name` is "auto" or a backend that computes the frame."""
    names = ("auto", *(backend.NAME for backend in _BACKENDS if frame in backend.FRAMES))
    if name not in names:
        raise ValueError(f"kernel must be one of {', '.join(names)}; got {name!r}")


@overload
def select(name: str, device: torch.device, frame: Literal["sign"] = "sign") -> SignKernel: ...
@overload
def select(name: str, device: torch.device, frame: Literal["int8"]) -> Int8Kernel: ...
@overload
def select(name: str, device: torch.device, frame: Literal["int4"]) -> Int4Kernel: ...
@overload
def select(name: str, device: torch.device, frame: Literal["log4"]) -> Log4Kernel: ...
def select(name: str, device: torch.device, frame: str = "sign") -> object:
    """The functions of a frame for tensors on `device`. Raises ImportError if the backend of this name is missing."""
    if name == "auto":
        return _functions(_best(device.type, frame), frame)
    backend = BACKENDS[name]
    if why := backend.why_not():
        raise ImportError(why)
    return _functions(backend.NAME, frame)


def describe() -> str:
    """One line: the backend of each device on this machine, and why a faster one does not run."""
    served = list(dict.fromkeys(backend.SERVES for backend in _BACKENDS if backend.SERVES is not None))
    parts = [f"{_TITLES.get(device, f'{device} tensors')}: {_describe(device)}" for device in served]
    return "; ".join([*parts, f"other devices: {reference.describe()}"])


def _describe(device: str) -> str:
    best = BACKENDS[_best(device, "sign")]
    if device == best.SERVES:
        return best.describe()
    return f"{best.describe()}: {'; '.join(b.why_not() for b in _BACKENDS if device == b.SERVES)}"


def _best(device: str, frame: str) -> str:
    for backend in _candidates(device, frame):
        if not backend.why_not():
            return backend.NAME
    raise AssertionError("the reference is there, for every device and frame")


@functools.cache
def _candidates(device: str, frame: str) -> tuple[Backend, ...]:
    return tuple(b for b in _BACKENDS if b.SERVES in (device, None) and frame in b.FRAMES)


@functools.cache
def _functions(name: str, frame: str) -> ModuleType:
    """The module, imported on first use: it may need a package that few machines have."""
    return importlib.import_module(BACKENDS[name].FRAMES[frame], __name__)
