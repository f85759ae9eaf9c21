"""Local steps over Gloo and MPI: the bits of the simulated network, also across a kill."""

from __future__ import annotations

from typing import Any

import local_steps_ranks
import numpy as np
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
    results: Any = ended.results
    assert [hashes for hashes, _ in results] == [list(hashes) for hashes in zip(*simulated, strict=True)]
    assert 2 <= results[0][1] == results[1][1] <= 6  # measured here, and agreed on
    assert simulated[1] == simulated[2]


@pytest.mark.thorough
def test_shards_of_fsdp2_take_rounds_between_replicas() -> None:
    """As nodes whose ranks average gradients. A gradient that is not finite on one shard counts its replica out."""
    results: Any = run_torchrun(4, local_steps_ranks.shards_and_nodes, timeout_s=120).check().results
    for result in results:
        np.testing.assert_allclose(result["sharded"], result["nodes"], rtol=2e-4, atol=2e-5)
        np.testing.assert_array_equal(result["sharded"][5], results[0]["sharded"][5])  # behind a round
    first, other = results[0]["in one bit"], results[3]["in one bit"]
    assert [result["missed"] for result in results] == [0, 0, 1, 1]
    assert other[3] == other[4] and first[3] != first[4]
    assert other[2] == first[2] and other[5] == first[5]
