"""Builds csrc/ into plain shared libraries beside comm/kernels/cpu.py and onebit/host/native.py: ctypes loads them.

The package works without it, on its pure-torch reference: no compiler is no reason for the installation to fail.
"""

from __future__ import annotations

import os
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

# No -ffast-math, no contraction: the kernels give the floats of their references in torch to the last bit.
FLAGS = ["-O3", "-g0", "-std=c++17", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
OPENMP = ["-fopenmp"]


class BuildKernel(build_ext):
    """With OpenMP where the compiler has it, else with one thread, else not at all and one line that says so."""

    def build_extension(self, ext: Extension) -> None:
        for openmp in (OPENMP, []):
            ext.extra_compile_args, ext.extra_link_args = FLAGS + openmp, openmp
            try:
                return super().build_extension(ext)
            except (CompileError, LinkError, PlatformError, OSError) as error:
                problem = error
        print(f"onebit: {ext.sources[0]} was not built, pure torch runs instead ({problem})", flush=True)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def get_ext_filename(self, fullname: str) -> str:
        """The same for every Python: no Python ever imports it."""
        return os.path.join(*fullname.split(".")) + ".so"


class BuildWheel(bdist_wheel):
    """For any Python 3 on this platform; for any platform where the kernel was not built."""

    def get_tag(self) -> tuple[str, str, str]:
        has_kernel = any(Path(self.bdist_dir).rglob("*.so"))
        return "py3", "none", super().get_tag()[2] if has_kernel else "any"


def library(name: str, source: str) -> Extension:
    parts = sorted(glob(os.path.join("csrc", "*.inl")))
    return Extension(name, sources=[source], depends=parts, language="c++", optional=True)


setup(
    ext_modules=[
        library("onebit.comm.kernels._kernels", "csrc/kernels.cpp"),
        library("onebit.host._host", "csrc/host_adam.cpp"),
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": BuildWheel},
)
