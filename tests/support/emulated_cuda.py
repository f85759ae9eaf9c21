"""csrc/*.cu on the host: `emulated` puts it behind `comm/kernels/cupy.py`, in the place of CuPy and a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

from onebit.comm.kernels import cupy
from onebit.comm.kernels.arguments import Edge

SOURCE = Path(__file__).with_name("emulated_cuda.cpp")
COMPILER = shutil.which("c++")
# No contraction, as on the GPU; a signed infinity or NaN is what IEEE says.
FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas",
         "-Wno-unused-function")  # fmt: skip


class Module:
    """As CuPy's: functions that take a grid, a block, and arguments."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library

    def get_function(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, f"emulate_{name}")
        function.argtypes = (ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)

        def launch(grid: tuple[int], block: tuple[int], args: tuple[object, ...]) -> None:
            values = [_value(arg) for arg in args]
            addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            function(grid[0], block[0], addresses)

        return launch


def _value(arg: object) -> ctypes.c_float | ctypes.c_int64:
    if isinstance(arg, numpy.float32):
        return ctypes.c_float(float(arg))
    assert isinstance(arg, int), f"CuPy would pass {arg!r} as something else than 8 bytes"
    return ctypes.c_int64(arg)


class Libraries:
    """Compiled when first asked for, one per block size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[int, Module] = {}

    def kernel(self, name: str, block: int, index: int | None) -> Callable[..., None]:
        if block not in self._built:
            self._built[block] = self._build(block)
        return self._built[block].get_function(name)

    def _build(self, block: int) -> Module:
        library = self._folder / f"frames_{block}.so"
        command = [str(COMPILER), *FLAGS, f"-DONEBIT_BLOCK={block}", "-o", str(library), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return Module(ctypes.PyDLL(str(library)))  # holds the GIL: one warp of fibers for the process


@contextlib.contextmanager
def emulated(libraries: Libraries) -> Iterator[None]:
    """`kernels.cupy` works on host tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy, "EDGE", Edge("cpu", cupy.EDGE.frame_alignment))
        patch.setattr(cupy, "why_not", lambda: "")
        patch.setattr(cupy, "_kernel", libraries.kernel)
        patch.setattr(cupy, "_on", lambda device: contextlib.nullcontext())
        yield
