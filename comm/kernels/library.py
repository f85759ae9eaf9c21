"""A shared library that setup.py builds from csrc/, opened with ctypes where it is there and fits this package."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

ISAS = ("auto", "portable", "avx2", "avx512")
ISA_TITLES = {"portable": "portable", "avx2": "AVX2", "avx512": "AVX-512"}

_REINSTALL = (
    "install a C++ compiler and reinstall onebit "
    "(pip install --force-reinstall --no-deps --no-cache-dir, or pip install -e .)"
)


@dataclass(frozen=True)
class Load:
    """The library; or none, and one sentence: what is missing and what to do."""

    library: ctypes.CDLL | None
    problem: str = ""


def open_library(path: Path, version_function: str, expected: int) -> Load:
    """The library at `path`, if `version_function` gives the ABI expected. torch is imported: they share OpenMP."""
    if not path.exists():
        return Load(None, f"the C++ kernel is not built; {_REINSTALL}")
    try:
        library = ctypes.CDLL(str(path))
        version = getattr(library, version_function)()
    except (OSError, AttributeError) as error:
        return Load(None, f"{path.name} cannot be loaded ({error}); {_REINSTALL}")
    if version != expected:
        return Load(None, f"{path.name} has ABI {version} and this package needs {expected}; {_REINSTALL}")
    return Load(library)
