"""CUDA tensors over real transports: ranks that are processes on one GPU end in the bits of simulated ones.

NCCL takes ranks with an NCCL_HOSTID of their own for hosts: they share a GPU and talk by sockets. Gloo and MPI carry
CUDA tensors through host memory. No transport adds up floats here: frames travel, and the ranks add them up in order.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ranks
import torch

from gpu_check.checks import assert_same
from gpu_check.forms import FORMS, train
from gpu_check.section import Outcome, Setting, outcome
from onebit.comm import SignCodec

RANK, W = Path(__file__).with_name("rank.py"), 2
TRIED = ("OnebitAdam, clipped", "OnebitAdam, delay=1", "sharded Adam, stage 2, signs down", "local steps in one bit")
ENV = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "2", "OMP_NUM_THREADS": "1",
    "OMPI_MCA_plm_rsh_agent": "false",  # where there is no ssh, Open MPI 4 does not even start local ranks
}  # fmt: skip


def check(backend: str, form: str, setting: Setting) -> None:
    steps = max(12, setting.steps)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        words = (backend, setting.device.type, setting.block, steps, form, folder)
        start = ranks.run_mpi if backend == "mpi" else ranks.run_torchrun
        ended = start(W, RANK, *map(str, words), timeout_s=150.0, env=ENV)
        if any(ended.returncodes):
            raise RuntimeError(f"ranks over {backend} ended with {ended.returncodes}: {ended.output[-500:]}")
        found = [torch.load(Path(folder) / f"{r}.pt") for r in range(W)]
    assert_same(f"parameters of rank 1 against rank 0, over {backend}", found[1]["params"], found[0]["params"])
    simulated = train(FORMS[form], setting.device, torch.float32, SignCodec(setting.block), steps, W)
    for r, (params, _) in enumerate(simulated):
        assert_same(f"parameters of rank {r} over {backend} against simulated ranks'", found[r]["params"], params)


def transport_checks(setting: Setting) -> Iterator[Outcome]:
    for backend in ("gloo", "mpi", "nccl"):
        if backend == "nccl" and setting.is_rehearsal:
            continue
        if backend == "mpi" and (why := ranks.why_no_mpi()):
            yield Outcome(f"mpi is there ({why})", "" if setting.is_rehearsal else why)
            continue
        for form in TRIED[:1] if setting.is_rehearsal else TRIED:
            yield outcome(f"{backend}, {W} ranks: {form}", functools.partial(check, backend, form, setting))
