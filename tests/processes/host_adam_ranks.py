"""What the ranks of test_host_adam_engine.py do: an engine with offload steps by torch's AdamW or by HostAdam."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import onebit.zero as deepspeed
from onebit import zero

STEPS = 4


def engine(is_ours: bool) -> zero.Engine:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    config: dict = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    given = {"lr": 1e-2, "weight_decay": 0.1}
    if is_ours:
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(net.parameters(), **given)
        return zero.initialize(model=net, optimizer=optimizer, config=config)[0]
    return zero.initialize(model=net, config=config | {"optimizer": {"type": "AdamW", "params": given}})[0]


def train(trained: zero.Engine, first: int) -> Tensor:
    for step in range(first, first + STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        trained.backward(trained(x).float().square().mean())
        trained.step()
    return torch.cat([p.full_tensor().detach().flatten() for p in trained.sharding.held.parameters()])


def compares(folder: str) -> dict[str, object]:
    """How far the two lie apart, from the start and from each other's checkpoints."""
    first = {is_ours: engine(is_ours) for is_ours in (False, True)}
    values = {is_ours: train(trained, 0) for is_ours, trained in first.items()}
    facts: dict[str, object] = {"start": float((values[True] - values[False]).abs().max())}
    facts["names"] = [type(trained.optimizer).__name__ for trained in first.values()]
    for saver, name in ((False, "of torch's"), (True, "of ours")):
        checkpoint = str(Path(folder) / name)
        first[saver].save_checkpoint(checkpoint)
        resumed = []
        for is_ours in (False, True):
            other = engine(is_ours)
            other.load_checkpoint(checkpoint)
            resumed.append(train(other, STEPS))
        facts[name] = float((resumed[1] - resumed[0]).abs().max())
        facts[f"{name} moved"] = float((resumed[saver] - values[saver]).abs().max())
    return facts
