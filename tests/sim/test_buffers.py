"""Module buffers: what each rank has gathered becomes the same on all, and nothing else is touched or sent."""

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
    """Buffers of every kind."""

    def __init__(self, rank: int):
        super().__init__()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.tensor([2, 2 * rank]).to(dtype))
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
        assert model.of_int64.tolist() == model.of_uint8.tolist() == [2, 0]  # rank 0's
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
