"""ZeRO inside the node, one bit between nodes: the optimizers on FSDP2's shards, over Gloo, against unsharded twins."""

from __future__ import annotations

from functools import cache

import fsdp_ranks
import pytest
import torch
from fsdp_cases import FAMILY, FREEZE, STEPS, twin
from grid_cases import Starts

from onebit.comm import SimTransport, run_ranks
from onebit.model_parallel import ModelParallelGroup

# (ranks, shards): which cases run there. One start for each number of ranks. All over two shards of two replicas, some
# over one shard or for one replica.
ALONE = ["ranks_use_other_parts", "blocks_of_other_ranks_at_stage_3"]
AGREED = ["clipping_is_torchs", "one_bad_shard_makes_all_skip"]
WORLDS: dict[tuple[int, int], list[str]] = {
    (4, 2): [name for name in fsdp_ranks.CASES if name not in ALONE],
    (2, 1): ["OnebitAdam_2_1", *AGREED],
    (2, 2): ["OnebitLamb_3_1", "ZeroOneAdam_1_1", *AGREED, "lamb_measures_whole_layers", *ALONE],
}
THOROUGH = ALONE[:1]
STARTS = Starts(fsdp_ranks.run_cases, WORLDS, THOROUGH)


@cache
def twin_run(name: str, replicas: int, shards: int, micros: int, reduces_once: bool, *options: tuple) -> list[dict]:
    return run_ranks(
        replicas, lambda transport: twin(transport, name, shards, micros, reduces_once=reduces_once, **dict(options))
    )


def cases(*kinds: str) -> list:
    """(ranks, shards, case) of these optimizers, unclipped: a norm adds up in another order over shards."""
    return [
        pytest.param(*world, name, marks=pytest.mark.thorough if name in THOROUGH else ())
        for world, names in WORLDS.items()
        for name in names
        if name.split("_")[0] in kinds and "max_grad_norm" not in name
    ]


def of_twin(ranks: int, shards: int, case: str) -> tuple[list, list]:
    name, stage, micros, *clip = case.split("_", 3)
    options = [(option, 0.1) for option in clip]
    ours = STARTS.results(ranks, shards, case)
    theirs = twin_run(name, ranks // shards, shards, int(micros), stage == "1", *options)
    return ours, [theirs[rank // shards] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [4, 2])
def test_every_run_ends_cleanly(ranks: int) -> None:
    STARTS.of(ranks)[0].check()


@pytest.mark.thorough
def test_the_thorough_run_ends_cleanly() -> None:
    STARTS.of(2, is_thorough=True)[0].check()


@pytest.mark.parametrize(("ranks", "shards", "case"), cases("OnebitAdam", "OnebitMuon", "ZeroOneAdam"))
def test_shards_change_not_a_bit(ranks: int, shards: int, case: str) -> None:
    """Every step's parameters, all rounds; blocks of the shards are blocks of the whole, two summands commute."""
    for rank, (ours, theirs) in enumerate(zip(*of_twin(ranks, shards, case), strict=True)):
        for step, (mine, twins) in enumerate(zip(ours["params"], theirs["params"], strict=True)):
            assert torch.equal(mine, twins), (rank, step)
        assert ours["fallback"] == pytest.approx(theirs["fallback"], rel=1e-6)  # a sum in another order
        assert ours["fallback"][-1] != ours["fallback"][0]


@pytest.mark.parametrize(("ranks", "shards", "case"), cases("OnebitLamb"))
def test_layers_are_measured_over_their_shards(ranks: int, shards: int, case: str) -> None:
    """Trust ratios to 1e-6: norms add up in another order. An element whose sign that turns moves by two scales."""
    for ours, theirs in zip(*of_twin(ranks, shards, case), strict=True):
        for step in range(STEPS):
            for key, mine in ours["layers"][step].items():
                torch.testing.assert_close(mine, theirs["layers"][step][key], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours["params"][step], theirs["params"][step], rtol=0, atol=1e-5)
        assert not torch.equal(ours["layers"][FREEZE - 1]["factor"], ours["layers"][-1]["factor"])


def test_estimated_norms_are_the_twins() -> None:
    """Clip factors, exact in warm-up and estimated after it, to 1e-5, and the same on all ranks."""
    ours, theirs = of_twin(4, 2, "OnebitAdam_2_1_max_grad_norm")
    assert all(rank["clip"] == ours[0]["clip"] for rank in ours)
    assert all(factor < 1.0 for factor in ours[0]["clip"])
    assert ours[0]["clip"] == pytest.approx(theirs[0]["clip"], rel=1e-5)


@pytest.mark.parametrize(("ranks", "shards", "case"), cases(*FAMILY))
def test_replicas_are_bit_identical(ranks: int, shards: int, case: str) -> None:
    """At the end, and after sync(); full parameters are gathered from the shards of each replica."""
    ours = STARTS.results(ranks, shards, case)
    assert all(torch.equal(rank["params"][-1], ours[0]["params"][-1]) for rank in ours)


def test_buckets_leave_during_backward() -> None:
    """FSDP2 runs the hooks of sharded parameters as it sets their gradients. The first step counts the passes.

    From the second one on the first two of five buckets leave; a third as far as other ranks have sent theirs by then.
    """
    for case in ("OnebitAdam_1_2", "OnebitAdam_2_1", "OnebitAdam_3_2"):
        early = STARTS.results(4, 2, case)[0]["early"]
        assert early[0] == 0.0 and len(early) == STEPS and all(share >= 0.4 for share in early[1:])


def test_the_twins_see_every_round() -> None:
    phases = {name: set(STARTS.results(4, 2, f"{name}_3_1")[0]["phases"]) for name in FAMILY if name != "OnebitMuon"}
    assert phases["OnebitAdam"] == phases["OnebitLamb"] == {"warmup", "compressed"}
    assert phases["ZeroOneAdam"] == {"variance", "compressed", "local"}


def test_one_bit_is_what_travels_between_replicas() -> None:
    """Two phases of half the elements each to the one peer: 1 + 16/64 bits per parameter of the shard, and the vote."""
    bits = STARTS.results(4, 2, "OnebitAdam_3_1")[0]["bits"]
    assert min(bits[:FREEZE]) > 4.0
    assert max(bits[FREEZE:]) < 2.5


@pytest.mark.parametrize("world", [world for world, names in WORLDS.items() if "clipping_is_torchs" in names])
def test_clipping_is_torchs(world: tuple[int, int]) -> None:
    for result in STARTS.results(*world, "clipping_is_torchs"):
        assert min(result["torch_factors"]) < 0.9
        assert result["factors"] == pytest.approx(result["torch_factors"], rel=1e-5)
        for ours, torchs in zip(result["ours"], result["torchs"], strict=True):
            torch.testing.assert_close(ours, torchs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("world", [world for world, names in WORLDS.items() if "lamb_measures_whole_layers" in names])
def test_lamb_measures_whole_layers(world: tuple[int, int]) -> None:
    for result in STARTS.results(*world, "lamb_measures_whole_layers"):
        torch.testing.assert_close(result["one_bit"], result["plain"], rtol=0, atol=2e-6)
        torch.testing.assert_close(result["dense"], result["plain"], rtol=0, atol=2e-6)


def test_torchs_adamw_after_averaging() -> None:
    for result in STARTS.results(4, 2, "torchs_adamw_after_averaging"):
        torch.testing.assert_close(result["ours"], result["plain"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("world", [world for world, names in WORLDS.items() if "one_bad_shard_makes_all_skip" in names])
def test_one_bad_shard_makes_all_skip(world: tuple[int, int]) -> None:
    for outcomes in STARTS.results(*world, "one_bad_shard_makes_all_skip"):
        for kept_parameters, kept_state, skipped, moved_on, skipped_in_all in outcomes:
            assert (kept_parameters, kept_state, skipped, moved_on, skipped_in_all) == (True, True, 1, True, 1)


def test_a_bad_shard_in_a_local_step_is_its_replicas_alone() -> None:
    outcomes = STARTS.results(4, 2, "a_bad_shard_in_a_local_step_is_its_replicas_alone")
    assert outcomes == [(0, True, True)] * 2 + [(1, True, True)] * 2


def test_errors_are_everybodys() -> None:
    for found in STARTS.results(4, 2, "errors_are_everybodys"):
        assert "error_dtype" in found["options"]
        assert "variance_floor" in found["shards"]
        assert "holds other values than rank 0 in" in found["replicas"]


def test_shards_that_do_not_fit_are_refused() -> None:
    for found in STARTS.results(4, 2, "shards_that_do_not_fit_are_refused"):
        assert "is in 2 shards, the optimizer's shards are 1 ranks" in found["no shards"]
        assert "is in 2 shards" in found["dense"]
        assert "is in 1 shard, the optimizer's shards are 2 ranks" in found["plain"]
        assert "shard is" in found["another's"]
        assert "stage must be 1, 2 or 3, got 0" in found["stage"]
        assert "went through onebit.zero.fsdp.shard" in found["not sharded"]


def test_resume_is_no_interruption() -> None:
    for found in STARTS.results(4, 2, "resume_is_no_interruption"):
        assert found and all(found.values()), found


def test_groups_may_share_a_module_and_edits_are_noticed() -> None:
    """Buckets leave during backward from the second step on; the third step's gradient is edited behind it."""
    for found in STARTS.results(4, 2, "groups_may_share_a_module"):
        assert found["early"] == [0, 2, 2]
        assert found["resent"] == 1


@pytest.mark.thorough
def test_what_a_rank_does_not_use_has_a_zero_gradient_there() -> None:
    """Two steps against float64; what no rank uses does not even decay. bfloat16 on the way: one percent."""
    for found in STARTS.results(2, 2, "ranks_use_other_parts"):
        for form, gaps in found.items():
            assert len(gaps) > 0 and max(gaps.values()) < (0.05 if "bf16" in form else 2e-6), (form, gaps)


def test_blocks_that_one_rank_runs_alone_at_stage_3_are_named() -> None:
    for rank, found in enumerate(STARTS.results(2, 2, "blocks_of_other_ranks_at_stage_3")):
        assert f"rank {rank} of the shards gathers layers.{1 if rank else 2}.0.weight" in found["runs"]
        assert "use stage 2" in found["runs"]


def test_masked_elements_stay() -> None:
    assert STARTS.results(4, 2, "masked_elements_stay") == [(True, False)] * 4


def test_low_precision_has_float32_masters() -> None:
    found = STARTS.results(4, 2, "low_precision_has_float32_masters")
    assert all(rank["of another"] for rank in found)
    for stage in (1, 2, 3):
        for rank in found:
            assert rank[f"gradients {stage}"] and rank[f"dtypes {stage}"]
            assert torch.equal(rank[f"params {stage}"], found[0]["params 1"])


def test_what_a_rank_holds() -> None:
    for rank, found in enumerate(STARTS.results(4, 2, "what_a_rank_holds")):
        transports = found.pop("transports")
        assert transports == (rank // 2, 2, rank % 2, 2)
        assert found == {"coordinates": True, "state": True, "gathered": True, "blocks": 3}


# -------------------------------------------------------------------------------- shards, simulated


@pytest.mark.parametrize("S", [1, 2, 3])
def test_shards_hold_the_same_sums(S: int) -> None:
    def work(transport: SimTransport) -> tuple:
        shards = ModelParallelGroup(transport)
        table = torch.arange(6.0).view(3, 2) + transport.rank
        return (
            shards.total(transport.rank + 0.5, 1.0),
            shards.agree(transport.rank != S - 1),
            shards.agree(True),
            shards.total_of_rows(table, [torch.ones(1)] * 3).tolist(),
            shards.norms(torch.tensor([1e-30, 3.0, 1e30]), [torch.ones(1)] * 3).tolist(),
        )

    expected = (
        [sum(rank + 0.5 for rank in range(S)), float(S)],
        False,
        True,
        (S * torch.arange(6.0).view(3, 2) + sum(range(S))).tolist(),
        (torch.tensor([1e-30, 3.0, 1e30], dtype=torch.float64) * S**0.5).float().tolist(),
    )
    for found in run_ranks(S, work):
        assert found[:4] == expected[:4]
        assert found[4] == pytest.approx(expected[4], rel=1e-6)


def test_an_error_of_one_shard_is_raised_by_all() -> None:
    def work(transport: SimTransport) -> str:
        def check() -> None:
            if transport.rank == 1:
                raise ValueError("found by shard 1")

        with pytest.raises(ValueError, match="found by shard 1") as raised:
            ModelParallelGroup(transport).raise_on_all_ranks(ValueError, check)
        ModelParallelGroup(transport).raise_on_all_ranks(ValueError, lambda: None)
        return str(raised.value)

    assert run_ranks(3, work) == ["found by shard 1"] * 3
