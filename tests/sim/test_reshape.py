"""From any layout to any other: what is owed is kept for every parameter, moments to the bit, and training goes on."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from family import same
from reshape_cases import FAMILY, LAYOUTS, SHAPES, Rank, assembled, cut, index_of, known, whole
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport, run_ranks
from onebit.zero.checkpoint.reshard import ParamSlice, packed_pieces, parts_of, pieces_of, plan, recut, saved_pieces
from onebit.zero.grid import GridShape

pytestmark = pytest.mark.slow

STEPS = {"warm-up": 2, "one bit": 9}
BETA1 = 0.9


@cache
def trained(name: str, layout: str, replicas: int, steps: int) -> tuple[list[dict], dict]:
    """(every rank's state, what all of them know)."""

    def work(transport: SimTransport) -> tuple[dict, list]:
        rank = Rank(transport, LAYOUTS[layout], name)
        rank.train(range(steps))
        if isinstance(rank.optimizer, onebit.ZeroOneAdam):
            rank.optimizer.sync()
        return copy.deepcopy(rank.optimizer.state_dict()), what_it_knows(rank)

    parts = len(LAYOUTS[layout])
    found = run_ranks(parts * replicas, work)
    return [state for state, _ in found], assembled([says for _, says in found], parts)


def what_it_knows(rank: Rank) -> list:
    return known(rank.optimizer, dict(zip(rank.params, rank.pieces, strict=True)))


def numbered(layout: str) -> list[list[ParamSlice]]:
    """Each part's pieces in the order of `Rank`'s groups."""
    return [sorted(pieces, key=lambda piece: len(piece.shape) == 1) for pieces in LAYOUTS[layout]]


def taken_over(rank: Rank, states: list[dict], layout: str) -> dict:
    parts = len(LAYOUTS[layout])
    cuts = plan(numbered(layout), rank.numbered)
    return recut(rank.optimizer, rank.numbered, cuts, lambda part: states[part::parts])


CUTS = [
    (("whole", 4), ("rows", 2)),
    (("rows", 2), ("whole", 4)),
    (("rows", 2), ("whole", 1)),
    (("whole", 1), ("rows", 4)),
    (("rows", 4), ("rows of 3", 1)),
    (("whole", 2), ("tensor", 2)),
    (("whole", 2), ("stages", 3)),
    (("stages", 1), ("rows", 2)),
    (("three axes", 1), ("whole", 2)),
    (("three axes", 1), ("rows of 3", 2)),
    (("rows", 3), ("three axes", 1)),
    (("stacks", 2), ("whole", 1)),
    (("tensor", 1), ("stacks in shards", 1)),
]
# Every cut by OnebitAdam, every second one by one of the others in turn.
TAKEN_OVER = [("OnebitAdam", *cut) for cut in CUTS]
TAKEN_OVER += [(("OnebitLamb", "ZeroOneAdam")[k % 2], *cut) for k, cut in enumerate(CUTS[::2])]


@pytest.mark.parametrize(
    ("name", "old", "new"), TAKEN_OVER, ids=lambda of: of if isinstance(of, str) else f"{of[0]} x{of[1]}"
)
def test_what_is_owed_is_kept_moments_to_the_bit_and_training_goes_on(
    name: str, old: tuple[str, int], new: tuple[str, int]
) -> None:
    check_taken_over(name, old, new, "one bit")


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(("old", "new"), [(("whole", 4), ("rows", 2)), (("three axes", 1), ("rows of 3", 2))])
def test_a_warm_up_goes_on(name: str, old: tuple[str, int], new: tuple[str, int]) -> None:
    check_taken_over(name, old, new, "warm-up")


def check_taken_over(name: str, old: tuple[str, int], new: tuple[str, int], steps: str) -> None:
    states, before = trained(name, *old, STEPS[steps])

    def work(transport: SimTransport) -> tuple[list, list[Tensor]]:
        rank = Rank(transport, LAYOUTS[new[0]], name)
        rank.optimizer.load_state_dict(taken_over(rank, states, old[0]))
        at_start = what_it_knows(rank)
        rank.train(range(STEPS[steps], STEPS[steps] + 6))
        if isinstance(rank.optimizer, onebit.ZeroOneAdam):
            rank.optimizer.sync()
        return at_start, [p.detach() for p in rank.params]

    parts = len(LAYOUTS[new[0]])
    ranks = run_ranks(parts * new[1], work)
    after = assembled([at_start for at_start, _ in ranks], parts)
    assert after.keys() == before.keys() == SHAPES.keys()
    if steps == "one bit":
        assert all(theirs["owed"].any() for parameter, theirs in before.items() if parameter != "one")
    for parameter, theirs in before.items():
        mine = after[parameter]
        assert mine.keys() == theirs.keys() and len(mine) > 1
        for what in mine.keys() - {"owed", "momentum"}:
            assert torch.equal(mine[what], theirs[what]), (parameter, what)
        if "owed" in mine:
            # What the next exchange is about to deliver: the momentum it keeps, and what it owes.
            due = [of["owed"] + BETA1 * of.get("momentum", torch.zeros(())) for of in (mine, theirs)]
            torch.testing.assert_close(*due, atol=1e-6, rtol=1e-6)
    for rank, (_, params) in enumerate(ranks):
        assert all(torch.equal(p, q) for p, q in zip(params, ranks[rank % parts][1], strict=True))
        assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(("old", "new"), [(("whole", 2), ("stages", 2)), (("stages", 1), ("whole", 3))])
def test_where_no_block_moves_the_momentum_is_the_same_to_the_bit(
    name: str, old: tuple[str, int], new: tuple[str, int]
) -> None:
    states, before = trained(name, *old, STEPS["one bit"])

    def work(transport: SimTransport) -> list:
        rank = Rank(transport, LAYOUTS[new[0]], name)
        rank.optimizer.load_state_dict(taken_over(rank, states, old[0]))
        return what_it_knows(rank)

    after = assembled(run_ranks(len(LAYOUTS[new[0]]) * new[1], work), len(LAYOUTS[new[0]]))
    for parameter, mine in after.items():
        moment = "exp_avg_update" if name == "ZeroOneAdam" else "momentum"
        assert torch.equal(mine[moment], before[parameter][moment])
        torch.testing.assert_close(mine["owed"], before[parameter]["owed"], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "old", "new"), [*((name, 4, 2) for name in FAMILY), ("OnebitAdam", 2, 4), ("OnebitAdam", 1, 3)]
)
def test_another_number_of_replicas_is_what_load_state_dicts_makes_of_it(name: str, old: int, new: int) -> None:
    states, _ = trained(name, "rows", old, STEPS["one bit"])

    def work(transport: SimTransport) -> bool:
        one, other = Rank(transport, LAYOUTS["rows"], name), Rank(transport, LAYOUTS["rows"], name)
        one.optimizer.load_state_dict(taken_over(one, states, "rows"))
        other.optimizer.load_state_dicts(states[other.part :: 2])
        return same(one.optimizer.state_dict(), other.optimizer.state_dict())

    assert run_ranks(2 * new, work) == [True] * 2 * new


def test_between_synchronisations_parameters_become_the_mean() -> None:
    """0/1 Adam after a local step, its replicas apart."""

    def train(transport: SimTransport) -> tuple[dict, list[Tensor], bool]:
        rank = Rank(transport, LAYOUTS["rows"], "ZeroOneAdam")
        rank.train(range(7))
        return copy.deepcopy(rank.optimizer.state_dict()), list(rank.params), rank.optimizer.rule.is_synchronised()

    ranks = run_ranks(4, train)
    assert not any(is_synchronised for _, _, is_synchronised in ranks)
    states = [state for state, _, _ in ranks]
    expected = {}
    for part in range(2):
        for k, piece in enumerate(LAYOUTS["rows"][part]):
            mean = torch.stack([ranks[rank][1][k].detach().double() for rank in (part, part + 2)]).mean(0)
            expected.setdefault(piece.name, []).append(mean)

    def load(transport: SimTransport) -> dict[str, Tensor]:
        rank = Rank(transport, LAYOUTS["whole"], "ZeroOneAdam")
        rank.optimizer.load_state_dict(taken_over(rank, states, "rows"))
        found = {piece.name: p.detach().clone() for piece, p in zip(rank.pieces, rank.params, strict=True)}
        rank.train(range(7, 12))
        rank.optimizer.sync()
        return found

    for found in run_ranks(3, load):
        for name, x in found.items():
            torch.testing.assert_close(x.double(), torch.cat(expected[name]), atol=1e-6, rtol=0)


def test_dense_lamb_is_cut_too() -> None:
    def train(params: list[torch.nn.Parameter]) -> onebit.Lamb:
        optimizer = onebit.Lamb(params, lr=0.01)
        for p in params:
            p.grad = torch.full_like(p, 0.5) * torch.arange(1.0, len(p) + 1).view(-1, *[1] * (p.dim() - 1))
        optimizer.step()
        return optimizer

    whole_pieces = [whole(name) for name in SHAPES]
    params = [torch.nn.Parameter(torch.ones(piece.sizes)) for piece in whole_pieces]
    state = train(params).state_dict()
    for pieces in LAYOUTS["three axes"]:
        mine = [torch.nn.Parameter(torch.ones(piece.sizes)) for piece in pieces]
        optimizer = onebit.Lamb(mine, lr=0.5)
        optimizer.load_state_dict(recut(optimizer, pieces, plan([whole_pieces], pieces), lambda _: [state]))
        assert optimizer.param_groups[0]["lr"] == 0.01
        for p, piece in zip(mine, pieces, strict=True):
            there = state["state"][list(SHAPES).index(piece.name)]
            assert torch.equal(optimizer.state[p]["exp_avg"], there["exp_avg"][index_of(piece)])
            assert float(optimizer.state[p]["step"]) == 1.0


# -------------------------------------------------------------------------------- what goes where


def test_every_element_comes_from_one_place() -> None:
    """Any layout of any other: numbers that say where they come from arrive where they belong."""
    full = {name: torch.arange(whole(name).numel).view(SHAPES[name]) for name in SHAPES}

    def held(piece: ParamSlice) -> Tensor:
        return full[piece.name][index_of(piece)]

    for old in LAYOUTS.values():
        for new in (part for layout in LAYOUTS.values() for part in layout):
            made = [torch.full(piece.sizes, -1) for piece in new]
            met = set()
            for part, cuts in zip(old, plan(old, new), strict=True):
                for where in cuts:
                    met.add(where.new)
                    if where.here is not None:
                        assert (made[where.new][where.here] == -1).all()
                        made[where.new][where.here] = held(part[where.old])[where.there]
            assert met == set(range(len(new)))
            assert all(torch.equal(x, held(piece)) for x, piece in zip(made, new, strict=True))


def test_a_scalar_has_one_piece() -> None:
    scalar = ParamSlice("scale", (), (), ())
    ((found,),) = plan([[scalar]], [scalar])
    x = torch.zeros(())
    x[found.here] = torch.tensor(3.0)[found.there]
    assert float(x) == 3.0


@pytest.mark.parametrize(("old", "new"), [((), (1,)), ((1,), ()), ((), ())])
@pytest.mark.parametrize("steps", [2, 9])
def test_a_scalar_is_also_a_row(old: tuple[int, ...], new: tuple[int, ...], steps: int) -> None:
    """A learnt temperature is whole at stage 0, and a row of a shard at others."""

    def optimizer_of(shape: tuple[int, ...]) -> tuple[onebit.OnebitAdam, list[ParamSlice]]:
        params = [nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(3))]
        pieces = [
            ParamSlice(name, tuple(p.shape), (0,) * p.dim(), tuple(p.shape))
            for name, p in zip(("temperature", "bias"), params, strict=True)
        ]
        optimizer = onebit.OnebitAdam(params, lr=0.1, freeze_step=4, transport=SimTransport(), compression="always")
        return optimizer, pieces

    def train(optimizer: onebit.OnebitAdam, steps: range) -> None:
        for k in steps:
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.full_like(p, float(k + 1))
            optimizer.step()

    optimizer, there = optimizer_of(old)
    train(optimizer, range(steps))
    other, here = optimizer_of(new)
    state = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(recut(other, here, plan([there], here), lambda part: [state]))
    with torch.no_grad():
        for p, its in zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
            p.copy_(its.view(p.shape))
    train(optimizer, range(steps, steps + 6))
    train(other, range(steps, steps + 6))
    for p, its in zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(p.view(-1), its.view(-1))


def test_what_does_not_cover_a_parameter_is_refused() -> None:
    halves = [cut(whole("up"), 0, k, 2) for k in range(2)]
    with pytest.raises(ValueError, match="hold 480 of 960 elements of up"):
        plan([[halves[0]]], [whole("up")])
    with pytest.raises(ValueError, match="hold 1440 of 960 elements of up"):
        plan([[halves[0]], [whole("up")]], [whole("up")])
    with pytest.raises(ValueError, match=r"up has shape \(40, 24\) there and \(40, 25\) here"):
        plan([[whole("up")]], [ParamSlice("up", (40, 25), (0, 0), (40, 25))])


def test_a_parameter_that_was_not_trained_is_refused() -> None:
    states, _ = trained("OnebitAdam", "stages", 1, STEPS["one bit"])
    rank = Rank(SimTransport(), LAYOUTS["whole"], "OnebitAdam")
    cuts = plan(numbered("stages")[:1], rank.numbered)
    with pytest.raises(ValueError, match="there is no state of"):
        recut(rank.optimizer, rank.numbered, cuts, lambda part: states[part::2])
    with pytest.raises(ValueError, match="has nothing of the parameters"):
        recut(rank.optimizer, rank.numbered, [[]], lambda part: states)


def test_a_state_without_places_is_refused() -> None:
    states = copy.deepcopy(trained("OnebitAdam", "whole", 1, STEPS["one bit"])[0])
    for bucket in states[0]["onebit"]["buckets"]:
        del bucket["params"]
    rank = Rank(SimTransport(), LAYOUTS["whole"], "OnebitAdam")
    with pytest.raises(ValueError, match="does not name the parameters in its buckets"):
        taken_over(rank, states, "whole")


def test_groups_must_be_the_same() -> None:
    states, _ = trained("OnebitAdam", "whole", 1, STEPS["one bit"])
    rank = Rank(SimTransport(), LAYOUTS["whole"], "OnebitAdam")
    optimizer = onebit.OnebitAdam(rank.params, transport=SimTransport())
    cuts = plan(numbered("whole"), rank.pieces)
    with pytest.raises(ValueError, match="2 parameter groups, this optimizer 1"):
        recut(optimizer, rank.pieces, cuts, lambda _: states)


def test_the_parts_of_a_grid_are_its_ranks_by_replica() -> None:
    assert parts_of(GridShape((1, 4, 1, 1))) == [[0, 1, 2, 3]]
    assert parts_of(GridShape((1, 2, 2, 1))) == [[0, 2], [1, 3]]
    assert parts_of(GridShape((2, 2, 1, 2))) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_pieces_survive_being_packed() -> None:
    rank = Rank(SimTransport(), LAYOUTS["whole"], "OnebitAdam")
    pieces = pieces_of(rank.model, rank.optimizer)
    assert pieces == rank.numbered
    for held in (pieces, LAYOUTS["stacks in shards"][3]):
        assert saved_pieces([list(map(list_or_text, row)) for row in packed_pieces(held)]) == held


def list_or_text(x: object) -> object:
    return list(x) if isinstance(x, tuple) else x
