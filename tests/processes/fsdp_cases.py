"""Models, batches and training loops for `test_fsdp.py` and the ranks it starts: sharded, and their unsharded twins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from grid_cases import whole as flat
from muon_of import muon_of
from torch import Tensor, nn

import onebit
from onebit.comm import SignCodec, Transport
from onebit.onebit_adam import AdamRule
from onebit.optimizer import CompressedOptimizer

_GLOBAL_RNG = threading.Lock()  # simulated ranks are threads: seeding and drawing must not interleave

FREEZE = 3
STEPS = 7
CODEC = SignCodec(64)
COMMON = {"codec": CODEC, "bucket_cap_mb": 2.5e-5, "check_replicas_every": 4, "compression": "always"}

FAMILY: dict[str, tuple[Callable[..., CompressedOptimizer], dict]] = {
    "OnebitAdam": (onebit.OnebitAdam, {"lr": 0.01, "freeze_step": FREEZE}),
    "OnebitMuon": (muon_of, {"lr": 0.01, "freeze_step": FREEZE}),
    "OnebitLamb": (onebit.OnebitLamb, {"lr": 0.02, "freeze_step": FREEZE, "weight_decay": 0.01}),
    "ZeroOneAdam": (
        onebit.ZeroOneAdam,
        {"lr": 0.01, "var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2},
    ),
}


def make(name: str, net: nn.Module, transport: Transport, **options: object) -> CompressedOptimizer:
    kind, defaults = FAMILY[name]
    return kind(net.parameters(), transport=transport, **COMMON | defaults | options)


def aligned_net() -> nn.Module:
    """Halves of its parameters are whole blocks of 64: sharded by two, they have the blocks that they have in one."""
    with _GLOBAL_RNG:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 128),
            nn.Tanh(),
            nn.Linear(128, 8, bias=False),
            nn.Tanh(),
            nn.Linear(8, 64, bias=False),
            nn.Linear(64, 4, bias=False),
        )


class OddNet(nn.Module):
    """Parameters of one row, of three, of none per rank; one that is never used, and one that only replica 0 uses."""

    def __init__(self, uses_extra: bool = True) -> None:
        super().__init__()
        self.uses_extra = uses_extra
        self.layers = nn.ModuleList([nn.Linear(8, 9), nn.Linear(9, 1), nn.Linear(1, 3, bias=False)])
        self.head = nn.Linear(3, 4)
        self.extra = nn.Linear(8, 4, bias=False)
        self.unused = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        h = self.head(h)
        return h + self.extra(x) if self.uses_extra else h


def odd_net(uses_extra: bool = True) -> nn.Module:
    with _GLOBAL_RNG:
        torch.manual_seed(1)
        return OddNet(uses_extra)


def loss_of(net: nn.Module, step: int, source: int, micro: int = 0) -> Tensor:
    """On the batch that rank `source` of the grid reads."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * source + micro)
    x, y = torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    return nn.functional.cross_entropy(net(x).float(), y)


def twin_backward(net: nn.Module, step: int, sources: Sequence[int], micros: int, reduces_once: bool) -> None:
    """p.grad ← the mean over `sources`, added up as their grid does: shards first, or micro-batches first."""
    params = [p for p in net.parameters() if p.requires_grad]
    grads = [
        [torch.autograd.grad(loss_of(net, step, source, k) / micros, params, allow_unused=True) for k in range(micros)]
        for source in sources
    ]
    for i, p in enumerate(params):
        table = [[g[i] for g in row] for row in grads]
        if table[0][0] is None:
            p.grad = None
        elif reduces_once:
            p.grad = _sum([_sum(row) for row in table]) / len(sources)
        else:
            p.grad = _sum([_sum(list(column)) / len(sources) for column in zip(*table, strict=True)])


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def twin(
    transport: Transport, name: str, shards: int, micros: int = 1, reduces_once: bool = False, **options: object
) -> dict[str, list]:
    """The same training without shards: rank r of the transport takes the batches of all ranks of replica r."""
    net = aligned_net()
    optimizer = make(name, net, transport, **options)
    sources = range(transport.rank * shards, (transport.rank + 1) * shards)
    out: dict[str, list] = {"params": [], "clip": [], "fallback": [], "layers": []}
    for step in range(STEPS):
        twin_backward(net, step, sources, micros, reduces_once)
        optimizer.step()
        note(out, net, optimizer)
    if isinstance(optimizer, onebit.ZeroOneAdam):
        optimizer.sync()
        note(out, net, optimizer)
    return out


def fallback_of(optimizer: CompressedOptimizer) -> float:
    """The variance of blocks that have never seen a gradient."""
    rule = optimizer.rule
    return rule.variance.fallback if isinstance(rule, AdamRule) else rule._fallback


def note(out: dict[str, list], net: nn.Module, optimizer: CompressedOptimizer) -> None:
    """What is compared: all parameters, the clip factor, the model's mean variance, what LAMB knows of its layers."""
    out["params"].append(flat(net))
    out["clip"].append(optimizer.stats.clip_factor)
    layers = [dict(bucket.layers) for bucket in optimizer.buckets]
    names = layers[0].keys()
    out["fallback"].append(fallback_of(optimizer))
    out["layers"].append({name: torch.cat([table[name] for table in layers]) for name in names})
