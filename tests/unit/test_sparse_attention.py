"""Both executors against dense attention with the same mask in float64, forward and backward; bad input by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from errors import refused
from torch import Tensor

from onebit.zero.sparse_attention import (
    Layout,
    SparseSelfAttention,
    SparsityConfig,
    build_layout,
    place_heads,
    sparse_attention,
)
from onebit.zero.sparse_attention.attention import chosen_executor
from onebit.zero.sparse_attention.flex import _compiled, _kernel, block_mask, covers
from onebit.zero.sparse_attention.plan import LEAST_SHARE, cost, plan

B, H, S, D, BLOCK = 2, 4, 53, 8, 8
CONFIGS = {
    "dense": SparsityConfig(mode="dense", block=BLOCK),
    "fixed": SparsityConfig(mode="fixed", block=BLOCK, num_local_blocks=3, attention="unidirectional"),
    "fixed, rows": SparsityConfig(mode="fixed", block=BLOCK, num_local_blocks=2, horizontal_global_attention=True),
    "fixed, heads differ": SparsityConfig(
        mode="fixed",
        block=BLOCK,
        attention="unidirectional",
        different_layout_per_head=True,
        num_different_global_patterns=4,
    ),
    "variable": SparsityConfig(mode="variable", block=BLOCK, num_random_blocks=1, local_window_blocks=(1, 2)),
    "bigbird": SparsityConfig(mode="bigbird", block=BLOCK, different_layout_per_head=True),
    "bigbird, causal": SparsityConfig(mode="bigbird", block=BLOCK, attention="unidirectional", num_random_blocks=2),
    "bslongformer": SparsityConfig(mode="bslongformer", block=BLOCK, global_block_indices=(0, 3)),
    "window": SparsityConfig(mode="local_sliding_window", block=BLOCK),
}
MASKS = ("none", "padding", "bias", "padding and bias")


def dense(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, padding: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Attention in float64 over all pairs, with the layout as a mask; rows that see nothing are zero."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(groups, 1), value.double().repeat_interleave(groups, 1)
    seen = layout.blocks_HNN.repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
    seen = seen[None, :, :length, :length]
    if layout.is_causal:
        seen = seen & torch.ones(length, length).tril().bool()
    if padding is not None:
        seen = seen & padding[:, None, None].bool()
    scores = q @ k.mT / query.shape[3] ** 0.5
    scores = scores if bias is None else scores + bias.double()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(3).nan_to_num(0)
    return weights @ v


def inputs(
    key_heads: int = H, length: int = S, dtype: torch.dtype = torch.float32, sequences: int = B
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(sequences, heads, length, D) for heads in (H, key_heads, key_heads)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def masks(name: str, length: int = S) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(4), {}
    if "padding" in name:
        found["padding"] = torch.arange(length) < torch.tensor([[length], [2 * length // 3]])
    if "bias" in name:
        found["bias"] = torch.randn(1, H, length, length, generator=generator).requires_grad_()
    return found


def gradients(out: Tensor, of: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return list(torch.autograd.grad((out.double() * weight).sum(), of))


@pytest.mark.pairwise
@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_gather_is_dense_attention_with_the_same_mask(name: str, mask: str, key_heads: int) -> None:
    """Within 1e-5, forward and backward: float32 against float64."""
    tensors, given = inputs(key_heads), masks(mask)
    layout = build_layout(CONFIGS[name], H, S)
    out, expected = sparse_attention(*tensors, layout, **given, executor="gather"), dense(*tensors, layout, **given)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert (out - expected).abs().max() < 1e-5
    trained = [*tensors, *([given["bias"]] if "bias" in given else [])]
    for found, wanted in zip(gradients(out, trained), gradients(expected, trained), strict=True):
        assert (found - wanted).abs().max() < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mask"),
    [("fixed, heads differ", "none"), ("bigbird", "padding"), ("fixed, rows", "bias"), ("window", "padding and bias")],
)
def test_flex_is_dense_attention_with_the_same_mask(name: str, mask: str) -> None:
    """Forward: on the CPU torch has no backward for it. Grouped-query heads; more than one block of the kernel."""
    length = 140
    tensors, given = inputs(2, length), masks(mask, length)
    layout = build_layout(CONFIGS[name], H, length)
    with torch.no_grad():
        out = sparse_attention(*tensors, layout, **given, executor="flex")
        assert (out - dense(*tensors, layout, **given)).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("name", ["window", "bslongformer", "fixed, rows"])
def test_any_length_is_taken(name: str, length: int) -> None:
    tensors = inputs(length=length)
    layout = build_layout(CONFIGS[name], H, length)
    out = sparse_attention(*tensors, layout)
    expected = dense(*tensors, layout)
    assert (out - expected).abs().max() < 1e-5
    for found, wanted in zip(gradients(out, list(tensors)), gradients(expected, list(tensors)), strict=True):
        assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(1, 1, S, S), (B, 1, 1, S), (H, 1, 1), (S, S), (1, S, 1)])
def test_a_bias_may_be_shared(shape: tuple[int, ...]) -> None:
    """Over sequences, heads, queries or keys; its gradient adds up over what it is shared by."""
    tensors, layout = inputs(), build_layout(CONFIGS["fixed"], H, S)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(6)).requires_grad_()
    out, expected = sparse_attention(*tensors, layout, bias=bias), dense(*tensors, layout, bias=bias)
    assert (out - expected).abs().max() < 1e-5
    (found,), (wanted,) = gradients(out, [bias]), gradients(expected, [bias])
    assert found.shape == bias.shape
    assert (found - wanted).abs().max() < 1e-5 * S  # sums of up to B·S·H terms


@pytest.mark.slow
def test_bfloat16_rounds_once() -> None:
    """The result is float32's, rounded to 8 bits: within half a unit of the last place, and the sums' own error."""
    tensors, layout = inputs(dtype=torch.bfloat16), build_layout(CONFIGS["bigbird"], H, S)
    out, expected = sparse_attention(*tensors, layout), dense(*tensors, layout)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    for found, wanted in zip(gradients(out, list(tensors)), gradients(expected, list(tensors)), strict=True):
        # The output's gradient and the output are rounded before: three roundings of terms of about one.
        torch.testing.assert_close(found.double(), wanted.double(), rtol=2**-6, atol=2**-6)


@pytest.mark.slow
def test_float64_gradients_are_the_functions() -> None:
    layout = build_layout(SparsityConfig(mode="bigbird", block=2), 2, 5)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, h, 5, 3, generator=generator, dtype=torch.float64).requires_grad_() for h in (2, 1, 1))
    bias = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64).requires_grad_()

    def attend(*given: Tensor, dropout: float = 0.0) -> Tensor:
        torch.manual_seed(8)  # the same weights are dropped each time
        return sparse_attention(given[0], given[1], given[2], layout, bias=given[3], dropout=dropout)

    assert torch.autograd.gradcheck(attend, (q, k, v, bias))
    assert torch.autograd.gradcheck(functools.partial(attend, dropout=0.3), (q, k, v, bias))


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    """Of values that are all one, the output is the sum of the weights that stay: one on average, ± 5 deviations."""
    query = torch.zeros(64, 1, 64, 4)
    layout = build_layout(SparsityConfig(mode="dense", block=16), 1, 64)
    torch.manual_seed(9)
    sums = sparse_attention(query, query, torch.ones_like(query), layout, dropout=0.25)[..., 0]
    deviation = (0.25 / 0.75 / 64) ** 0.5  # of the mean of 64 weights that are 0 or 4/3
    assert sums.std().item() == pytest.approx(deviation, rel=0.1)
    assert abs(sums.mean().item() - 1) < 5 * deviation / sums.numel() ** 0.5


def test_what_sees_only_padding_is_zero_and_gives_no_gradient() -> None:
    """The second sequence is padding but for its first block, which a window's last rows do not see."""
    tensors, layout = inputs(), build_layout(CONFIGS["window"], H, S)
    padding = torch.arange(S) < torch.tensor([[S], [BLOCK]])
    out = sparse_attention(*tensors, layout, padding=padding)
    assert torch.equal(out[1, :, 2 * BLOCK :], torch.zeros(H, S - 2 * BLOCK, D))
    assert out.isfinite().all() and bool((out[1, :, :BLOCK] != 0).all())
    grads = gradients(out, list(tensors))
    assert all(grad.isfinite().all() for grad in grads)
    assert torch.equal(grads[1][1, :, BLOCK:], torch.zeros(H, S - BLOCK, D))


@pytest.mark.parametrize("name", CONFIGS)
def test_cost_follows_density_and_not_the_densest_row(name: str) -> None:
    """Of all tasks: at most 1/0.9 of what the rows of the layout cost one by one, whatever one row sees."""
    layout = build_layout(CONFIGS[name], H, 41 * BLOCK)
    buckets = plan(layout, 1, H, torch.device("cpu"))
    whole = sum(len(b.rows_TR) * int(cost(b.rows_TR.shape[1], b.columns_TC.shape[1], BLOCK)) for b in buckets)
    assert whole <= int(cost(1, int(layout.blocks_HNN.sum()), BLOCK)) / LEAST_SHARE
    rows = torch.cat([bucket.rows_TR.flatten() for bucket in buckets])
    assert torch.equal(rows.sort().values, torch.arange(H * 41))


def test_nothing_but_inputs_and_output_is_kept_for_backward() -> None:
    tensors, kept = inputs(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        out = sparse_attention(*tensors, build_layout(CONFIGS["dense"], H, S))
    assert out.requires_grad
    padded = B * H * -(-S // BLOCK) * BLOCK * D * 4
    assert sum(kept) == 4 * padded


@pytest.mark.parametrize("block", [8, 16, 48, 128, 200, 256])
def test_the_kernels_blocks_cover_the_layout(block: int) -> None:
    """What a token sees is in a block that is computed; in those that are computed unmasked, all tokens see all."""
    length, size = 700, block if block == 256 else 128
    for attention in ("unidirectional", "bidirectional"):
        layout = build_layout(SparsityConfig(mode="bigbird", block=block, attention=attention), 2, length)
        some, whole = covers(layout, length, torch.device("cpu"))
        assert not (some & whole).any()
        tokens = torch.arange(length)
        of_block = tokens // size
        seen = layout.visible(length)
        assert not (seen & ~(some | whole)[:, of_block][:, :, of_block]).any()
        assert not (~seen & whole[:, of_block][:, :, of_block]).any()


def test_a_cache_of_keys_gives_the_last_rows() -> None:
    """One token, and several at once; with padding on the left, as generation has it."""
    q, k, v = inputs(2)
    attention = SparseSelfAttention(CONFIGS["bigbird, causal"], H).eval()
    padding = torch.arange(S) >= torch.tensor([[0], [5]])
    whole = attention(q, k, v, padding=padding)
    for last in (1, 6):
        rows = attention(q[:, :, -last:], k, v, padding=padding)
        assert (rows - whole[:, :, -last:]).abs().max() < 1e-5
    refused(ValueError, "at most as many queries as keys, got 53 and 52", attention, q, k[:, :, 1:], v[:, :, 1:])


def test_a_tensor_parallel_rank_attends_with_its_own_heads() -> None:
    q, k, v = inputs()
    attention = SparseSelfAttention(CONFIGS["bigbird"], H)
    whole = attention(q, k, v)
    refused(ValueError, "has 4 heads, query has 2; if ranks divide the heads", attention, q[:, 2:], k[:, 2:], v[:, 2:])
    place_heads(attention, 1, 2)
    assert torch.equal(attention(q[:, 2:], k[:, 2:], v[:, 2:]), whole[:, 2:])
    refused(ValueError, "3 tensor ranks cannot divide 4 heads", place_heads, attention, 0, 3)


def test_the_executor_is_chosen_by_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [chosen_executor("auto", cpu, 0), chosen_executor("auto", cuda, 0)] == ["gather", "flex"]
    assert chosen_executor("auto", cuda, 0.1) == "gather"
    refused(ValueError, '"flex" has no dropout', chosen_executor, "flex", cuda, 0.1)
    refused(ValueError, "one of auto, flex, gather, got 'triton'", chosen_executor, "triton", cpu, 0)
    with pytest.raises(RuntimeError, match='no backward pass on cpu; use executor="gather"'):
        sparse_attention(*inputs(), CONFIGS["window"], executor="flex")


BAD: dict[str, tuple[Callable[[Tensor, Layout], object], str]] = {
    "heads": (
        lambda x, layout: sparse_attention(x[:, :3], x[:, :3], x[:, :3], layout),
        "the layout has 4 heads, query has 3; build it with heads=3",
    ),
    "key heads": (lambda x, layout: sparse_attention(x, x[:, :3], x[:, :3], layout), "divides the query heads"),
    "length": (
        lambda x, layout: sparse_attention(x[:, :, :48], x[:, :, :48], x[:, :, :48], layout),
        "7 blocks of 8 tokens, for lengths 49 to 56; query has 48 tokens: build it with length=48",
    ),
    "fewer keys": (
        lambda x, layout: sparse_attention(x, x[:, :, 1:], x[:, :, 1:], layout),
        "query's sequences, tokens and features",
    ),
    "three axes": (lambda x, layout: sparse_attention(x[0], x[0], x[0], layout), r"\[sequences, heads, tokens"),
    "types": (lambda x, layout: sparse_attention(x, x.double(), x, layout), "of one floating-point type"),
    "padding": (
        lambda x, layout: sparse_attention(x, x, x, layout, padding=torch.ones(B, S - 1).bool()),
        r"padding of shape \[2, 53\], one for each token, got \(2, 52\)",
    ),
    "additive padding": (
        lambda x, layout: sparse_attention(x, x, x, layout, padding=torch.zeros(B, S)),
        "add to the scores as bias=",
    ),
    "bias": (
        lambda x, layout: sparse_attention(x, x, x, layout, bias=torch.zeros(H, S)),
        r"broadcasts to \[2, 4, 53, 53\], got \(4, 53\)",
    ),
    "bool bias": (
        lambda x, layout: sparse_attention(x, x, x, layout, bias=torch.ones(S, S).bool()),
        "pass a padding mask as padding=",
    ),
    "dropout": (lambda x, layout: sparse_attention(x, x, x, layout, dropout=1.0), r"dropout in \[0, 1\), got 1.0"),
    "mode": (lambda x, layout: sparse_attention(x, x, x, SparsityConfig()), "has no mode"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    call, error = BAD[name]
    refused((ValueError, TypeError), error, call, torch.zeros(B, H, S, D), build_layout(CONFIGS["window"], H, S))


def test_each_kind_of_call_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts variants by code, and runs those beyond the eighth uncompiled: lengths in one padded block, too."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    _compiled.cache_clear()
    layout = build_layout(CONFIGS["window"], H, 256)

    def kernel(length: int, scale: float = 0.125) -> Callable[..., object]:
        shape = torch.Size((1, H, length, 8))
        on_gpu = SimpleNamespace(device=torch.device("cuda"), shape=shape, dtype=torch.float32, requires_grad=False)
        return _kernel(on_gpu, on_gpu, on_gpu, layout, None, None, scale)  # type: ignore[arg-type]

    kernels = [kernel(length) for length in range(130, 150)] + [kernel(130, scale=0.25)]
    assert len({id(each.__code__) for each in kernels}) == 21 and kernel(130) is kernels[0]
    _compiled.cache_clear()


def test_a_mask_that_inference_has_made_serves_training() -> None:
    with torch.inference_mode():
        mask = block_mask(build_layout(CONFIGS["window"], H, 256), 256, torch.device("cpu"))
    assert not mask.kv_num_blocks.is_inference() and not mask.kv_indices.is_inference()
