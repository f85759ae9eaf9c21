"""DeepSpeed's `deepspeed.comm`: torch.distributed's collectives, started by `init_distributed`.

    onebit.zero.init_distributed()            # before anything that communicates; `initialize` does it, too
    onebit.zero.comm.get_rank()

The collectives are torch's own, between all ranks. What the engine sends goes over its grid (`grid.py`).
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter_tensor,
    scatter,
    send,
)

from ...comm import Transport, init
from ...comm.launch import detect, local_rank

__all__ = [
    "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "default_backend", "destroy_process_group", "gather",
    "get_local_rank", "get_rank", "get_world_size", "init_distributed", "irecv", "is_available", "is_initialized",
    "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter_tensor", "scatter", "send",
    "timeout_s",
]  # fmt: skip

log = logging.getLogger(__name__)

_MOST_WAITING = timedelta(minutes=30)  # DeepSpeed's
_DEFAULT_S = 300.0
_started: list[Transport] = []
_worlds: WeakKeyDictionary[object, Transport] = WeakKeyDictionary()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta = _MOST_WAITING,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed with the launcher's ranks; does nothing if it is running. All ranks.

    Args:
        dist_backend: "nccl" or "gloo". Default None: "nccl" if there is CUDA, else "gloo".
        auto_mpi_discovery: Without effect: mpirun is always detected.
        distributed_port: MASTER_PORT, if the launcher sets none. Default None.
        verbose: Without effect.
        timeout: Longest wait of an operation for a peer, also within the engine. Default 30 minutes.
        init_method: As in torch's init_process_group, instead of the launcher's. Default None.
        dist_init_required: False: torch.distributed must be running already. Default None.
        config: Without effect.
        rank: This rank, with init_method. Default -1: the launcher's.
        world_size: Number of ranks, with init_method. Default -1: the launcher's.

    Raises:
        ValueError: The backend is not available, or rank and world_size contradict the launcher.
        RuntimeError: torch.distributed must be running, and is not.
    """
    if torch.distributed.is_initialized():
        _warn_of_other_backend(dist_backend)
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required=False, but torch.distributed is not running; call "
            "torch.distributed.init_process_group first, or leave dist_init_required out"
        )
    backend = dist_backend or default_backend()
    if backend not in ("nccl", "gloo"):
        raise ValueError(f'dist_backend must be "nccl", "gloo" or None, got {dist_backend!r}')
    if init_method is not None:
        _check_backend(backend)
        torch.distributed.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
        )
        _started.append(init(None, timeout.total_seconds(), levels=1, hops=1))
        return
    if (rank, world_size) != (-1, -1):
        launch = detect(os.environ)
        if (rank, world_size) != (launch.rank, launch.world_size):
            raise ValueError(
                f"rank={rank}, world_size={world_size}, but {launch.launcher} started rank {launch.rank} of "
                f"{launch.world_size}; leave them out, or pass init_method= with them"
            )
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    _check_backend(backend)
    _started.append(init(backend, timeout.total_seconds(), levels=1, hops=1))


def world() -> Transport:
    """The connection between all ranks of torch.distributed, which is started if it is not running. All ranks."""
    init_distributed()
    group = torch.distributed.group.WORLD
    if group not in _worlds:
        _worlds[group] = init(None, timeout_s(), levels=1, hops=1)
    return _worlds[group]


def default_backend() -> str:
    """The default backend: "nccl" if there is CUDA, else "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def _check_backend(backend: str) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError(
            f'rank {detect(os.environ).rank}: dist_backend is "nccl" and there is no CUDA; pass dist_backend="gloo", '
            "or leave it out"
        )


def _warn_of_other_backend(asked: str | None) -> None:
    running = str(torch.distributed.get_backend_config())
    if asked is not None and asked not in running and get_rank() == 0:
        log.warning("dist_backend=%r has no effect: torch.distributed runs already, with %s", asked, running)


def timeout_s() -> float:
    """Seconds that an operation of the engine waits for a peer: `init_distributed`'s timeout, else 300."""
    return _started[-1].timeout_s if _started and is_initialized() else _DEFAULT_S


def get_local_rank() -> int:
    """This process's number on its host, from 0."""
    return local_rank()
