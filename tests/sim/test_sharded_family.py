"""What holds of every leaf of the sharded family: stage 2, skipping, degenerate sizes, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from family import same
from sharded_ranks import initial, new, state_of, take_steps, values
from test_sharded import FORMS
from test_sharded_overlap import backward
from test_sharded_state import SIZES, saved
from torch import Tensor

from onebit.comm import SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

CAP = 1100 * 4 / 2**20
CYCLES = {"local_step_scaler": 2, "local_step_clipper": 4, "warmup_steps": 2}  # synchronises in steps 0, 1, 3, 7, 11
LEAVES = {
    "lamb": (ShardedOnebitLamb, {"weight_decay": 0.1, "warmup_steps": 3}),
    "zero-one": (ShardedZeroOneAdam, CYCLES),
}


def start(transport: SimTransport, leaf: str, steps: int, **options: object) -> tuple:
    kind, own = LEAVES[leaf]
    params, optimizer = new(transport, torch.bfloat16, SIZES, kind, **own, **options)
    take_steps(params, optimizer, range(steps))
    return params, optimizer


def resume(transport: SimTransport, leaf: str, params: list[Tensor], states: list[dict], **options: object) -> tuple:
    kind, own = LEAVES[leaf]
    mine = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = kind(mine, transport=transport, lr=1e-2, betas=(0.9, 0.99), **own, **options)
    optimizer.load_state_dicts(states)
    return mine, optimizer


@pytest.mark.parametrize("leaf", LEAVES)
def test_stage_2_is_stage_1_to_the_bit_and_frees_gradients_in_backward(leaf: str) -> None:
    """Also in steps that send nothing."""
    kind, own = LEAVES[leaf]

    def work(transport: SimTransport, stage: int) -> tuple[Tensor, list[Tensor], list[bool]]:
        params = initial(sizes=(600, 7, 900))
        optimizer = kind(params, transport=transport, lr=1e-2, stage=stage, bucket_cap_mb=600 * 4 / 2**20, **own)
        assert len(optimizer.buckets) > 1
        freed = []
        for step in range(9):
            data = torch.Generator().manual_seed(100 * step + transport.rank)
            targets = [torch.randn(p.shape, generator=data) for p in params]
            torch.stack([(p - t).square().sum() for p, t in zip(params, targets, strict=True)]).sum().backward()
            freed.append(params[2].grad is None)
            optimizer.step()
            assert stage == 1 or all(p.grad is None for p in params)
            optimizer.zero_grad()
        return values(params), state_of(optimizer), freed

    whole, freed = (run_ranks(3, lambda transport, s=s: work(transport, s)) for s in (1, 2))
    for (x, state, kept), (y, other, left) in zip(whole, freed, strict=True):
        assert torch.equal(x, y) and all(torch.equal(a, b) for a, b in zip(state, other, strict=True))
        assert not any(kept) and any(left)


WAYS = {form: (ShardedOnebitAdam, options) for form, options in FORMS.items()} | {
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


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 5, 8])
@pytest.mark.parametrize("leaf", LEAVES)
def test_resume_equals_no_interruption(leaf: str, stop: int) -> None:
    """Within a cycle as well: steps 5 and 8 are in the middle of two."""

    def save(transport: SimTransport) -> tuple[object, Tensor, list[Tensor]]:
        params, optimizer = start(transport, leaf, stop, max_grad_norm=100.0)
        kept = saved([[p.detach() for p in params], optimizer.state_dict()])
        take_steps(params, optimizer, range(stop, 12))
        return kept, values(params), state_of(optimizer)

    before = run_ranks(3, save)
    states = [kept[1] for kept, *_ in before]

    def load(transport: SimTransport) -> tuple[Tensor, list[Tensor]]:
        params, optimizer = resume(transport, leaf, before[transport.rank][0][0], states, max_grad_norm=100.0)
        take_steps(params, optimizer, range(stop, 12))
        return values(params), state_of(optimizer)

    for (_, x, kept), (y, other) in zip(before, run_ranks(3, load), strict=True):
        assert torch.equal(x, y)
        assert all(torch.equal(a, b) for k, (a, b) in enumerate(zip(kept, other, strict=True)) if k % 4)


@pytest.mark.parametrize("leaf", LEAVES)
def test_four_ranks_become_two_and_then_eight(leaf: str) -> None:
    """In the middle of a cycle. What waits on one rank alone waits for all of the next world."""

    def begin(transport: SimTransport) -> tuple[list[Tensor], dict]:
        params, optimizer = start(transport, leaf, 4)
        for step in (4, 5):
            for p in params:
                p.grad = None
            if transport.rank == 1 and leaf == "zero-one":
                params[1].grad = torch.ones_like(params[1])
            elif leaf == "lamb":
                take_steps(params, optimizer, range(step, step + 1))
                continue
            optimizer.step()
        return [p.detach() for p in params], optimizer.state_dict()

    def go_on(
        transport: SimTransport, params: list[Tensor], states: list[dict]
    ) -> tuple[list[Tensor], dict, dict, list]:
        mine, optimizer = resume(transport, leaf, params, states)
        loaded = copy.deepcopy(optimizer.state_dict())
        for _ in (6, 7):
            for p in mine:
                p.grad = None if leaf == "zero-one" else torch.ones_like(p)
            optimizer.step()
        optimizer.check_replicas()
        moved = [not torch.equal(p, old) for p, old in zip(mine, params, strict=True)]
        take_steps(mine, optimizer, range(8, 10))
        return [p.detach() for p in mine], optimizer.state_dict(), loaded, moved

    four = run_ranks(4, begin)
    params, states = four[0][0], saved([state for _, state in four])
    for world_size in (2, 8):
        ranks = run_ranks(world_size, lambda transport, p=params, s=states: go_on(transport, p, s))
        for _, _, loaded, moved in ranks:
            for key, entry in loaded["state"].items():
                mean = torch.stack([state["state"][key]["momentum"].double() for state in states]).mean(0)
                torch.testing.assert_close(entry["momentum"].double(), mean, rtol=2**-8, atol=1e-9)
            if leaf == "zero-one" and world_size == 2:
                assert moved == [False, True, False, False]
                assert loaded["onebit"]["interval"] == 4 and loaded["onebit"]["since_sync"] == 2
        params, states = ranks[0][0], [state for _, state, *_ in ranks]
        for rank, other in enumerate(ranks):
            assert all(torch.equal(a, b) for a, b in zip(params, other[0], strict=True)), rank


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
@pytest.mark.parametrize("kind", [ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam])
@pytest.mark.parametrize("differences", ["int4", "sign"])
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
