"""The block "sparse_attention" of a DeepSpeed JSON: which key blocks each block of queries sees.

Names and defaults are DeepSpeed's, except for `seed`, which it does not have. `layouts.py` builds the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..config.reader import Reading, read_block
from ..config.schema import BOOL, INT, TEXT, Block, Kind, key

MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window")
UNIDIRECTIONAL, BIDIRECTIONAL = "unidirectional", "bidirectional"

_GLOBAL_INDICES = ("global_block_indices", "global_block_end_indices")
# The keys that each mode reads besides "mode", "block", "attention" and "seed".
_KEYS = {
    "dense": (),
    "fixed": (
        "num_local_blocks",
        "num_global_blocks",
        "horizontal_global_attention",
        "num_different_global_patterns",
        "different_layout_per_head",
    ),
    "variable": (
        "num_random_blocks",
        "local_window_blocks",
        "horizontal_global_attention",
        "different_layout_per_head",
        *_GLOBAL_INDICES,
    ),
    "bigbird": ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "different_layout_per_head"),
    "bslongformer": ("num_sliding_window_blocks", *_GLOBAL_INDICES),
    "local_sliding_window": ("num_sliding_window_blocks",),
}
_OF_ALL = ("mode", "block", "attention", "seed")


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(_integer(item) for item in value)


def _integer(value: object) -> int:
    taken = INT.read(value)
    assert isinstance(taken, int)
    return taken


_INTS = Kind("a list of integers", _integers)


@dataclass(frozen=True)
class SparsityConfig(Block):
    """Which key blocks each block of queries sees. docs/sparse-attention.md shows each mode.

    Args:
        mode: "dense", "fixed" (local windows, whose last blocks all later rows see), "variable" (windows of listed
            sizes, random and global blocks), "bigbird" (window, random blocks, first rows and columns),
            "bslongformer" (window, global rows and columns) or "local_sliding_window". None (default): the model's
            attention stays as it is.
        block: Tokens in a block, 16 by default.
        different_layout_per_head: Whether each head has its own random blocks and global pattern; False by default.
        attention: "unidirectional" (no token sees a later one) or "bidirectional". None (default): as the model's
            attention; without a model, unidirectional for local_sliding_window and bidirectional for other modes.
        num_local_blocks: fixed: blocks in a window, 4 by default.
        num_global_blocks: fixed: how many blocks at the end of each window are global; bigbird: how many blocks at
            the start of the sequence. 1 by default.
        horizontal_global_attention: fixed, variable: whether global blocks also see the whole sequence. False by
            default.
        num_different_global_patterns: fixed: heads use, in turn, this many different runs of blocks of each window,
            from its end backwards, as global ones. 1 by default; more needs different_layout_per_head.
        num_random_blocks: variable, bigbird: random blocks in each row. None (default) for 0, in bigbird 1.
        local_window_blocks: variable: blocks in each window, the last of which repeats; (4,) by default.
        global_block_indices: variable, bslongformer: global blocks, or the first of each run of them; (0,) by default.
        global_block_end_indices: variable, bslongformer: the end of each run, exclusive; None (default) for runs of
            one block.
        num_sliding_window_blocks: bigbird, bslongformer, local_sliding_window: blocks of the window around the
            diagonal, half of them on each side; 3 by default.
        seed: Seed of the random blocks, 0 by default. They depend only on (seed, head, row), so all ranks and resumed
            runs have the same.

    Raises:
        ValueError: A value is out of range, or values contradict each other.
        TypeError: A value has the wrong type.
    """

    mode: str | None = key(None, TEXT, null=True, choices=MODES)
    block: int = key(16, INT, least=1)
    different_layout_per_head: bool = key(False, BOOL)
    attention: str | None = key(None, TEXT, null=True, choices=(UNIDIRECTIONAL, BIDIRECTIONAL))
    num_local_blocks: int = key(4, INT, least=1)
    num_global_blocks: int = key(1, INT, least=0)
    horizontal_global_attention: bool = key(False, BOOL)
    num_different_global_patterns: int = key(1, INT, least=1)
    num_random_blocks: int | None = key(None, INT, null=True, least=0)
    local_window_blocks: tuple[int, ...] = key((4,), _INTS, least=1)
    global_block_indices: tuple[int, ...] = key((0,), _INTS, least=0)
    global_block_end_indices: tuple[int, ...] | None = key(None, _INTS, null=True, least=1)
    num_sliding_window_blocks: int = key(3, INT, least=1)
    seed: int = key(0, INT, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "fixed":
            self._check_fixed()
        if self.mode == "variable" and not self.local_window_blocks:
            raise ValueError("expected local_window_blocks to list at least one window, got []")
        if self.mode in ("variable", "bslongformer"):
            self._check_global_ranges()
        if "horizontal_global_attention" in _KEYS.get(self.mode or "", ()) and self.horizontal_global_attention:
            self._refuse_rows_of_the_future()

    @property
    def is_causal(self) -> bool:
        """Whether no token sees a later one."""
        if self.attention is None:
            return self.mode == "local_sliding_window"
        return self.attention == UNIDIRECTIONAL

    @property
    def random_blocks(self) -> int:
        """Random blocks in each row."""
        default = 1 if self.mode == "bigbird" else 0
        return default if self.num_random_blocks is None else self.num_random_blocks

    @property
    def global_ranges(self) -> tuple[tuple[int, int], ...]:
        """The first block and the exclusive end of each run of global blocks."""
        ends = self.global_block_end_indices
        return tuple(
            (first, first + 1 if ends is None else ends[k]) for k, first in enumerate(self.global_block_indices)
        )

    def of_model(self, is_causal: bool) -> SparsityConfig:
        """The configuration with `attention` set to the model's.

        Raises:
            ValueError: `attention` is set and contradicts the model.
        """
        asked, has = self.attention, UNIDIRECTIONAL if is_causal else BIDIRECTIONAL
        if asked is not None and asked != has:
            raise ValueError(
                f'sparse_attention.attention is "{asked}", but the model\'s attention is {has}; write "{has}", or '
                "remove the key"
            )
        return self if asked == has else replace(self, attention=has)

    def without_effect(self) -> list[str]:
        """The keys that were set but that this mode does not read."""
        fresh, read = SparsityConfig(), (*_OF_ALL, *_KEYS.get(self.mode or "", ()))
        names = [f.name for f in fields(self) if f.name not in read]
        return [name for name in names if getattr(self, name) != getattr(fresh, name)]

    def _check_fixed(self) -> None:
        local, shared = self.num_local_blocks, self.num_global_blocks
        if shared and local % shared:
            raise ValueError(f"expected num_global_blocks to divide num_local_blocks = {local}, got {shared}")
        patterns = self.num_different_global_patterns
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns = {patterns} needs different_layout_per_head: true; without it all "
                "heads have one layout"
            )
        if shared and patterns > local // shared:
            raise ValueError(
                f"expected num_different_global_patterns of at most num_local_blocks / num_global_blocks = "
                f"{local // shared}, got {patterns}"
            )

    def _check_global_ranges(self) -> None:
        firsts, ends = self.global_block_indices, self.global_block_end_indices
        if ends is None:
            return
        if len(firsts) != len(ends):
            raise ValueError(
                f"expected one of global_block_end_indices for each of global_block_indices, got {len(ends)} and "
                f"{len(firsts)}"
            )
        for first, end in zip(firsts, ends, strict=True):
            if first >= end:
                raise ValueError(
                    f"global_block_end_indices: expected an end above {first}, the first block of its run, got {end}"
                )

    def _refuse_rows_of_the_future(self) -> None:
        if self.attention == UNIDIRECTIONAL:
            raise ValueError(
                "horizontal_global_attention shows the whole sequence to global rows, but unidirectional attention "
                'hides later tokens from them; set it to false, or attention to "bidirectional"'
            )


def read_sparsity(given: SparsityConfig | Mapping[str, object]) -> SparsityConfig:
    """Read the block "sparse_attention" of a DeepSpeed JSON.

    Args:
        given: The block as a mapping, or a `SparsityConfig`, which is only checked.

    Raises:
        ValueError: There is no mode, a key is unknown, or a value is out of range.
        TypeError: A value has the wrong type.
    """
    made = given if isinstance(given, SparsityConfig) else read_block(SparsityConfig, given, "", Reading("config"))
    if made.mode is None:
        raise ValueError(f"sparse_attention.mode is missing: expected one of {', '.join(MODES)}")
    return made
