"""One contract for every transport: simulated, Gloo, MPI. The real ones run in one set of processes per backend."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transport_ranks
from ranks import Ended, run_mpi, run_torchrun
from transport_contract import CHECKS, digest_of_compressed_rounds

from onebit import OnebitAdam, dense, zero
from onebit.comm import PeerError, SignCodec, SimNetwork, SimTransport, allreduce_mean, hierarchical, run_ranks
from onebit.comm.transports.edge import DIAGNOSIS_S, check_all_gather, check_all_to_all, check_contiguous, check_shift
from onebit.comm.transports.mpi import check_thread_level
from onebit.comm.transports.torch_distributed import TorchTransport

WORLDS = [1, 2, 3]
BACKENDS = ("gloo", "mpi")


@cache
def contract_run(backend: str) -> Ended:
    """Started by whichever test asks first; all later ones read it."""
    if backend == "gloo":
        return run_torchrun(3, transport_ranks.contract_over_gloo, WORLDS, timeout_s=60, as_python_ends=True)
    return run_mpi(3, transport_ranks.contract_over_mpi, WORLDS, timeout_s=90)


def outcomes(backend: str, part: str, W: int = 3) -> list[dict[str, str]]:
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


@pytest.mark.parametrize("check", CHECKS)
def test_contract_of_mpi_in_pieces(check: str) -> None:
    assert [outcome[check] for outcome in outcomes("mpi", "pieces")] == [""] * 3


def test_init_picks_gloo_from_plain_variables() -> None:
    described = {result["description"] for result in contract_run("gloo").results}
    assert described == {
        "3 ranks by the environment (RANK, WORLD_SIZE), transport torch.distributed (gloo)",
    }


def test_init_picks_mpi_under_mpirun_and_bootstraps_gloo_on_request() -> None:
    for result in contract_run("mpi").results:
        assert result["description"] == "3 ranks by Open MPI, transport MPI (host memory)"
        assert set(result["gloo"].values()) == {""}
        assert result["gloo descriptions"] == ["3 ranks by Open MPI, transport torch.distributed (gloo)"] * 2


@cache
def outlived(backend: str, fate: str) -> Ended:
    if backend == "gloo":
        return run_torchrun(4, transport_ranks.outlive_a_peer_on_gloo, fate, timeout_s=90, as_python_ends=True)
    return run_mpi(3, transport_ranks.outlive_a_peer_on_mpi, fate, timeout_s=90)


@pytest.mark.parametrize(
    ("backend", "fate", "operation"),
    [("gloo", "killed", operation) for operation in transport_ranks.OPERATIONS]
    + [
        pytest.param(backend, "stopped", operation, marks=pytest.mark.thorough)
        for backend, operations in (("gloo", transport_ranks.OPERATIONS), ("mpi", ("all_to_all", "all_reduce")))
        for operation in operations
    ],
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
        # Groups whose turn comes later have launched nothing for a while, which their errors say, too.
        verdicts = [f"{what}: rank {transport_ranks.VICTIM}" for what in ("Missing", "Ended meanwhile")]
        assert any(verdict in seen["message"] for verdict in verdicts), seen
        assert f"has failed before, in {operation}" in seen["again"], seen
        assert f" because of rank {transport_ranks.VICTIM}; end this process" in seen["again"], seen
        assert seen["seconds"] < transport_ranks.TIMEOUT_S + DIAGNOSIS_S, seen


def check_disagreement(name: str, rank: int, seen: dict[str, Any]) -> None:
    """Every rank says where it is and where the others are, in time; nobody has been served with the wrong bytes."""
    odd = transport_ranks.ODD
    assert seen["ranks"], seen
    assert set(seen["ranks"]) == {odd} if rank != odd else odd not in seen["ranks"], seen
    usual, other = {
        "kinds": ("all_to_all (operation 1, 1000000 bytes)", "all_gather (operation 1, 1000000 bytes)"),
        "larger": ("all_to_all (operation 1, 1000000 bytes)", "all_to_all (operation 1, 1000001 bytes)"),
        "smaller": ("all_gather (operation 1, 1000000 bytes)", "all_gather (operation 1, 999999 bytes)"),
        "larger sum": ("all_reduce (operation 1, 36 bytes)", "all_reduce (operation 1, 360 bytes)"),
        "sources": ("broadcast from rank 0 (operation 1, 36 bytes)", "broadcast from rank 1 (operation 1, 36 bytes)"),
        "larger news": (
            "broadcast from rank 0 (operation 1, 36 bytes)",
            "broadcast from rank 0 (operation 1, 32 bytes)",
        ),
        "closing": ("all_to_all (operation 1, 1000000 bytes)", "the barrier of close() (operation 1)"),
        "splitting": ("split 1 into ranks [", "all_to_all (operation 1, 1000000 bytes)"),
    }[name]
    mine, theirs = (other, usual) if rank == odd else (usual, other)
    assert seen["message"].startswith(f"rank {rank}: {mine}"), seen
    how = "Waiting elsewhere: rank " if name == "splitting" else "launched different operations: rank "
    assert how in seen["message"] and theirs in seen["message"], seen
    assert seen["seconds"] < transport_ranks.TIMEOUT_S + DIAGNOSIS_S, seen


@pytest.mark.parametrize(
    ("backend", "name"),
    [("gloo", name) for name in transport_ranks.DISAGREEMENTS if name != "late"]
    + [("mpi", name) for name in transport_ranks.DISAGREEMENTS_OVER_MPI],
)
def test_ranks_that_launch_different_operations_are_told(backend: str, name: str) -> None:
    """Not SIGABRT, not a wrong result: Gloo takes a short message for a whole one, and aborts at a long one."""
    ended = outlived(backend, "stopped")
    for rank, result in enumerate(ended.results):
        if rank != transport_ranks.VICTIM:
            assert result, ended.output
            check_disagreement(name, rank, result[name])


@pytest.mark.parametrize(
    "name", [name for name in transport_ranks.DISAGREEMENTS if name not in ("late", "closing", "splitting")]
)
def test_simulated_ranks_that_launch_different_operations_are_told(name: str) -> None:
    for rank, seen in enumerate(run_ranks(3, lambda transport: transport_ranks.disagree(transport, name))):
        check_disagreement(name, rank, seen)


def test_a_late_simulated_rank_is_named_and_not_one_that_came_meanwhile() -> None:
    network = SimNetwork(3, timeout_s=1.0)
    comes = threading.Timer(0.2, lambda: SimTransport(network, 1).all_reduce(torch.ones(1)))
    comes.start()
    with pytest.raises(PeerError, match=r"nothing from rank \[2\] for 1.0 s"):
        SimTransport(network, 0).all_reduce(torch.ones(1)).wait()
    comes.join()


def test_a_rank_in_a_barrier_of_torch_and_one_in_an_exchange_name_each_other() -> None:
    """Not after a minute: torch's operation ends with ours, and a line behind its traceback says who is where."""
    ended = run_torchrun(2, transport_ranks.end_unlike_the_others, "waits", timeout_s=30, as_python_ends=True)
    assert ended.returncodes == (1, 1)
    torchs, ours = "an operation of torch's own (operation 2)", "all_to_all (operation 2, 1000000 bytes)"
    assert re.search(rf"^rank 0: {re.escape(torchs)}: .* rank 1 {re.escape(ours)}", ended.output, re.M), ended.output
    assert re.search(rf"PeerError: rank 1: {re.escape(ours)}: .* rank 0 {re.escape(torchs)}", ended.output), (
        ended.output
    )


def test_survivors_of_rank_0_print_no_stack_of_cplusplus() -> None:
    """The store dies with it, of which torch would tell in twenty lines before the one that helps."""
    env = {"TORCH_CPP_LOG_LEVEL": "WARNING"}
    ended = run_torchrun(3, transport_ranks.end_unlike_the_others, "dies", timeout_s=30, env=env, as_python_ends=True)
    assert ended.returncodes == (17, 1, 1)
    assert ended.output.count("Missing: rank 0; look at its log") == 2, ended.output
    assert "frame #" not in ended.output and "Exception raised from" not in ended.output, ended.output


def test_who_comes_too_late_is_told_so() -> None:
    """The others name it; it learns that they have given up, not that they are missing. MPI has kept what they sent."""
    results = outlived("gloo", "stopped").results
    odd = transport_ranks.ODD
    assert f"Missing: rank {odd}" in results[0]["late"]["message"]
    assert "This rank came too late: rank" in results[odd]["late"]["message"]


PROMISED_S = 5.0
"""docs/reliability.md: the error comes within timeout_s and so much more."""


@pytest.mark.timeout(90)
def test_a_stopped_host_of_the_store_is_named_in_time() -> None:
    ended = run_torchrun(3, transport_ranks.lose_a_peer, "stopped", timeout_s=60)
    for result in ended.results[1:]:
        assert result, ended.output
        first = result["first"]
        assert tuple(first["ranks"]) == (0,) and "Missing: rank 0" in first["message"], first
        assert first["seconds"] < transport_ranks.TIMEOUT_S + PROMISED_S, first


@pytest.mark.timeout(90)
def test_a_killed_rank_is_missed_at_once_whatever_its_children_hold() -> None:
    """Workers that read for seconds, a fork, and a program in the background all outlive it."""
    ended = run_torchrun(3, transport_ranks.lose_a_peer, "killed with workers", timeout_s=60)
    for result in ended.results[1:]:
        assert result, ended.output
        first = result["first"]
        assert tuple(first["ranks"]) == (0,) and first["seconds"] < PROMISED_S, first


@pytest.mark.timeout(90)
def test_who_comes_when_the_others_have_exited_is_told_so() -> None:
    late = run_torchrun(3, transport_ranks.lose_a_peer, "late", timeout_s=60).results[1]["first"]
    assert "too late" in late["message"] and "launched nothing for " in late["message"], late


@pytest.mark.timeout(90)
def test_the_others_learn_the_error_that_ended_a_rank() -> None:
    ended = run_torchrun(3, transport_ranks.lose_a_peer, "raises", timeout_s=60, as_python_ends=True)
    assert ended.returncodes == (0, 1, 0), ended.output
    for rank in (0, 2):
        first, second = ended.results[rank]["first"], ended.results[rank]["second"]
        assert "Ended: rank 1 by FileNotFoundError: no shard_7.bin" in first["message"], first
        assert "network interface" not in first["message"]
        assert tuple(first["ranks"]) == (1,) and first["seconds"] < PROMISED_S
        assert tuple(second["ranks"]) == (1,) and "has failed before, in all_to_all" in second["message"]
        assert second["seconds"] < 0.5


@pytest.mark.timeout(90)
def test_the_end_of_a_forked_child_is_not_its_ranks_end() -> None:
    ended = run_torchrun(2, transport_ranks.fork_a_child_that_exits, timeout_s=60, as_python_ends=True).check()
    assert ended.results == ([2.0, 2.0, 2.0],) * 2, ended.output


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_mpi_job_ends_when_a_rank_is(fate: str) -> None:
    """Killed: mpirun ends the others. Stopped: the survivors' uncaught PeerError does, by MPI_Abort."""
    ended = outlived("mpi", fate)
    assert ended.returncodes[0] > 0, ended.output
    assert "not over after" not in ended.output
    if fate == "stopped":
        assert "PeerError" in ended.output
        assert "MPI_ABORT" in ended.output


def test_gloo_survivors_end_by_themselves() -> None:
    codes = outlived("gloo", "stopped").returncodes
    assert codes == (0, 0, -9, 0)


@pytest.mark.parametrize(
    ("backends", "reached"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, {"cpu"}),
        ({"cuda": "nccl"}, {"cuda"}),
        ({"cpu": "gloo", "cuda": "nccl"}, {"cpu", "cuda"}),
        ({"cpu": "gloo"}, {"cpu"}),
    ],
)
def test_a_group_sends_from_the_devices_that_its_backends_serve(backends: dict[str, str], reached: set[str]) -> None:
    transport = object.__new__(TorchTransport)
    transport._backends = backends
    assert {name for name in ("cpu", "cuda") if transport.reaches(torch.device(name))} == reached


def test_edge_refuses_wrong_shapes_and_says_the_rank() -> None:
    rows_WB = torch.zeros(2, 6, dtype=torch.uint8)
    for refused in (
        lambda: check_all_to_all(1, 3, rows_WB, rows_WB),
        lambda: check_all_to_all(1, 2, rows_WB, rows_WB[:, :5]),
        lambda: check_all_to_all(1, 2, rows_WB[:, ::2], rows_WB[:, ::2]),
        lambda: check_all_to_all(1, 2, rows_WB, rows_WB.to(torch.int8)),
        lambda: check_all_gather(1, 3, rows_WB, rows_WB[0]),
        lambda: check_all_gather(1, 2, rows_WB, rows_WB),
        lambda: check_shift(1, 2, rows_WB[0], rows_WB[0, :5], 0),
        lambda: check_shift(1, 2, rows_WB, rows_WB, 1),
        lambda: check_shift(1, 2, rows_WB[0], rows_WB[0].to(torch.int8), 1),
        lambda: check_shift(1, 2, rows_WB[0], rows_WB[1], 2),
        lambda: check_contiguous(1, "broadcast", rows_WB.t()),
    ):
        with pytest.raises(ValueError, match=r"^rank 1: "):
            refused()


def test_mpi_without_threads_is_refused() -> None:
    check_thread_level(2, 2)
    with pytest.raises(RuntimeError, match="MPI_Init_thread"):
        check_thread_level(1, 2)


@pytest.mark.parametrize("transport", ["gloo", None, 4])
def test_what_is_no_transport_is_refused_by_name(transport: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(4))]
    makers: list[Callable[[], object]] = [
        lambda: hierarchical(transport, 2),
        lambda: allreduce_mean(torch.zeros(64), None, SignCodec(block=64), transport),
    ]
    if transport is not None:
        makers += [
            lambda: dense.DenseAverager(params, transport),
            lambda: dense.broadcast_parameters(params, transport),
        ]
        makers += [
            lambda: OnebitAdam(params, transport=transport),
            lambda: zero.ShardedOnebitAdam(params, transport=transport),
        ]
    for make in makers:
        said = rf"transport must be a transport, got {transport!r}; make one with onebit\.comm\.init\("
        with pytest.raises(TypeError, match=said + ("backend='gloo'" if transport == "gloo" else "")):
            make()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("makes_group", [True, False])
def test_a_group_that_the_script_destroys_is_gone(makes_group: bool) -> None:
    """Its threads would come back while Python ends, which aborts the process."""
    for closes in (False, True):
        life = (transport_ranks.short_life, makes_group, closes)
        assert run_torchrun(3, *life, timeout_s=50, as_python_ends=True).check().results == ([], [], [])


@pytest.mark.timeout(60)
def test_the_last_of_a_groups_transports_ends_it() -> None:
    """Whichever is closed first; and a script's end, if one of them is not closed."""
    for first_ends, second_ends, is_left in (
        (True, "by close()", False),
        (False, "by close()", True),
        (True, "with the process", True),
        (True, "on odd ranks", True),
    ):
        ended = run_torchrun(
            3, transport_ranks.lives_of_one_group, first_ends, second_ends, timeout_s=50, as_python_ends=True
        )
        assert ended.check().results == ([is_left, is_left],) * 3
        assert "at exit" not in ended.output


@pytest.mark.timeout(60)
def test_a_reference_to_an_ended_group_does_no_harm() -> None:
    """At the script's end, where rank 0 would wait for the others once more."""
    ended = run_torchrun(2, transport_ranks.group_kept_by_a_reference, timeout_s=50, as_python_ends=True)
    assert ended.check().results == (True, True)
    assert "atexit" not in ended.output and "at exit" not in ended.output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("closes", [False, True])
def test_an_error_reaches_ranks_with_further_transports_of_the_group(closes: bool) -> None:
    """At once, although the transport that made the group is closed."""
    ended = run_torchrun(2, transport_ranks.error_beside_a_closed_transport, closes, timeout_s=50, as_python_ends=True)
    assert ended.results[0] is not None and ended.results[0] < 5.0
    assert "atexit" not in ended.output, ended.output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("levels", [1, 2])
def test_nothing_is_left_of_transports_one_after_another(levels: int) -> None:
    ended = run_torchrun(4, transport_ranks.lives_one_after_another, levels, timeout_s=50, as_python_ends=True)
    assert ended.check().results == ({"left": 0, "hook": "torch.distributed.distributed_c10d", "more files": 0},) * 4


@pytest.mark.timeout(60)
def test_closed_engines_leave_no_files_open() -> None:
    """Of process groups that they have made: torch's meshes, of which it keeps some, kept 20 with each."""
    ended = run_torchrun(2, transport_ranks.engines_one_after_another, timeout_s=50, as_python_ends=True)
    for opened in ended.check().results:
        assert len(set(opened)) == 1, opened


@pytest.mark.timeout(60)
def test_engines_do_not_take_the_groups_of_closed_ones() -> None:
    """torch's caches of DTensor have meshes, and take two of one layout for the same, whatever their groups."""
    run_torchrun(2, transport_ranks.engines_after_others, timeout_s=50, as_python_ends=True).check()


@pytest.mark.timeout(60)
def test_closed_transports_leave_no_files_open() -> None:
    """Of a process group that the script has made, and keeps."""
    for opened in run_torchrun(2, transport_ranks.closed_parts_of_a_scripts_group, timeout_s=50).check().results:
        assert opened[-1] <= opened[0] + 2  # each transport kept 10


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_short_lives_under_mpirun_end_cleanly() -> None:
    """By MPI's launcher as well, of ranks that do not close their transport; test_launch.py has torchrun's agent."""
    run_mpi(2, transport_ranks.short_life, False, False, as_python_ends=True).check()
