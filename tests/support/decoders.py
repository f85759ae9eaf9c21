"""Small decoders of transformers in sizes that divide badly, their batches, and one process that trains them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from onebit import zero
from onebit.comm import run_ranks
from onebit.zero.config.optimizers import build_optimizer

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")

STEPS, ROWS, CONTEXT = 2, 4, 8
_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SHAPE = {
    **_IDS,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 16,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "vocab_size": 97}
# torch's grouped product wants rows of whole 16 bytes: 20 floats are, and the 10 of one of two ranks are not.
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LATENT = {
    **{"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 97},
}
_GPT2 = _IDS | {"n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 16, "vocab_size": 97}
# Class and configuration. A vocabulary of 97 is divided by no number of ranks, 96 by two.
DECODERS: Mapping[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", _GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("Llama", _GROUPED | {"vocab_size": 96, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _GROUPED | {"head_dim": 6}),
    "mistral": ("Mistral", _GROUPED | {"sliding_window": 3}),
    "gemma": ("Gemma", _GROUPED | {"head_dim": 6, "vocab_size": 96, "pad_token_id": 0}),
    "phi3": ("Phi3", _GROUPED),
    "olmo2": ("Olmo2", _GROUPED),
    "gpt_neox": ("GPTNeoX", _SHAPE | {"vocab_size": 96, "rotary_pct": 0.5}),
    "mixtral": ("Mixtral", _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", _GROUPED | {"num_experts": 3, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 12}),
    "deepseek_v2": ("DeepseekV2", _SHAPE | _EXPERTS | _LATENT),
    "gpt2": ("GPT2", _GPT2),
}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def decoder(name: str, **changes: object) -> nn.Module:
    """The model, with the same values in every process."""
    family, options = DECODERS[name]
    config = getattr(transformers, f"{family}Config")(**(options | (_NO_DROPOUT if family == "GPT2" else {}) | changes))
    kind = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    torch.manual_seed(5)
    model: nn.Module = kind(config)
    with torch.no_grad():
        for p in model.parameters():  # biases begin at 0 and norms at 1, which hides errors
            p.add_(0.05 * torch.randn_like(p))
    return model


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
