"""The C++ libraries that setup.py builds: one for kernels of frames, one for Adam on the host."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ISAS = ("auto", "portable", "avx2", "avx512")
ISA_TITLES = {"portable": "portable", "avx2": "AVX2", "avx512": "AVX-512"}
# Below this many elements per thread a second thread gains less than it costs to wake (scripts/bench.py kernels).
ELEMENTS_PER_THREAD = 32768

_REINSTALL = (
    "install a C++ compiler and reinstall onebit "
    "(pip install --force-reinstall --no-deps --no-cache-dir, or pip install -e .)"
)


class SharedLibrary:
    """A library that setup.py builds from csrc/, opened with ctypes on first use if it exists and its ABI fits.

    path: of the file. prefix: start of its functions' names, as in `PREFIX_abi_version`. abi_version: the one that this
    package needs. declare: sets the argument types of its functions. log: gets one warning if there is no library.
    without: the consequence, for that warning. torch must be imported first: they share OpenMP. Any thread may call.
    """

    def __init__(
        self,
        path: Path,
        prefix: str,
        abi_version: int,
        declare: Callable[[ctypes.CDLL], None],
        log: logging.Logger,
        without: str,
    ) -> None:
        self.path, self.prefix, self.abi_version = path, prefix, abi_version
        self._declare, self._log, self._without = declare, log, without
        self._lock = threading.Lock()
        self._loaded: ctypes.CDLL | None = None
        self._problem: str | None = None

    def is_built(self) -> bool:
        """Whether the library exists and fits this version of the package."""
        return not self.why_not()

    def why_not(self) -> str:
        """One sentence: what is missing and what to do. Empty if the library is built."""
        if self._problem is not None:
            return self._problem
        with self._lock:
            if self._problem is None:
                self._problem = self._open()
                if self._problem:
                    self._log.warning("%s: %s", self._without, self._problem)
            return self._problem

    def get(self) -> ctypes.CDLL:
        """The library. Raises ImportError if it is missing or belongs to another version."""
        if self._loaded is None and (problem := self.why_not()):
            raise ImportError(problem)
        assert self._loaded is not None
        return self._loaded

    def function(self, name: str) -> Any:
        """Function `PREFIX_name`."""
        return getattr(self.get(), f"{self.prefix}_{name}")

    def available_isas(self) -> tuple[str, ...]:
        """The instruction sets that this machine can run, slowest first."""
        return ISAS[1 : 1 + self.function("best_isa")()]

    def describe(self) -> str:
        """A description, e.g. "C++, AVX-512, up to 2 threads"."""
        threads = torch.get_num_threads() if self.function("has_openmp")() else 1
        return f"C++, {ISA_TITLES[self.available_isas()[-1]]}, up to {threads} thread{'s' if threads > 1 else ''}"

    def run(self, name: str, *args: object, isa: str, elements: int) -> None:
        """Call a kernel, with the instruction set and the number of threads as its last two arguments.

        The kernel returns non-zero if this machine lacks the instruction set. Raises ValueError then, and for an
        unknown name.
        """
        if isa not in ISAS:
            raise ValueError(f"isa must be one of {', '.join(ISAS)}; got {isa!r}")
        threads = max(1, min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD))
        if self.function(name)(*args, ISAS.index(isa), threads):
            there = ", ".join(self.available_isas())
            raise ValueError(f'isa "{isa}" is not available on this machine, which has {there}')

    def _open(self) -> str:
        """Load the library; "" or why it cannot be loaded."""
        if not self.path.exists():
            return f"the C++ kernel is not built; {_REINSTALL}"
        try:
            library = ctypes.CDLL(str(self.path))
            version = getattr(library, f"{self.prefix}_abi_version")()
        except (OSError, AttributeError) as error:
            return f"{self.path.name} cannot be loaded ({error}); {_REINSTALL}"
        if version != self.abi_version:
            return f"{self.path.name} has ABI {version} and this package needs {self.abi_version}; {_REINSTALL}"
        self._declare(library)
        self._loaded = library
        return ""
