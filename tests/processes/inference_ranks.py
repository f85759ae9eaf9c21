"""What the ranks of test_inference_processes.py do: train sharded or in stages, save, serve split over Gloo."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from train.model import GPT, ModelSize, build_model
from train.model_layers import as_gpt, build_layers

from onebit import zero
from onebit.zero import grid as grids

SIZE = ModelSize(layers=2, width=32, heads=4, context=32)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": None,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def windows() -> Tensor:
    return torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(1))


def train_and_serve(folder: str) -> dict[str, object]:
    """Stage 3 over both ranks, then both serve what was saved."""
    engine = zero.initialize(model=build_model(SIZE, 0), config=CONFIG | {"zero_optimization": {"stage": 3}})[0]
    for _ in range(2):
        engine.backward(engine(windows()).logsumexp(2).mean())
        engine.step()
    engine.save_checkpoint(folder)
    try:
        zero.init_inference(engine)
        refused = ""
    except ValueError as error:
        refused = str(error)
    with torch.device("meta"):
        empty = GPT(SIZE)
    served = zero.init_inference(empty, checkpoint=folder, mp_size=2, transport=engine.grid.world)
    answer = served.generate(windows()[:, :9], max_new_tokens=12)
    logits = served(windows())
    assert isinstance(answer, Tensor) and isinstance(logits, Tensor)
    found = {"tokens": answer.tolist(), "logits": logits.tolist(), "refused": refused}
    engine.close()
    return found


def serve_packed(file: str) -> dict[str, object]:
    """Both ranks serve a file of `export_compressed`."""
    with torch.device("meta"):
        empty = GPT(SIZE)
    served = zero.init_inference(empty, checkpoint=file, mp_size=2)
    answer = served.generate(windows()[:, :9], max_new_tokens=12)
    logits = served(windows())
    assert isinstance(answer, Tensor) and isinstance(logits, Tensor)
    served.transport.close()
    return {"tokens": answer.tolist(), "logits": logits.tolist(), "held": served.held_bytes}


def train_in_stages(folder: str) -> None:
    """Two stages of a pipeline."""
    grid = grids.start(pipe=2, shard=1, timeout_s=60)
    config = CONFIG | {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    engine = zero.initialize(model=build_layers(SIZE, 0), config=config, grid=grid)[0]
    engine.train_batch(iter([(windows()[:, :-1], windows()[:, 1:])] * 2))
    engine.save_checkpoint(folder)
    engine.close()
    grid.close()


def of_stages(folder: Path) -> GPT:
    model = build_model(SIZE, 0)
    model.load_state_dict(as_gpt(zero.read_checkpoint_weights(folder)))
    return model
