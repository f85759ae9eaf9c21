"""Kernels: the frames in Triton. Here is the backend's description; `backend.py` has its functions.

Triton is imported with `backend.py`, not with this module.
"""

from __future__ import annotations

import functools
import importlib.util

from ... import torch_versions

NAME = "triton"
SERVES = "cuda"
FRAMES = dict.fromkeys(("sign", "int8", "int4", "log4"), ".triton.backend")


@functools.cache
def why_not() -> str:
    """One sentence: what is missing and what to do. Empty if Triton is installed, and new enough."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'onebit[triton]' (Linux; CUDA builds of torch bring it)"
    return torch_versions.why_no_triton()


def describe() -> str:
    """What runs, e.g. "Triton 3.7.1"."""
    from .lanes import INTERPRETED, VERSION

    return f"Triton {VERSION}{', interpreted' if INTERPRETED else ''}"
