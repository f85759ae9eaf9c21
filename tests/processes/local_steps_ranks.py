"""What ranks do with `onebit.LocalSteps`, whatever transport joins them."""

from __future__ import annotations

import copy
import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onebit
from onebit.comm import IdentityCodec, Transport, hierarchical, init


def train(transport: Transport, resume_at: int = -1, **options: object) -> str:
    """14 steps of AdamW in rounds of four; a hash of anchors, parameters and what is owed.

    resume_at: behind that step, all goes on in a new model and optimizer, from the state.
    """

    def make() -> tuple[list[nn.Parameter], onebit.LocalSteps]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(size, generator=generator)) for size in ((20, 65), (65,), (65, 9), (9,))]
        inner = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
        given = {"every": 4, "bucket_cap_mb": 0.003, "check_replicas_every": 4, "transport": transport} | options
        return params, onebit.LocalSteps(inner, **given)  # type: ignore[arg-type]

    params, optimizer = make()
    for step in range(14):
        generator = torch.Generator().manual_seed(100 * step + transport.rank)
        for p in params:
            p.grad = p.detach() + torch.randn(p.shape, generator=generator)
        if step == 5 and transport.rank == 1:
            params[0].grad[0, 0] = float("nan")  # type: ignore[index]
        optimizer.step()
        if step == resume_at:
            state = copy.deepcopy(optimizer.state_dict())
            params, optimizer = make()
            optimizer.load_state_dict(state)
    assert optimizer.stats.missed_rounds == (transport.rank == 1)
    state = optimizer.state_dict()
    found = [entry[name] for entry in state["state"].values() for name in ("anchor", "worker_error")]
    found += [*(p.detach() for p in params), *(bucket["server_error"] for bucket in state["onebit"]["buckets"])]
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in found)).hexdigest()


def train_here(cases: list[dict[str, object]]) -> tuple[list[str], int]:
    """Each case over the launcher's transport; and the interval that this network asks for."""
    transport = init(levels=1)
    found = [train(transport, **case) for case in cases]  # type: ignore[arg-type]
    p = nn.Parameter(torch.zeros(3000))
    interval = onebit.Auto(least=2, most=6)
    optimizer = onebit.LocalSteps(torch.optim.SGD([p], lr=0.1), interval, transport=transport)
    for _ in range(16):
        p.grad = torch.ones_like(p)
        optimizer.step()
    transport.close()
    assert interval.chosen is not None
    return found, interval.chosen


def shards_and_nodes() -> dict[str, object]:
    """Two replicas of two shards under FSDP2, and two nodes of two ranks that average: the same training."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rank = mesh.get_rank()

    def take_steps(model: nn.Module, optimizer: onebit.LocalSteps, spoilt: int = -1) -> list[list[float]]:
        """Of each step, some elements of the whole parameters. spoilt: the step of a NaN in rank 3's gradients."""
        found = []
        for step in range(8):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * rank + step))
            model(x).square().mean().backward()
            if step == spoilt and rank == 3:
                for p in model.parameters():
                    held = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    assert isinstance(held, Tensor)
                    held.fill_(float("nan"))
            optimizer.step()
            optimizer.zero_grad()
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
            found.append(torch.cat([p.detach().reshape(-1)[:40] for p in whole]).tolist())
        return found

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 30), nn.Linear(30, 3))

    def sharded(spoilt: int, **options: object) -> tuple[list[list[float]], int]:
        model = make()
        for layer in (model[0], model[2], model[3]):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        given = {"every": 3, "check_replicas_every": 3, **onebit.transports_of(mesh), **options}
        optimizer = onebit.LocalSteps(inner, **given)  # type: ignore[arg-type]
        return take_steps(model, optimizer, spoilt), optimizer.stats.missed_rounds

    model = make()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    nodes = onebit.LocalSteps(inner, 3, codec=IdentityCodec(), transport=hierarchical(init("gloo", levels=1), 2))
    in_one_bit, missed = sharded(spoilt=4)
    return {
        "sharded": sharded(-1, codec=IdentityCodec())[0],
        "nodes": take_steps(model, nodes),
        "in one bit": in_one_bit,
        "missed": missed,
    }
