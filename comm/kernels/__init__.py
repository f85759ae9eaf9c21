"""Kernels: the same few functions in several implementations, the same bytes from each.

`reference.py` is the specification; `cpu.py` the C++ one (built by setup.py from csrc/); `cupy.py` the one for CUDA
tensors, compiled at run time; `triton/` another for those, imported where Triton is installed. `select` picks one
per device, `describe` tells what runs, so that nobody has to guess. A kernel is a module with `encode`, `decode`,
`decode_mean` for sign frames, the same with `int8_` in front for int8 frames, and the fused steps over sign frames:
`encode_momentum`, `encode_mean`, `apply`.

The int4 frame has two implementations so far: its specification, `int4_reference.py`, and `cpu.py`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from . import cpu, cupy, reference

_NAMES = ("auto", "reference", "cpu", "cupy", "triton")


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a kernel."""
    if name not in _NAMES:
        raise ValueError(f"kernel must be one of {', '.join(_NAMES)}; got {name!r}")


def select(name: str, device: torch.device) -> ModuleType:
    """The kernel module for tensors on `device`. Raises ImportError where one was asked for that is not there."""
    if name == "auto":
        name = _best(device)
    if name == "reference":
        return reference
    if name == "triton":
        return _triton()
    if name == "cupy":
        if why := cupy.why_not():
            raise ImportError(why)
        return cupy
    if not cpu.is_built():
        raise ImportError(cpu.why_not_built())
    if device.type != "cpu":
        raise ValueError(f'kernel "cpu" works on host tensors, this one is on {device}; use kernel="auto"')
    return cpu


def describe() -> str:
    """One line: which kernel serves which device on this machine."""
    host = cpu.describe() if cpu.is_built() else f"reference (pure torch): {cpu.why_not_built()}"
    if not cupy.why_not():
        cuda = cupy.describe()
    elif not _why_no_triton():
        cuda = _triton().describe()
    else:
        cuda = f"reference (pure torch): {cupy.why_not()}; {_why_no_triton()}"
    return f"host tensors: {host}; CUDA tensors: {cuda}; other devices: reference (pure torch)"


def _best(device: torch.device) -> str:
    if device.type == "cpu" and cpu.is_built():
        return "cpu"
    if device.type == "cuda":
        return "cupy" if not cupy.why_not() else "triton" if not _why_no_triton() else "reference"
    return "reference"


@functools.cache
def _why_no_triton() -> str:
    """One sentence: what is missing and what to do. Empty where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'onebit[triton]' (Linux; CUDA builds of torch bring it)"
    return ""


@functools.cache
def _triton() -> ModuleType:
    if why := _why_no_triton():
        raise ImportError(why)
    return importlib.import_module(".triton.backend", __name__)
