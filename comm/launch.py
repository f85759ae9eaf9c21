"""Start-up: which launcher started this process, and the transport that follows from it.

`detect` is pure: environment in, a `Launch` out, one clear ValueError if the environment contradicts itself. `init`
acts on it. The variables of launchers are read here.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from .hierarchy import Seen, decide, hierarchical
from .messages import gather_bytes
from .open_files import may_open
from .transports.arrivals import Arrival
from .transports.base import PeerError, Transport
from .transports.composite import Composite
from .transports.edge import ANSWER_S, DIAGNOSIS_S, reason
from .transports.hanging import call_within
from .transports.rendezvous import Rendezvous
from .transports.simulated import SimTransport

if TYPE_CHECKING:
    from .transports.mpi import MpiTransport
    from .transports.torch_distributed import TorchTransport

_log = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl", "mpi")

_SINGLE = "a single process"

_FILES = 64  # that a process has open besides its connections, with room
_REASON = 300
"""Characters of its error that a rank tells the others."""

_AT_EXIT_S = 10.0
"""How long a rank that ends without close() waits for the others to do the same."""


@dataclass(frozen=True)
class Launch:
    """What the launcher's variables tell about this process. None: they do not tell."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    has_agent_store: bool = False
    """Whether the launcher itself hosts the store at the master's address."""

    @property
    def is_mpi(self) -> bool:
        return self.launcher in _MPI_VARIABLES


# launcher: (rank, world size, local rank, local size). The first one found is taken: MVAPICH2 also sets PMI_*.
_MPI_VARIABLES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH2": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def detect(env: Mapping[str, str]) -> Launch:
    """Which launcher started a process with this environment, and as which rank.

    torchrun counts first: it is the innermost launcher. Then MPI, then Slurm's srun, then plain RANK and WORLD_SIZE; if
    these two are set, they must agree with MPI and srun. Without LOCAL_RANK, the rank is used in its place.

    Raises:
        ValueError: The environment contradicts itself.
    """
    torch_launch = _from_torch(env)
    if torch_launch is not None and "TORCHELASTIC_RUN_ID" in env:
        return torch_launch
    other = _from_mpi(env) or _from_slurm(env)
    if torch_launch is None:
        return other or Launch(_SINGLE, 0, 1, 0, 1)
    if other is None:
        return torch_launch
    if (torch_launch.rank, torch_launch.world_size) != (other.rank, other.world_size):
        raise ValueError(
            f"RANK={torch_launch.rank} WORLD_SIZE={torch_launch.world_size}, but {other.launcher} started this process "
            f"as rank {other.rank} of {other.world_size}; unset RANK and WORLD_SIZE, or start without {other.launcher}"
        )
    return other


def _from_torch(env: Mapping[str, str]) -> Launch | None:
    found = _ranks(env, _TORCH_VARIABLES)
    if found is None:
        return None
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "the environment (RANK, WORLD_SIZE)"
    return Launch(launcher, *found, *_master(env), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _from_mpi(env: Mapping[str, str]) -> Launch | None:
    for launcher, names in _MPI_VARIABLES.items():
        if names[0] == "PMI_RANK" and _is_srun_step(env) and names[2] not in env:
            continue  # srun --mpi=pmi2 sets PMI_RANK for its own tasks; Hydra, which srun may start, sets all four
        found = _ranks(env, names)
        if found is not None:
            return Launch(launcher, *found, *_master(env))
    return None


def _from_slurm(env: Mapping[str, str]) -> Launch | None:
    """srun's tasks only: the shell of sbatch or salloc has SLURM_PROCID and SLURM_NTASKS too, but runs once."""
    if "SLURM_PROCID" not in env or not _is_srun_step(env):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    found = _ranks(env, ("SLURM_PROCID", size_name, "SLURM_LOCALID", ""))
    assert found is not None  # SLURM_PROCID is there
    rank, world_size, local_rank, _ = found
    local_size = _slurm_local_size(env)
    addr, port = _master(env)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if addr is None and nodes:
        addr = first_host(nodes)
    if port is None and "SLURM_JOB_ID" in env:
        # Below the ephemeral ports (32768 and up); another one for each step of a job.
        port = 10000 + (16 * _integer(env, "SLURM_JOB_ID") + _integer(env, "SLURM_STEP_ID")) % 20000
    return Launch("Slurm", rank, world_size, local_rank, local_size, addr, port)


def _is_srun_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    # Steps that are not srun's have names, or numbers from 0xfffffff0 on (batch script, extern, interactive shell).
    return step.isdecimal() and int(step) < 0xFFFFFFF0


def _slurm_local_size(env: Mapping[str, str]) -> int | None:
    """Tasks on this node, from SLURM_STEP_TASKS_PER_NODE ("2(x3),1": two on each of three nodes, then one)."""
    per_node: list[int] = []
    for group in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group.strip())
        if match is None:
            return None
        per_node += [int(match[1])] * int(match[2] or 1)
    node = env.get("SLURM_NODEID", "")
    return per_node[int(node)] if node.isdecimal() and int(node) < len(per_node) else None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "node[03-07,9],gpu1" → "node03", "a[1-2]b[5-6]" → "a1b5"."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes.strip())
    if first is None or "[]" in first[0]:
        raise ValueError(f"cannot read the Slurm node list {nodes!r}; set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^\]]*)\]", lambda brackets: re.split("[,-]", brackets[1])[0], first[0])


def _ranks(env: Mapping[str, str], names: tuple[str, str, str, str]) -> tuple[int, int, int, int | None] | None:
    """(rank, world size, local rank, local size) from these variables. None if neither of the first two is set."""
    rank_name, size_name, local_rank_name, local_size_name = names
    if rank_name not in env and size_name not in env:
        return None
    for present, absent in ((rank_name, size_name), (size_name, rank_name)):
        if absent not in env:
            raise ValueError(
                f"{present}={env[present]} is set, {absent} is not; set both, or neither (a single process)"
            )
    rank, world_size = _integer(env, rank_name), _integer(env, size_name)
    local_rank = _integer(env, local_rank_name) if local_rank_name in env else rank
    local_size = _integer(env, local_size_name) if local_size_name in env else None
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{rank_name}={rank} is not a rank of {size_name}={world_size}: ranks are 0 to size-1; correct the one "
            "that is wrong"
        )
    if local_size is not None and not 0 <= local_rank < local_size <= world_size:
        raise ValueError(
            f"{local_rank_name}={local_rank}, {local_size_name}={local_size} and {size_name}={world_size} contradict "
            "each other; correct the one that is wrong"
        )
    return rank, world_size, local_rank, local_size


def _master(env: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    if port is not None and not 0 <= port < 65536:
        raise ValueError(f"MASTER_PORT={port} is no port: set it to one below 65536, the same on all ranks")
    return env.get("MASTER_ADDR"), port


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is not an integer; set it to one, or unset it") from None


def local_rank() -> int:
    """This process's number on its host: the index of the device it should use, modulo the number of devices."""
    return detect(os.environ).local_rank


def init(
    backend: str | None = None,
    timeout_s: float = 300.0,
    *,
    levels: int | str = "auto",
    hops: int | str = "auto",
    launch: Launch | None = None,
) -> Transport:
    """Connect this rank to the others. All ranks call it once, before anything else that communicates.

    A process group that is already initialised is used as it is. Otherwise torchrun, srun and a plain RANK/WORLD_SIZE
    give NCCL if there is CUDA, else Gloo. mpirun gives NCCL if there is CUDA (bootstrapped over MPI), else MPI. One
    process alone gets a `SimTransport` of one rank.

    With NCCL this sets the current CUDA device to local rank modulo the number of devices. At exit it closes the
    transport if `close()` was not called. An exception that ends this rank ends the MPI job, or breaks off the group:
    no rank waits for a dead one.

    Args:
        backend: "gloo", "nccl" or "mpi". Default None: chosen as above.
        timeout_s: Seconds to wait for the other ranks, here and in every later operation. Default 300.
        levels: Ranks per node, an int, for a `HierarchicalTransport`; 1 for a flat one. Default "auto": two levels if
            every node has the same number of ranks, two or more, by the launcher's variables and the host names;
            otherwise flat, and rank 0 logs the reason unless it is obvious.
        hops: 2: exchanges between nodes go through rows and columns, with 2·√H messages for H nodes instead of H, and
            half as many bytes again; 1: each rank sends to all others. Default "auto": 2 from `hops.FROM` nodes on.
        launch: What `detect` has found, if the caller has asked it already. Default None: asked here.

    Returns:
        This rank's `Transport`.

    Raises:
        ValueError: An argument is out of its range, the environment contradicts itself, levels does not divide the
            number of ranks, or hops is 2 for a prime number of nodes.
        ImportError: MPI was asked for, and mpi4py is not installed.
        PeerError: Ranks did not come, or cannot connect to each other, within timeout_s.
    """
    if levels != "auto" and not (isinstance(levels, int) and levels > 0):
        raise ValueError(f'levels must be "auto" or a number of ranks per node, got {levels!r}')
    if hops not in (1, 2, "auto"):
        raise ValueError(f'hops must be 1, 2 or "auto", got {hops!r}')
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _in_hierarchy(_on_existing_group(backend, timeout_s), levels, hops)
    launch = detect(os.environ) if launch is None else launch
    if launch.launcher == _SINGLE and (tasks := os.environ.get("SLURM_NTASKS", "1")) != "1":
        _log.warning("this process trains alone, in a Slurm job of %s tasks: start it with srun or torchrun", tasks)
    if backend is None and launch.launcher == _SINGLE:
        return _in_hierarchy(SimTransport(), levels, hops)
    transport = _start(launch, backend or _default_backend(launch), timeout_s)
    _tie_to_process(transport, launch)
    leveled = _in_hierarchy(transport, levels, hops)
    if isinstance(leveled, Composite):
        _tie_to_process(leveled, launch)
    if transport.rank == 0:
        _log.info("%s", describe(leveled, launch))
    return leveled


def describe(transport: Transport, launch: Launch | None = None) -> str:
    """One line: how many ranks, who started them, what moves their bytes."""
    launch = detect(os.environ) if launch is None else launch
    ranks = f"{transport.world_size} rank{'s' * (transport.world_size > 1)}"
    return f"{ranks} by {launch.launcher}, transport {transport.describe()}"


def _in_hierarchy(transport: Transport, levels: int | str, hops: int | str) -> Transport:
    """The transport itself, or one with two levels or hops; the same choice on all ranks. Sends 56 bytes to each."""
    if transport.world_size == 1:
        return hierarchical(transport, 1 if levels == "auto" else int(levels), hops)
    mine = [0 if asked == "auto" else asked for asked in (levels, hops)]
    every = gather_bytes(transport, struct.pack("<32sqqq", *_seen_here(transport), *mine))
    hosts, sizes, *asked = zip(*(struct.unpack("<32sqqq", row) for row in every), strict=True)
    for name, column in zip(("levels", "hops"), asked, strict=True):
        if len(set(column)) > 1:
            raise ValueError(
                f"rank {transport.rank}: {name} differ between ranks: {column} (0: auto); give all the same"
            )
    if levels == "auto":
        levels, why = decide([Seen(host.hex(), size or None) for host, size in zip(hosts, sizes, strict=True)])
        if why and transport.rank == 0:
            _log.info("one level between %d ranks: %s; init(levels=L) makes two", transport.world_size, why)
    return hierarchical(transport, int(levels), hops)


def _seen_here(transport: Transport) -> tuple[bytes, int]:
    """A digest of the host's name, and its number of ranks by the launcher; 0: unknown, or about another world."""
    try:
        launch = detect(os.environ)
    except ValueError:  # the caller made the process group: the variables need not describe it
        launch = Launch("unknown", 0, 0, 0)
    fits = (launch.rank, launch.world_size) == (transport.rank, transport.world_size)
    return hashlib.sha256(socket.gethostname().encode()).digest(), (launch.local_size or 0) if fits else 0


def _default_backend(launch: Launch) -> str:
    if torch.cuda.is_available():
        return "nccl"
    return "mpi" if launch.is_mpi else "gloo"


def _start(launch: Launch, backend: str, timeout_s: float) -> MpiTransport | TorchTransport:
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError('backend "nccl" needs CUDA, and torch.cuda.is_available() is False; use backend="gloo"')
    _allow_connections(launch)
    try:
        return _on_mpi(launch, timeout_s) if backend == "mpi" else _on_new_group(launch, backend, timeout_s)
    except PeerError:
        if launch.is_mpi or backend == "mpi":  # srun starts MPI's ranks, too
            from .transports.mpi import abort

            atexit.register(abort)  # MPI_Finalize would wait for those that have not come
        raise


def _allow_connections(launch: Launch) -> None:
    """Let this process open a connection to every other one, as Gloo and MPI do. Warn on rank 0 if it may not."""
    needed = launch.world_size + _FILES
    most = may_open(needed)
    if launch.rank == 0 and most < needed:
        _log.warning(
            "%d ranks are connected each to each, and a process may have %d open files here at most: raise the limit "
            "on all hosts (ulimit -Hn %d), or connecting may fail",
            launch.world_size,
            most,
            2 * needed,
        )


def _on_existing_group(backend: str | None, timeout_s: float) -> TorchTransport:
    from .transports.torch_distributed import TorchTransport

    present = torch.distributed.get_backend_config()
    if backend is not None and f":{backend}" not in present:
        raise ValueError(
            f'backend "{backend}" was asked for, but torch.distributed is already initialised with {present}; '
            "pass backend=None to use that, or call onebit.comm.init() before init_process_group"
        )
    return TorchTransport(None, timeout_s)


def _on_mpi(launch: Launch, timeout_s: float) -> MpiTransport:
    from .transports.mpi import MpiTransport

    transport = MpiTransport(None, timeout_s)
    _check_same_world(launch, transport.rank, transport.world_size)
    return transport


def _check_same_world(launch: Launch, mpi_rank: int, mpi_world_size: int) -> None:
    if (launch.rank, launch.world_size) != (mpi_rank, mpi_world_size):
        raise ValueError(
            f"{launch.launcher} started this process as rank {launch.rank} of {launch.world_size}, but MPI says rank "
            f"{mpi_rank} of {mpi_world_size}: mpi4py uses another MPI library than the launcher's; use the mpirun of "
            "the library that `python -m mpi4py --mpi-lib-version` shows"
        )


def _on_new_group(launch: Launch, backend: str, timeout_s: float) -> TorchTransport:
    from .transports.torch_distributed import TorchTransport

    device = None
    if backend == "nccl":
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rendezvous, store = _meet(launch, timeout_s)
    connect = partial(
        torch.distributed.init_process_group,
        backend,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
        store=store,
    )
    try:
        if backend == "gloo":
            # If a peer dies while connecting, Gloo can wait for ever.
            call_within(timeout_s + ANSWER_S, connect, getattr(store, "port", launch.master_port))
            # The script may use the group, too. When its timeout passes, Gloo closes all connections, so ours must
            # pass first: only then can the ranks still find out who is missing.
            set_group_timeout(timeout_s + DIAGNOSIS_S)
        else:
            connect()
    except (RuntimeError, TimeoutError) as error:
        if rendezvous is None:
            why = f"the ranks do not all connect to each other ({reason(error)})"
            raise PeerError(
                f"rank {launch.rank} of {launch.world_size}: {why}; look for the first rank with an error"
            ) from error
        raise rendezvous.explain(reason(error)) from error
    return TorchTransport(None, timeout_s, owns_group=True, store_host=None if launch.has_agent_store else 0)


def set_group_timeout(timeout_s: float) -> None:
    """Set the timeout of the default group's operations from now on."""
    group = torch.distributed.group.WORLD
    assert group is not None
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_s))


def _meet(launch: Launch, timeout_s: float) -> tuple[Rendezvous | None, torch.distributed.Store]:
    """The store in which the ranks of a new group find each other, once all of them have come."""
    if launch.world_size == 1:
        return None, torch.distributed.HashStore()
    if launch.is_mpi:
        return None, _store_found_by_mpi(launch, timeout_s)
    if launch.master_addr is None or launch.master_port is None:
        raise ValueError(
            f"{launch.world_size} ranks by {launch.launcher}, but no rendezvous: set MASTER_ADDR to the host of rank 0 "
            "and MASTER_PORT to a free port there"
        )
    me, address = Arrival.here(launch.rank, launch.world_size), (launch.master_addr, launch.master_port)
    rendezvous = Rendezvous(me, address, timeout_s, is_hosted=launch.has_agent_store)
    return rendezvous, rendezvous.meet()


def _store_found_by_mpi(launch: Launch, timeout_s: float) -> torch.distributed.Store:
    """Rank 0 opens a store on a free port and tells the others its address over MPI."""
    from .transports.mpi import import_mpi, meet

    comm = import_mpi().COMM_WORLD
    _check_same_world(launch, comm.Get_rank(), comm.Get_size())
    meet(comm, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    if launch.rank == 0:
        host = launch.master_addr or ("127.0.0.1" if launch.local_size == launch.world_size else socket.gethostname())
        store = torch.distributed.TCPStore(host, 0, launch.world_size, True, timeout, wait_for_workers=False)
        comm.bcast((host, store.port))
        return store
    host, port = comm.bcast(None)
    return torch.distributed.TCPStore(host, port, launch.world_size, False, timeout, wait_for_workers=False)


def _tie_to_process(transport: MpiTransport | TorchTransport | Composite, launch: Launch) -> None:
    """Close at exit; abandon on an uncaught exception, after its traceback. Until its release."""
    report, process, tied = sys.excepthook, os.getpid(), [transport]

    def end(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        report(kind, error, where)
        if os.getpid() != process:
            return  # a forked child's end is not this rank's
        for held in tied[:]:
            _explain(held, error)
            sys.stderr.flush()
            held.abandon(traceback.format_exception_only(kind, error)[0].split("\n")[0][:_REASON])
        _end_job(launch)

    def close() -> None:
        if os.getpid() != process:
            return
        for held in tied[:]:
            held.timeout_s = min(held.timeout_s, _AT_EXIT_S)
            try:
                held.end()
            except PeerError as error:
                _log.warning("at exit, without close(): %s", error)
            if held.has_failed:
                held.abandon()
                _end_job(launch)

    def untie() -> None:
        tied.clear()
        atexit.unregister(close)
        if sys.excepthook is end and not launch.is_mpi:  # an error still ends an MPI job
            sys.excepthook = report

    sys.excepthook = end
    atexit.register(close)
    transport.on_release(untie)


def _explain(transport: Transport, error: BaseException) -> None:
    """If an operation of torch itself on this group has failed (e.g. a barrier), log which ranks are missing."""
    try:
        with transport.naming_peers("an operation of torch's own"):
            raise error
    except PeerError as explained:
        if explained is not error:
            _log.error("%s", explained)
    except BaseException:
        pass  # not an error of the network


def _end_job(launch: Launch) -> None:
    """Under mpirun end the job, because MPI_Finalize would wait for the missing rank."""
    if launch.is_mpi:
        from .transports.mpi import abort

        abort()
