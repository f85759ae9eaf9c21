"""The model, batches and configurations of `test_tensor.py` and the ranks it starts, and its plain twins."""

from __future__ import annotations

from collections.abc import Mapping

import fsdp_cases
import torch
from grid_cases import whole as flat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train.model import GPT, ModelSize, build_model, next_byte_loss

import onebit
from onebit import zero
from onebit.comm import Transport
from onebit.dense import average_gradients
from onebit.optimizer import CompressedOptimizer
from onebit.zero.config.optimizers import build_optimizer

# Blocks of 64 are the same sets of elements, cut or not: half a row of any matrix is whole blocks.
SIZE = ModelSize(layers=1, width=128, heads=4, context=16)
FREEZE, STEPS, BATCH = 2, 4, 2
SEEN = (FREEZE - 1, FREEZE)  # the last step with gradients, the first in one bit; and the end, synchronised

OPTIMIZERS: dict[str, tuple[str, dict]] = {
    "OnebitAdam": ("OneBitAdam", {"lr": 2e-3, "freeze_step": FREEZE, "weight_decay": 0.01}),
    "OnebitLamb": ("OneBitLamb", {"lr": 2e-3, "freeze_step": FREEZE, "weight_decay": 0.01}),
    "ZeroOneAdam": (
        "ZeroOneAdam",
        {"lr": 2e-3, "var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2},
    ),
    "OnebitMuon": ("OneBitMuon", {"lr": 2e-3, "freeze_step": FREEZE, "weight_decay": 0.01}),
    "AdamW": ("AdamW", {"lr": 2e-3, "weight_decay": 0.01}),
    "Lamb": ("Lamb", {"lr": 2e-3, "weight_decay": 0.01}),
}


def config_of(name: str, stage: int, **blocks: object) -> dict:
    kind, params = OPTIMIZERS[name]
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": None,
        "communication_data_type": "fp32",
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
        "onebit": {"compression": "always", "block": 64, "bucket_cap_mb": 0.3, "check_replicas_every": 2},
        **blocks,
    }


class Checkpointed(GPT):
    """Computes each block a second time in backward, in place of what it would keep."""

    def forward(self, text_BT: Tensor) -> Tensor:
        x_BTD = self.bytes(text_BT) + self.positions.weight[: text_BT.shape[1]]
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        return nn.functional.linear(self.norm(x_BTD), self.bytes.weight)


def gpt(*, again: bool = False) -> GPT:
    """again: compute twice."""
    net = build_model(SIZE, seed=0)
    if again:
        net.__class__ = Checkpointed
    return net


def windows(step: int, source: int, micro: int = 0) -> Tensor:
    """What a data-parallel rank reads."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * source + micro)
    return torch.randint(256, (BATCH, SIZE.context + 1), generator=generator)


def note(out: dict[str, list], net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """What is compared: of each step, and all parameters in `SEEN`; LAMB's layers in the order of the parameters."""
    if step in SEEN:
        out["params"].append(flat(net))
    if isinstance(optimizer, CompressedOptimizer):
        out["clip"].append(optimizer.stats.clip_factor)
        out["phases"].append(optimizer.stats.phase)
        out["fallback"].append(fsdp_cases.fallback_of(optimizer))
        layers = [dict(bucket.layers) for bucket in optimizer.buckets]
        order = [p for bucket in optimizer.buckets for p in bucket.params]
        place = {p: k for k, p in enumerate(order)}
        rows = torch.tensor([place[p] for p in net.parameters()])
        out["layers"].append({name: torch.cat([table[name] for table in layers])[rows] for name in layers[0]})


def record() -> dict[str, list]:
    return {name: [] for name in ("params", "loss", "clip", "norm", "phases", "fallback", "layers")}


def twin(transport: Transport, name: str, shards: int, blocks: Mapping[str, object]) -> dict[str, list]:
    """Plain data parallelism over the transport: rank r reads what the shards of replica r read, in one batch."""
    config = zero.read_config(config_of(name, 0, **blocks), world_size=transport.world_size)
    net = gpt()
    params = list(net.parameters())
    options = config.optimizer_options() | {"transport": transport, "model": net}
    assert config.optimizer is not None
    optimizer = build_optimizer(config.optimizer, params, **options)
    sources = range(transport.rank * shards, (transport.rank + 1) * shards)
    out = record()
    for step in range(STEPS):
        optimizer.zero_grad()
        micros = range(config.gradient_accumulation_steps)
        batch = torch.cat([windows(step, source, micro) for source in sources for micro in micros])
        loss = next_byte_loss(net(batch[:, :-1]), batch)
        loss.backward()
        if not isinstance(optimizer, CompressedOptimizer):
            average_gradients(params, transport)
            if config.gradient_clipping:
                out["norm"].append(float(nn.utils.clip_grad_norm_(params, config.gradient_clipping)))
        optimizer.step()
        out["loss"].append(float(loss.detach()))
        note(out, net, optimizer, step)
    if isinstance(optimizer, onebit.ZeroOneAdam):
        optimizer.sync()
    out["params"].append(flat(net))
    return out
