"""Members of several ranks: a node comes and goes as a whole, and its ranks take each step together or not at all."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults.member_runs import Hub, Killed, Run
from torch import Tensor
from torch.utils.data import DataLoader

import onebit
from onebit import membership
from onebit.agreement.replicas import ReplicaError
from onebit.comm import PeerError, SimTransport, Transport
from onebit.comm.messages import gather_tensors, sum_in_order
from onebit.comm.transports.simulated import SimNetwork
from onebit.dense import average_gradients
from onebit.membership import Members, MembershipError, Rendezvous, begin, change, end
from onebit.membership.node import Node
from onebit.model_parallel import ModelParallelGroup

INF = float("inf")
ROWS, WIDTH = 6, 40


class Cut:
    """The placement of a tensor that is divided by rows."""

    def is_replicate(self) -> bool:
        return False


_CUTS = (Cut(),)


def shard(rank: int, ranks: int) -> torch.nn.Parameter:
    """This rank's rows of a matrix that the ranks of a node hold together."""
    whole = torch.randn(ranks * ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    return cut(torch.nn.Parameter(whole.chunk(ranks)[rank].clone()), ranks)


def cut(p: Any, ranks: int) -> Any:
    """The same tensor, marked as the rows that one of these ranks holds."""
    p.device_mesh = SimpleNamespace(shape=(ranks,), mesh_dim_names=("shard",))
    p.placements = _CUTS
    return p


def give_gradient(p: torch.nn.Parameter, local: Transport, draw: torch.Generator) -> None:
    """This rank's rows of a gradient that depends on the whole matrix, as FSDP2 leaves them."""
    whole = torch.cat(list(gather_tensors(local, p.detach())))  # hangs if one rank is a step ahead
    grad = (whole - torch.randn(whole.shape, generator=draw)).chunk(local.world_size)[local.rank]
    p.grad = cut(grad, local.world_size)


def local_steps(params: list[torch.nn.Parameter], **options: Any) -> onebit.LocalSteps:
    inner = torch.optim.AdamW(params, lr=1e-2)
    return onebit.LocalSteps(inner, **{"every": 2, "outer_momentum": 0.5, "check_replicas_every": 4, **options})


def averaged(params: list[torch.nn.Parameter], **options: Any) -> onebit.AveragedSteps:
    inner = torch.optim.AdamW(params, lr=1e-2)
    return onebit.AveragedSteps(inner, **{"max_grad_norm": 5.0, "check_replicas_every": 5, **options})


ADAM = partial(
    onebit.OnebitAdam, lr=1e-2, compression="always", freeze_step=4, max_grad_norm=5.0, check_replicas_every=5
)
DELAYED = partial(ADAM, delay=1)  # a step more than has landed is sent
LAMB = partial(onebit.OnebitLamb, lr=1e-2, compression="always", freeze_step=4, check_replicas_every=5)
KINDS = {
    "1-bit": ADAM,
    "LAMB": LAMB,
    "delayed": DELAYED,
    "0/1": partial(onebit.ZeroOneAdam, lr=1e-2, compression="always"),
    "local": local_steps,
    "local, delayed": partial(local_steps, every=4, delay=2),
    "dense": averaged,
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
LAYOUTS = {"shards": (1, 2), "stages": (2, 2), "stages of shards": (2, 4)}
layouts = pytest.mark.parametrize(("stages", "ranks"), LAYOUTS.values(), ids=LAYOUTS)


def of_stage(stage: int, rank: int, ranks: int) -> list[torch.nn.Parameter]:
    """This rank's parts of its stage's layers, of which each stage has others, and others in number."""
    draw = torch.Generator().manual_seed(stage)
    wholes = [torch.randn(40 + 4 * k, 7, generator=draw) for k in range(1 + 2 * stage)]
    params = [torch.nn.Parameter(whole.chunk(ranks)[rank].clone()) for whole in wholes]
    return params if ranks == 1 else [cut(p, ranks) for p in params]


def give_gradients(params: list[torch.nn.Parameter], local: Transport, draw: torch.Generator) -> None:
    """Gradients that depend on all stages."""
    total = sum_in_order(gather_tensors(local, torch.stack([p.detach().sum() for p in params]).sum()))
    for p in params:
        grad = p.detach() - torch.randn(p.shape, generator=draw) + 1e-3 * total
        p.grad = cut(grad, 2) if hasattr(p, "placements") else grad


def train(
    members: Members, local: Transport, hub: Hub, steps: int, newcomer: bool = False, kind: Any = ADAM, stages: int = 1
) -> tuple[Tensor, int, int, int]:
    """A shard after these steps, and how many members went and came. Gradients need all ranks of the node.

    newcomer: steps are counted once one has come. stages: of a pipeline, which its ranks have.
    """
    whole, ranks = local.split(range(local.world_size)), local.world_size // stages
    stage, place = divmod(local.rank, ranks)
    if stages == 1:
        group, params = ModelParallelGroup(whole), [shard(local.rank, local.world_size)]
    else:
        of_its_stage = local.split(range(stage * ranks, (stage + 1) * ranks))
        group, params = ModelParallelGroup(of_its_stage, whole), of_stage(stage, place, ranks)
    parts = members.parts(group)
    optimizer = kind(params, bucket_cap_mb=0.0005, transport=members, model_parallel_group=parts)
    begin(optimizer)
    draw, last = torch.Generator().manual_seed(ord(members.rendezvous.name)), INF if newcomer else steps
    while optimizer.steps_taken() < last:
        if newcomer and optimizer.steps_taken() >= 8:
            hub.holds.set()
            time.sleep(0.002)
        if last == INF and members.world_size > hub.founders:
            # The others have taken the step before, unless it is under way.
            last = optimizer.steps_taken() + steps + (members.joined == 0 and kind is not DELAYED)
        if stages > 1:
            give_gradients(params, local, draw)
        else:
            give_gradient(params[0], local, draw)
        optimizer.step()
    if hasattr(optimizer, "sync"):
        optimizer.sync()
    optimizer.check_replicas()
    end(optimizer)
    return (
        torch.cat([p.detach().view(-1) for p in params]),
        members.lost,
        members.joined,
        optimizer.stats.lost_residuals,
    )


def run_of(hub: Hub, fuses: list[list[float]], **options: Any) -> Run:
    run = Run(hub, lambda members, local: train(members, local, hub, **options))
    for name, its in zip("abcdefgh", fuses, strict=False):
        run.start_node(name, its)
    return run


def check(run: Run, ranks: int = 2) -> list[str]:
    """All ranks at one place have the same bits; the ranks of a node have seen the same changes. The nodes that end."""
    run.wait()
    nodes = sorted({name[0] for name in run.results})
    for rank in range(ranks):
        (mine, *_), *others = (run.results[f"{name}{rank}"] for name in nodes)
        assert all(torch.equal(mine, theirs) for theirs, *_ in others)
    for name in nodes:
        counts = {run.results[f"{name}{rank}"][1:3] for rank in range(ranks)}
        assert len(counts) == 1, counts
    for name, error in run.errors.items():
        was_killed = any(isinstance(run.errors.get(f"{name[0]}{rank}"), Killed) for rank in range(ranks))
        came_late = "the run has ended" in str(error)
        if was_killed and isinstance(error, PeerError):
            continue  # the others needed it for their gradients
        is_meant = isinstance(error, MembershipError) and (was_killed or came_late)
        assert is_meant or isinstance(error, Killed), error
    return nodes


@kinds
def test_without_changes_a_node_trains_as_a_world_of_its_ranks(kind: Any) -> None:
    run = run_of(Hub(2), [[INF, INF], [INF, INF]], steps=12, kind=kind)
    assert check(run) == ["a", "b"]

    def of_world(transport: SimTransport) -> Tensor:
        node, place = divmod(transport.rank, 2)
        local = transport.split([2 * node, 2 * node + 1])
        column, p = transport.split([place, place + 2]), shard(local.rank, 2)
        optimizer = None
        if kind is not averaged:  # which is for members alone
            optimizer = kind(
                [p], bucket_cap_mb=0.0005, transport=column, model_parallel_group=ModelParallelGroup(local)
            )
        inner = torch.optim.AdamW([p], lr=1e-2)
        draw = torch.Generator().manual_seed(ord("ab"[column.rank]))
        for _ in range(13 if kind is DELAYED else 12):
            give_gradient(p, local, draw)
            if optimizer is not None:
                optimizer.step()
                continue
            average_gradients([p], column)
            square = sum_in_order(gather_tensors(local, p.grad.double().square().sum()))
            p.grad.mul_(min(1.0, 5.0 / (float(square.sqrt()) + 1e-6)))
            inner.step()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        return p.detach()

    expected, rounding = onebit.comm.run_ranks(4, of_world), 1e-6 * (kind in (averaged, LAMB))
    for name, p in zip(("a0", "a1", "b0", "b1"), expected, strict=True):
        torch.testing.assert_close(run.results[name][0], p.view(-1), rtol=rounding, atol=rounding)


@kinds
def test_a_replica_that_differs_at_one_place_is_an_error_on_all_ranks(kind: Any) -> None:
    def work(members: Members, local: Transport) -> None:
        whole = local.split(range(local.world_size))
        p = shard(local.rank, local.world_size)
        optimizer = kind([p], transport=members, model_parallel_group=members.parts(ModelParallelGroup(whole)))
        begin(optimizer)
        if members.rendezvous.name == "a" and local.rank == 1:
            (optimizer.buckets[0].anchor if "LocalSteps" in type(optimizer).__name__ else p.data).view(-1)[0] += 1
        with pytest.raises(ReplicaError):
            optimizer.check_replicas()

    run = Run(Hub(2), work)
    for name in "ab":
        run.start_node(name, [INF, INF])
    run.wait()
    assert not run.errors and len(run.results) == 4, run.errors


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("fuse", [60, 61.5, 100])
def test_a_lost_rank_takes_its_node_along_and_the_others_go_on(place: int, fuse: float) -> None:
    fuses = [[INF, INF] for _ in range(3)]
    fuses[1][place] = fuse
    run = run_of(Hub(3), fuses, steps=20)
    assert check(run) == ["a", "c"]
    assert run.results["a0"][1:3] == run.results["a1"][1:3] == (1, 0)
    assert isinstance(run.errors[f"b{1 - place}"], MembershipError)


@layouts
@kinds
def test_a_new_node_takes_over_all_parts(kind: Any, stages: int, ranks: int) -> None:
    hub = Hub(2)
    run = run_of(hub, [[INF] * ranks, [INF] * ranks], steps=12, newcomer=True, kind=kind, stages=stages)
    assert hub.holds.wait(30)
    run.start_node("n", [INF] * ranks)
    assert check(run, ranks) == ["a", "b", "n"]
    assert run.results["a0"][1:3] == (0, 1) and run.results["n1"][1:3] == (0, 0)


def test_a_rank_whose_state_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the ranks of a node wait for a message of each other."""
    send, is_slow = change.send_state, [True]

    def send_slowly(*given: Any) -> None:
        slow = is_slow.pop() if is_slow else False
        send(*given, *([lambda nbytes: time.sleep(0.3)] if slow else []))

    monkeypatch.setattr(change, "copy_state", lambda *given: None)
    monkeypatch.setattr(change, "send_state", send_slowly)
    monkeypatch.setattr(change, "PIECE_BYTES", 300)
    monkeypatch.setattr("onebit.membership.node.TELL_S", 0.1)
    hub = Hub(2, timeout_s=1.0)
    run = run_of(hub, [[INF, INF], [INF, INF]], steps=6, newcomer=True)
    assert hub.holds.wait(30)
    run.start_node("n", [INF, INF])
    assert check(run) == ["a", "b", "n"] and not is_slow


def test_optimizers_without_parts_on_all_ranks_of_a_member_are_refused() -> None:
    def work(members: Members, local: Transport) -> list[str]:
        group = ModelParallelGroup(local.split(range(local.world_size)))
        p, said = shard(local.rank, local.world_size), []
        for make in (
            lambda: onebit.OnebitAdam([p], transport=members),
            lambda: onebit.OnebitAdam([p], transport=members, model_parallel_group=group),
            lambda: onebit.LocalSteps(torch.optim.SGD([p], lr=0.1), every=2, transport=members),
            lambda: onebit.AveragedSteps(torch.optim.SGD([p], lr=0.1), transport=members),
            lambda: membership.MemberSampler(members, 64, 4, balanced=True),
            lambda: membership.MemberSampler(members, 64, 4),
            lambda: members.parts(ModelParallelGroup(SimTransport())),
        ):
            with pytest.raises(ValueError) as told:
                make()
            said.append(str(told.value))
        return said

    hub = Hub(1)
    run = Run(hub, work)
    run.start_node("a", [INF, INF])
    run.wait()
    assert not run.errors
    parts = "the ranks of a member are those that hold its model together"
    words = [
        parts,
        parts,
        parts,
        parts,
        "balanced=False",
        "give part=grid.data",
        "2 ranks",
    ]
    for said in run.results.values():
        assert all(word in text for word, text in zip(words, said, strict=True)), said


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (partial(ADAM, max_grad_norm=0.0), [2, 2]),
        (ADAM, [3, 3]),
        (partial(DELAYED, max_grad_norm=0.0, freeze_step=3), [3, 3]),
        (LAMB, [4, 4]),
        (local_steps, [2, 6]),
        (averaged, [3, 3]),
    ],
    ids=["1-bit", "clipped", "delayed", "LAMB", "local", "dense"],
)
def test_a_step_tells_a_nodes_ranks_so_often(kind: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first steps, whose gradients are compared, are over; docs/members.md has these numbers."""
    told, check_of = Counter[str](), Node.check

    def counted(node: Node, **what: bool) -> tuple[bool, bool]:
        told[threading.current_thread().name] += 1
        return check_of(node, **what)

    monkeypatch.setattr(Node, "check", counted)

    def work(members: Members, local: Transport) -> list[int]:
        parts, p = members.parts(ModelParallelGroup(local.split(range(local.world_size)))), shard(local.rank, 2)
        optimizer = kind([p], check_replicas_every=0, transport=members, model_parallel_group=parts)
        begin(optimizer)
        draw, counts = torch.Generator().manual_seed(ord(members.rendezvous.name)), []
        for _ in range(8):
            give_gradient(p, local, draw)
            before = told[threading.current_thread().name]
            optimizer.step()
            counts.append(told[threading.current_thread().name] - before)
        end(optimizer)
        return counts

    run = Run(Hub(2), work)
    for name in "ab":
        run.start_node(name, [INF, INF])
    run.wait()
    assert not run.errors
    for counts in run.results.values():
        assert counts[4:] == 2 * expected and max(counts) <= max(expected) + 2


def test_members_have_the_same_number_of_ranks() -> None:
    hub = Hub(1)
    hub.members("a", [INF])
    network = SimNetwork(1)
    node = Node(SimTransport(network, 0))
    assert hub.members("b", [INF], node).rendezvous.name == "b"
    with pytest.raises(ValueError, match="the members of this run have 1 ranks each, and this one has 3"):
        Rendezvous(lambda: hub.store, "c", token="secret", ranks=3)


def test_a_stranger_that_came_first_does_not_keep_members_out() -> None:
    hub = Hub(1)
    hub.store.set("ranks", "not signed with this run's token")
    for name in "ab":
        hub.members(name, [INF]).close()
    with pytest.raises(ValueError, match="have 1 ranks each, and this one has 2"):
        Rendezvous(lambda: hub.store, "c", token="secret", ranks=2)


def test_ranks_of_members_draw_each_sample_once() -> None:
    """And if a member goes, only its own samples are not seen."""

    def work(members: Members, local: Transport) -> list[int]:
        parts = members.parts(ModelParallelGroup(local.split(range(local.world_size))))
        p = shard(local.rank, local.world_size)
        optimizer = onebit.OnebitAdam(
            [p], lr=1e-2, compression="always", transport=members, model_parallel_group=parts, freeze_step=2
        )
        options: dict[str, Any] = {"part": (local.rank, local.world_size), "shuffle": False}
        sampler = membership.MemberSampler(members, 1000, 4, **options)
        begin(optimizer, sampler=sampler)
        batches = sampler.batches(DataLoader(range(1000), batch_sampler=sampler))  # type: ignore[arg-type]
        draw, seen = torch.Generator().manual_seed(ord(members.rendezvous.name)), list[int]()
        while optimizer.steps_taken() < 8:
            seen += next(batches).tolist()
            give_gradient(p, local, draw)
            optimizer.step()
        end(optimizer)
        return seen

    def seen_of(fuses: dict[str, float]) -> list[int]:
        run = Run(Hub(len(fuses)), work)
        for name, fuse in fuses.items():
            run.start_node(name, [INF, fuse])
        run.wait()
        assert {name[0] for name in run.results} == {name for name, fuse in fuses.items() if fuse == INF}
        return sorted(k for seen in run.results.values() for k in seen)

    assert seen_of({"a": INF, "b": INF}) == list(range(8 * 16))
    seen = seen_of({"a": INF, "b": 30, "c": INF})
    lost = sorted(set(range(seen[-1] + 1)).difference(seen))
    assert len(set(seen)) == len(seen) and lost and len(lost) % 8 == 0
    assert len({k // 8 % 3 for k in lost}) == 1  # those of b's two ranks, in each step


@pytest.mark.parametrize(
    ("kind", "layout", "seed"),
    [
        pytest.param(kind, layout, seed, marks=pytest.mark.thorough if seed else ())
        for seed in range(10)
        for k, kind in enumerate(KINDS)
        for layout in [[*LAYOUTS][(k + seed) % 3]]
    ],
)
def test_random_changes_leave_nodes_equal(kind: str, layout: str, seed: int) -> None:
    """Each kind in one layout; in the others, thoroughly, with other changes."""
    stages, ranks = LAYOUTS[layout]
    draw = np.random.default_rng(seed)

    def fuse() -> float:
        return INF if draw.random() < 0.6 else int(draw.integers(10, 400)) / 2

    def fuses() -> list[float]:
        return [fuse() for _ in range(ranks)]

    run = run_of(Hub(4), [[INF] * ranks, *(fuses() for _ in range(3))], steps=40, kind=KINDS[kind], stages=stages)
    for name in "wxyz":
        run.start_node(name, fuses())
    assert "a" in check(run, ranks)
