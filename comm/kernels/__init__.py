"""Kernels: the same few functions in several implementations, the same bytes from each.

`reference.py` is the specification; `cpu.py` the C++ one (built by setup.py from csrc/). `select` picks one per device,
`describe` tells what runs, so that nobody has to guess. A kernel is a module with `encode`, `decode`, `decode_mean` for
sign frames, and the same with `int8_` in front for int8 frames.
"""

from __future__ import annotations

from types import ModuleType

import torch

from . import cpu, reference

_NAMES = ("auto", "reference", "cpu")


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a kernel."""
    if name not in _NAMES:
        raise ValueError(f"kernel must be one of {', '.join(_NAMES)}; got {name!r}")


def select(name: str, device: torch.device) -> ModuleType:
    """The kernel module for tensors on `device`. Raises ImportError where "cpu" was asked for and is not built."""
    if name == "reference" or (name == "auto" and (device.type != "cpu" or not cpu.is_built())):
        return reference
    if not cpu.is_built():
        raise ImportError(cpu.why_not_built())
    if device.type != "cpu":
        raise ValueError(f'kernel "cpu" works on host tensors, this one is on {device}; use kernel="auto"')
    return cpu


def describe() -> str:
    """One line: which kernel serves which device on this machine."""
    host = cpu.describe() if cpu.is_built() else f"reference (pure torch): {cpu.why_not_built()}"
    return f"host tensors: {host}; other devices: reference (pure torch)"
