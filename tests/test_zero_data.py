"""The engine's data loader: every element once, and a place that can be returned to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from onebit.zero.data import ShardedLoader, forever


def loader(n: int, batch: int, rank: int = 0, world_size: int = 1, **options: bool) -> ShardedLoader:
    return ShardedLoader(TensorDataset(torch.arange(n)), batch, rank=rank, world_size=world_size, seed=3, **options)


def epoch(of: ShardedLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in of]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 7))
def test_an_epoch_is_every_element_once_less_what_does_not_divide(n: int, world_size: int, batch: int) -> None:
    n = max(n, world_size)
    shares = [epoch(loader(n, batch, rank, world_size)) for rank in range(world_size)]
    seen = [x for share in shares for b in share for x in b]
    assert len(seen) == len(set(seen)) == n - n % world_size
    assert {len(share) for share in shares} == {len(loader(n, batch, 0, world_size))}


def test_epochs_differ_and_are_the_same_again() -> None:
    first, second = loader(32, 4), loader(32, 4)
    epochs = [epoch(first), epoch(first)]
    assert epochs[0] != epochs[1] and epochs == [epoch(second), epoch(second)]
    assert epoch(loader(8, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert epoch(loader(8, 3, shuffle=False, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("done", [0, 1, 7, 8, 9, 20])
def test_it_goes_on_where_it_was(done: int) -> None:
    whole = forever(loader(32, 4))
    expected = [next(whole)[0].tolist() for _ in range(30)]
    first, second = loader(32, 4), loader(32, 4)
    batches = forever(first)
    for _ in range(done):
        next(batches)
    second.load_state_dict(first.state_dict())
    batches = forever(second)
    assert [next(batches)[0].tolist() for _ in range(30 - done)] == expected[done:]


def test_too_little_data_is_refused() -> None:
    with pytest.raises(ValueError, match="2 elements for 3 ranks"):
        loader(2, 1, 0, 3)
    with pytest.raises(ValueError, match="no batch of 9"):
        next(forever(loader(8, 9, drop_last=True)))
