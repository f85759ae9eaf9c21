"""Local steps over Gloo and MPI: the bits of the simulated network, also across a kill."""

from __future__ import annotations

import local_steps_ranks
import pytest
from ranks import run_mpi, run_torchrun

from onebit.comm import run_ranks

CASES: list[dict[str, object]] = [{}, {"fragments": 2, "delay": 2}, {"resume_at": 6, "fragments": 2, "delay": 2}]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_same_bits_on_every_transport(backend: str) -> None:
    run = run_torchrun if backend == "gloo" else run_mpi
    ended = run(2, local_steps_ranks.train_here, CASES, timeout_s=120).check()
    simulated = [
        run_ranks(2, lambda transport, case=case: local_steps_ranks.train(transport, **case)) for case in CASES
    ]
    assert list(ended.results) == [list(hashes) for hashes in zip(*simulated, strict=True)]
    assert simulated[1] == simulated[2]
