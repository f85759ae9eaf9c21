"""What holds of every optimizer of the family in every world, flat or of nodes, with any option."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from family import FREEZE, flat, fresh, loss_of, make, model, same, snapshot, train
from torch import Tensor

import onebit
from onebit.comm import Transport, hierarchical, run_ranks
from onebit.optimizer import CompressedOptimizer

T = TypeVar("T")
World: TypeAlias = tuple[int, int | None]  # nodes and the ranks on each; (ranks, None): a flat world
STEPS = 20


def run_world(world: World, work: Callable[[Transport], T]) -> list[T]:
    """work(transport) on every simulated rank; the results in rank order."""
    nodes, local_size = world
    if local_size is None:
        return run_ranks(nodes, work)
    return run_ranks(nodes * local_size, lambda transport: work(hierarchical(transport, local_size)))


def owed(optimizer: CompressedOptimizer) -> Tensor:
    """This rank's share of what the mean is still owed: worker error / H, and the server error of its chunk."""
    parts = []
    for bucket in optimizer.buckets:
        if bucket.ef is None:
            continue
        mine = bucket.spread(bucket.ef.worker.double()) / bucket.hierarchy.nodes
        bucket.own_chunk(mine).add_(bucket.ef.server.double())
        parts += [view.reshape(-1) for view in bucket.layout.views(mine)]
    return torch.cat(parts) if parts else torch.zeros(0)


def trained(world: World, name: str, steps: int, **options: object) -> list[tuple[dict, dict, Tensor]]:
    """Per rank: its state, its model, and the mean over ranks of what is owed, per parameter."""

    def work(transport: Transport) -> tuple[dict, dict, Tensor]:
        net, optimizer = fresh(transport, name, **options)
        train(transport, range(steps), net, optimizer)
        return snapshot(optimizer), copy.deepcopy(net.state_dict()), owed(optimizer)

    results = run_world(world, work)
    total = torch.stack([owes for _, _, owes in results]).sum(0)
    return [(state, weights, total) for state, weights, _ in results]


def check_replicas(name: str, world: World, dtype: torch.dtype = torch.float32, **options: object) -> None:
    """Every round of each optimizer: the same bits on all ranks, which had other initial values. Rank 0's count."""

    def ours(transport: Transport) -> list[Tensor]:
        net = model(seed=transport.rank, dtype=dtype)
        optimizer = make(name, net, transport, check_replicas_every=1, **options)
        assert torch.equal(flat(net), flat(model(seed=0, dtype=dtype)))
        assert len(optimizer.buckets) > 2 or "bucket_cap_mb" not in options
        steps = [(train(transport, range(k, k + 1), net, optimizer)[0], optimizer.stats.phase) for k in range(STEPS)]
        return [weights for weights, phase in steps if phase != "local"]

    results = run_world(world, ours)
    assert all(same(result, results[0]) for result in results)
    assert results[0][-1].dtype == dtype and results[0][-1].isfinite().all()
    assert len(results[0]) > FREEZE + 3 and not torch.equal(results[0][FREEZE + 3], results[0][-1])


def check_resume(name: str, world: World, stop: int, **options: object) -> None:
    """To the bit: parameters and the whole optimizer state; through torch.save with weights_only.

    In the midst of local steps of 0/1 Adam each rank's own parameters are those of the state.
    """

    def ours(transport: Transport) -> Tensor:
        net, optimizer = fresh(transport, name, check_replicas_every=1, **options)
        train(transport, range(stop), net, optimizer)
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        train(transport, range(stop, STEPS), net, optimizer)
        other = model(seed=5)
        resumed = make(name, other, transport, **options)
        train(transport, range(50, 50 + (stop * 7) % 9), other, resumed)  # some other past, in some other phase
        if not saved["optimizer"]["onebit"].get("since_sync"):
            other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        train(transport, range(stop, STEPS), other, resumed)
        assert resumed.error_norm_ratio() == optimizer.error_norm_ratio() > 0.0
        assert torch.equal(flat(other), flat(net)) and same(resumed.state_dict(), optimizer.state_dict())
        if isinstance(optimizer, onebit.ZeroOneAdam):
            optimizer.sync()
        return flat(net).clone()

    first, *others = run_world(world, ours)
    assert first.isfinite().all() and all(torch.equal(first, other) for other in others)


def check_skip(name: str, world: World, bad_step: int, bad: float, **options: object) -> None:
    """A gradient that is not finite on rank 1: all skip, and the run goes on as if the step had not been."""

    def ours(transport: Transport) -> bool:
        (net, optimizer), (clean_net, clean) = (fresh(transport, name, **options) for _ in range(2))
        train(transport, range(bad_step), net, optimizer)
        before, weights = snapshot(optimizer), flat(net).clone()
        optimizer.zero_grad()
        (loss_of(net, 77, transport.rank) * (bad if transport.rank == 1 else 1.0)).backward()
        optimizer.step()
        assert optimizer.stats.skipped_steps == 1
        before["onebit"]["skipped_steps"] = 1
        assert same(before, optimizer.state_dict()) and torch.equal(flat(net), weights)
        train(transport, range(bad_step, 12), net, optimizer)
        train(transport, range(12), clean_net, clean)
        return torch.equal(flat(net), flat(clean_net))

    assert all(run_world(world, ours))


def check_another_world(name: str, old: World, new: World, steps: int, **options: object) -> None:
    """What is owed is kept, and training goes on from the mean of the replicas, the same on all ranks."""
    before = trained(old, name, steps, **options)

    def work(transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        net = model(seed=3)
        optimizer = make(name, net, transport, **options)
        net.load_state_dict(before[0][1])
        optimizer.load_state_dicts(copy.deepcopy([state for state, _, _ in before]))
        shares, at_start = owed(optimizer), flat(net).clone()
        train(transport, range(steps, steps + 6), net, optimizer)
        if isinstance(optimizer, onebit.ZeroOneAdam):
            optimizer.sync()
        return shares, at_start, flat(net).clone()

    after = run_world(new, work)
    torch.testing.assert_close(sum(shares for shares, _, _ in after), before[0][2], atol=1e-6, rtol=1e-6)
    mean = torch.stack([torch.cat([p.reshape(-1) for p in weights.values()]) for _, weights, _ in before]).mean(0)
    for _, at_start, at_end in after:
        torch.testing.assert_close(at_start, mean, atol=1e-7, rtol=0)
        assert torch.equal(at_end, after[0][2]) and at_end.isfinite().all()
