"""Architectures of transformers as small models, in sizes that divide badly, with a batch for each.

Models are built from a configuration: nothing is downloaded. `study/models.py` trains `MODELS`, and
`study/inference_models.py` serves `SERVED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

ROWS = 8  # of a batch
WORDS = 97  # a vocabulary that no number of ranks divides
CONTEXT, SIDE, CLASSES = 8, 8, 5
Batch = dict[str, Tensor]


def causal() -> Batch:
    ids = _ids()
    return {"input_ids": ids, "labels": ids}


def masked() -> Batch:
    """A word in four is to be guessed."""
    ids = _ids()
    hidden = torch.arange(CONTEXT) % 4 == 1
    return {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)}


def replaced() -> Batch:
    ids = _ids()
    return {"input_ids": ids, "labels": ids % 2}


def translated() -> Batch:
    ids = _ids()
    return {"input_ids": ids, "labels": ids.flip(1)[:, :5].contiguous()}


def images() -> Batch:
    return {"pixel_values": _noise(3, SIDE, SIDE), "labels": torch.arange(ROWS) % CLASSES}


def captioned() -> Batch:
    return {"input_ids": _ids(), "pixel_values": _noise(3, SIDE, SIDE), "return_loss": torch.tensor(True)}


def spectra() -> Batch:
    return {"input_features": _noise(10, 2 * CONTEXT), "labels": _ids()[:, :5]}


def sounds() -> Batch:
    return {"input_values": _noise(96), "labels": _ids()[:, :3]}


def _ids() -> Tensor:
    return torch.randint(4, WORDS, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True, eq=False)
class Model:
    """A configuration of transformers and a batch.

    kind: transformers' class without "Config", and also without "Text" that without its task. batch: makes the same
    rows in every process.
    """

    kind: str
    task: str
    batch: Callable[[], Batch]
    options: Mapping[str, object]

    def build(self, noise: float = 0.05) -> nn.Module:
        """The model, with the same values in every process."""
        config = getattr(transformers, f"{self.kind}Config")(**self.options)
        torch.manual_seed(5)
        model: nn.Module = getattr(transformers, self.kind.removesuffix("Text") + self.task)(config)
        with torch.no_grad():
            for p in model.parameters():  # biases begin at 0 and norms at 1, which hides errors
                p.add_(noise * torch.randn_like(p))
        return model


_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LAYERS = {
    "vocab_size": WORDS,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}
_THREE, _SIX = _LAYERS | {"num_attention_heads": 3}, _LAYERS | {"num_attention_heads": 6}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DECODER = _SIX | _SPECIAL
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_ENCODER = _SIX | _STILL | {"pad_token_id": 0}
_EXPERTS = _GROUPED | {"num_experts": 3, "num_experts_per_tok": 2}
# torch's grouped product wants rows of whole 16 bytes: 24 numbers are, and the 12 of one of two ranks are not.
_NARROW = _EXPERTS | {"moe_intermediate_size": 24}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_BOTH = _ENDS | {
    "vocab_size": WORDS,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "dropout": 0.0,
}
_TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
_IMAGES = {"image_size": SIDE, "patch_size": 4, "num_labels": CLASSES}

MODELS: Mapping[str, Model] = {
    "Llama": Model("Llama", "ForCausalLM", causal, _GROUPED | {"attention_bias": True}),
    "Mistral": Model("Mistral", "ForCausalLM", causal, _GROUPED | {"sliding_window": 3}),
    "Qwen2": Model("Qwen2", "ForCausalLM", causal, _GROUPED | {"tie_word_embeddings": True}),
    "Qwen3": Model("Qwen3", "ForCausalLM", causal, _GROUPED | {"head_dim": 6}),
    "Gemma": Model("Gemma", "ForCausalLM", causal, _GROUPED | {"head_dim": 6, "pad_token_id": 0}),
    "Phi-3": Model("Phi3", "ForCausalLM", causal, _GROUPED),
    "OLMo-2": Model("Olmo2", "ForCausalLM", causal, _GROUPED),
    "GPT-2": Model(
        "GPT2",
        "LMHeadModel",
        causal,
        _SPECIAL
        | {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 16, "vocab_size": WORDS}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "GPT-NeoX": Model("GPTNeoX", "ForCausalLM", causal, _DECODER | {"rotary_pct": 0.5}),
    "OPT": Model(
        "OPT",
        "ForCausalLM",
        causal,
        _SIX | {"ffn_dim": 40, "word_embed_proj_dim": 24, "dropout": 0.0, "pad_token_id": 1},
    ),
    "BLOOM": Model(
        "Bloom", "ForCausalLM", causal, _SPECIAL | {"vocab_size": WORDS, "hidden_size": 24, "n_layer": 2, "n_head": 3}
    ),
    "Falcon": Model("Falcon", "ForCausalLM", causal, _THREE | _SPECIAL),
    "Mamba": Model(
        "Mamba", "ForCausalLM", causal, _SPECIAL | {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2}
    ),
    "Mixtral": Model("Mixtral", "ForCausalLM", causal, _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "OLMoE": Model("Olmoe", "ForCausalLM", causal, _EXPERTS),
    "Qwen2-MoE": Model("Qwen2Moe", "ForCausalLM", causal, _NARROW | {"shared_expert_intermediate_size": 12}),
    "Qwen3-MoE": Model("Qwen3Moe", "ForCausalLM", causal, _NARROW | {"head_dim": 6}),
    "DeepSeek-V2": Model(
        "DeepseekV2",
        "ForCausalLM",
        causal,
        _DECODER
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 3, "n_shared_experts": 1}
        | {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
        | {"first_k_dense_replace": 1},
    ),
    "BERT": Model("Bert", "ForMaskedLM", masked, _ENCODER),
    "RoBERTa": Model("Roberta", "ForMaskedLM", masked, _ENCODER),
    "DistilBERT": Model(
        "DistilBert",
        "ForMaskedLM",
        masked,
        {"vocab_size": WORDS, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 6, "max_position_embeddings": 16}
        | {"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "ALBERT": Model("Albert", "ForMaskedLM", masked, _ENCODER | {"embedding_size": 10, "classifier_dropout_prob": 0.0}),
    "ELECTRA": Model("Electra", "ForPreTraining", replaced, _ENCODER | {"embedding_size": 10}),
    "DeBERTa-v2": Model(
        "DebertaV2", "ForMaskedLM", masked, _ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "ModernBERT": Model("ModernBert", "ForMaskedLM", masked, _SIX | _ENDS | {"sep_token_id": 2, "cls_token_id": 1}),
    "T5": Model(
        "T5",
        "ForConditionalGeneration",
        translated,
        {"vocab_size": WORDS, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6}
        | {"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
    "BART": Model("Bart", "ForConditionalGeneration", translated, _BOTH | {"max_position_embeddings": 16}),
    "Whisper": Model(
        "Whisper",
        "ForConditionalGeneration",
        spectra,
        _BOTH
        | {"num_mel_bins": 10, "max_source_positions": CONTEXT, "max_target_positions": 16}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "CLIP": Model(
        "CLIP",
        "Model",
        captioned,
        {
            "projection_dim": 10,
            # A key's bias has no gradient but rounding errors, which logits 14 times as large, the default, scale up.
            "logit_scale_init_value": 1.0,
            "text_config": _SIX | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 10},
            "vision_config": _TOWER | {"image_size": SIDE, "patch_size": 4, "projection_dim": 10},
        },
    ),
    "ViT": Model("ViT", "ForImageClassification", images, _TOWER | _STILL | _IMAGES),
    "Swin": Model(
        "Swin",
        "ForImageClassification",
        images,
        _STILL
        | {"image_size": SIDE, "patch_size": 2, "num_labels": CLASSES, "window_size": 2, "drop_path_rate": 0.0}
        | {"embed_dim": 12, "depths": [1, 1], "num_heads": [3, 3]},
    ),
    "DINOv2": Model("Dinov2", "ForImageClassification", images, _TOWER | _STILL | _IMAGES),
    "Wav2Vec2": Model(
        "Wav2Vec2",
        "ForCTC",
        sounds,
        _SIX
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "ctc_loss_reduction": "mean", "layerdrop": 0.0}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0}
        | {"final_dropout": 0.0, "apply_spec_augment": False, "conv_dim": (12, 12), "conv_kernel": (4, 4)}
        | {"conv_stride": (2, 4), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 3},
    ),
}


def _decoder(kind: str, options: Mapping[str, object]) -> Model:
    return Model(kind, "ForCausalLM", causal, options)


def _translator(kind: str, options: Mapping[str, object]) -> Model:
    return Model(kind, "ForConditionalGeneration", translated, options)


_MIXED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_OF_GPT2 = MODELS["GPT-2"].options
_ODD_HEADS = {"vocab_size": WORDS, "n_layers": 2, "max_seq_len": 16}
_OF_BART = _BOTH | {"max_position_embeddings": 16}
_OF_T5 = MODELS["T5"].options
_ROUTED = {"n_routed_experts": 3, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}

SERVED: Mapping[str, Model] = {
    **{name: model for name, model in MODELS.items() if model.batch in (causal, translated, spectra)},
    "Llama, wide heads": _decoder("Llama", _GROUPED | {"head_dim": 10}),
    "GPT-2, odd heads": Model("GPT2", "LMHeadModel", causal, _OF_GPT2 | {"n_embd": 42}),  # of 7
    "GPT-2, five heads": Model("GPT2", "LMHeadModel", causal, _OF_GPT2 | {"n_embd": 25, "n_head": 5}),
    "GPT": Model("OpenAIGPT", "LMHeadModel", causal, _OF_GPT2),
    "GPT-BigCode": _decoder("GPTBigCode", _OF_GPT2),
    "GPT-J": _decoder("GPTJ", _OF_GPT2 | {"rotary_dim": 2}),
    "GPT-Neo": _decoder(
        "GPTNeo",
        _SPECIAL
        | {"vocab_size": WORDS, "hidden_size": 42, "num_layers": 2, "num_heads": 6, "max_position_embeddings": 16}
        | {"window_size": 3, "attention_types": [[["global", "local"], 1]], "embed_dropout": 0.0},
    ),
    "gpt-oss": _decoder(
        "GptOss", _GROUPED | _MIXED | {"head_dim": 6, "num_local_experts": 3, "num_experts_per_tok": 2}
    ),
    "CodeGen": _decoder("CodeGen", _OF_GPT2 | {"rotary_dim": 2, "n_head": 4}),
    "CTRL": Model("CTRL", "LMHeadModel", causal, _OF_GPT2 | {"dff": 40}),
    "MPT": _decoder("Mpt", _SPECIAL | _ODD_HEADS | {"d_model": 35, "n_heads": 5}),
    "XGLM": _decoder(
        "XGLM",
        _SPECIAL
        | {"vocab_size": WORDS, "d_model": 42, "ffn_dim": 40, "num_layers": 2, "attention_heads": 6}
        | {"max_position_embeddings": 16, "pad_token_id": 1},
    ),
    "BioGPT": _decoder("BioGpt", _SIX | _SPECIAL | {"pad_token_id": 1}),
    "OLMo": _decoder("Olmo", _GROUPED),
    "OLMo-3": _decoder("Olmo3", _GROUPED | _MIXED),
    "Gemma-2": _decoder("Gemma2", _GROUPED | _MIXED | {"head_dim": 6, "pad_token_id": 0}),
    "Gemma-3": _decoder("Gemma3Text", _GROUPED | _MIXED | {"head_dim": 6, "pad_token_id": 0}),
    "VaultGemma": _decoder("VaultGemma", _GROUPED | _MIXED | {"head_dim": 6, "pad_token_id": 0}),
    "Ministral": _decoder("Ministral", _GROUPED | _MIXED | {"head_dim": 6}),
    "Phi": _decoder("Phi", _GROUPED | {"partial_rotary_factor": 0.5}),
    "PhiMoE": _decoder("Phimoe", _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "Starcoder2": _decoder("Starcoder2", _GROUPED | {"sliding_window": 3}),
    "StableLM": _decoder("StableLm", _GROUPED | {"partial_rotary_factor": 0.5}),
    "Cohere": _decoder("Cohere", _GROUPED),
    "Cohere-2": _decoder("Cohere2", _GROUPED | _MIXED),
    "Granite": _decoder("Granite", _GROUPED),
    "Granite-MoE": _decoder("GraniteMoe", _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "Persimmon": _decoder("Persimmon", _DECODER),
    "Nemotron": _decoder("Nemotron", _GROUPED),
    "NanoChat": _decoder("NanoChat", _GROUPED),
    "BitNet": _decoder("BitNet", _GROUPED),
    "GLM": _decoder("Glm", _GROUPED | {"head_dim": 4, "pad_token_id": 0}),
    "GLM-4": _decoder("Glm4", _GROUPED | {"head_dim": 4, "pad_token_id": 0}),
    "GLM-4-MoE": _decoder("Glm4Moe", _NARROW | _ROUTED | {"head_dim": 4}),
    "SmolLM-3": _decoder("SmolLM3", _GROUPED | {"pad_token_id": 0, "use_sliding_window": False}),
    "ERNIE-4.5": _decoder("Ernie4_5", _GROUPED),
    "ERNIE-4.5-MoE": _decoder(
        "Ernie4_5_Moe",
        _GROUPED
        | {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1}
        | {"moe_num_shared_experts": 1},
    ),
    "HunYuan": _decoder("HunYuanDenseV1", _GROUPED | {"head_dim": 4}),
    "Seed-OSS": _decoder("SeedOss", _GROUPED | {"head_dim": 6}),
    "EXAONE-4": _decoder("Exaone4", _GROUPED | _MIXED),
    "Arcee": _decoder("Arcee", _GROUPED),
    "Helium": _decoder("Helium", _GROUPED | {"head_dim": 4}),
    "Apertus": _decoder("Apertus", _GROUPED),
    "DiffLlama": _decoder("DiffLlama", _GROUPED),
    "JetMoE": _decoder(
        "JetMoe",
        _SPECIAL
        | _LAYERS
        | {"num_key_value_heads": 3, "kv_channels": 4, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "DeepSeek-V3": _decoder("DeepseekV3", MODELS["DeepSeek-V2"].options | _ROUTED | {"num_key_value_heads": 6}),
    "BERT, decoder": Model("Bert", "LMHeadModel", causal, _DECODER | {"is_decoder": True, "pad_token_id": 0}),
    "RoBERTa, decoder": _decoder("Roberta", _DECODER | {"is_decoder": True, "pad_token_id": 1}),
    "ModernBERT, decoder": _decoder("ModernBertDecoder", _SIX | _ENDS),
    "Llama-4": _decoder(
        "Llama4Text",
        _GROUPED
        | {"head_dim": 4, "num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size_mlp": 40}
        | {"attention_chunk_size": 4},
    ),
    "MiniMax": _decoder("MiniMax", _GROUPED | {"num_local_experts": 2}),
    "Qwen3-Next": _decoder("Qwen3Next", _NARROW | _LINEAR | {"head_dim": 6}),
    "LFM-2": _decoder("Lfm2", _GROUPED | {"layer_types": ["conv", "full_attention"]}),
    "Jamba": _decoder("Jamba", _GROUPED | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "RWKV": _decoder("Rwkv", {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2, "context_length": 16}),
    "XLNet": Model(
        "XLNet",
        "LMHeadModel",
        causal,
        _SPECIAL | {"vocab_size": WORDS, "d_model": 24, "d_inner": 40, "n_layer": 2, "n_head": 6},
    ),
    "mBART": _translator("MBart", _OF_BART),
    "M2M-100": _translator("M2M100", _OF_BART),
    "Pegasus": _translator("Pegasus", _OF_BART),
    "Blenderbot": _translator("Blenderbot", _OF_BART),
    "PLBART": _translator("PLBart", _OF_BART),
    "Marian": Model("Marian", "MTModel", translated, _OF_BART),
    "LED": _translator(
        "LED",
        _BOTH | {"max_encoder_position_embeddings": 16, "max_decoder_position_embeddings": 16, "attention_window": 4},
    ),
    "ProphetNet": _translator(
        "ProphetNet",
        _ENDS
        | {"vocab_size": WORDS, "hidden_size": 24, "max_position_embeddings": 16, "decoder_ffn_dim": 40}
        | {"encoder_ffn_dim": 40, "num_encoder_layers": 2, "num_encoder_attention_heads": 6}
        | {"num_decoder_layers": 2, "num_decoder_attention_heads": 6},
    ),
    "T5, gated": _translator("T5", _OF_T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "T5, odd heads": _translator("T5", _OF_T5 | {"d_kv": 5}),
    "mT5": _translator("MT5", _OF_T5),
    "UMT5": _translator("UMT5", _OF_T5),
    "LongT5": _translator("LongT5", _OF_T5 | {"local_radius": 3}),
    "Switch": _translator(
        "SwitchTransformers",
        _OF_T5
        | {"num_decoder_layers": 2, "num_experts": 2}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
}
