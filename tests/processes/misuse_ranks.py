"""What the ranks of test_engine_misuse.py do: scripts that use an engine as it is not meant to be used."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import onebit
from onebit import zero
from onebit.zero import grid as grids

BATCH, STEPS = 4, 6


class Net(nn.Module):
    """All parameters are in blocks, or some are the root's."""

    def __init__(self, *, has_root: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 16) if has_root else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(16 if has_root or k else 8, 16) for k in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def config_of(name: str, stage: int, gas: int = 1, **blocks: object) -> dict:
    params = {"lr": 0.01} | ({"freeze_step": 4} if name == "OneBitAdam" else {})
    onebit_block = {"compression": "always", "block": 64} if name == "OneBitAdam" else {}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": name, "params": params},
        "zero_optimization": {"stage": stage},
        "onebit": onebit_block,
        **blocks,
    }


def empty_batches(cases: Sequence[tuple[dict, int, bool, str]]) -> list[str]:
    """Of each case (configuration, shards, whether the root has parameters, how): "" if it is a zero gradient's run.

    Rank 1 has no batch now and then. how: the loss that it has then, or that it calls no backward at all.
    """
    by_shards, expected, found = {}, {}, []
    for config, shards, has_root, how in cases:
        if shards not in by_shards:
            by_shards[shards] = grids.start(shard=shards, timeout_s=15)
        given = config, has_root, by_shards[shards]
        if (run := json.dumps([config, shards, has_root])) not in expected:
            expected[run] = _trained(*given, "zero").module_state_dict()
        engine = _trained(*given, how)
        weights = engine.module_state_dict()
        unlike = [name for name, x in expected[run].items() if not torch.equal(x, weights[name])]
        found.append(", ".join(unlike) if engine.global_steps == STEPS else f"{engine.global_steps} steps")
    for grid in by_shards.values():
        grid.close()
    return found


def _trained(config: dict, has_root: bool, grid: grids.Grid, kind: str) -> zero.Engine:
    engine = zero.initialize(model=Net(has_root=has_root), config=config, grid=grid)[0]
    rank = grid.world.rank
    generator = torch.Generator().manual_seed(rank)
    for k in range(STEPS * engine.gradient_accumulation_steps()):
        x = torch.randn(BATCH, 8, generator=generator)
        is_empty = rank == 1 and k in (0, 3, 7, 8)
        if not is_empty or kind == "zero":
            engine.backward(engine(x).float().square().mean() * (0.0 if is_empty else 1.0))
        elif kind == "constant":
            engine.backward(torch.zeros(()))
        elif kind == "leaf":
            engine.backward(torch.zeros((), requires_grad=True))
        elif kind == "unused":
            engine(x)
            engine.backward(torch.zeros(()))
        engine.step()
    return engine


def frozen_after_backward(config: dict) -> list[float]:
    """The parameters at the end of a run with a layer that has no gradient in step 2."""
    grid = grids.start(shard=1, timeout_s=15)
    engine = zero.initialize(model=Net(), config=config, grid=grid)[0]
    generator = torch.Generator().manual_seed(grid.world.rank)
    for step in range(4):
        engine.backward(engine(torch.randn(BATCH, 8, generator=generator)).square().mean())
        engine.module.first.requires_grad_(step != 2)
        engine.step()
        engine.module.requires_grad_(True)
    grid.close()
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()]).tolist()


def unlike_models(config: dict, shards: int) -> list[str]:
    """What a rank is told if the last rank has a layer less than the others; then it has as many."""
    grid, found = grids.start(shard=shards, timeout_s=15), []
    for lacks in (grid.world.rank == grid.world.world_size - 1, False):
        model = Net()
        model.layers = model.layers[:2] if lacks else model.layers
        try:
            engine = zero.initialize(model=model, config=config, grid=grid)[0]
            engine.backward(engine(torch.randn(BATCH, 8)).square().mean())
            engine.step()
            found.append(f"{engine.global_steps} step")
        except ValueError as error:
            found.append(str(error))
    grid.close()
    return found


def alone(call: str, folder: str, config: dict, shards: int) -> list[str]:
    """Rank 0 makes a call that is every rank's, while the others go on training: what each of them is told."""
    grid = grids.start(shard=shards, timeout_s=3)
    engine = zero.initialize(model=Net(), config=config, grid=grid)[0]
    calls = {
        "engine.save_checkpoint()": lambda: engine.save_checkpoint(folder),
        "engine.load_checkpoint()": lambda: engine.load_checkpoint(folder),
        "engine.save_16bit_model()": lambda: engine.save_16bit_model(folder),
        "engine.module_state_dict()": engine.module_state_dict,
        "engine.synchronise()": engine.synchronise,
        "engine.eval()": engine.eval,
        "check_replicas()": lambda: engine.optimizer.check_replicas(),
        "sync_buffers()": lambda: onebit.sync_buffers(engine.module, grid.world),
        "export_weights()": lambda: zero.export_weights(engine.module, Path(folder) / "a.safetensors", grid.world),
    }
    began = time.monotonic()
    try:
        for k in range(3):
            engine.backward(engine(torch.randn(BATCH, 8)).square().mean())
            engine.step()
            if k == 0 and grid.world.rank == 0:
                calls[call]()
    except onebit.comm.PeerError as error:
        return [str(error), f"{time.monotonic() - began:.1f}"]
    return ["", ""]


def half_saved(folder: str, config: dict, shards: int, tensor: int = 1) -> list[str]:
    """Ways in which rank 0 writes weights: "" if the file is whole, or why it is refused."""
    grid = grids.start(shard=shards, tensor=tensor, timeout_s=15)
    from torch.distributed.tensor.parallel import ColwiseParallel

    plan = {"layers.*": ColwiseParallel()} if tensor > 1 else None
    if plan:
        from torch.distributed.tensor import Replicate

        plan = {"layers.*": ColwiseParallel(output_layouts=Replicate())}
    net = Net()
    engine = zero.initialize(model=net, config=config, grid=grid, tensor_plan=plan)[0]
    engine.backward(engine(torch.randn(BATCH, 8)).square().mean())
    engine.step()
    expected, found, path = engine.module_state_dict(), [], f"{folder}/{grid.world.rank}.pt"
    ways = {
        "engine.module": lambda: torch.save(engine.module.state_dict(), path),
        "the model": lambda: torch.save(net.state_dict(), path),
        "on the CPU": lambda: torch.save({name: x.cpu() for name, x in net.state_dict().items()}, path),
        "a layer": lambda: torch.save({f"layers.0.{n}": x for n, x in net.layers[0].state_dict().items()}, path),
        "a prefix": lambda: torch.save({n[2:]: x for n, x in net.state_dict(prefix="a.").items()}, path),
        "the module": lambda: torch.save({"first.weight": None, "module": net.layers[0]}, path),
    }
    for way in ways.values():
        if grid.world.rank != 0:
            break
        try:
            way()
        except Exception as error:
            found.append(str(error))
            continue
        state = torch.load(path, weights_only=False)
        is_whole = all(type(x) is Tensor and torch.equal(x, expected[name]) for name, x in state.items())
        found.append("" if is_whole else "half")
    sharded = torch.distributed.checkpoint.state_dict.get_model_state_dict(net)  # torch's own, of shards
    engine.save_checkpoint(folder)
    found.append("" if len(sharded) == len(expected) else "torch's own is refused")
    # As PEFT asks a layer of `modules_to_save` for names, whatever save_pretrained(state_dict=whole) is given.
    names = eval("list(layer.state_dict())", {"__name__": "peft.utils.other", "layer": net.layers[0]})
    found.append("" if names == ["weight", "bias"] else "PEFT's own is refused")
    grid.close()
    return found


def loaded_past_the_engine(config: dict, shards: int) -> tuple[str, bool, bool]:
    """The error of loading whole weights into the model, whether it left them alone, and whether the engine loads."""
    grid, net = grids.start(shard=shards, timeout_s=15), Net()
    engine = zero.initialize(model=net, config=config, grid=grid)[0]
    before = engine.module_state_dict()
    ones, error = {name: torch.ones_like(x) for name, x in before.items()}, ""
    try:
        net.load_state_dict(ones)
    except RuntimeError as refusal:
        error = str(refusal)
    is_as_before = all(torch.equal(x, before[name]) for name, x in engine.module_state_dict().items())
    engine.load_module_state_dict(ones)
    is_loaded = all(torch.equal(x, ones[name]) for name, x in engine.module_state_dict().items())
    grid.close()
    return error, is_as_before, is_loaded
