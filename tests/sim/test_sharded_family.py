"""What holds of every leaf of the sharded family: stage 2, skipping, degenerate sizes, checkpoints."""

from __future__ import annotations

import pytest
import torch
from family import same
from sharded_ranks import initial, new, state_of, take_steps, values
from test_sharded import FORMS
from test_sharded_overlap import backward
from torch import Tensor

from onebit.comm import SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

CAP = 1100 * 4 / 2**20
CYCLES = {"local_step_scaler": 2, "local_step_clipper": 4, "warmup_steps": 2}  # synchronises in steps 0, 1, 3, 7, 11
LEAVES = {
    "lamb": (ShardedOnebitLamb, {"weight_decay": 0.1, "warmup_steps": 3}),
    "zero-one": (ShardedZeroOneAdam, CYCLES),
}


@pytest.mark.parametrize("leaf", ["adam", *LEAVES])
def test_stage_2_is_stage_1_to_the_bit_and_frees_gradients_in_backward(leaf: str) -> None:
    """Also in steps that send nothing; of two passes each, the first in no_sync()."""
    kind, own = ({"adam": (ShardedOnebitAdam, {"warmup_steps": 4})} | LEAVES)[leaf]

    def work(transport: SimTransport, stage: int) -> tuple[Tensor, list[Tensor], list[bool]]:
        params = initial(sizes=(600, 7, 900))
        optimizer = kind(params, transport=transport, lr=1e-2, stage=stage, bucket_cap_mb=600 * 4 / 2**20, **own)
        assert len(optimizer.buckets) > 1
        freed = []
        for step in range(9):
            with optimizer.no_sync():
                backward(params, 50 + step, transport.rank)
            backward(params, step, transport.rank)
            assert leaf == "zero-one" or params[0].grad is not None  # the last bucket's vote is still under way
            freed.append(params[2].grad is None)
            for too_late in (optimizer.zero_grad, optimizer.state_dict, optimizer.adopt_parameters):
                if freed[-1]:
                    with pytest.raises(RuntimeError, match="call step"):
                        too_late()
            optimizer.step()
            assert stage == 1 or all(p.grad is None for p in params)
            optimizer.zero_grad()
        return values(params), state_of(optimizer), freed

    whole, freed = (run_ranks(3, lambda transport, s=s: work(transport, s)) for s in (1, 2))
    for (x, state, kept), (y, other, left) in zip(whole, freed, strict=True):
        assert torch.equal(x, y) and same(state, other)
        assert not any(kept) and (all(left) if leaf == "adam" else any(left))


WAYS = {form: (ShardedOnebitAdam, FORMS[form]) for form in FORMS if "warm-up, " not in form or "stage 2" in form} | {
    f"{leaf}, stage {stage}": (kind, own | {"stage": stage, "bucket_cap_mb": CAP})
    for leaf, (kind, own) in LEAVES.items()
    for stage in (1, 2)
}


@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_leaves_everything_untouched(way: str) -> None:
    """On all ranks; step 3 of nine, at the end of a cycle where there are any, goes on as if it had not been."""
    kind, options = WAYS[way]

    def work(transport: SimTransport, bad: bool) -> tuple[Tensor, list[Tensor]]:
        params, optimizer = new(transport, torch.bfloat16, kind=kind, **options)
        take_steps(params, optimizer, range(3))
        if bad:
            before, kept = values(params), state_of(optimizer)

            def spoil(step: int, grads: list[Tensor]) -> None:
                if transport.rank == 1:
                    for g in grads if options.get("stage") == 2 else grads[2:3]:
                        g[5] = float("inf")

            take_steps(params, optimizer, range(90, 91), spoil)
            assert optimizer.stats.is_skipped and optimizer.stats.skipped_steps == 1
            assert torch.equal(values(params), before) and same(state_of(optimizer), kept)
        take_steps(params, optimizer, range(3, 9))
        assert optimizer.stats.is_skipped is False
        return values(params), state_of(optimizer)

    never, skipped = (run_ranks(3, lambda transport, bad=bad: work(transport, bad)) for bad in (False, True))
    assert same(never, skipped)


KINDS = {f"adam, stage {stage}": (ShardedOnebitAdam, {"stage": stage, "warmup_steps": 2}) for stage in (0, 1, 2)}


@pytest.mark.pairwise
@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(1,), (1, 0, 2), (255, 1), (256,), (257, 1), (0,)])
@pytest.mark.parametrize("name", [*KINDS, *LEAVES])
def test_degenerate_sizes(name: str, sizes: tuple[int, ...], world_size: int) -> None:
    """In one bucket or in one each; what has elements moves, the same everywhere, whether frames leave early or not."""
    kind, own = (KINDS | LEAVES)[name]
    cap = 4 / 2**20 if world_size == 2 else 16.0

    def work(transport: SimTransport, overlap: bool) -> tuple[Tensor, list[Tensor]]:
        options = {"bucket_cap_mb": cap, "overlap": overlap, **own}
        params, optimizer = new(transport, sizes=sizes, kind=kind, **options | {"weight_decay": 0.0})
        for step in range(6):
            optimizer.zero_grad()
            backward(params, step, transport.rank)
            optimizer.step()
        for p, old in zip(params, initial(sizes=sizes), strict=True):
            assert bool((p != old).any()) == (p.numel() > 0)
        return values(params), state_of(optimizer)

    early, late = (run_ranks(world_size, lambda transport, on=on: work(transport, on)) for on in (True, False))
    assert same(early, late)
    assert all(torch.equal(x, early[0][0]) and bool(x.isfinite().all()) for x, _ in early)


def test_one_leaf_does_not_load_the_state_of_another() -> None:
    params, optimizer = new(SimTransport())
    take_steps(params, optimizer, range(1))
    for kind in (ShardedOnebitLamb, ShardedZeroOneAdam):
        with pytest.raises(ValueError, match=f"not that of a {kind.__name__}"):
            kind(initial(), transport=SimTransport()).load_state_dict(optimizer.state_dict())
    other = ShardedOnebitLamb(initial(), transport=SimTransport())
    with pytest.raises(ValueError, match="not that of a ShardedOnebitAdam"):
        ShardedOnebitAdam(initial(), transport=SimTransport()).load_state_dict(other.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "differences"),
    [
        (ShardedOnebitAdam, "int4"),
        (ShardedOnebitAdam, "sign"),
        (ShardedOnebitLamb, "sign"),
        (ShardedZeroOneAdam, "int4"),
    ],
)
def test_at_lr_0_masters_stand_still_and_replicas_go_to_them(kind: type, differences: str) -> None:
    """What the differences owe is delivered; where there was no step before, nothing is owed, and nothing moves."""

    def work(transport: SimTransport, steps: int) -> list[float]:
        p = torch.nn.Parameter(torch.randn(1024, generator=torch.Generator().manual_seed(0)))
        optimizer = kind([p], lr=1e-3 if steps else 0.0, transport=transport, differences=differences)
        data = torch.Generator().manual_seed(transport.rank)
        gaps, masters = [], None
        for step in range(steps + 40):
            if step == steps:
                optimizer.param_groups[0]["lr"] = 0.0
            p.grad = torch.randn(1024, generator=data)
            optimizer.step()
            bucket = optimizer.buckets[0]
            if step >= steps:
                assert masters is None or torch.equal(bucket.owned, masters)
                masters = bucket.owned.clone()
                gaps.append(float((bucket.gather_replica() - masters).abs().max()))
        return [gaps[0], gaps[-1]]

    for first, last in run_ranks(2, lambda transport: work(transport, 10)):
        assert 0 < first < 1e-2 and last < (0.5 if differences == "sign" else 1e-4) * first
    for first, last in run_ranks(2, lambda transport: work(transport, 0)):
        assert first == last == 0.0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ShardedOnebitAdam, {"stage": 3}, "stage must be"),
        (ShardedOnebitAdam, {"warmup_steps": -1}, "warmup_steps must be at least 0"),
        (ShardedOnebitAdam, {"stage": 2, "max_grad_norm": 1.0}, "stage=1"),
        (ShardedOnebitAdam, {"differences": "int8"}, 'differences must be "int4" or "sign"'),
        (ShardedOnebitAdam, {"stage": 0, "updates": "x"}, "updates must be"),
        (ShardedOnebitAdam, {"eps": -1.0}, "eps"),
        (ShardedOnebitAdam, {"momentum_dtype": torch.float16}, "momentum_dtype"),
        (ShardedOnebitAdam, {"bucket_cap_mb": 0}, "bucket_cap_mb"),
        (ShardedOnebitAdam, {"block": 100}, "multiple of 64"),
        (ShardedOnebitLamb, {"stage": 0}, "stage must be one of .1, 2. for ShardedOnebitLamb"),
        (ShardedOnebitLamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff <= max_coeff"),
        (ShardedOnebitLamb, {"coeff_beta": 1.0}, "coeff_beta"),
        (ShardedOnebitLamb, {"eps": -1.0}, "eps"),
        (ShardedZeroOneAdam, {"stage": 0}, "stage must be one of .1, 2. for ShardedZeroOneAdam"),
        (ShardedZeroOneAdam, {"local_step_clipper": 0}, "local_step_clipper"),
        (ShardedZeroOneAdam, {"local_step_clipper": 2, "betas": (0.9, 0.0)}, "betas.1. must be above 0"),
    ],
)
def test_bad_options_are_refused(kind: type, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(initial(), transport=SimTransport(), **options)


@pytest.mark.parametrize(
    ("kind", "option", "of_ranks", "message"),
    [
        (ShardedOnebitAdam, "differences", ("int4", "sign"), "Int4Codec"),
        (ShardedOnebitAdam, "overlap", (True, False), "option overlap"),
        (ShardedOnebitLamb, "max_coeff", (10.0, 5.0), "max_coeff"),
    ],
)
def test_options_that_differ_between_ranks_are_refused(kind: type, option: str, of_ranks: tuple, message: str) -> None:
    def work(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=message):
            kind(initial(), transport=transport, **{option: of_ranks[transport.rank]})

    run_ranks(2, work)
