"""Encoder-decoders of transformers: the decoder as a model that decodes over a cache, and what it reads of the encoder.

`EncoderDecoder` gives an encoder-decoder the call of a decoder, so that the engine has one kind of step. What the
encoder made of the inputs travels with the cache, as a `Source`. How a request begins is in `requests.py`.

Shape legend: B rows, T new tokens of the decoder.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .cache import CacheView, Source
from .requests import Prompts, rows_of


def source_of(named: Mapping[str, Any]) -> Source:
    """The source of an encoder-decoder's arguments "encoder_outputs" and "attention_mask"."""
    cross = importlib.import_module("transformers").DynamicCache()
    return Source(named["encoder_outputs"], named.get("attention_mask"), cross)


class EncoderDecoder(nn.Module):
    """An encoder-decoder, called like a decoder. The cache brings what the encoder made of the inputs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config
        self._taken = inspect.signature(model.forward).parameters
        self._caches = importlib.import_module("transformers.cache_utils")

    def forward(
        self, tokens_BT: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: CacheView
    ) -> object:
        source = past_key_values.source
        assert source is not None
        pair = self._caches.EncoderDecoderCache(self._caches.DynamicCache(), source.cross)
        pair.self_attention_cache = past_key_values
        named = {
            "decoder_input_ids": tokens_BT,
            "decoder_attention_mask": attention_mask,
            "encoder_outputs": source.outputs,
            "attention_mask": source.mask_BE,
            "cache" if "cache" in self._taken else "past_key_values": pair,
            "use_cache": True,
        }
        if "decoder_position_ids" in self._taken:
            named["decoder_position_ids"] = position_ids
        return self.model(**named)


def decoder_of(model: nn.Module) -> nn.Module:
    """What decodes: the model itself, or an encoder-decoder of transformers called like a decoder."""
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    can_generate = getattr(model, "can_generate", lambda: False)()
    taken = inspect.signature(model.forward).parameters
    has_names = {"encoder_outputs", "decoder_input_ids", "decoder_attention_mask"} <= taken.keys()
    return EncoderDecoder(model) if has_encoder and can_generate and has_names else model


def inputs_of(inputs: Prompts, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The inputs of an encoder as a tensor, with their mask. Sequences are padded at their ends.

    Raises:
        ValueError: There are no inputs, one is empty, or the mask does not fit them.
        TypeError: An input of a list is no sequence of integers.
    """
    if isinstance(inputs, Tensor):
        if not inputs.numel() or inputs.dim() < 2:
            raise ValueError(f"expected inputs [B, ...] of at least one row and token, got shape {tuple(inputs.shape)}")
        if mask is not None and (mask.dim() != 2 or len(mask) != len(inputs) or not bool(mask.any(1).all())):
            raise ValueError("expected attention_mask [B, positions of the inputs], with one that is seen in every row")
        return inputs, mask
    if mask is not None:
        raise ValueError("attention_mask goes with a tensor of inputs; a list needs none")
    rows = rows_of(inputs, None)
    if not rows or min(map(len, rows)) == 0:
        raise ValueError("expected inputs of at least one token each")
    seen = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), seen
