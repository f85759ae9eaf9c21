"""What a released version writes: states, checkpoints and frames that all later ones read (docs/versions.md).

    git archive REVISION | tar x -C /tmp/released    # of the release
    PYTHONPATH=/tmp/released python tests/golden/write_released.py

In released_VERSION.zip: frames.json, names.json with the public names, NAME/rankK.pt with the state of an optimizer and
its weights, and stageK/, a folder as `engine.save_checkpoint` leaves it, with config.json and expected.pt. Two ranks
each have taken `STEPS` steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn
from write_golden import frames

import onebit
from onebit.comm import SimTransport, run_ranks
from onebit.zero.config.sections import Onebit

STEPS = 6
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], SimTransport], torch.optim.Optimizer]] = {
    "OnebitAdam": lambda params, link: onebit.OnebitAdam(params, lr=1e-2, freeze_step=2, transport=link),
    "OnebitLamb": lambda params, link: onebit.OnebitLamb(params, lr=1e-2, freeze_step=2, transport=link),
    "ZeroOneAdam": lambda params, link: onebit.ZeroOneAdam(params, lr=1e-2, transport=link),
    "OnebitMuon": lambda params, link: onebit.OnebitMuon(
        [{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}], lr=1e-2, transport=link
    ),
    "LocalSteps": lambda params, link: onebit.LocalSteps(torch.optim.AdamW(params, lr=1e-2), every=2, transport=link),
}
ENGINES = {0: "OneBitAdam", 1: "OneBitAdam", 2: "AdamW", 3: "AdamW"}


def names() -> dict[str, list[str]]:
    """What is public, by module; under "JSON" the keys of its block."""
    modules = (onebit, onebit.comm, onebit.zero)
    return {m.__name__: list(m.__all__) for m in modules} | {"JSON": [field.name for field in fields(Onebit)]}


def net() -> nn.Module:
    """A small model with the same values on every machine."""
    model = nn.Sequential(nn.Linear(24, 12), nn.Linear(12, 5))
    fill(model.parameters(), 0)
    return model


def fill(tensors: Iterable[Tensor], seed: int) -> None:
    """Exact fractions in place of random numbers."""
    with torch.no_grad():
        for k, x in enumerate(tensors):
            x.copy_((torch.arange(x.numel()) * 7919 + 31 * k + 577 * seed).remainder(1009).sub(504).view_as(x) / 4096)


def train(name: str, link: SimTransport) -> dict:
    """The state of an optimizer and the weights, after some steps of one rank."""
    params = list(net().parameters())
    optimizer = OPTIMIZERS[name](params, link)
    take_steps(params, optimizer, link.rank, STEPS)
    return {"state": optimizer.state_dict(), "weights": [p.detach().clone() for p in params]}


def take_steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    """Steps with gradients that differ between ranks."""
    for step in range(steps):
        for p in params:
            p.grad = torch.empty_like(p)
        fill((p.grad for p in params if p.grad is not None), 2 * step + rank + 1)
        optimizer.step()


def train_engine(stage: int, folder: Path) -> None:
    """Two ranks write a checkpoint."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": ENGINES[stage], "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": stage == 2},
        "onebit": {"sharding": "intra_node"},
    }
    engine, *_ = onebit.zero.initialize(model=net(), config=config)
    for step in range(STEPS):
        x = torch.empty(4, 24)
        fill([x], 2 * step + engine.global_rank + 1)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder)
    weights = engine.module_state_dict()
    if engine.global_rank == 0:
        (folder / "config.json").write_text(json.dumps(config))
        torch.save({name: x.clone() for name, x in weights.items()}, folder / "expected.pt")
    engine.close()


def main() -> None:
    if len(sys.argv) == 2:  # a rank that torchrun has started
        for stage in ENGINES:
            train_engine(stage, Path(sys.argv[1]) / f"stage{stage}")
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        (top / "frames.json").write_text(json.dumps(frames()))
        (top / "names.json").write_text(json.dumps(names()))
        for name in OPTIMIZERS:
            (top / name).mkdir()
            for rank, result in enumerate(run_ranks(2, lambda link, name=name: train(name, link))):
                torch.save(result, top / name / f"rank{rank}.pt")
        subprocess.run([*launcher, made], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        target = Path(__file__).with_name(f"released_{onebit.__version__}.zip")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(path for path in top.rglob("*") if path.is_file()):
                archive.write(file, file.relative_to(top))


if __name__ == "__main__":
    main()
