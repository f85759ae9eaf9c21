"""What ranks under torchrun do with FSDP2 and a mesh of their own, beside onebit.zero.fsdp over a grid."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from errors import error_of
from example_ranks import run_example
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import onebit
from onebit import zero


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 30), nn.Linear(30, 3))


def train(model: nn.Module, rank: int, **groups: Any) -> str:
    """The bits of all parameters after some steps, most of them in one bit."""
    optimizer = onebit.OnebitAdam(
        model.parameters(), lr=0.01, freeze_step=3, compression="always", max_grad_norm=1.0, **groups
    )
    for step in range(8):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = b"".join(p.full_tensor().detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(whole).hexdigest()


def by_hand(mesh: DeviceMesh, over: DeviceMesh) -> str:
    model = net()
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return train(model, mesh.get_rank(), **onebit.transports_of(mesh))


def over_a_grid() -> str:
    grid = zero.grid.start(shard=2)
    model = zero.fsdp.shard(net(), grid, stage=3)
    return train(model, grid.world.rank, transport=grid.transport, model_parallel_group=grid.model_parallel_group)


def everything(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {
        "by hand": by_hand(mesh, mesh["shard"]),
        "over a grid": over_a_grid(),
        "all of the mesh": error_of(ValueError, by_hand, mesh, mesh),
        "one axis": error_of(ValueError, by_hand, mesh["shard"], mesh["shard"]),
    }
    for name in ("fsdp2", "titan_loop"):
        (Path(folder) / name).mkdir(exist_ok=True)
        found[name] = run_example(name, Path(folder) / name, "--steps", "60", "--warmup", "20")
    return found
