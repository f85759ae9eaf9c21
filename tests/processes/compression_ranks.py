"""What the ranks of test_compression_engine.py do: compressed models in the engine's forms, whole and in two halves."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from compression_cases import GPT_TECHNIQUES, config, gpt, windows
from torch import Tensor, nn

from onebit import zero
from onebit.comm import init
from onebit.comm.messages import gather_bytes
from onebit.zero import grid as grids
from onebit.zero.compression import import_compressed, init_compression, redundancy_clean

STEPS, HALF = 8, 3
COMPRESSION = config(**GPT_TECHNIQUES)


def ds_config(name: str, params: dict, stage: int, **blocks: object) -> dict:
    ours = {"onebit": {"compression": "always", "block": 64}} if name not in ("AdamW", "Lamb") else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": {"type": name, "params": {"lr": 5e-3, **params}},
        "zero_optimization": {"stage": stage},
        **ours, **COMPRESSION, **blocks,
    }  # fmt: skip


def train(engine: zero.Engine, steps: range) -> None:
    """All ranks read the same: they train what one alone trains."""
    for k in steps:
        x = windows(k)
        logits = engine(x[:, :-1])
        assert isinstance(logits, Tensor)
        engine.backward(nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten()))
        engine.step()


def whole(engine: zero.DeepSpeedEngine) -> tuple[str, Tensor, nn.Module]:
    """(hash of all that the model holds, logits before cleaning, the cleaned model), on a plain one."""
    state = engine.module_state_dict()
    digest = hashlib.sha256()
    for name, x in state.items():
        digest.update(name.encode() + x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    plain = init_compression(gpt(seed=3), COMPRESSION).to(engine.config.dtype).float()
    plain.load_state_dict(state)
    with torch.no_grad():
        before = plain.eval()(windows(99)[:, :-1])
    return digest.hexdigest(), before, redundancy_clean(plain)


def trains(folder: str, cases: Sequence[tuple[dict, int]]) -> list[dict]:
    """Each case to the end, and again in two halves with a checkpoint in mid-schedule between them."""
    transport = init("gloo", levels=1)
    facts = []
    for k, (given, shards) in enumerate(cases):
        grid = grids.start(shard=min(shards, transport.world_size))

        def start(given: dict = given, grid: grids.Grid = grid, seed: int = 0) -> zero.DeepSpeedEngine:
            model = init_compression(gpt(seed), COMPRESSION)
            return zero.initialize(model=model, config=copy.deepcopy(given), grid=grid)[0]

        engine = start()
        train(engine, range(STEPS))
        refusal = ""
        if any(hasattr(p, "placements") for p in engine.module.parameters()):
            try:
                redundancy_clean(engine.module)
            except ValueError as error:
                refusal = str(error)
        digest, before, cleaned = whole(engine)
        first = start()
        train(first, range(HALF))
        first.save_checkpoint(Path(folder) / str(k))
        second = start(seed=1)
        second.load_checkpoint(Path(folder) / str(k))
        train(second, range(HALF, STEPS))
        with torch.no_grad():
            after = cleaned(windows(99)[:, :-1])
        zero.export_compressed(cleaned, Path(folder) / f"{k}.safetensors", grid.world)
        with torch.no_grad():
            back = import_compressed(gpt(seed=4), Path(folder) / f"{k}.safetensors").eval()(windows(99)[:, :-1])
        scheduler = second.compression_scheduler
        assert scheduler is not None
        facts.append(
            {
                "form": engine.form.name,
                "same bits": whole(second)[0] == digest,
                "same everywhere": len(set(gather_bytes(grid.world, bytes.fromhex(digest)))) == 1,
                "refusal": refusal,
                "step": scheduler.training_steps,
                "on": scheduler.describe(),
                "cleaning moves": float((after - before).abs().max()),
                "file moves": float((back - after).abs().max()),
                "loss": float(nn.functional.cross_entropy(after.flatten(0, 1), windows(99)[:, 1:].flatten())),
            }
        )
        grid.close()
    return facts
