"""One contract for every transport: simulated, Gloo, MPI. The real ones run in one set of processes per backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import transport_ranks
from ranks import Ended, run_mpi, run_torchrun
from transport_contract import CHECKS, digest_of_compressed_rounds

from onebit.comm import run_ranks
from onebit.comm.edge import check_all_gather, check_all_to_all, check_contiguous
from onebit.comm.mpi_transport import check_thread_level

WORLDS = [1, 2, 3, 4]
BACKENDS = [pytest.param(name, marks=pytest.mark.dist) for name in ("gloo", "mpi")]


@cache
def contract_run(backend: str) -> Ended:
    """Started by whichever test asks first; all later ones read it."""
    if backend == "gloo":
        return run_torchrun(4, transport_ranks.contract_over_gloo, WORLDS, timeout_s=60)
    return run_mpi(4, transport_ranks.contract_over_mpi, WORLDS, timeout_s=90)


def outcomes(backend: str, part: str, W: int = 4) -> list[dict[str, str]]:
    """What the first W ranks say about one part of the contract run."""
    ended = contract_run(backend)
    assert all(ended.results), ended.output
    return [result[part] for result in ended.results[:W]]


@pytest.mark.parametrize("W", WORLDS)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract_of_the_simulated_network(check: Callable, W: int) -> None:
    run_ranks(W, check, timeout_s=20.0)


@pytest.mark.parametrize("W", WORLDS)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_contract(backend: str, check: str, W: int) -> None:
    assert [outcome[check] for outcome in outcomes(backend, str(W), W)] == [""] * W


@pytest.mark.parametrize("W", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compressed_rounds_are_bitwise_those_of_the_simulated_network(backend: str, W: int) -> None:
    assert [outcome["digest"] for outcome in outcomes(backend, str(W), W)] == run_ranks(W, digest_of_compressed_rounds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_contract_run_ends_cleanly(backend: str) -> None:
    contract_run(backend).check()


@pytest.mark.dist
@pytest.mark.parametrize("check", CHECKS)
def test_contract_of_mpi_in_pieces(check: str) -> None:
    assert [outcome[check] for outcome in outcomes("mpi", "pieces")] == [""] * 4


@pytest.mark.dist
def test_init_picks_gloo_from_plain_variables() -> None:
    described = {result["description"] for result in contract_run("gloo").results}
    assert described == {
        "4 ranks by the environment (RANK, WORLD_SIZE), transport torch.distributed (gloo)",
    }


@pytest.mark.dist
def test_init_picks_mpi_under_mpirun_and_bootstraps_gloo_on_request() -> None:
    for result in contract_run("mpi").results:
        assert result["description"] == "4 ranks by Open MPI, transport MPI (host memory)"
        assert set(result["gloo"].values()) == {""}
        assert result["gloo descriptions"] == ["4 ranks by Open MPI, transport torch.distributed (gloo)"] * 2


@cache
def outlived(backend: str, fate: str) -> Ended:
    if backend == "gloo":
        return run_torchrun(4, transport_ranks.outlive_a_peer_on_gloo, fate, timeout_s=45)
    return run_mpi(3, transport_ranks.outlive_a_peer_on_mpi, fate, timeout_s=60)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("backend", "fate", "operation"),
    [("gloo", fate, operation) for fate in ("killed", "stopped") for operation in transport_ranks.OPERATIONS]
    + [("mpi", "stopped", operation) for operation in ("all_to_all", "all_reduce")],
)
def test_survivors_name_the_peer(backend: str, fate: str, operation: str) -> None:
    ended = outlived(backend, fate)
    for rank, result in enumerate(ended.results):
        if rank == transport_ranks.VICTIM:
            continue
        assert result, ended.output
        seen = result[operation]
        assert tuple(seen["ranks"]) == (transport_ranks.VICTIM,), seen
        assert f"rank {rank}: {operation}" in seen["message"]
        assert f"Missing: rank {transport_ranks.VICTIM}" in seen["message"]
        assert seen["seconds"] < transport_ranks.TIMEOUT_S + 4, seen


@pytest.mark.dist
@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_mpi_job_ends_when_a_rank_is(fate: str) -> None:
    """Killed: mpirun ends the others. Stopped: the survivors' uncaught PeerError does, by MPI_Abort."""
    ended = outlived("mpi", fate)
    assert ended.returncodes[0] > 0, ended.output
    assert "not over after" not in ended.output
    if fate == "stopped":
        assert "PeerError" in ended.output
        assert "MPI_ABORT" in ended.output


@pytest.mark.dist
def test_gloo_survivors_end_by_themselves() -> None:
    codes = outlived("gloo", "stopped").returncodes
    assert codes == (0, 0, -9, 0)


def test_edge_refuses_wrong_shapes_and_says_the_rank() -> None:
    rows_WB = torch.zeros(2, 6, dtype=torch.uint8)
    for refused in (
        lambda: check_all_to_all(1, 3, rows_WB, rows_WB),
        lambda: check_all_to_all(1, 2, rows_WB, rows_WB[:, :5]),
        lambda: check_all_to_all(1, 2, rows_WB[:, ::2], rows_WB[:, ::2]),
        lambda: check_all_to_all(1, 2, rows_WB, rows_WB.to(torch.int8)),
        lambda: check_all_gather(1, 3, rows_WB, rows_WB[0]),
        lambda: check_all_gather(1, 2, rows_WB, rows_WB),
        lambda: check_contiguous(1, "broadcast", rows_WB.t()),
    ):
        with pytest.raises(ValueError, match=r"^rank 1: "):
            refused()


def test_mpi_without_threads_is_refused() -> None:
    check_thread_level(2, 2)
    with pytest.raises(RuntimeError, match="MPI_Init_thread"):
        check_thread_level(1, 2)
