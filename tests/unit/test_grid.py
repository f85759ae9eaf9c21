"""The grid's arithmetic: places, neighbours, and what is refused before anybody communicates."""

from __future__ import annotations

import pytest
import torch

from onebit.comm.launch import Launch
from onebit.zero.grid import AXES, GridShape, choose_device, shape_of, start


def test_every_rank_has_one_place() -> None:
    shape = GridShape((1, 3, 4, 1))
    places = [shape.coordinates(rank) for rank in range(12)]
    assert [shape.rank(place) for place in places] == list(range(12))
    assert places[5] == {"pipe": 0, "replica": 1, "shard": 1, "tensor": 0}
    assert list(places[0]) == list(AXES)


@pytest.mark.parametrize("axis", AXES)
def test_the_ranks_along_an_axis_partition_the_world(axis: str) -> None:
    shape = GridShape((2, 3, 4, 2))
    lines = {tuple(shape.along(axis, rank)) for rank in range(48)}
    assert sorted(rank for line in lines for rank in line) == list(range(48))
    assert all(len(line) == shape.size(axis) for line in lines)
    assert shape.along("pipe", 5) == [5, 29]
    assert shape.along("replica", 5) == [5, 13, 21]
    assert shape.along("shard", 5) == [1, 3, 5, 7]
    assert shape.along("tensor", 5) == [4, 5]


def test_the_ranks_across_several_axes() -> None:
    shape = GridShape((2, 3, 4, 2))
    assert shape.across(("shard", "tensor"), 5) == list(range(8))
    assert shape.across(("pipe", "tensor"), 5) == [4, 5, 28, 29]
    assert shape.across(AXES, 5) == list(range(48))
    assert shape.across((), 5) == [5]


@pytest.mark.parametrize(
    ("world_size", "local_size", "given", "sizes"),
    [
        (8, 2, {}, (1, 4, 2, 1)),
        (8, 8, {}, (1, 1, 8, 1)),
        (8, 1, {}, (1, 8, 1, 1)),
        (1, 1, {}, (1, 1, 1, 1)),
        (8, None, {"shard": 4}, (1, 2, 4, 1)),
        (8, 2, {"shard": 4}, (1, 2, 4, 1)),
        (8, 4, {"replica": 8}, (1, 8, 1, 1)),
        (8, 4, {"replica": 4, "shard": 2}, (1, 4, 2, 1)),
        (8, 2, {"pipe": 2}, (2, 2, 2, 1)),
        (4, 4, {"pipe": 2}, (2, 1, 2, 1)),
        (8, 4, {"tensor": 2}, (1, 2, 2, 2)),
        (16, 4, {"pipe": 2, "tensor": 2}, (2, 2, 2, 2)),
        (16, None, {"pipe": 2, "tensor": 2, "shard": 2}, (2, 2, 2, 2)),
        (6, 2, {"replica": None, "shard": None}, (1, 3, 2, 1)),
    ],
)
def test_what_is_not_given_follows(world_size: int, local_size: int | None, given: dict, sizes: tuple) -> None:
    assert shape_of(world_size, local_size, given).sizes == sizes


@pytest.mark.parametrize(
    ("world_size", "local_size", "given", "says"),
    [
        (8, None, {}, "give shard="),
        (8, 2, {"shard": 3}, "8 ranks cannot be divided by shard=3"),
        (8, 3, {}, "8 ranks cannot be divided by shard=3"),
        (8, 4, {"tensor": 3}, "the 4 ranks of a node cannot be divided by tensor=3"),
        (8, 4, {"pipe": 3}, "8 ranks cannot be divided by pipe=3"),
        (8, 2, {"pipe": 2, "shard": 2, "replica": 4}, "has 16 ranks, but 8 were started"),
        (8, 2, {"replica": 3}, "cannot be divided by replica=3"),
        (8, 2, {"replica": 2, "shard": 2}, "has 4 ranks, but 8 were started"),
        (8, 2, {"shard": 0}, "at least one rank"),
        (8, 2, {"shards": 2}, "not 'shards'"),
    ],
)
def test_what_does_not_fit_is_refused(world_size: int, local_size: int | None, given: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shape_of(world_size, local_size, given)


def test_it_is_refused_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="cannot be divided"):
        start(shard=3)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("local_rank", "there", "chosen", "used"),
    [(0, 4, 0, 0), (3, 4, 0, 3), (3, 4, 2, 2), (3, 1, 0, 0)],  # the last one: each rank sees its own GPU alone
)
def test_a_rank_of_a_group_that_the_script_made_computes_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, there: int, chosen: int, used: int
) -> None:
    current = [chosen]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    choose_device(Launch("torchrun", local_rank, 4, local_rank, 4))
    assert current == [used]


def test_ranks_of_a_sequence_are_adjacent_data_ranks() -> None:
    """A fold of replica x shard: with two tensor ranks, every other rank."""
    shape = GridShape((1, 2, 4, 2), sequence=2)
    assert [shape.along_sequence(rank) for rank in (0, 1, 2, 5)] == [[0, 2], [1, 3], [0, 2], [5, 7]]
    assert GridShape((1, 4, 2, 1), sequence=4).along_sequence(5) == [4, 5, 6, 7]
    lines = {tuple(shape.along_sequence(rank)) for rank in range(16)}
    assert sorted(rank for line in lines for rank in line) == list(range(16))
    assert [GridShape((2, 2, 2, 1), sequence=2).along_sequence(rank) for rank in (1, 6)] == [[0, 1], [6, 7]]
    assert shape.data_ranks == 8 and str(shape).endswith("sequence=2")


@pytest.mark.parametrize(
    ("sizes", "sequence", "says"),
    [
        ({"shard": 2}, 3, "3 ranks cannot share each sequence: expected a divisor of the 4 data ranks"),
        ({"shard": 1, "tensor": 2}, 4, "a divisor of the 2 data ranks"),
        ({"shard": 2}, 0, "0 ranks cannot share"),
        ({"shard": 1, "pipe": 2}, 4, "a divisor of the 2 data ranks"),
    ],
)
def test_sequences_that_the_data_ranks_do_not_divide_are_refused(sizes: dict, sequence: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shape_of(4, 4, sizes, sequence=sequence)
