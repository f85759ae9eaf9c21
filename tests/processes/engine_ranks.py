"""What the ranks of test_zero_engine.py do: many configurations in one start of processes."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from onebit import zero
from onebit.comm import init
from onebit.comm.messages import gather_bytes
from onebit.zero import grid as grids

BATCH, STEPS = 4, 12
FILLS = {"train_micro_batch_size_per_gpu": 2, "lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": 10}


class Net(nn.Module):
    """Two layers, a norm, an embedding of which some rows are never used, and tied weights nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


class Attending(nn.Module):
    """With attention that a configuration may replace: four heads, over a token said 32 times."""

    heads, is_causal = 4, False

    def __init__(self) -> None:
        super().__init__()
        self.core_attention = nn.functional.scaled_dot_product_attention
        self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BHSd = self.embed(tokens).view(-1, 4, 1, 4).repeat(1, 1, 32, 1)
        return self.out(self.core_attention(x_BHSd, x_BHSd, x_BHSd).mean(2).flatten(1))


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(15, (512,), generator=generator)
    return TensorDataset(tokens, tokens % 5)


def config_of(name: str, params: Mapping[str, object] | None = None, **blocks: object) -> dict:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "steps_per_print": None,
        "optimizer": {"type": name, "params": {"lr": 0.01, "weight_decay": 0.01, **(params or {})}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
        **blocks,
    }


def bits(engine: zero.Engine) -> bytes:
    """All weights, whole; masters if the model has rounded ones."""
    engine.synchronise()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in engine.sharding.held.parameters()]
    return b"".join(p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in whole)


def train(engine: zero.Engine, steps: int) -> list[float]:
    """The mean loss of each step, over all ranks."""
    losses = []
    assert engine.loader is not None
    batches = zero.data.forever(engine.loader)
    for _ in range(steps):
        total = 0.0
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = next(batches)
            loss = nn.functional.cross_entropy(engine(tokens).float(), targets)
            engine.backward(loss)
            engine.step()
            total += float(loss) / engine.gradient_accumulation_steps()
        mean = torch.tensor(total, dtype=torch.float64)
        engine.grid.world.all_reduce(mean).wait()
        losses.append(float(mean) / engine.grid.world.world_size)
    return losses


def resumes(folder: str, cases: Sequence[tuple[dict, int]]) -> list[dict]:
    """Train each case, with a checkpoint half way, and another engine from there to the same end.

    That a checkpoint changes nothing of the run that writes it: `contract_ranks.on_four`, of every form.
    """
    init("gloo", levels=1)
    facts, by_shards = [], {}
    for k, (config, shards) in enumerate(cases):
        if shards not in by_shards:
            by_shards[shards] = grids.start(shard=shards)
        grid = by_shards[shards]

        def start(config: dict = config, grid: grids.Grid = grid) -> zero.Engine:
            return zero.initialize(model=net(), config=copy.deepcopy(config), training_data=dataset(), grid=grid)[0]

        whole = start()
        losses = train(whole, STEPS // 2)
        place = Path(folder) / str(k)
        whole.save_checkpoint(place, None, {"note": grid.world.rank}, in_background=k % 2 == 1)
        losses += train(whole, STEPS - STEPS // 2)
        whole.wait_for_checkpoint()
        second = start()
        found, client = second.load_checkpoint(place)
        again = train(second, STEPS - STEPS // 2)
        expected = bits(whole)
        rows = gather_bytes(grid.world, hashlib.sha256(expected).digest())
        facts.append(
            {
                "form": whole.form.name,
                "losses": losses,
                "again": again,
                "same bits": bits(second) == expected,
                "same everywhere": len(set(rows)) == 1,
                "client": client == {"note": grid.world.rank},
                "found": found is not None,
                "counts": [second.global_steps, second.micro_steps, second.skipped_steps],
            }
        )
    for grid in by_shards.values():
        grid.close()
    return facts


def trains_json(files: Sequence[str], folder: str) -> dict[str, str]:
    """Each configuration file, a few steps: what went wrong, by file. Monitors write under `folder`."""
    os.chdir(folder)
    transport = init("gloo", levels=1)
    sharded, whole, problems = grids.start(shard=transport.world_size), grids.start(shard=1), {}
    split = grids.start(shard=transport.world_size, sequence=transport.world_size)
    for file in files:
        text = Path(file).read_text()
        config = json.loads(text)
        if "train_micro_batch_size_per_gpu" in config:
            config.pop("train_batch_size", None)  # of a world of another size
        fills = {name: value for name, value in FILLS.items() if f'"{name}": "auto"' in text}
        adamw = None if '"optimizer"' in text else partial(torch.optim.AdamW, lr=1e-3)
        model = Attending() if "sparse_attention" in config else net()
        is_split = config.get("sequence_parallel_size", 1) != 1
        if is_split:  # its tokens do not attend to each other, so each rank of a sequence may compute all of them
            model.split_sequences = lambda ranks, codec: None
        try:
            engine, *_ = zero.initialize(
                model=model,
                config=config,
                optimizer=adamw,
                training_data=dataset(),
                grid=split if is_split else sharded if config.get("zero_optimization", {}).get("stage") else whole,
                **fills,
            )
            losses = train(engine, 2)
            if not all(0 < loss < 10 for loss in losses):
                problems[file] = f"losses {losses}"
        except Exception as error:
            problems[file] = f"{type(error).__name__}: {error}"
    for grid in (sharded, whole, split):
        grid.close()
    return problems


def trains_with_a_collective_between(cases: Sequence[tuple[dict, int]]) -> list[dict]:
    """A few steps of each case, in which replicas leave out layers of their own; the loss is averaged before step()."""
    init("gloo", timeout_s=20.0, levels=1)
    found, by_shards = [], {}
    for config, shards in cases:
        if shards not in by_shards:
            by_shards[shards] = grids.start(shard=shards)
        grid = by_shards[shards]
        torch.manual_seed(5)
        layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        engine = zero.initialize(model=_Dropping(layers), config=copy.deepcopy(config), grid=grid)[0]
        draw = torch.Generator().manual_seed(grid.world.rank // shards)
        for _ in range(7):
            x, dropped = torch.randn(4, 16, generator=draw), int(torch.randint(-2, 6, (), generator=draw))
            loss = (engine(x, dropped) - 1.0).square().mean()
            engine.backward(loss)
            dist.all_reduce(loss.detach().clone())
            engine.step()
        rows = gather_bytes(grid.world, hashlib.sha256(bits(engine)).digest())
        found.append({"same everywhere": len(set(rows)) == 1, "steps": engine.global_steps})
    for grid in by_shards.values():
        grid.close()
    return found


class _Dropping(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, dropped: int) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = x if k == dropped else x + torch.tanh(layer(x))
        return x
