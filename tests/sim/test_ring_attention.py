"""Ring attention equals attention over the whole sequence, forward and backward, whatever the ranks and the length."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from test_ring_layouts import WORLDS, drawn, in_pieces, whole
from torch import Tensor
from torch.nn import functional as F

from onebit.comm import Bf16Codec, Codec, Int4Codec, Int8Codec, SimTransport, run_ranks
from onebit.comm.codecs.tensors import decode_, encode
from onebit.zero.sequence import local, sight
from onebit.zero.sequence.pieces import Pieces
from onebit.zero.sequence.ranks import SequenceRanks, widest_degree
from onebit.zero.sequence.ring import ring_attention
from onebit.zero.sequence.sight import Sight


def dense_mask(
    length: int, is_causal: bool = True, window: int | None = None, documents: list[list[int]] | None = None
) -> Tensor:
    """Which keys each query sees, [2, 1, length, length], element by element."""

    def sees(row: int, i: int, j: int) -> bool:
        is_near = window is None or abs(i - j) < window
        is_its = documents is None or documents[row % len(documents)][i] == documents[row % len(documents)][j]
        return is_near and is_its and (j <= i or not is_causal)

    return torch.tensor([[[[sees(row, i, j) for j in range(length)] for i in range(length)]] for row in (0, 1)])


DOCUMENTS = {
    "one": [[5] * 41],
    "of one token": [list(range(41))],
    "three": [[0] * 3 + [1] * 20 + [2] * 18],
    "unlike rows": [[0] * 40 + [1], [7] + [3] * 9 + [0] * 31],
    "descending": [[9] * 10 + [1] * 5 + [0] * 26, [2] * 41],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("W", WORLDS)
@pytest.mark.parametrize("length", [41, 16, 3, 1])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("documents", [None, *DOCUMENTS])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 40, 41, 100])
@pytest.mark.parametrize("rows", [256, 4])
def test_it_equals_attention_with_a_mask(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    window: int | None,
    documents: str | None,
    is_causal: bool,
    length: int,
    W: int,
) -> None:
    """Over windows, documents and the whole; of lengths that do not divide, and ranks without a token."""
    monkeypatch.setattr(sight, "_ROWS", rows)
    ids = None if documents is None else [row[:length] for row in DOCUMENTS[documents]]
    check(W, drawn(length), is_causal=is_causal, window=window, documents=ids)


def check(
    W: int,
    given: list[Tensor],
    rtol: float = 0.0,
    atol: float = 1e-5,
    scale: float | None = None,
    documents: list[list[int]] | None = None,
    **seen: Any,
) -> None:
    """Output, gradients and bytes: a rank gets the range of each chunk that its queries see, and gradients go back."""
    length, groups, size = given[0].shape[2], given[1].shape[1], given[1].element_size()
    pieces, mask = Pieces(length, W), dense_mask(length, documents=documents, **seen)
    ids = None if documents is None else torch.tensor(documents)
    found, sent = in_pieces(W, given, scale=scale, documents=ids, **seen)
    for x, expected in zip(found, whole(given, mask, scale=scale), strict=True):
        assert x.dtype == given[0].dtype
        torch.testing.assert_close(x.double(), expected, rtol=rtol, atol=atol)
    for me in range(W):
        going = sum(ranges_of(mask, pieces, other, me) for other in range(W))
        coming = sum(ranges_of(mask, pieces, me, other) for other in range(W))
        assert sent[me] == 2 * 2 * groups * 8 * (2 * size * going + max(4, size) * coming)


def ranges_of(mask: Tensor, pieces: Pieces, rank: int, source: int) -> int:
    """How many tokens of a rank another gets: from the first to the last that it sees of each chunk."""
    if rank == source:
        return 0
    seen = mask[:, 0, pieces.positions(rank)].flatten(0, 1).any(0)
    chunks = [[j for j in chunk if seen[j]] for chunk in pieces.chunks(source)]
    return sum(its[-1] - its[0] + 1 for its in chunks if its)


@pytest.mark.pairwise
@pytest.mark.parametrize(("W", "U"), [(2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (3, 3)])
@pytest.mark.parametrize("length", [1, 5, 24, 41])
@pytest.mark.parametrize(("heads", "groups"), [(12, 12), (12, 6), (12, 4), (12, 1)])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("window", [None, 7])
def test_ranks_of_a_node_divide_heads(
    window: int | None, is_causal: bool, heads: int, groups: int, length: int, W: int, U: int
) -> None:
    """On two levels; between nodes travel keys and values of a rank's heads alone."""
    given, mask = drawn(length, heads, groups), dense_mask(length, is_causal, window)
    shared = math.lcm(groups, U)

    def rank(transport: SimTransport) -> list[Tensor]:
        ranks = SequenceRanks.of(transport, U)
        pieces = ranks.pieces(length)
        assert pieces == Pieces(length, W, U)
        q, k, v, grad = (pieces.cut(x, transport.rank, 2) for x in given)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = ring_attention(q, k, v, ranks, pieces, is_causal=is_causal, window=window)
        found = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
        node, nodes = transport.rank // U, Pieces(length, W // U)
        going = sum(ranges_of(mask, nodes, other, node) for other in range(W // U))
        coming = sum(ranges_of(mask, nodes, node, other) for other in range(W // U))
        assert ranks.ring.sent_bytes == 2 * 2 * (shared // U) * 8 * 4 * (2 * going + coming)
        largest = max(pieces.sizes(node))
        exchanged = 2 * largest * 8 * 4 * (2 * heads + 2 * shared) // U  # queries, keys, values, outputs
        assert ranks.heads.sent_bytes == (U - 1) * 2 * exchanged
        assert transport.sent_bytes == 0
        ranks.close()
        return found

    whole_pieces = Pieces(length, W, U)
    parts = [whole_pieces.join(list(each), 2) for each in zip(*run_ranks(W, rank), strict=True)]
    for found, expected in zip(parts, whole(given, mask), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_ranks_that_cannot_divide_heads_are_refused() -> None:
    def rank(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=f"rank {transport.rank}: expected ulysses_degree to divide the 4 ranks"):
            SequenceRanks.of(transport, 3)
        ranks = SequenceRanks.of(transport, 4)
        q, k, v, _ = (ranks.pieces(8).cut(x, transport.rank, 2) for x in drawn(8, 6, 3))
        with pytest.raises(ValueError, match=f"rank {transport.rank}: 4 ranks cannot divide 6 heads with 3"):
            ring_attention(q, k, v, ranks, ranks.pieces(8))
        with pytest.raises(ValueError, match="of which 1 divide heads, but there are 4, of which 4 do"):
            ring_attention(q, k, v, ranks, Pieces(8, 4))

    run_ranks(4, rank)


@pytest.mark.parametrize(
    ("hosts", "heads", "degree"),
    [("a", 3, 1), ("aabb", 8, 2), ("aaaa", 8, 4), ("aaaa", 6, 2), ("aaaa", 5, 1), ("aaab", 8, 1), ("abab", 8, 1),
     ("aaabbb", 6, 3), ("aaaabb", 8, 2), ("aaaaaa", 9, 3)],
)  # fmt: skip
def test_as_many_ranks_divide_heads_as_share_a_host(hosts: str, heads: int, degree: int) -> None:
    assert widest_degree(hosts, heads) == degree


def test_the_bytes_of_a_window_do_not_grow_with_the_length() -> None:
    def sent(length: int) -> int:
        sees = Sight(Pieces(length, 4), window=32)
        assert sees.rounds() == [1, 3]
        return sum(part.stop - part.start for r in range(4) for s in range(4) if r != s for part in sees.keys(r, s))

    assert sent(1024) == sent(65536) == 6 * 31  # the seven borders of eight chunks; one is inside a rank


def test_windows_and_documents_that_make_no_sense_are_refused() -> None:
    q, k, v, _ = drawn(12)
    for options, words in (
        ({"dropout": 1.0}, "expected a dropout of at least 0 and below 1, got 1.0"),
        ({"window": 0}, "expected a window of at least 1 token .*, got 0"),
        ({"documents": torch.zeros(11, dtype=torch.int64)}, r"expected documents \[12\] or .*, got \(11,\)"),
        ({"documents": torch.zeros(3, 12, dtype=torch.int64)}, r"expected documents of 2 sequences, got 3"),
        ({"documents": torch.tensor([0] * 4 + [1] * 4 + [0] * 4)}, "a document of row 0 is not in one piece"),
    ):
        with pytest.raises(ValueError, match=f"^rank 0: .*{words}"):
            ring_attention(q, k, v, SimTransport(), Pieces(12, 1), **options)


@pytest.mark.parametrize("W", [1, 3])
@pytest.mark.parametrize("window", [None, 9])
def test_dropped_weights_are_those_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, window: int | None, W: int
) -> None:
    """With the unit matrix as values the output is the weights themselves: what was dropped is read from it."""
    monkeypatch.setattr(sight, "_ROWS", 8)
    length, p, pieces = 48, 0.25, Pieces(48, W)
    generator = torch.Generator().manual_seed(5)
    q, k, v, grad = (torch.randn(2, 3, length, length, generator=generator).double() for _ in range(4))
    units = torch.eye(length, dtype=torch.float64).expand(2, 3, length, length)

    monkeypatch.setattr(torch, "randint", lambda *args, **options: torch.tensor(9))  # ranks share the test's generator

    def rank(transport: SimTransport, values: Tensor) -> list[Tensor]:
        mine = [pieces.cut(x, transport.rank, 2) for x in (q, k, values, grad)]
        leaves = [x.requires_grad_() for x in mine[:3]]
        out = ring_attention(*leaves, transport, pieces, window=window, dropout=p, scale=0.05)
        return [out.detach(), *torch.autograd.grad(out, leaves, mine[3])]

    weights = pieces.join([x[0] for x in run_ranks(W, partial(rank, values=units))], 2)
    plain_q, plain_k, plain_v = (x.clone().requires_grad_() for x in (q, k, v))
    seen = dense_mask(length, True, window)
    scores = (plain_q @ plain_k.mT * 0.05).masked_fill(~seen, float("-inf"))
    kept = (weights > 0).double() / (1 - p)
    whole_weights = scores.softmax(-1) * kept
    torch.testing.assert_close(weights, whole_weights.detach())
    share = float((weights > 0).sum() / seen.expand_as(weights).sum())
    assert abs(share - (1 - p)) < 0.02
    out = whole_weights @ plain_v
    expected = [out.detach(), *torch.autograd.grad(out, (plain_q, plain_k, plain_v), grad)]
    parts = zip(*run_ranks(W, partial(rank, values=v)), strict=True)
    for found, wanted in zip(parts, expected, strict=True):
        torch.testing.assert_close(pieces.join(list(found), 2), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 1), (1, 1)])
def test_key_value_heads_travel_alone(heads: int, groups: int) -> None:
    check(3, drawn(24, heads, groups), scale=0.3)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 3, 0, 2), (0, 2, 3, 1), (3, 2, 1, 0)])
@pytest.mark.parametrize(("W", "U"), [(1, 1), (3, 1), (4, 2)])
def test_any_order_of_dimensions_in_memory(W: int, U: int, order: tuple[int, ...]) -> None:
    """Tensor ranks make queries whose elements are no neighbours, which torch's kernel would read as if they were."""
    given = drawn(21, 4, 4)
    for x, expected in zip(in_pieces(W, given, U, order)[0], whole(given, dense_mask(21)), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_dtypes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float) -> None:
    """Parts are summed in float32: low precision rounds once for each block, as a single pass does once."""
    given = drawn(40, dtype=dtype)
    check(4, given, rtol=tolerance, atol=tolerance)
    monkeypatch.setattr(sight, "_ROWS", 4)  # tiles of which some queries see nothing
    (found, *_), _ = in_pieces(4, given, 2, window=6)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), whole(given, dense_mask(40, True, 6))[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("elements", [1 << 24, 60])
def test_plain_operations_equal_torchs_kernel(monkeypatch: pytest.MonkeyPatch, is_causal: bool, elements: int) -> None:
    """As on devices for which no kernel is named, in one slice and in many."""
    given = drawn(20)
    expected, _ = in_pieces(3, given, is_causal=is_causal)
    monkeypatch.setattr(local, "_has_kernel", lambda q, v: False)
    monkeypatch.setattr(local, "_SLICE_ELEMENTS", elements)
    for found, wanted in zip(in_pieces(3, given, is_causal=is_causal)[0], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("W", WORLDS)
def test_every_rank_computes_the_same_number_of_pairs(W: int) -> None:
    """Of a causal sequence that divides, per rank s·(s+1)/2 and s²/2 with each other rank."""
    pieces, s = Pieces(2 * W * 6, W), 12
    sees, host = Sight(pieces), torch.device("cpu")
    for rank in range(W):
        tiles = [tile for source in range(W) if source != rank for tile in sees.tiles(rank, source, host)]
        assert all(tile.hidden is None for tile in tiles)
        sizes = [(t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in tiles]
        assert sum(sizes) == (W - 1) * s * s // 2


@pytest.mark.parametrize("W", WORLDS)
@pytest.mark.parametrize("length", [0, 1, 7, 64, 65])
@pytest.mark.parametrize("U", [1, 2])
def test_pieces_hold_each_token_once_in_order(length: int, W: int, U: int) -> None:
    pieces, tokens = Pieces(length, W * U, U), torch.arange(length)
    parts = [pieces.cut(tokens, rank, 0) for rank in range(W * U)]
    assert torch.equal(pieces.join(parts, 0), tokens)
    for rank, part in enumerate(parts):
        assert torch.equal(part, pieces.positions(rank)) and len(part) == pieces.size(rank)
        assert torch.equal(part, part.sort().values)


def test_shapes_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    q, k, v, _ = drawn(12)
    transport = SimTransport()
    for given, words in (
        ((q, k, v, Pieces(12, 2)), "pieces for 2 ranks, of which 1 divide heads, but there are 1"),
        ((q, k, v, Pieces(13, 1)), r"expected queries and keys \[b, heads, 13, d\]"),
        ((q, k, v[:, :1], Pieces(12, 1)), "expected keys and values .* of one shape"),
        ((q[:, :3], k, v, Pieces(12, 1)), "g a divisor of the 3 query heads"),
        ((q, k.double(), v, Pieces(12, 1)), "give them one"),
    ):
        with pytest.raises(ValueError, match=f"^rank 0: .*{words}"):
            ring_attention(*given[:3], transport, given[3])
    assert transport.sent_bytes == 0


@pytest.mark.parametrize(
    ("codec", "bytes_per_element", "tolerance"),
    [(Bf16Codec(), 2.0, 0.01), (Int8Codec(64), 1.0 + 2 / 64, 0.02), (Int4Codec(64), 0.5 + 2 / 64, 0.25)],
)
def test_blocks_travel_in_few_bytes(codec: Codec, bytes_per_element: float, tolerance: float) -> None:
    """The error of output and gradients, as a share of their size."""
    given, W = drawn(48, 4, 2), 3
    pieces, mask = Pieces(48, W), dense_mask(48)
    expected = whole(given, mask)

    def rank(transport: SimTransport) -> tuple[list[Tensor], int]:
        q, k, v, grad = (pieces.cut(x, transport.rank, 2).requires_grad_() for x in given)
        out = ring_attention(q, k, v, transport, pieces, codec=codec)
        sent = transport.sent_bytes
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())], sent

    ranks = run_ranks(W, rank)
    for parts, wanted in zip(zip(*(found for found, _ in ranks), strict=True), expected, strict=True):
        error = float((pieces.join(list(parts), 2) - wanted).norm() / wanted.norm())
        assert 0 < error < tolerance
    elements = [2 * 2 * 2 * 8 * sum(ranges_of(mask, pieces, r, me) for r in range(W)) for me in range(W)]
    for (_, sent), count in zip(ranks, elements, strict=True):
        assert sent == pytest.approx(count * bytes_per_element, rel=0.05)


@pytest.mark.parametrize("codec", [Int8Codec(64), Int4Codec(64)])
def test_gradients_are_those_of_the_rounded_blocks(codec: Codec) -> None:
    """Equal to autograd through rounded copies of what the other rank sees."""
    given, pieces = drawn(24, 2, 2), Pieces(24, 2)

    def rank(transport: SimTransport) -> list[Tensor]:
        q, k, v, grad = (pieces.cut(x, transport.rank, 2) for x in given)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        return list(torch.autograd.grad(ring_attention(q, k, v, transport, pieces, codec=codec), (q, k, v), grad))

    def rounded(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        decode_(codec, encode(codec, x), out)
        return out

    # Rank 1 sees the first chunk of rank 0 rounded, and rank 0's second chunk sees both chunks of rank 1 rounded.
    found = run_ranks(2, rank)
    q, k, v, grad = given
    parts = [torch.stack([pieces.cut(x, r, 2) for x in (k, v)]) for r in range(2)]
    first = len(pieces.chunks(0)[0])
    seen_by_1, seen_by_0 = rounded(parts[0][:, :, :, :first].contiguous()), rounded(parts[1])
    leaves = [x.clone().requires_grad_() for x in (parts[0], parts[1], seen_by_1, seen_by_0)]
    own_0, own_1, of_0, of_1 = leaves
    places = [pieces.positions(r) for r in range(2)]
    total = 0.0
    for r, (own, other, other_places) in enumerate(((own_0, of_1, places[1]), (own_1, of_0, places[0][:first]))):
        keys, values = torch.cat([own, other], 3)
        mask = torch.cat([places[r], other_places]) <= places[r].unsqueeze(1)
        out = F.scaled_dot_product_attention(pieces.cut(q, r, 2), keys, values, attn_mask=mask)
        total = total + (out * pieces.cut(grad, r, 2)).sum()
    of_own_0, of_own_1, of_seen_0, of_seen_1 = torch.autograd.grad(total, leaves)
    of_own_0[:, :, :, :first] += of_seen_0
    for mine, expected in zip(found, (of_own_0, of_own_1 + of_seen_1), strict=True):
        torch.testing.assert_close(torch.stack(mine[1:]), expected, rtol=0, atol=1e-5)
