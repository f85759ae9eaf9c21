"""Module buffers: the mean of running statistics, rank 0's of all else; nothing that is equal is touched or sent."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport, run_ranks

with torch.random.fork_rng():
    torch.manual_seed(0)
    ORIGINAL = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))


def trained(rank: int) -> nn.Module:
    """A model that has seen other batches on each rank, and more of them on the higher ones."""
    model, generator = copy.deepcopy(ORIGINAL), torch.Generator().manual_seed(rank)
    for _ in range(rank + 1):
        model(torch.randn(16, 6, generator=generator) + rank)
    return model


class Odd(nn.Module):
    """Buffers of every kind; of each dtype one that is to be averaged, and one that is not."""

    averaged_buffers = ("of_float32", "of_float64", "of_bfloat16", "of_float16", "of_int64", "transposed", "nothing")

    def __init__(self, rank: int):
        super().__init__()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.tensor([2, 2 * rank]).to(dtype))
            self.register_buffer(f"own_{str(dtype)[6:]}", torch.tensor([2, 2 * rank]).to(dtype))
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("phase", torch.tensor(1j * rank))
        self.register_buffer("transposed", torch.full((2, 3), float(rank)).t())
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("third", torch.tensor([1 / 3, float("-inf")]))  # the same everywhere: a mask, say
        self.register_buffer("cache", torch.full((1 + rank,), float(rank)), persistent=False)
        self.register_buffer("later", torch.empty(3, device="meta"))
        self.register_buffer("nothing", None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_statistics_become_the_mean_over_the_ranks(world_size: int) -> None:
    def work(transport: SimTransport) -> dict[str, Tensor]:
        model = trained(transport.rank)
        onebit.sync_buffers(model, transport)
        return dict(model.named_buffers())

    every = [dict(trained(rank).named_buffers()) for rank in range(world_size)]
    for found in run_ranks(world_size, work):
        for name, buffer in found.items():
            if name.endswith("tracked"):
                assert int(buffer) == 1  # rank 0's
            else:
                assert torch.equal(buffer, torch.stack([b[name].double() for b in every]).mean(0).float())


def test_an_evaluation_is_the_same_on_all_ranks() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(9))

    def work(transport: SimTransport) -> tuple[Tensor, Tensor]:
        model = trained(transport.rank).eval()
        before = model(x).detach()
        onebit.sync_buffers(model, transport)
        return before, model(x).detach()

    (before, after), (before_1, after_1) = run_ranks(2, work)
    assert float((before - before_1).abs().max()) > 0.01
    assert torch.equal(after, after_1)


def test_buffers_of_every_kind() -> None:
    def work(transport: SimTransport) -> tuple[Odd, int]:
        model = Odd(transport.rank)
        third, cache = model.third.clone(), model.cache.clone()
        onebit.sync_buffers(model, transport)
        assert torch.equal(model.third, third) and torch.equal(model.cache, cache)
        before = transport.sent_bytes
        onebit.sync_buffers(model, transport)
        return model, transport.sent_bytes - before

    for model, sent_bytes in run_ranks(3, work):
        for name in ("float32", "float64", "bfloat16", "float16"):
            assert getattr(model, f"of_{name}").tolist() == [2.0, 2.0], name
            assert getattr(model, f"own_{name}").tolist() == [2.0, 0.0], name  # rank 0's
        assert model.of_int64.tolist() == model.own_uint8.tolist() == [2, 0]
        assert bool(model.flag) and model.phase == 0
        assert torch.equal(model.transposed, torch.ones(3, 2)) and model.transposed.stride() == (1, 3)
        assert sent_bytes == 2 * 48  # all are equal now


def test_a_model_without_buffers() -> None:
    def work(transport: SimTransport) -> int:
        onebit.sync_buffers(nn.Linear(2, 2), transport)
        return transport.sent_bytes

    assert run_ranks(2, work) == [48, 48]


def test_other_buffers_on_one_rank_are_refused_by_all() -> None:
    def work(transport: SimTransport) -> str:
        with pytest.raises(ValueError, match=r"the model's buffers differ between ranks: entry 3 is 4.running_mean"):
            onebit.sync_buffers(nn.Sequential(*[*ORIGINAL][: 5 - transport.rank]), transport)
        return "refused"

    assert run_ranks(2, work) == ["refused"] * 2


# ---------------------------------------------------------------- what has no mean


@pytest.mark.parametrize("form", ["hooks", "parametrization"])
def test_spectral_norm_evaluates_as_rank_0_does(form: str) -> None:
    """u and v point the other way on rank 1, as they may: their mean is 0, and the weight divided by it no number."""
    make = nn.utils.spectral_norm if form == "hooks" else nn.utils.parametrizations.spectral_norm
    torch.manual_seed(0)
    original = make(nn.Linear(6, 6))

    def work(transport: SimTransport) -> tuple[Tensor, Tensor]:
        layer = copy.deepcopy(original)
        if transport.rank == 1:
            for buffer in layer.buffers():
                buffer.neg_()
        x = torch.ones(2, 6)
        before = layer.eval()(x).detach()
        onebit.sync_buffers(layer, transport)
        return before, layer(x).detach()

    (first, after), (_, other) = run_ranks(2, work)
    assert torch.equal(after, first) and torch.equal(other, first)


class Features(nn.Module):
    """Random Fourier features, a mask that no state_dict holds, and BatchNorm."""

    def __init__(self, rank: int):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.register_buffer("frequencies", torch.randn(4, 6, generator=generator))
        self.register_buffer("mask", (torch.randn(6, generator=generator) > 0).float(), persistent=False)
        self.register_buffer("cache", torch.zeros(1 + rank), persistent=False)
        self.out, self.norm = nn.Linear(6, 1), nn.BatchNorm1d(1, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.out(torch.cos(x @ self.frequencies) * self.mask))


def test_random_features_are_rank_0s_and_statistics_the_mean() -> None:
    def work(transport: SimTransport) -> Features:
        model = Features(transport.rank)
        model.norm.running_var.fill_(float(transport.rank))  # type: ignore[union-attr]
        onebit.sync_buffers(model, transport)
        return model

    for model in run_ranks(2, work):
        assert torch.equal(model.frequencies, Features(0).frequencies)
        assert model.norm.running_var is not None and model.norm.running_var.tolist() == [0.5]


def test_local_steps_begin_with_rank_0s_buffers_and_keep_them() -> None:
    def work(transport: SimTransport) -> list[Tensor]:
        model = Features(transport.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = onebit.LocalSteps(inner, 2, model=model, transport=transport)
        begun = [model.frequencies.clone(), model.mask.clone(), model.cache.clone()]
        for _ in range(2):
            model.frequencies.fill_(float("-inf") if transport.rank == 0 else 1.0)  # the model's own, and no statistic
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        return [*begun, model.frequencies]

    first = Features(0)
    for rank, (frequencies, mask, cache, after) in enumerate(run_ranks(2, work)):
        assert torch.equal(frequencies, first.frequencies) and torch.equal(mask, first.mask)
        assert cache.shape == (1 + rank,)  # its own
        assert (after == float("-inf")).all()
