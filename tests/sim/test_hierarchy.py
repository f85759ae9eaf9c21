"""Two levels: the optimizers over nodes of several ranks do what a flat world of nodes does, and send what they should.

Shape legend: W = L·H ranks, L on each of H nodes.
"""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
import transport_contract as contract
from family import FAMILY, flat, loss_of, make, model, same, snapshot, train
from family_contract import World, check_another_world, check_replicas, check_resume, check_skip, run_world
from torch import Tensor, nn

import onebit
from onebit.comm import (
    ErrorFeedback,
    HierarchicalTransport,
    Hierarchy,
    IdentityCodec,
    Int8Codec,
    Log4Codec,
    SignCodec,
    SimTransport,
    Transport,
    allreduce_mean,
    hierarchical,
    run_ranks,
)
from onebit.comm.hierarchy import Seen, decide

pytestmark = pytest.mark.slow

T = TypeVar("T")

SHAPES = [(2, 2), (2, 3), (3, 2), (2, 1), (1, 2), (4, 2)]  # (H, L)
# Optimizers see no more of a shape than its collective: one of them on each, the others on one.
EACH = [("OnebitAdam", *shape) for shape in SHAPES[:-1]] + [(name, 3, 2) for name in FAMILY if name != "OnebitAdam"]


def vector(seed: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------- the transport


@pytest.mark.parametrize(("H", "L"), SHAPES)
def test_ranks_are_numbered_node_by_node_and_rows_by_local_rank(H: int, L: int) -> None:
    def work(transport: Transport) -> tuple[int, range]:
        hierarchy = Hierarchy.of(transport)
        assert (hierarchy.nodes, hierarchy.local_size, hierarchy.phases) == (H, L, 2 if L == 1 else 4)
        return hierarchy.owner, range(hierarchy.own.start, hierarchy.own.stop)

    for rank, (owner, own) in enumerate(run_world((H, L), work)):
        node, local_rank = divmod(rank, L)
        assert own == range(local_rank * H, local_rank * H + H) and owner == own[node]


def test_it_is_a_transport() -> None:
    """Operations are the world's; its parts obey the contract among themselves."""

    def work(transport: Transport) -> list[dict[str, str]]:
        assert isinstance(transport, HierarchicalTransport)
        names = tuple(name for name in contract.CHECKS if name != "large_rows")
        return [contract.run_checks(part, names) for part in (transport, transport.intra_node, transport.inter_node)]

    for outcomes in run_world((2, 3), work):
        assert all(set(outcome.values()) == {""} for outcome in outcomes)


def test_bytes_to_other_nodes_are_counted_apart() -> None:
    """all_gather and all_to_all: (W-L)·B of (W-1)·B."""

    def work(transport: Transport) -> tuple[int, int, int]:
        assert isinstance(transport, HierarchicalTransport)
        transport.all_gather(contract.garbage(6, 10), contract.garbage(10)).wait()
        transport.intra_node.all_gather(contract.garbage(3, 100), contract.garbage(100)).wait()
        transport.inter_node.all_gather(contract.garbage(2, 1000), contract.garbage(1000)).wait()
        sent = transport.sent_bytes, transport.sent_bytes_inter_node
        transport.shift(contract.garbage(7), contract.garbage(7), 1).wait()
        return *sent, transport.sent_bytes_inter_node - sent[1]

    assert run_world((2, 3), work) == [(50 + 200 + 1000, 30 + 1000, 7 * (rank in (2, 5))) for rank in range(6)]


@pytest.mark.parametrize("local_size", [0, 3, 8])
def test_a_local_size_that_does_not_divide_is_refused(local_size: int) -> None:
    def work(transport: SimTransport) -> str:
        with pytest.raises(ValueError) as caught:
            hierarchical(transport, local_size)
        return str(caught.value)

    for rank, message in enumerate(run_ranks(4, work)):
        assert message == f"rank {rank}: 4 ranks cannot be {local_size} on each node; give a divisor of 4"


def test_links_that_do_not_fit_are_refused() -> None:
    def work(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=r"expected rank = node·2 \+ local rank"):
            HierarchicalTransport(transport, transport.split([0, 1]), transport.split([0, 1]))

    run_ranks(2, work)


def test_two_levels_reach_what_all_of_their_transports_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo between nodes reaches host memory alone, whatever serves the node."""

    def work(transport: SimTransport) -> list[bool]:
        levels = hierarchical(transport, 2)
        cuda = torch.device("cuda")
        found = [levels.reaches(cuda)]
        for part in (levels.world, levels.intra_node, levels.inter_node):
            with monkeypatch.context() as patched:
                patched.setattr(part, "reaches", lambda device: device.type == "cpu")
                found += [levels.reaches(cuda), levels.reaches(torch.device("cpu"))]
        return found

    assert run_ranks(2, work) == [[True] + 3 * [False, True]] * 2


# -------------------------------------------------------------------------------- the collective


@pytest.mark.parametrize(("H", "L"), SHAPES)
@pytest.mark.parametrize("codec", [IdentityCodec(4), Int8Codec(64), SignCodec(64)])
def test_the_mean_is_that_of_the_node_means(codec: SignCodec, H: int, L: int) -> None:
    """Three rounds with what is owed: bitwise those of H ranks that hold the nodes' means, computed the same way."""
    n = H * L * 192

    def ours(transport: Transport) -> list[Tensor]:
        ef = ErrorFeedback.zeros(n, transport.world_size, local_size=Hierarchy.of(transport).local_size)
        rounds = [vector(10 * k + transport.rank, n) for k in range(3)]
        assert all(allreduce_mean(x, ef, codec, transport) for x in rounds)
        return rounds

    def flat_world(transport: SimTransport) -> list[Tensor]:
        ef, rounds = ErrorFeedback.zeros(n, H), []
        for k in range(3):
            first, *others = (vector(10 * k + transport.rank * L + i, n) for i in range(L))
            rounds.append(sum(others, first) * (1.0 / L))
        assert all(allreduce_mean(x, ef, codec, transport) for x in rounds)
        return rounds

    expected = run_ranks(H, flat_world)[0]
    for result in run_world((H, L), ours):
        assert same(result, expected)


def test_an_error_of_the_wrong_size_is_refused() -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(ValueError, match=r"local_size=2; make it with ErrorFeedback\.zeros"):
            allreduce_mean(torch.zeros(1024), ErrorFeedback.zeros(1024, 4), SignCodec(64), transport)

    run_world((2, 2), work)


# -------------------------------------------------------------------------------- the optimizers


def node_losses(net: nn.Module, step: int, node: int, local_size: int) -> None:
    """The gradients of one rank of a flat world of nodes: the means over the ranks of the node, added in rank order."""
    sums: list[Tensor] = []
    for rank in range(node * local_size, (node + 1) * local_size):
        net.zero_grad()
        loss_of(net, step, rank).backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
    for p, total in zip(net.parameters(), sums, strict=True):
        p.grad = total * (1.0 / local_size)


@pytest.mark.parametrize(("name", "H", "L"), EACH)
def test_equals_a_flat_world_of_nodes(name: str, H: int, L: int) -> None:
    """To the bit where L = 2; thirds are no binary fractions: up to 2 % of the elements may take another sign then.

    Local steps and LAMB's factor are left out: they know each rank's own gradient.
    """
    options: dict = {"overlap": False, "bucket_cap_mb": 0.004, "check_replicas_every": 1}
    if name == "ZeroOneAdam":
        options |= {"local_step_clipper": 1}
    if name == "OnebitLamb":
        options |= {"factor_threshold": 0.0}
    steps = 12

    def ours(transport: Transport) -> list[Tensor]:
        net = model()
        return train(transport, range(steps), net, make(name, net, transport, **options))

    def flat_world(transport: SimTransport) -> list[Tensor]:
        net = model()
        optimizer = make(name, net, transport, **options)
        out = []
        for step in range(steps):
            node_losses(net, step, transport.rank, L)
            optimizer.step()
            out.append(flat(net).clone())
        return out

    expected = run_ranks(H, flat_world)[0]
    results = run_world((H, L), ours)
    assert all(same(result, results[0]) for result in results)
    if L != 3:
        assert same(results[0], expected)
    else:
        off = (results[0][-1] - expected[-1]).abs() > 2e-5
        assert off.float().mean() <= 0.02


@pytest.mark.parametrize("name", FAMILY)
def test_replicas_are_bit_identical_and_learn(name: str) -> None:
    """Buckets that leave during backward, clipping in warm-up or throughout."""
    check_replicas(name, (3, 2), bucket_cap_mb=0.003, max_grad_norm=5.0 if name == "OnebitAdam" else 0.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [3, 17])
def test_resume_equals_no_interruption(stop: int, error_dtype: torch.dtype, name: str) -> None:
    check_resume(name, (2, 2), stop, error_dtype=error_dtype)


def test_overlap_changes_nothing() -> None:
    """Six buckets: every phase is launched during backward, or none is."""

    def ours(transport: Transport, overlap: bool) -> Tensor:
        net = nn.Sequential(*(nn.Linear(20, 20) for _ in range(8)), nn.Linear(20, 3))
        net.load_state_dict({k: 0.2 * vector(len(k), v.numel()).view(v.shape) for k, v in net.state_dict().items()})
        optimizer = make("OnebitAdam", net, transport, overlap=overlap, bucket_cap_mb=0.0015)
        assert len(optimizer.buckets) > 7
        return train(transport, range(8), net, optimizer)[-1]

    with_overlap, without = (run_world((2, 2), lambda transport, o=o: ours(transport, o)) for o in (True, False))
    assert same(with_overlap, without)


@pytest.mark.parametrize(("name", "bad_step"), [("OnebitAdam", 9), ("OnebitLamb", 2), ("OnebitMuon", 9)])
def test_a_bad_gradient_on_one_rank_makes_all_skip_and_leaves_no_trace(name: str, bad_step: int) -> None:
    check_skip(name, (2, 2), bad_step, float("nan"))


SMALL: list[list[tuple[int, ...]]] = [[(0,)], [(1,)], [(3,), (0,)], [(256,), (1,), (700,)]]
OTHERS = [(shapes, name) for name in FAMILY if name != "OnebitAdam" for shapes in SMALL[2:]]


@pytest.mark.parametrize(("shapes", "name"), [*((shapes, "OnebitAdam") for shapes in SMALL), *OTHERS])
def test_buckets_smaller_than_a_block_per_rank(shapes: list[tuple[int, ...]], name: str) -> None:
    def ours(transport: Transport) -> Tensor:
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        kind, defaults = FAMILY[name]
        optimizer = kind(params, transport=transport, check_replicas_every=1, **defaults)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(16):
            for p in params:
                p.grad = 1.0 + 0.1 * torch.randn(p.shape, generator=generator)
            optimizer.step()
        if isinstance(optimizer, onebit.ZeroOneAdam):
            optimizer.sync()
        return torch.cat([p.detach().view(-1) for p in params])

    results = run_world((2, 2), ours)
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] < 0.97).all() and (results[0] > 0.3).all()


@pytest.mark.parametrize(("H", "L"), [(2, 2), (2, 3), (3, 2)])
def test_what_crosses_nodes_is_an_lth_of_what_a_flat_world_sends(H: int, L: int) -> None:
    """A one-bit step: 2·(H-1)·B across nodes, B the frame of a W-th; 4·(W-H)/W bytes per element and frames inside."""
    n = H * L * 2048

    def ours(transport: Transport) -> list[tuple[int, int, float]]:
        p = nn.Parameter(torch.zeros(n))
        optimizer = onebit.OnebitAdam([p], freeze_step=1, transport=transport, check_replicas_every=0)
        out = []
        for _ in range(3):
            p.grad = torch.full((n,), 1.0 + transport.rank)
            optimizer.step()
            stats = optimizer.stats
            out.append((stats.sent_bytes, stats.sent_bytes_inter_node, stats.bits_per_parameter))
        return out

    W, vote = H * L, 17 + 26  # with the summary of a header
    B, gradients = SignCodec().frame_bytes(2048), Log4Codec().frame_bytes(2048)
    inside = (L - 1) * 4 * n // L
    for steps in run_world((H, L), ours):
        for (sent, across, bits), frame in zip(steps, (gradients, B, B), strict=True):
            assert across == 2 * (H - 1) * frame + (W - L) * vote
            assert sent == across + inside + (L - 1) * H * frame + (L - 1) * vote
            assert bits == pytest.approx(8 * across / n)


def test_what_is_owed_takes_an_lth_of_the_memory() -> None:
    def ours(transport: Transport) -> float:
        p = nn.Parameter(torch.zeros(1 << 16))
        optimizer = onebit.OnebitAdam([p], freeze_step=1, transport=transport)
        p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer.state_bytes() / p.numel()

    one, two = run_world((4, 1), ours)[0], run_world((2, 2), ours)[0]
    assert one - two == 2.0


# -------------------------------------------------------------------------------- from one shape of a world to another


@pytest.mark.pairwise
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(("old", "new"), [((2, 3), (3, 2)), ((2, 2), (1, 1)), ((3, 1), (2, 2))])
@pytest.mark.parametrize("steps", [3, 14, 20])
def test_what_is_owed_is_kept_where_the_world_changes(name: str, old: World, new: World, steps: int) -> None:
    check_another_world(name, old, new, steps)


def test_a_state_of_other_levels_is_refused_untouched() -> None:
    def saved(transport: Transport) -> dict:
        net = model()
        optimizer = make("OnebitAdam", net, transport)
        train(transport, range(8), net, optimizer)
        return snapshot(optimizer)

    flat_state = run_ranks(4, saved)[0]
    nodes_state = run_world((2, 2), saved)[0]

    def work(transport: Transport) -> None:
        if transport.rank:
            make("OnebitAdam", model(), transport)
            return
        optimizer = make("OnebitAdam", model(), transport)
        two = isinstance(transport, HierarchicalTransport)
        before = snapshot(optimizer)
        wrong, message = (flat_state, "1 there and 2 here") if two else (nodes_state, "2 there and 1 here")
        with pytest.raises(ValueError, match=f"local_size is {message}.*load_state_dicts"):
            optimizer.load_state_dict(wrong)
        assert same(before, snapshot(optimizer))

    run_ranks(4, work)
    run_world((2, 2), work)


# -------------------------------------------------------------------------------- where the nodes are


def placed(*sizes: int, says: int | None = -1) -> list[Seen]:
    """Hosts of so many ranks, numbered host by host; the launcher says so too, or `says`."""
    return [Seen(f"host{h}", size if says == -1 else says) for h, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("seen", "local_size", "why"),
    [
        pytest.param(placed(2, 2), 2, "", id="two nodes of two"),
        pytest.param(placed(4, 4, 4), 4, "", id="three nodes of four"),
        pytest.param(placed(1), 1, "", id="one rank"),
        pytest.param(placed(4), 1, "", id="one node"),
        pytest.param(placed(1, 1, 1), 1, "", id="one rank per node"),
        pytest.param(placed(1, 1, 1, says=None), 1, "", id="one rank per node, which nobody says"),
        pytest.param(placed(2, 2, says=None), 1, "does not say how many ranks share a node", id="unknown"),
        pytest.param([*placed(2), Seen("b", None), Seen("b", None)], 1, "does not say", id="unknown to some"),
        pytest.param(placed(2, 1), 1, "different numbers of ranks: 1, 2", id="unequal nodes"),
        pytest.param(placed(2, 4, 2), 1, "different numbers of ranks: 2, 4", id="unequal, but divisible"),
        pytest.param(placed(2, 2)[::2] + placed(2, 2)[1::2], 1, "not numbered node by node", id="round robin"),
        pytest.param(placed(4, says=2), 1, "says 2 ranks share a node, but by their host names 4 do", id="one host"),
        pytest.param(placed(1, 1, 1, 1, says=2), 1, "host names 1, 1, 1, 1 do", id="a host name for each container"),
        pytest.param(placed(2, 2, says=4), 1, "says 4 ranks share a node, but", id="launcher says one node"),
        pytest.param([Seen("a", 2), Seen("a", 2), Seen("b", 2)], 1, "host names 2, 1 do", id="does not divide"),
    ],
)
def test_two_levels_where_launcher_and_host_names_agree(seen: list[Seen], local_size: int, why: str) -> None:
    chosen, reason = decide(seen)
    assert chosen == local_size and why in reason and bool(why) == bool(reason)
