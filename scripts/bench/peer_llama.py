"""llama.cpp as a side of `bench.py inference`: a model of transformers in its file format, and its greedy tokens.

Needs `pip install llama-cpp-python gguf`, which compiles it for this processor. Llama and Qwen2; int8 is its Q8_0, int4
its Q4_0: blocks of 32 weights with a scale in float16 each.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMATS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2"}  # by transformers' model_type
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def why_not(model: Any) -> str:
    """What is missing for this model; empty if nothing is."""
    if any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf")):
        return "pip install llama-cpp-python gguf"
    known = getattr(model.config, "model_type", "") in ARCHITECTURES and model.config.tie_word_embeddings
    return "" if known else f"only {', '.join(ARCHITECTURES)} with tied embeddings are written for llama.cpp"


def write(model: Any, dtype: str, path: Path) -> None:
    """The model's file, without a tokenizer. Vectors stay in float32, as llama.cpp has them."""
    import gguf

    config, kind = model.config, gguf.GGMLQuantizationType[FORMATS[dtype]]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, x in model.state_dict().items():
        if name != "lm_head.weight":  # tied to the embedding
            values = _in_its_order(name, x, config).float().numpy()
            stays = values.ndim == 1
            packed = values if stays else gguf.quants.quantize(values, kind)
            writer.add_tensor(_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.F32 if stays else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _in_its_order(name: str, x: Tensor, config: Any) -> Tensor:
    """Of Llama, rotated pairs of features are neighbours there, and half a head apart in transformers."""
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return x
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)


class LlamaCpp:
    """A model that llama.cpp has loaded.

    Args:
        model: A model of transformers for which `why_not` is empty.
        dtype: Format of its matrices, of `FORMATS`.
        context: The most tokens of a row, answer included.
        rows: The most rows at once.
        threads: Threads of the processor.
    """

    def __init__(self, model: Any, dtype: str, context: int, rows: int, threads: int):
        import llama_cpp

        self._api, self._words = llama_cpp, model.config.vocab_size
        silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent  # the library keeps no reference
        with tempfile.TemporaryDirectory(prefix="onebit-llama-") as folder:
            write(model, dtype, Path(folder) / "model.gguf")
            self._model = llama_cpp.llama_model_load_from_file(
                str(Path(folder) / "model.gguf").encode(), llama_cpp.llama_model_default_params()
            )
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_seq_max, given.n_batch = rows * context, rows, rows * context
        given.n_threads = given.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, given)
        if not self._context:
            raise RuntimeError(f"llama.cpp has made no context of {rows} rows of {context} tokens")
        self._batch = llama_cpp.llama_batch_init(rows * context, 0, 1)

    def generate(self, prompt_BT: Tensor, new: int) -> Tensor:
        """The prompts with `new` greedy tokens each, int64 [B, T + new]."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        tokens_BT = prompt_BT
        logits_BV = self._logits(prompt_BT, 0)
        for k in range(new):
            chosen = logits_BV.argmax(1, keepdim=True)
            tokens_BT = torch.cat([tokens_BT, chosen], 1)
            if k < new - 1:
                logits_BV = self._logits(chosen, tokens_BT.shape[1] - 1)
        return tokens_BT

    def _logits(self, tokens_BT: Tensor, first: int) -> Tensor:
        """Of the token after the last of each row; `first` is the place of the first."""
        batch, (B, T) = self._batch, tokens_BT.shape
        batch.n_tokens = B * T
        for i, token in enumerate(tokens_BT.flatten().tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i % T, 1
            batch.seq_id[i][0], batch.logits[i] = i // T, i % T == T - 1
        if status := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode has returned {status}")
        rows = [self._api.llama_get_logits_ith(self._context, (b + 1) * T - 1) for b in range(B)]
        return torch.stack([torch.frombuffer(_floats(row, self._words), dtype=torch.float32).clone() for row in rows])


def _floats(at: Any, count: int) -> Any:
    return ctypes.cast(at, ctypes.POINTER(ctypes.c_float * count)).contents
