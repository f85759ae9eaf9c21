"""Sums over a replica whose parameters are cut over shards, over tensor ranks, over both, or held alike: simulated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from errors import error_of
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Cut

import onebit
from onebit.comm import SignCodec, SimTransport, run_ranks
from onebit.model_parallel import ModelParallelGroup

SHARD, TENSOR = 2, 3
WAYS = {
    "plain": None,
    "both": ((SHARD, TENSOR), ("shard", "tensor"), (Cut(0), Cut(1))),
    "shard alone": ((SHARD,), ("shard",), (Cut(0),)),
    "shard, held alike": ((SHARD, TENSOR), ("shard", "tensor"), (Cut(0), Replicate())),
    "tensor alone": ((TENSOR,), ("tensor",), (Cut(1),)),
    "alike": ((TENSOR,), ("tensor",), (Replicate(),)),
    "no names": ((SHARD, TENSOR), None, (Cut(0), Cut(1))),
    "shard, no names": ((SHARD,), None, (Cut(0),)),
}


def held(whole: Tensor, way: str, rank: int) -> Tensor:
    """What a rank holds of a tensor; as a DTensor's local elements, with what a DTensor says of itself."""
    here = {"shard": (rank // TENSOR, SHARD), "tensor": (rank % TENSOR, TENSOR)}
    said = WAYS[way]
    if said is None:
        return whole.clone()
    sizes, names, placements = said
    part = whole
    for axis, placement in zip(names or ("shard", "tensor"), placements, strict=False):
        if not placement.is_replicate():
            k, n = here[axis]
            part = part.chunk(n, placement.dim)[k]
    part = part.clone()
    part.device_mesh = SimpleNamespace(shape=sizes, mesh_dim_names=names, size=lambda: 6)  # type: ignore[attr-defined]
    part.placements = placements  # type: ignore[attr-defined]
    return part


def test_every_element_counts_once() -> None:
    """Norms of layers and sums over the model, against the whole tensors; the same bits on all ranks."""
    ways = ["both", "shard alone", "shard, held alike", "no names", "shard, no names"]
    wholes = [torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in range(len(ways))]

    def work(transport: SimTransport) -> tuple:
        shards = ModelParallelGroup(transport, tensor=TENSOR)
        params = [held(whole, way, transport.rank) for whole, way in zip(wholes, ways, strict=True)]
        for p, way in zip(params, ways, strict=True):
            shards.check_holds(p, way)
        norms = shards.norms(torch.stack([p.norm() for p in params]).unsqueeze(1), params)
        (total,) = shards.total(sum(float(p.double().square().sum()) / shards.copies(p) for p in params))
        return norms.flatten().tolist(), total

    found = run_ranks(SHARD * TENSOR, work)
    assert all(row == found[0] for row in found)
    assert found[0][0] == pytest.approx([float(whole.norm()) for whole in wholes], rel=1e-6)
    assert found[0][1] == pytest.approx(sum(float(whole.double().square().sum()) for whole in wholes), rel=1e-9)


def test_tied_parameters_of_two_stages_count_once() -> None:
    """Two stages, each with a layer of its own; both hold the tied one."""

    def work(transport: SimTransport) -> float:
        tied, own = torch.full((3,), 2.0), torch.full((2,), float(transport.rank))
        shards = ModelParallelGroup(SimTransport(), stages=transport, tied={tied: 2})
        (total,) = shards.total(sum(float(p.square().sum()) / shards.copies(p) for p in (tied, own)))
        return total

    assert run_ranks(2, work) == [12.0 + 2.0] * 2


@pytest.mark.parametrize(
    ("way", "tensor", "fits"),
    [
        ("both", TENSOR, True),
        ("shard alone", TENSOR, True),
        ("shard, held alike", TENSOR, True),
        ("no names", TENSOR, True),
        ("plain", TENSOR, False),
        ("alike", TENSOR, False),
        ("tensor alone", TENSOR, False),
        ("shard alone", 1, False),
        ("both", 1, False),
        ("no names", 1, True),
    ],
)
def test_what_the_ranks_do_not_hold_between_them_is_refused(way: str, tensor: int, fits: bool) -> None:
    def work(transport: SimTransport) -> str:
        group = ModelParallelGroup(transport, tensor=tensor)
        return error_of(ValueError, group.check_holds, held(torch.ones(4, 6), way, transport.rank), "p")

    for said in run_ranks(SHARD * TENSOR, work):
        assert (said == "") == fits
        assert fits or "the optimizer's shards are 6 ranks" in said


@pytest.mark.parametrize("way", ["plain", "tensor alone", "alike"])
def test_without_shards_tensor_ranks_hold_plain_parameters_alike(way: str) -> None:
    def work(transport: SimTransport) -> int:
        shards = ModelParallelGroup(transport, tensor=TENSOR)
        p = held(torch.ones(2, 6), way, transport.rank)
        shards.check_holds(p, "p")
        return shards.copies(p)

    assert run_ranks(TENSOR, work) == [1 if way == "tensor alone" else TENSOR] * TENSOR


def test_a_layer_has_a_momentum_if_any_of_its_shards_has() -> None:
    """LAMB's mean trust ratio, of a layer of which one shard has seen no gradient in warm-up: the same on both."""

    def work(transport: SimTransport) -> list[float]:
        p = torch.nn.Parameter(torch.ones(2, 64))
        for x in (p, grad := torch.full_like(p, float(transport.rank == 0))):
            x.device_mesh = SimpleNamespace(shape=(2,), mesh_dim_names=("shard",))  # type: ignore[attr-defined]
            x.placements = (Cut(0),)  # type: ignore[attr-defined]
        optimizer = onebit.OnebitLamb(
            [p],
            lr=0.01,
            freeze_step=2,
            transport=SimTransport(),
            model_parallel_group=transport,
            codec=SignCodec(64),
            compression="always",
        )
        for _ in range(3):
            p.grad = grad
            optimizer.step()
        return [float(optimizer.buckets[0].layers[name]) for name in ("ratio_total", "mean_ratio", "coeff")]

    first, second = run_ranks(2, work)
    assert first == second and first[0] > 0.0


def test_tensor_ranks_vote_on_what_they_hold_alike() -> None:
    """ModelParallelGroup differ, and so do parts; only what the ranks of one shard should hold alike may not."""
    whole = torch.arange(24.0).view(4, 6)

    def work(transport: SimTransport, bad: int = 4) -> list[str]:
        shards, said = ModelParallelGroup(transport, tensor=TENSOR), []
        ways = ["both", "shard alone", "shard, held alike"]
        for spoilt in (None, *ways):
            params = [held(whole, way, transport.rank) for way in ways]
            if spoilt is not None and transport.rank == bad:
                params[ways.index(spoilt)][0, 0] += 1.0
            said.append(shards.find_divergence(params, ways))
        return said

    for rank, said in enumerate(run_ranks(SHARD * TENSOR, work)):
        assert said[:2] == ["", ""]
        for way, text in zip(("shard alone", "shard, held alike"), said[2:], strict=True):
            expected = f"tensor rank 1 holds other values than tensor rank 0 in {way} (and 0 more)"
            assert text.startswith(expected) if rank >= TENSOR else text == ""
