"""Styles of tensor parallelism beyond torch's: who sends which features, and zeros that align experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from onebit.zero.parallel.experts import aligned
from onebit.zero.parallel.model_plan import stack_sizes
from onebit.zero.parallel.styles import divide, route
from onebit.zero.parallel.tensor import resolve

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 4))
def test_an_exchange_gives_each_rank_its_share_of_every_matrix(widths: list[int], ranks: int) -> None:
    """Matrices of any sizes that the ranks divide; every feature goes to one rank."""
    sizes = tuple(width * ranks for width in widths)
    features = torch.arange(sum(sizes))
    sent: list[tuple[Tensor, ...]] = []
    for rank, held in enumerate(features.chunk(ranks)):
        order, counts, _ = route(sizes, ranks, rank, CPU)
        assert sorted(order.tolist()) == list(range(len(held)))
        sent.append(held[order].split(counts))
    for rank in range(ranks):
        taken = [row[rank] for row in sent]
        assert [len(x) for x in taken] == route(sizes, ranks, rank, CPU)[2]
        wanted = [matrix.chunk(ranks)[rank] for matrix in features.split(list(sizes))]
        assert torch.equal(torch.cat(taken), torch.cat(wanted))


def test_the_stack_of_attention_has_as_many_keys_as_values() -> None:
    class Config:
        num_attention_heads, num_key_value_heads = 6, 2

    model, layer = nn.Module(), nn.Linear(4, 50)
    model.config = Config()  # type: ignore[assignment]
    assert stack_sizes("qkv", layer, model) == (30, 10, 10)
    assert stack_sizes("", layer, model) == (25, 25)
    with pytest.raises(ValueError, match=r"'packed_colwise:3' .* 3 matrices .* has 50 outputs"):
        stack_sizes("3", layer, model)


@pytest.mark.parametrize("style", ["colwise", ColwiseParallel, None])
def test_what_is_no_style_is_named_with_its_layer(style: object) -> None:
    with pytest.raises(TypeError, match=r"the tensor plan's '0' has .*expected a style, an instance"):
        resolve(nn.Sequential(nn.Linear(4, 4)), {"0": style}, 1)  # type: ignore[dict-item]


def test_a_divided_config_follows_the_models_own() -> None:
    class Config:
        num_attention_heads, form = 6, "eager"

    module = nn.Module()
    module.config = config = Config()  # type: ignore[assignment]
    divide(module, ("config.num_attention_heads",), 2)
    config.form = "sdpa"
    assert (module.config.num_attention_heads, module.config.form) == (3, "sdpa")
    assert config.num_attention_heads == 6


@pytest.mark.parametrize("form", ["gated", "alternating", "transposed", "plain"])
def test_zeros_that_align_experts_change_nothing(form: str) -> None:
    """By the products of one expert in float64, of 3 features between them where 2 or 8 are wanted."""
    E, K, n = 2, 4, 3
    experts = nn.Module()
    options = {"has_gate": form != "plain", "is_transposed": form == "transposed", "is_concatenated": form == "gated"}
    vars(experts).update(options)
    width, up = (n, "up_proj") if form == "plain" else (2 * n, "gate_up_proj")
    parts = {up: torch.randn(E, width, K), "down_proj": torch.randn(E, K, n), f"{up}_bias": torch.randn(E, width)}
    if form == "transposed":
        parts |= {name: parts[name].mT.contiguous() for name in (up, "down_proj")}
    x = torch.randn(5, K, dtype=torch.float64)

    def product(held: dict[str, Tensor], expert: int) -> Tensor:
        first, second = held[up][expert].double(), held["down_proj"][expert].double()
        first, second = (first.mT, second.mT) if form == "transposed" else (first, second)
        y = x @ first.mT + held[f"{up}_bias"][expert].double()
        gate, up_ = (y, 1.0) if form == "plain" else y.chunk(2, 1) if form == "gated" else (y[:, ::2], y[:, 1::2])
        return (torch.sigmoid(gate) * up_) @ second.mT

    for dtype in (torch.float32, torch.bfloat16):
        given_ = {name: part.to(dtype) for name, part in parts.items()}
        made = aligned(experts, given_)
        assert made["down_proj"].shape[1 if form == "transposed" else 2] * dtype.itemsize % 16 == 0
        assert aligned(experts, made).keys() == made.keys()
        assert all(aligned(experts, made)[name] is part for name, part in made.items())
        for expert in range(E):
            torch.testing.assert_close(product(made, expert), product(given_, expert), rtol=1e-12, atol=1e-12)
