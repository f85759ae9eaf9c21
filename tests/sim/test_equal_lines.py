"""Ranks compare what they were given: one small message, and one error on all of them, whichever rank differs."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

import onebit
from onebit.agreement.replicas import differing, make_equal, unequal_lines
from onebit.comm import SimTransport, run_ranks

RANKS = 4


def test_only_ranks_of_a_stage_are_compared() -> None:
    def rank(transport: SimTransport) -> tuple[str, int]:
        stage = transport.rank // 2
        return unequal_lines(transport, "the lines", [f"a layer of stage {stage}"], stage=stage), transport.sent_bytes

    assert run_ranks(RANKS, rank) == [("", (RANKS - 1) * 32)] * RANKS


@pytest.mark.parametrize(("odd", "given"), [(1, ["first"]), (2, ["first", "last", "more"]), (3, ["first", "other"])])
def test_all_ranks_name_the_two_that_differ_and_their_line(odd: int, given: list[str]) -> None:
    def rank(transport: SimTransport) -> str:
        lines = given if transport.rank == odd else ["first", "last"]
        return unequal_lines(transport, "the lines", lines, stage=transport.rank // 2)

    entry = {1: "entry 1 is last on rank 0 and nothing on rank 1", 3: "entry 1 is last on rank 2 and other on rank 3"}
    expected = entry.get(odd, "entry 2 is more on rank 2 and nothing on rank 3")
    for number, text in enumerate(run_ranks(RANKS, rank)):
        assert text.startswith(f"rank {number}: the lines differ between ranks: {expected}; ")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_one_bit_of_one_tensor_is_found(dtype: torch.dtype) -> None:
    """Any of them. Modulo 2^64 an even factor loses the highest: the sign of a float64."""
    cases = [(k, bit) for k in range(3) for bit in range(8 * dtype.itemsize)]

    def rank(transport: SimTransport) -> list[dict[int, list[int]]]:
        found = []
        for k, bit in cases:
            tensors = [torch.arange(5).to(dtype) for _ in range(3)]
            tensors[k].view(torch.uint8)[2 * dtype.itemsize + bit // 8] ^= transport.rank << bit % 8
            found.append(differing(transport, tensors))
        return found

    assert run_ranks(2, rank) == [[{1: [k]} for k, _ in cases]] * 2


@pytest.mark.parametrize("odd", range(RANKS))
def test_the_same_values_in_another_order_are_refused(odd: int) -> None:
    """Layers of one shape, as a set has them. Equal ones may change places; other values are rank 0's afterwards."""

    def rank(transport: SimTransport) -> None:
        layers = [torch.zeros(3), torch.ones(3), torch.zeros(3), torch.arange(3.0)]
        make_equal(transport, [layers[k] for k in ((2, 1, 0, 3) if transport.rank == odd else (0, 1, 2, 3))])
        order = (0, 3, 2, 1) if transport.rank == odd else (0, 1, 2, 3)
        text = f"rank {transport.rank}: rank {odd or 1} has the parameters of rank 0 in another order: its entry 1 is"
        given, before = [layers[k] for k in order], [layers[k].clone() for k in order]
        with pytest.raises(ValueError, match=text):
            make_equal(transport, given)
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
        make_equal(transport, [x + transport.rank for x in given])
        with pytest.raises(ValueError, match=text):
            onebit.OnebitAdam([torch.nn.Parameter(x) for x in given], lr=1e-3, transport=transport)

    run_ranks(RANKS, rank)


@pytest.mark.parametrize("odd", range(RANKS))
@pytest.mark.parametrize("option", [{"lr": 0.5}, {"delay": 1}])
def test_all_parts_of_all_replicas_refuse_the_options_of_one_rank(odd: int, option: dict[str, float]) -> None:
    """The odd rank differs from its twin in the other replica, and from the other part of its own."""

    def rank(transport: SimTransport) -> None:
        here = transport.rank
        replicas = transport.split([here % 2, here % 2 + 2])
        parts = transport.split([here // 2 * 2, here // 2 * 2 + 1])
        options = {"lr": 0.1, "transport": replicas, "model_parallel_group": parts} | (option if here == odd else {})
        mesh = type("Mesh", (), {"mesh_dim_names": ("shard",), "shape": (2,), "size": lambda self: 2})()
        p = torch.nn.Parameter(torch.zeros(3))
        p.device_mesh, p.placements = mesh, (Shard(0),)  # as a DTensor describes itself
        with pytest.raises(ValueError, match=r"parameters differ between ranks: entry .* on rank 0 and .* on rank 1"):
            onebit.OnebitAdam([p], freeze_step=4, **options)

    run_ranks(RANKS, rank)
