"""Small decoders of transformers in sizes that divide badly, their batches, and one process that trains them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onebit import zero
from onebit.comm import run_ranks
from onebit.zero.config.optimizers import build_optimizer

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))  # ranks have it not

from study.model_cases import MODELS  # noqa: E402

STEPS, ROWS, CONTEXT = 2, 4, 8
# torch's grouped product wants rows of whole 16 bytes: 20 floats are, and the 10 of one of two ranks are not.
_NARROW = {"moe_intermediate_size": 20}
# The study's model, and what is changed. A vocabulary of 97 is divided by no number of ranks, 96 by two.
DECODERS: Mapping[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {"mlp_bias": True}),
    "llama_tied": ("Llama", {"attention_bias": False, "vocab_size": 96, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {}),
    "gemma": ("Gemma", {"vocab_size": 96}),
    "phi3": ("Phi-3", {}),
    "olmo2": ("OLMo-2", {}),
    "gpt_neox": ("GPT-NeoX", {"vocab_size": 96}),
    "mixtral": ("Mixtral", {}),
    "olmoe": ("OLMoE", {}),
    "qwen2_moe": ("Qwen2-MoE", _NARROW),
    "deepseek_v2": ("DeepSeek-V2", _NARROW),
    "gpt2": ("GPT-2", {}),
}


def decoder(name: str, **changes: object) -> nn.Module:
    """The model in three layers, which two stages divide badly; the same values in every process."""
    of_study, own = DECODERS[name]
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 3}
    model = MODELS[of_study]
    return replace(model, options=dict(model.options) | layers | own | changes).build()


def config_of(optimizer: str, **blocks: object) -> dict[str, object]:
    """A configuration whose one-bit optimizer stays in its warm-up."""
    # eps: without it Adam makes whole steps of gradients that are only noise, as those of keys' biases.
    params = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3} | (
        {"freeze_step": 100} if optimizer == "OneBitAdam" else {}
    )
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": None,
        "communication_data_type": "fp32",
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": 0},
        **blocks,
    }


def batches(count: int = STEPS, rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    """As a collator for language models makes them: the labels are the inputs. Three have all 96 words."""
    for step in range(count):
        words = torch.randperm(96, generator=torch.Generator().manual_seed(step // 3))
        ids = words.view(3, -1, CONTEXT)[step % 3, :rows]
        yield {"input_ids": ids, "labels": ids}


def alone(name: str, optimizer: str, micro_batches: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process: a step's micro-batches are one batch."""
    return run_ranks(1, lambda transport: _train(name, optimizer, micro_batches, transport))[0]


def _train(name: str, optimizer: str, micro_batches: int, transport: object) -> tuple[list[float], dict[str, Tensor]]:
    model, config = decoder(name), zero.read_config(config_of(optimizer), world_size=1)
    assert config.optimizer is not None
    options = config.optimizer_options() | {"transport": transport, "model": model}
    steps, losses = build_optimizer(config.optimizer, list(model.parameters()), **options), []
    read = batches(STEPS * micro_batches)
    for _ in range(STEPS):
        micros = [next(read) for _ in range(micro_batches)]
        loss = model(**{key: torch.cat([micro[key] for micro in micros]) for key in micros[0]}).loss
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(float(loss.detach()))
    return losses, copy.deepcopy(model.state_dict())
