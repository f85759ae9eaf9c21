"""Ring attention with block layouts, windows to both sides and capped scores equals attention with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onebit.comm import SimTransport, run_ranks
from onebit.zero.sequence.pieces import Pieces
from onebit.zero.sequence.ranks import SequenceRanks
from onebit.zero.sequence.ring import ring_attention
from onebit.zero.sequence.sight import Sight
from onebit.zero.sequence.stages import Split
from onebit.zero.sparse_attention import Layout, SparsityConfig, build_layout

WORLDS = (1, 2, 3, 4, 5, 8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "fixed": {"mode": "fixed", "num_local_blocks": 2},
    "fixed by head": {
        "mode": "fixed",
        "num_local_blocks": 2,
        "num_different_global_patterns": 2,
        "different_layout_per_head": True,
    },
    "variable": {"mode": "variable", "local_window_blocks": [1, 3], "num_random_blocks": 1},
    "bigbird": {"mode": "bigbird", "different_layout_per_head": True},
    "bslongformer": {"mode": "bslongformer", "num_sliding_window_blocks": 3},
    "window": {"mode": "local_sliding_window", "num_sliding_window_blocks": 3},
    "dense": {"mode": "dense"},
}


def drawn(length: int, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, each, length, 8, generator=generator, dtype=torch.float64).to(dtype)
        for each in (heads, groups, groups, heads)
    ]


def whole(given: list[Tensor], seen: Tensor, softcap: float | None = None, scale: float | None = None) -> list[Tensor]:
    """The output and three gradients, in float64, of scores with a mask."""
    q, k, v = (x.double().requires_grad_() for x in given[:3])
    of_each = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(of_each, 1).mT * (scale or q.shape[3] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = weights @ v.repeat_interleave(of_each, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3].double())]


def in_pieces(
    W: int, given: list[Tensor], U: int = 1, order: tuple[int, ...] = (0, 1, 2, 3), **options: Any
) -> tuple[list[Tensor], list[int]]:
    """The same of all ranks' pieces, and the bytes that each has sent. order: of the dimensions in memory."""
    pieces = Pieces(given[0].shape[2], W, U)

    def rank(transport: SimTransport) -> tuple[list[Tensor], int]:
        ranks = SequenceRanks.of(transport, U)
        parts = (pieces.cut(x, transport.rank, 2) for x in given)
        back = [order.index(dim) for dim in range(4)]
        q, k, v, grad = (x.permute(order).contiguous().permute(back) for x in parts)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = ring_attention(q, k, v, ranks, pieces, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)], transport.sent_bytes

    found = run_ranks(W, rank)
    return [pieces.join(list(parts), 2) for parts in zip(*(its for its, _ in found), strict=True)], [
        sent for _, sent in found
    ]


def seen_of(pieces: Pieces, visible: Tensor, node: int, source: int) -> int:
    """How many of one rank's tokens some query of another sees in some head: counted token by token."""
    return int(visible[pieces.positions(node)][:, pieces.positions(source)].any(0).sum())


def layout_of(name: str, is_causal: bool, length: int, block: int = 4) -> Layout:
    said = "unidirectional" if is_causal else "bidirectional"
    lists = {key: tuple(x) if isinstance(x, list) else x for key, x in LAYOUTS[name].items()}
    return build_layout(SparsityConfig(**lists, block=block, attention=said), 4, length)


@pytest.mark.pairwise
@pytest.mark.parametrize("W", WORLDS)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("length", [64, 83])
def test_layouts_equal_a_mask_and_only_what_is_seen_travels(name: str, is_causal: bool, length: int, W: int) -> None:
    given, layout = drawn(length), layout_of(name, is_causal, length)
    found, sent = in_pieces(W, given, is_causal=is_causal, layout=layout)
    for x, expected in zip(found, whole(given, layout.visible(length)), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-5)
    pieces, visible = Pieces(length, W), layout.visible(length).any(0)
    for me in range(W):
        going = sum(seen_of(pieces, visible, other, me) for other in range(W) if other != me)
        coming = sum(seen_of(pieces, visible, me, other) for other in range(W) if other != me)
        assert sent[me] == 2 * 2 * 2 * 8 * 4 * (2 * going + coming)  # keys and values twice, gradients home


@pytest.mark.parametrize("name", ["bslongformer", "fixed by head"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_layouts_and_documents_and_windows_hide_together(name: str, is_causal: bool) -> None:
    length, window = 45, 17
    documents = torch.tensor([[0] * 20 + [1] * 25, [0] * 45])
    given, layout = drawn(length), layout_of(name, is_causal, length)
    at = torch.arange(length)
    seen = layout.visible(length) & ((at[:, None] - at).abs() < window)
    seen = seen & (documents[:, :, None] == documents[:, None]).unsqueeze(1)
    found, _ = in_pieces(3, given, is_causal=is_causal, layout=layout, documents=documents, window=window)
    for x, expected in zip(found, whole(given, seen), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("W", "U"), [(2, 2), (4, 2), (6, 2)])
def test_ranks_that_divide_heads_have_one_layout(W: int, U: int) -> None:
    given, layout = drawn(64), layout_of("bslongformer", True, 64)
    found, _ = in_pieces(W, given, U, layout=layout)
    for x, expected in zip(found, whole(given, layout.visible(64)), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="to 1 if heads differ"):
        in_pieces(W, given, U, layout=layout_of("fixed by head", True, 64))


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_layers_of_a_pipeline_see_by_the_layout(is_causal: bool) -> None:
    """Of each batch in its own length."""
    sparsity = SparsityConfig(mode="bslongformer", block=4, num_sliding_window_blocks=3)

    def rank(transport: SimTransport) -> list[Tensor]:
        split, found = Split(SequenceRanks.of(transport), None, sparsity), []
        for length in (64, 83):
            ids = torch.zeros(2, length, dtype=torch.int64)
            split.cut([(ids, ids)], shifts=False)
            q, k, v = (split.pieces.cut(x, transport.rank, 2) for x in drawn(length)[:3])
            found.append(split.attend(q, k, v, is_causal=is_causal))
        return found

    for length, parts in zip((64, 83), zip(*run_ranks(3, rank), strict=True), strict=True):
        seen = layout_of("bslongformer", is_causal, length).visible(length)
        expected = whole(drawn(length), seen)[0]
        torch.testing.assert_close(Pieces(length, 3).join([*parts], 2).double(), expected, rtol=0, atol=1e-5)


def test_traffic_of_windows_and_global_blocks_does_not_grow_with_the_length() -> None:
    """Of causal windows with one global block a rank gets its neighbours' ends, and the block."""

    def travelling(length: int) -> int:
        sight = Sight(Pieces(length, 4), layout=layout_of("bslongformer", True, length))
        return sum(part.stop - part.start for n in range(4) for m in range(4) if n != m for part in sight.keys(n, m))

    assert travelling(4096) == travelling(512) == 6 * 4 + 3 * 4


def test_a_rank_that_sees_nothing_of_others_is_named() -> None:
    """Windows side by side, without global blocks: chunks of 16 tokens hold whole ones."""
    layout = build_layout(SparsityConfig(mode="fixed", block=4, num_global_blocks=0, attention="unidirectional"), 4, 64)
    with pytest.raises(ValueError, match="rank 1: by this layout the tokens of rank 0 see none of other ranks"):
        Sight(Pieces(64, 2), layout=layout, rank=1)
    assert Sight(Pieces(64, 1), layout=layout).rounds() == []


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected a layout of 16 blocks of 4 tokens, causal, .*got 20 blocks, causal"
    ):
        Sight(Pieces(64, 2), layout=layout_of("fixed", True, 80))
    with pytest.raises(ValueError, match="not causal, for attention over 64 tokens, got 16 blocks, causal"):
        Sight(Pieces(64, 2), is_causal=False, layout=layout_of("fixed", True, 64))
    q, k, v, _ = drawn(64)
    hollow = Layout(~torch.eye(16, dtype=torch.bool).expand(4, 16, 16), 4, False)
    with pytest.raises(ValueError, match="each block sees itself"):
        Sight(Pieces(64, 2), is_causal=False, window=3, layout=hollow)
    with pytest.raises(ValueError, match="expected a layout of 2 heads"):
        ring_attention(q[:, :2], k, v, SimTransport(), Pieces(64, 1), layout=layout_of("fixed", True, 64))


@pytest.mark.pairwise
@pytest.mark.parametrize("W", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_capped_scores(W: int, window: int | None, is_causal: bool) -> None:
    given, at = drawn(41), torch.arange(41)
    given[0] *= 5  # so that the bound is felt
    seen = (at[:, None] - at).abs() < (window or 41)
    seen = seen & (at[:, None] >= at) if is_causal else seen
    found, _ = in_pieces(W, given, is_causal=is_causal, window=window, softcap=2.0)
    for x, expected in zip(found, whole(given, seen, 2.0), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="expected a softcap above 0"):
        in_pieces(1, given, softcap=0.0)
