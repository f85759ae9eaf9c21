"""Folders of transformers with a tokenizer, made here: a Llama and a T5 of random weights whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

END = 256


def tokenizer_of_bytes() -> Any:
    """Its end token has the number END."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save(folder: Path) -> Path:
    """Write the Llama, with a chat template, and return the folder."""
    import transformers

    fast = tokenizer_of_bytes()
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def save_t5(folder: Path) -> Path:
    """Write the T5, without a chat template, and return the folder."""
    import transformers

    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=258, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=257,
        pad_token_id=257, eos_token_id=END,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer_of_bytes().save_pretrained(folder)
    return folder
