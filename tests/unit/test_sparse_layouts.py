"""Layouts against tables written by hand from the papers, the same on all ranks, drawn; bad ones refused by name."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import pytest
import torch

from onebit.zero.sparse_attention import Layout, SparsityConfig, build_layout, draw, reach, read_sparsity, save_picture
from onebit.zero.sparse_attention.config import MODES

SPREAD = SparsityConfig(mode="bigbird", block=4, different_layout_per_head=True, num_random_blocks=2, seed=5)


def rows_of(config: SparsityConfig, blocks: int, head: int = 0, heads: int = 1) -> list[str]:
    layout = build_layout(config, heads, blocks * config.block)
    return ["".join("x" if seen else "." for seen in row) for row in layout.blocks_HNN[head].tolist()]


TABLES = {
    # Sparse Transformers (Child et al., 2019), figure 3c: windows of 4, and the last column of each for all later rows.
    "fixed, unidirectional": (
        {"mode": "fixed", "attention": "unidirectional"},
        """
        x.........
        xx........
        xxx.......
        xxxx......
        ...xx.....
        ...xxx....
        ...xxxx...
        ...xxxxx..
        ...x...xx.
        ...x...xxx
        """,
    ),
    "fixed, bidirectional, rows too": (
        {"mode": "fixed", "num_local_blocks": 3, "horizontal_global_attention": True},
        """
        xxx..x
        xxx..x
        xxxxxx
        ..xxxx
        ..xxxx
        xxxxxx
        """,
    ),
    # The last window is short: its last blocks take the place of the summaries that it does not have.
    "fixed, a short window": (
        {"mode": "fixed", "num_global_blocks": 2},
        """
        xxxxxx
        xxxxxx
        xxxxxx
        xxxxxx
        ..xxxx
        ..xxxx
        """,
    ),
    "variable": (
        {"mode": "variable", "local_window_blocks": [1, 3], "global_block_indices": [5]},
        """
        x....x..
        .xxx.x..
        .xxx.x..
        .xxx.x..
        ....xxx.
        ....xxx.
        ....xxx.
        .....x.x
        """,
    ),
    "variable, runs of global blocks, rows too": (
        {
            "mode": "variable",
            "local_window_blocks": [2],
            "global_block_indices": [0, 9],
            "global_block_end_indices": [2, 11],
            "horizontal_global_attention": True,
        },
        """
        xxxxxx
        xxxxxx
        xxxx..
        xxxx..
        xx..xx
        xx..xx
        """,
    ),
    # BigBird (Zaheer et al., 2020), figure 1, without its random blocks: a window of 3 and 2 global blocks.
    "bigbird": (
        {"mode": "bigbird", "num_random_blocks": 0, "num_global_blocks": 2},
        """
        xxxxxxx
        xxxxxxx
        xxxx...
        xxxxx..
        xx.xxx.
        xx..xxx
        xx...xx
        """,
    ),
    "bigbird, unidirectional": (
        {"mode": "bigbird", "num_random_blocks": 0, "attention": "unidirectional"},
        """
        x.....
        xx....
        xxx...
        x.xx..
        x..xx.
        x...xx
        """,
    ),
    # Longformer (Beltagy et al., 2020), figure 2d: a window, and global tokens that see and are seen by all.
    "bslongformer": (
        {"mode": "bslongformer", "global_block_indices": [0, 4]},
        """
        xxxxxxx
        xxx.x..
        xxxxx..
        x.xxx..
        xxxxxxx
        x...xxx
        x...xxx
        """,
    ),
    "local_sliding_window": (
        {"mode": "local_sliding_window", "num_sliding_window_blocks": 5},
        """
        x.....
        xx....
        xxx...
        .xxx..
        ..xxx.
        ...xxx
        """,
    ),
    "local_sliding_window, bidirectional": (
        {"mode": "local_sliding_window", "attention": "bidirectional"},
        """
        xx...
        xxx..
        .xxx.
        ..xxx
        ...xx
        """,
    ),
    "dense": ({"mode": "dense"}, "xx\nxx"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_layout_is_its_hand_drawn_table(name: str) -> None:
    keys, table = TABLES[name]
    expected = table.split()
    assert rows_of(read_sparsity(keys), len(expected)) == expected


def test_heads_take_the_summaries_of_a_window_in_turn() -> None:
    config = read_sparsity(
        {
            "mode": "fixed",
            "attention": "unidirectional",
            "different_layout_per_head": True,
            "num_different_global_patterns": 4,
        }
    )
    later = [rows_of(config, 8, head, heads=5)[4] for head in range(5)]
    assert later == ["...xx...", "..x.x...", ".x..x...", "x...x...", "...xx..."]


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_every_row_has_its_random_blocks_where_it_may_have_them(attention: str) -> None:
    """Of 3 in each row: a causal row has no more than its past and itself, the first row one."""
    keys = {"mode": "variable", "num_random_blocks": 3, "local_window_blocks": [1], "global_block_indices": []}
    table = build_layout(read_sparsity(keys | {"attention": attention, "block": 4}), 1, 80).blocks_HNN[0]
    off_diagonal = (table & ~torch.eye(20, dtype=torch.bool)).sum(1)
    for row, count in enumerate(off_diagonal.tolist()):
        most = min(3, row) if attention == "unidirectional" else 3
        assert most - 1 <= count <= most
    assert attention == "bidirectional" or not table.triu(1).any()


def test_a_layout_depends_on_its_seed_alone() -> None:
    """Not on torch's generators: ranks and resumed runs stand elsewhere in these."""
    torch.manual_seed(1)
    first = build_layout(SPREAD, 3, 64).blocks_HNN
    build_layout.__globals__["_build"].cache_clear()
    torch.manual_seed(2)
    again = build_layout(SPREAD, 3, 64).blocks_HNN
    assert torch.equal(first, again) and not torch.equal(first[0], first[1])
    other = SparsityConfig(mode="bigbird", block=4, different_layout_per_head=True, num_random_blocks=2, seed=6)
    assert not torch.equal(first, build_layout(other, 3, 64).blocks_HNN)


def test_heads_share_one_layout_unless_it_is_said_that_they_differ() -> None:
    table = build_layout(SparsityConfig(mode="bigbird", block=4), 3, 64).blocks_HNN
    assert torch.equal(table[0], table[1]) and torch.equal(table[0], table[2])


@pytest.mark.parametrize("mode", MODES)
def test_a_longer_causal_layout_begins_with_the_shorter(mode: str) -> None:
    """What a cache of keys rests on: a token's row does not change as the sequence grows."""
    config = SparsityConfig(mode=mode, block=4, attention="unidirectional", num_random_blocks=2)
    longer = build_layout(config, 1, 27 * 4).blocks_HNN
    for blocks in range(1, 27):
        assert torch.equal(build_layout(config, 1, blocks * 4).blocks_HNN, longer[:, :blocks, :blocks])


def test_a_short_last_block_counts() -> None:
    layout = build_layout(SparsityConfig(mode="dense", block=16, attention="unidirectional"), 2, 33)
    assert layout.rows == 3 and layout.visible(33).shape == (2, 33, 33)
    assert torch.equal(layout.visible(33)[1], torch.ones(33, 33).tril().bool())


def test_a_rank_takes_its_part_of_the_heads() -> None:
    layout = build_layout(SPREAD, 6, 64)
    assert torch.equal(layout.of_heads(2, 3).blocks_HNN, layout.blocks_HNN[2:5])
    assert layout.of_heads(0, 6) is layout
    with pytest.raises(ValueError, match="the layout has 6 heads, and no heads 5 to 6"):
        layout.of_heads(5, 2)


def test_a_layout_that_hides_everything_from_a_row_is_refused() -> None:
    table = torch.ones(2, 4, 4, dtype=torch.bool)
    table[1, 2] = False
    with pytest.raises(ValueError, match=r"hides everything from row 2 of head 1 \(tokens 16 to 23\)"):
        Layout(table, 8, is_causal=False)
    ahead = torch.ones(1, 3, 3, dtype=torch.bool).triu(1)
    with pytest.raises(ValueError, match=r"row 0 of head 0 .* no block of its past or itself"):
        Layout(ahead, 8, is_causal=True)
    with pytest.raises(ValueError, match=r"expected a layout of shape \[heads, blocks, blocks\], got \(4, 4\)"):
        Layout(table[0], 8, is_causal=False)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"mode": "fxed"}, r'config: mode: expected one of "dense", "fixed"'),
        ({"mode": "fixed", "num_local_block": 3}, 'unknown key "num_local_block"; did you mean "num_local_blocks"'),
        ({"block": 16}, "sparse_attention.mode is missing: expected one of dense, fixed"),
        ({"mode": "fixed", "num_global_blocks": 3}, "num_global_blocks to divide num_local_blocks = 4, got 3"),
        ({"mode": "fixed", "num_different_global_patterns": 2}, "needs different_layout_per_head: true"),
        (
            {"mode": "fixed", "num_different_global_patterns": 5, "different_layout_per_head": True},
            "at most num_local_blocks / num_global_blocks = 4, got 5",
        ),
        (
            {"mode": "fixed", "attention": "unidirectional", "horizontal_global_attention": True},
            "hides later tokens from them",
        ),
        ({"mode": "variable", "local_window_blocks": []}, "at least one window"),
        ({"mode": "variable", "local_window_blocks": [2, 0]}, "at least 1"),
        ({"mode": "variable", "local_window_blocks": 4}, "expected a list of integers"),
        ({"mode": "bslongformer", "global_block_end_indices": [2, 3]}, "got 2 and 1"),
        (
            {"mode": "bslongformer", "global_block_indices": [4], "global_block_end_indices": [4]},
            "expected an end above 4, the first block of its run, got 4",
        ),
        ({"mode": "bigbird", "block": 0}, "at least 1, got 0"),
    ],
)
def test_bad_keys_are_refused_by_name(keys: dict[str, object], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        read_sparsity(keys)


def test_keys_of_other_modes_are_told() -> None:
    """DeepSpeed's page lists the keys of all modes in one block."""
    config = read_sparsity({"mode": "bigbird", "num_local_blocks": 8, "local_window_blocks": [4], "block": 64})
    assert config.without_effect() == ["num_local_blocks"]


def test_a_model_says_what_the_file_leaves_out() -> None:
    assert SparsityConfig(mode="bigbird").of_model(True).is_causal
    assert not SparsityConfig(mode="local_sliding_window").of_model(False).is_causal
    with pytest.raises(ValueError, match='is "bidirectional", but the model\'s attention is unidirectional; write'):
        SparsityConfig(mode="bigbird", attention="bidirectional").of_model(True)


def test_a_window_sees_one_window_farther_with_each_layer() -> None:
    """3 layers of 1 block back each: 3 blocks. With a first block that all see, one layer sees the first token."""
    window = build_layout(SparsityConfig(mode="local_sliding_window", block=16), 1, 160)
    assert [seen.farthest for seen in reach(window, 3)] == [16, 32, 48]
    assert reach(window, 1)[0].share == pytest.approx(19 / 55)  # 19 blocks of the 55 on and below the diagonal
    seen_first = build_layout(SparsityConfig(mode="bslongformer", block=16, attention="unidirectional"), 1, 160)
    assert reach(seen_first, 1)[0].farthest == 144
    everything = build_layout(SparsityConfig(mode="bslongformer", block=16), 1, 160)
    assert reach(everything, 2)[1].share == 1


def test_a_drawing_has_a_mark_for_each_block() -> None:
    layout = build_layout(SparsityConfig(mode="local_sliding_window", block=16), 1, 64)
    assert draw(layout) == "█···\n██··\n·██·\n··██"
    assert draw(layout, width=2) == "▒·\n▒▒"


def test_a_picture_has_the_layouts_colours(tmp_path: Path) -> None:
    layout, file = build_layout(SPREAD, 2, 64), tmp_path / "layout.png"
    save_picture(layout, file, heads=[0, 1])
    data = file.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    scale = height // layout.rows
    assert data.startswith(b"\x89PNG") and width == 2 * height + 2 * scale
    (packed,) = re.findall(rb"IDAT(.*)....\0\0\0\0IEND", data, re.DOTALL)
    rows = zlib.decompress(packed)
    pixels = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(height, width + 1)[:, 1:]
    assert torch.equal(pixels[::scale, :height:scale].bool(), layout.blocks_HNN[0])
