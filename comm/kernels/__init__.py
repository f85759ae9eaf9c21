"""Kernels: the same few functions in several implementations, the same bytes from each.

`reference.py` is the specification; `cpu.py` the C++ one (built by setup.py from csrc/); `triton.py` the one for CUDA
tensors, imported where Triton is installed. `select` picks one per device, `describe` tells what runs, so that nobody
has to guess. A kernel is a module with `encode`, `decode`, `decode_mean` for sign frames, and the same with `int8_` in
front for int8 frames.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from . import cpu, reference

_NAMES = ("auto", "reference", "cpu", "triton")


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
    if not cpu.is_built():
        raise ImportError(cpu.why_not_built())
    if device.type != "cpu":
        raise ValueError(f'kernel "cpu" works on host tensors, this one is on {device}; use kernel="auto"')
    return cpu


def describe() -> str:
    """One line: which kernel serves which device on this machine."""
    host = cpu.describe() if cpu.is_built() else f"reference (pure torch): {cpu.why_not_built()}"
    cuda = _triton().describe() if not _why_no_triton() else f"reference (pure torch): {_why_no_triton()}"
    return f"host tensors: {host}; CUDA tensors: {cuda}; other devices: reference (pure torch)"


def _best(device: torch.device) -> str:
    if device.type == "cpu" and cpu.is_built():
        return "cpu"
    return "triton" if device.type == "cuda" and not _why_no_triton() else "reference"


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
    return importlib.import_module(".triton", __name__)
