"""A folder of transformers with a tokenizer, made here: a Llama of random weights whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path

import torch


def save(folder: Path) -> Path:
    """Write the model, with a chat template, and return the folder."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
