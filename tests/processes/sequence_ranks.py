"""What the ranks of test_sequence_processes.py do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onebit
from onebit import zero
from onebit.zero import grid as grids

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
LLAMA, MISTRAL = transformers.LlamaForCausalLM, transformers.MistralForCausalLM
"""Imported with this module, in the process that forks: in each rank it takes 1 to 2 s."""
STEPS = 2
KINDS = {"stage 1": 1, "stage 2": 2, "windows": 3}


def decoder(*, in_windows: bool = False) -> nn.Module:
    """A Llama, or a Mistral of whose tokens each sees five."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 97, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 64}
    if in_windows:
        return MISTRAL(transformers.MistralConfig(**sizes, sliding_window=5)).train()
    return LLAMA(transformers.LlamaConfig(**sizes)).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 97, (2, 21), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def trains_long_sequences(folder: str) -> None:
    """AdamW at stages 1 to 3, also in windows, of which some ranks see nothing of others, and OnebitAdam by itself.

    Weights after some steps, in files.
    """
    grid, found = grids.start(backend="gloo", timeout_s=30.0), {}
    for kind, stage in KINDS.items():
        model = zero.sequence_parallel(decoder(in_windows=kind == "windows"), grid.world)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}},
        }
        engine = zero.initialize(model=model, config=config | {"zero_optimization": {"stage": stage}}, grid=grid)[0]
        for step in range(STEPS):
            engine.backward(engine(**batch(step)).loss)
            engine.step()
        found[kind] = engine.module_state_dict()
    model = zero.sequence_parallel(decoder(), grid.world)
    optimizer = onebit.OnebitAdam(
        model.parameters(), lr=1e-3, transport=grid.world, compression="always", freeze_step=1
    )
    for step in range(STEPS):
        model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found["one bit"] = model.state_dict()
    torch.save(found, f"{folder}/{grid.world.rank}.pt")
    grid.close()


def alone(kind: str) -> dict[str, torch.Tensor]:
    model = decoder(in_windows=kind == "windows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    for step in range(STEPS):
        model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
