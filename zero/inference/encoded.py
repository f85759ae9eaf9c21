"""Encoder-decoders of transformers: the decoder as a model that decodes over a cache, and what it reads of the encoder.

`EncoderDecoder` gives an encoder-decoder the call of a decoder, so that the engine has one kind of step. What the
encoder made of the inputs travels with the cache, as a `Source`. A running batch keeps it by row, in `SourceRows`. How
a request begins is in `requests.py`.

Shape legend: B rows, T new tokens of the decoder, E positions of the inputs, H heads, d features of a head; R rows of a
running batch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

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


class SourceRows:
    """What an encoder has made for each row of a running batch: keys and values of at most `positions` positions.

    The first `put` allocates the memory. Rows have inputs of unlike lengths: a pass reads as many positions as its
    longest row has, and a mask hides those that others do not have. They are zeros.
    """

    def __init__(self, rows: int, positions: int):
        self.positions = positions
        self._lengths = [0] * rows
        self._kept: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, [R, H, positions, d]
        self._outputs: Callable[[Tensor], Any] = tuple  # the class of the encoder's outputs
        self._transformers = importlib.import_module("transformers")

    def put(self, row: int, source: Source) -> None:
        """Keep for this row what the first pass over a source of one row has left there."""
        made = [(layer.keys, layer.values) for layer in source.cross.layers]
        if not self._kept:
            self._outputs, R = type(source.outputs), len(self._lengths)
            whole = [[x.new_zeros(R, x.shape[1], self.positions, x.shape[3]) for x in pair] for pair in made]
            self._kept = [(keys, values) for keys, values in whole]
        before, E = self._lengths[row], source.outputs[0].shape[1]
        self._lengths[row] = E
        for pair, new in zip(self._kept, made, strict=True):
            for kept_RHEd, x_1HEd in zip(pair, new, strict=True):
                kept_RHEd[row, :, :E] = x_1HEd[0]
                kept_RHEd[row, :, E:before].zero_()  # it may not be finite, and 0 × NaN is NaN, also if masked

    def swap(self, row: int, to: int) -> None:
        """Exchange what two rows have."""
        E = max(self._lengths[row], self._lengths[to])
        for kept_RHEd in (x for pair in self._kept for x in pair):
            before = kept_RHEd[row, :, :E].clone()
            kept_RHEd[row, :, :E] = kept_RHEd[to, :, :E]
            kept_RHEd[to, :, :E] = before
        self._lengths[row], self._lengths[to] = self._lengths[to], self._lengths[row]

    def at(self, rows: slice) -> Source:
        """The source of these rows, which have all been `put`. Its keys and values are views."""
        lengths, device = self._lengths[rows], self._kept[0][0].device
        # At least two: of a single one torch would compile a form apart.
        cross, E = self._transformers.DynamicCache(), max(2, *lengths)
        for keys_RHEd, values_RHEd in self._kept:
            layer = self._transformers.cache_utils.DynamicLayer()
            layer.lazy_initialization(keys_RHEd, values_RHEd)
            layer.keys, layer.values = keys_RHEd[rows, :, :E], values_RHEd[rows, :, :E]
            cross.layers.append(layer)
        lengths_B1 = torch.tensor(lengths, dtype=torch.int64, device=device)[:, None]
        mask_BE = (torch.arange(E, device=device) < lengths_B1).long()
        # With keys and values at hand, models ask the outputs for nothing but their shape, dtype and device.
        nothing_BE1 = self._kept[0][0].new_zeros(1, 1, 1).expand(len(lengths), E, 1)
        return Source(self._outputs(nothing_BE1), mask_BE, cross)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(x.nbytes for pair in self._kept for x in pair)


def place_by_row(model: nn.Module) -> None:
    """Make an encoder-decoder's modules of positions follow a cache whose rows have unlike numbers of tokens.

    `CacheView.get_seq_length` then is a tensor [B, 1], to which most models add as to a number. Three kinds of modules
    take the rows for another dimension. Changes nothing of passes in which all rows have the same number.
    """
    for module in model.get_decoder().modules():  # type: ignore[operator]
        if hasattr(module, "compute_bias") and "compute_bias" not in vars(module):  # T5's, by the distance of tokens
            cast(Any, module).compute_bias = partial(_bias_by_row, module.compute_bias)
        elif hasattr(module, "create_position_ids_from_input_ids") and "forward" not in vars(module):  # M2M-100's
            cast(Any, module).forward = partial(_sines_by_row, module, module.forward)
        elif isinstance(module, nn.Embedding) and _table_by_row not in module._forward_hooks.values():
            module.register_forward_hook(_table_by_row)  # BART's


def _bias_by_row(compute: Callable[..., Tensor], *lengths: int, **named: Any) -> Tensor:
    """The bias [B, H, 1, S] of a token of each row; the model's own has the rows in place of the tokens."""
    bias = compute(*lengths, **named)
    return bias.transpose(0, 2) if isinstance(named.get("past_seen_tokens"), Tensor) else bias


def _table_by_row(_: nn.Module, __: object, out: Tensor) -> Tensor:
    """A forward hook: [B, T, D] in place of [1, B, T, D]."""
    return out[0] if out.dim() == 4 else out


def _sines_by_row(
    module: Any,
    forward: Callable[..., Tensor],
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    past_key_values_length: Tensor | int = 0,
) -> Tensor:
    """As the module's own forward, which compares one number with the length of its table, and makes it longer."""
    if not isinstance(past_key_values_length, Tensor):
        return forward(input_ids, inputs_embeds, past_key_values_length)
    padding = module.padding_idx
    at_BT = module.create_position_ids_from_input_ids(input_ids, padding, past_key_values_length)
    return cast(Tensor, module.weights[at_BT])


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
