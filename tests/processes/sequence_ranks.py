"""The decoder of the ranks that split sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
LLAMA, MISTRAL = transformers.LlamaForCausalLM, transformers.MistralForCausalLM
"""Imported with this module, in the process that forks: in each rank it takes 1 to 2 s."""


def decoder(*, in_windows: bool = False) -> nn.Module:
    """A Llama, or a Mistral of whose tokens each sees five."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 97, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 64}
    if in_windows:
        return MISTRAL(transformers.MistralConfig(**sizes, sliding_window=5)).train()
    return LLAMA(transformers.LlamaConfig(**sizes)).train()
