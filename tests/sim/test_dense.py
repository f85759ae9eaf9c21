"""The dense baseline gives the plain mean of the gradients, whether it is sent during the backward pass or after it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from onebit.comm import SimTransport, run_ranks
from onebit.dense import DenseAverager, average_gradients, broadcast_parameters
from onebit.model_parallel import ModelParallelGroup
from onebit.zero.parallel import dense

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)  # where a mean gradient is not near 0 by chance, whose roundings are not
    ORIGINAL = nn.Sequential(nn.Linear(5, 400), nn.ReLU(), nn.Linear(400, 900), nn.ReLU(), nn.Linear(900, 1))


def build() -> nn.Module:
    return copy.deepcopy(ORIGINAL)


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(7, 5, generator=generator)).square().mean().backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def mean_gradients(world_size: int) -> list[Tensor]:
    """In float64, summed in rank order, without any of our code."""
    models = [build() for _ in range(world_size)]
    for rank, model in enumerate(models):
        backward(model, rank)
    return [torch.stack([g.double() for g in gs]).mean(0) for gs in zip(*map(gradients, models), strict=True)]


@pytest.mark.parametrize(("world_size", "bucket_cap_mb"), [(1, 0.1), (2, 1e-6), (3, 0.1), (3, 25.0)])
def test_average_is_the_mean(world_size: int, bucket_cap_mb: float) -> None:
    def work(transport: SimTransport) -> list[Tensor]:
        model = build()
        backward(model, transport.rank)
        assert average_gradients(model.parameters(), transport, bucket_cap_mb) >= 0.0
        return gradients(model)

    for averaged in run_ranks(world_size, work):
        for ours, mean in zip(averaged, mean_gradients(world_size), strict=True):
            # Two float32 roundings per addend: 1e-6 of the largest element.
            torch.testing.assert_close(ours.double(), mean, rtol=0, atol=1e-6 * float(mean.abs().max()))


def test_sending_during_backward_gives_the_same_bits_as_after_it() -> None:
    def work(transport: SimTransport) -> bool:
        after, during = build(), build()
        averager = DenseAverager(during.parameters(), transport, bucket_cap_mb=0.1)
        for seed in range(3):
            for model in (after, during):
                model.zero_grad()
                backward(model, 10 * seed + transport.rank)
            average_gradients(after.parameters(), transport, bucket_cap_mb=0.1)
            averager.finish()
            if not all(map(torch.equal, gradients(after), gradients(during))):
                return False
        return True

    assert run_ranks(2, work) == [True, True]


def test_accumulated_gradients_are_sent_once() -> None:
    def work(transport: SimTransport) -> tuple[list[Tensor], int]:
        model = build()
        averager = DenseAverager(model.parameters(), transport)
        with averager.no_sync():
            backward(model, transport.rank)
        backward(model, transport.rank)
        averager.finish()
        return gradients(model), transport.sent_bytes

    numel = sum(p.numel() for p in build().parameters())
    for accumulated, sent_bytes in run_ranks(2, work):
        assert sent_bytes == pytest.approx(4 * numel, abs=64)
        for ours, mean in zip(accumulated, mean_gradients(2), strict=True):
            torch.testing.assert_close(ours.double(), 2 * mean, rtol=0, atol=2e-6 * float(mean.abs().max()))


@pytest.mark.parametrize("during_backward", [False, True])
def test_gradient_missing_on_one_rank_counts_as_zero(during_backward: bool) -> None:
    def work(transport: SimTransport) -> Tensor:
        used, sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
        averager = DenseAverager([used, sometimes], transport) if during_backward else None
        (used.sum() + (sometimes.sum() if transport.rank == 1 else 0.0)).backward()
        averager.finish() if averager is not None else average_gradients([used, sometimes], transport)
        return sometimes.grad

    for grad in run_ranks(2, work):
        assert torch.equal(grad, torch.full((4,), 0.5))


def test_edits_behind_torchs_back_are_found_however_late_a_bucket_leaves_early(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Through `.data`, in every step of rank 1; in the first ones the bucket is not complete during backward."""

    def work(transport: SimTransport) -> list[Tensor]:
        used, later = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
        averager = DenseAverager([used, later], transport)
        means = []
        for step in range(8):
            used.grad = later.grad = None
            (used.sum() + (later.sum() if step > 4 else 0.0)).backward()
            if transport.rank == 1:
                used.grad.data.mul_(3.0)
            averager.finish()
            means.append(used.grad.clone())
        return means

    for means in run_ranks(2, work):
        assert all(torch.equal(mean, torch.full((3,), 2.0)) for mean in means)
    assert caplog.text.count("rank 1: gradients were edited after backward") == 1


def test_half_precision_gradients_are_averaged_in_float32() -> None:
    def work(transport: SimTransport) -> Tensor:
        p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        p.grad = torch.tensor([1.0, 2.0 ** (8 * transport.rank)], dtype=torch.bfloat16)
        average_gradients([p], transport)
        return p.grad

    for grad in run_ranks(3, work):
        assert torch.equal(grad, torch.tensor([1.0, (1 + 2**8 + 2**16) / 3], dtype=torch.bfloat16))


def test_broadcast_gives_every_rank_the_source_values() -> None:
    def work(transport: SimTransport) -> list[Tensor]:
        model = build()
        broken_up = nn.Parameter(torch.full((4, 6), float(transport.rank)).t())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(transport.rank)
        broadcast_parameters((p for p in [*model.parameters(), broken_up]), transport, src=1)
        return [p.detach().clone() for p in [*model.parameters(), broken_up]]

    ranks = run_ranks(3, work)
    expected = [p + 1 for p in build().parameters()] + [torch.full((6, 4), 1.0)]
    for values in ranks:
        assert all(map(torch.equal, values, expected))


# -------------------------------------------------------------------------------- passes that no step follows


def double(model: nn.Module, passes: list) -> list[Tensor]:
    """What these passes add up to, in float64, without any of our code; a pass is (seed, which part of the model)."""
    model = copy.deepcopy(model).double()
    for seed, part in passes:
        loss_of(model, seed, part).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def loss_of(model: nn.Module, seed: int, part: str) -> Tensor:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).to(model[0].weight.dtype)
    return (model[:2] if part == "front" else model)(x).square().mean()


# Per rank of two: what a step does. "drop" is zero_grad(), "zero" fills with zeros, "edit" doubles every gradient,
# "behind" does so behind torch's back, "hold" is a pass in no_sync().
SCRIPTS = {
    "two passes": [["all 1", "all 2"], ["all 3", "all 4"]],
    "three on one rank, one on the other": [["all 1", "all 2", "all 5"], ["all 3"]],
    "an abandoned pass, dropped": [["all 1", "drop", "all 2"], ["all 3", "drop", "all 4"]],
    "an abandoned pass on one rank": [["all 1", "drop", "all 2"], ["all 3"]],
    "an abandoned pass, zeroed": [["all 1", "zero", "all 2"], ["all 3"]],
    "nothing left of a pass": [["all 1", "drop"], ["all 3"]],
    "an abandoned window": [["hold 1", "all 2", "drop", "hold 4", "all 5"], ["hold 3", "all 7"]],
    "an abandoned part": [["front 1", "drop", "all 2"], ["all 3"]],
    "a part, then all": [["front 1", "all 2"], ["all 3", "front 4"]],
    "a part each": [["front 1"], ["all 3"]],
    "accumulated, then a pass too many": [["hold 1", "all 2", "all 4"], ["hold 3", "all 5"]],
    "edited behind the pass": [["all 1", "edit"], ["all 3"]],
    "edited through .data": [["all 1", "behind"], ["all 3"]],
}


def play(model: nn.Module, averager: DenseAverager, script: list[str]) -> None:
    for action in script:
        part, _, seed = action.partition(" ")
        if part == "drop":
            model.zero_grad()
        elif part == "zero":
            model.zero_grad(set_to_none=False)
        elif part in ("edit", "behind"):
            for p in model.parameters():
                (p.grad if part == "edit" else p.grad.data).mul_(2.0)
        else:
            with averager.no_sync() if part == "hold" else nullcontext():
                loss_of(model, int(seed), part).backward()


def adds_up_to(script: list[str]) -> list[Tensor]:
    """The oracle's gradients of one rank."""
    factor, passes = 1, []
    for action in script:
        part, _, seed = action.partition(" ")
        if part in ("drop", "zero"):
            passes = []
        elif part in ("edit", "behind"):
            factor = 2
        else:
            passes.append((int(seed), part))
    return [factor * g for g in double(ORIGINAL, passes)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bucket_cap_mb"),
    [*((name, 0.1) for name in SCRIPTS), ("an abandoned part", 25.0), ("edited through .data", 25.0)],
)
def test_whatever_the_passes_were_the_gradients_are_the_means_of_what_they_added_up_to(
    name: str, bucket_cap_mb: float
) -> None:
    """And the step after them is an ordinary one again: nothing travels twice in it."""

    def work(transport: SimTransport) -> tuple[list[Tensor], list[Tensor], int]:
        model = build()
        averager = DenseAverager(model.parameters(), transport, bucket_cap_mb)
        play(model, averager, SCRIPTS[name][transport.rank])
        averager.finish()
        odd = [g.clone() for g in gradients(model)]
        model.zero_grad()
        before = transport.sent_bytes
        play(model, averager, ["all 8"])
        averager.finish()
        return odd, gradients(model), transport.sent_bytes - before

    truths = [adds_up_to(script) for script in SCRIPTS[name]]
    numel = sum(p.numel() for p in build().parameters())
    for odd, ordinary, sent_bytes in run_ranks(2, work):
        assert sent_bytes == pytest.approx(4 * numel, abs=64)
        for ours, *theirs in zip(odd, *truths, strict=True):
            mean = torch.stack(theirs).mean(0)
            torch.testing.assert_close(ours.double(), mean, rtol=0, atol=1e-5 * max(float(mean.abs().max()), 1e-3))
        for ours, mean in zip(ordinary, adds_up_to(["all 8"]), strict=True):
            torch.testing.assert_close(ours.double(), mean, rtol=0, atol=1e-5 * float(mean.abs().max()))


@pytest.mark.parametrize(("value", "max_norm"), [(9e19, 0.0), (9e19, 1.0), (1e17, 0.0), (float("nan"), 1.0)])
def test_the_engine_skips_what_no_variance_can_hold_unless_it_is_clipped(value: float, max_norm: float) -> None:
    """Its square would be infinite, and with it the variance: nothing would move any more, and nobody be told."""

    def work(transport: SimTransport) -> tuple[bool, float]:
        p = nn.Parameter(torch.zeros(6))
        p.grad = torch.full((6,), value if transport.rank else 1.0)
        optimizer = torch.optim.AdamW([p])
        is_good, _ = dense.prepare(optimizer, transport, ModelParallelGroup(SimTransport()), 1, 1.0, max_norm)
        optimizer.step()
        return is_good, float(optimizer.state[p]["exp_avg_sq"].max())

    found = run_ranks(2, work)
    is_good = (value < 1e18 or max_norm > 0) and value == value
    assert [good for good, _ in found] == [is_good] * 2
    assert not is_good or all(v < 1e38 for _, v in found)


@pytest.mark.parametrize("is_during_backward", [True, False])
def test_sparse_gradients_are_refused_by_name(is_during_backward: bool) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    averager = DenseAverager(model.parameters(), SimTransport()) if is_during_backward else None
    with pytest.raises(RuntimeError, match=r"the mean over 1 ranks needs dense gradients.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
        if averager is None:
            average_gradients(model.parameters(), SimTransport())
        else:
            averager.finish()
