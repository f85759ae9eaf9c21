"""Ring attention in models of transformers, through their registry of attention functions.

A hook before the model's forward cuts the whole batch into this rank's piece; its attention modules call the function
that `model.config._attn_implementation` names, which is registered here.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...comm import Codec
from ..sparse_attention.config import SparsityConfig
from ..sparse_attention.layouts import build_layout
from .pieces import Pieces
from .ranks import SequenceRanks, check_same
from .ring import attention_by_sight
from .sight import Sight

NAME = "onebit_ring"
_HOLDER = "onebit_sequence"
_UNSUPPORTED = ("s_aux", "output_attentions", "position_bias")
_SHIFTED, _UNSHIFTED = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM",)
"""Ends of names of classes whose loss is the mean cross-entropy of the next tokens, or of the same ones."""
_PICKING = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_IGNORED = -100
_MIXING = (nn.Conv1d, nn.RNNBase)
"""Layers that mix tokens without attention: state-space models have such a convolution."""
_CUT = ("input_ids", "inputs_embeds", "token_type_ids")
_PLAIN = (bool, int, float, str, type(None))
_under_way: ContextVar[_Holder] = ContextVar("the model in whose forward pass this thread is")


def check_splits(model: nn.Module, rank: int) -> None:
    """Check that sequences of this model can be split.

    Args:
        model: The model.
        rank: This rank, for the message.

    Raises:
        ValueError: It is no model of transformers, is split already, or some layers have another kind of attention.
    """
    transformers = sys.modules.get("transformers")  # whoever has a model of transformers has imported it
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(
            f"rank {rank}: {type(model).__name__} is no model of transformers, and has no method split_sequences("
            "ranks, codec); write one that calls ring_attention in its attention (docs/long-sequences.md)"
        )
    if any(_HOLDER in module.__dict__ for module in model.modules()):
        raise ValueError(
            f"rank {rank}: the sequences of this {type(model).__name__} are split already; call sequence_parallel "
            "once, or leave it to initialize() with sequence_parallel_size"
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention"} or getattr(model.config, "is_encoder_decoder", False):
        what = ", ".join(sorted(kinds)) or "an encoder and a decoder"
        raise ValueError(f"rank {rank}: {type(model).__name__} has {what}; its sequences cannot be split over ranks")
    if type(model).__name__.endswith(_PICKING):
        raise ValueError(
            f"rank {rank}: {type(model).__name__} picks one token of a sequence for its outputs, and every rank would "
            "pick one of its own piece; its sequences cannot be split over ranks"
        )
    if mixing := find_mixing(model):
        raise ValueError(
            f"rank {rank}: {mixing} of {type(model).__name__} mixes tokens as attention does, and would see those of "
            "its own piece alone; the model's sequences cannot be split over ranks"
        )


def find_mixing(model: nn.Module) -> str | None:
    """Return the name of a layer that mixes tokens without attention, or None."""
    return next((name for name, each in model.named_modules() if isinstance(each, _MIXING)), None)


def split_sequences(
    model: Any, ranks: SequenceRanks, codec: Codec | None, sparsity: SparsityConfig | None = None
) -> None:
    """Split the sequences of a model that `check_splits` has passed, in place. All ranks.

    Args:
        model: A model of transformers.
        ranks: The ranks of the sequence.
        codec: Format in which keys and values travel; None: as they are.
        sparsity: Layout of all its attention. Default None: what the model has.
    """
    holder = _hold(model, ranks, codec, sparsity)
    model.register_forward_pre_hook(holder.cut, with_kwargs=True)
    model.register_forward_hook(holder.finish)


def split_stage(
    model: Any,
    ranks: SequenceRanks,
    codec: Codec | None,
    pieces: Callable[[], Pieces],
    sparsity: SparsityConfig | None = None,
) -> None:
    """Split the sequences of a decoder that is one stage of a pipeline, in place. Its inputs are pieces already.

    Args:
        model: A causal decoder of transformers, without the layers of other stages.
        ranks: The ranks of the sequence.
        codec: Format in which keys and values travel; None: as they are.
        pieces: Tells how the sequences under way are cut.
        sparsity: Layout of all its attention. Default None: what the model has.
    """
    holder = _hold(model, ranks, codec, sparsity)
    # A stage before the last calls the base model alone.
    model.base_model.register_forward_pre_hook(partial(holder.place, pieces), with_kwargs=True)


def shifted_labels(
    labels: Tensor, pieces: Pieces, rank: int, count: Tensor | int | None = None
) -> tuple[Tensor, Tensor | float]:
    """Return a rank's piece of the next tokens' labels, and by how many the sum of its losses is divided.

    Args:
        labels: [b, length]; those of -100 do not count.
        pieces: How the sequences are cut.
        rank: The rank.
        count: Labels that count in the whole batch. Default None: those that do in this one.
    """
    labels = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    count = (labels != _IGNORED).sum() if count is None else count
    return pieces.cut(labels, rank), count / pieces.world_size


def _hold(model: Any, ranks: SequenceRanks, codec: Codec | None, sparsity: SparsityConfig | None) -> _Holder:
    """Let the attention modules of a model call the ring."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        first = int(model.config.pad_token_id) + 1  # RoBERTa and its relatives
    else:
        first = 0
    holder = _Holder(model, ranks, first, codec, sparsity)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.__dict__[_HOLDER] = holder
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _window_of_mask)
    model.set_attn_implementation(NAME)
    return holder


class _Pass:
    """A forward pass: how its sequences are cut, and the documents of the whole batch, if it is packed."""

    def __init__(self, pieces: Pieces, documents: Tensor | None = None):
        self.pieces, self.documents = pieces, documents
        self.sights: dict[tuple[bool, int | None, int], Sight] = {}


@dataclass(frozen=True)
class _Mask:
    """In place of a mask. Layers that are computed again have the pass in it, after others have begun.

    Attributes:
        of: The pass.
        window: Tokens see this many, with themselves, to each side that they see. None: all.
        is_causal: Of the window.
    """

    of: _Pass
    window: int | None = None
    is_causal: bool = True


class _Holder:
    """What the attention modules of a model share.

    Attributes:
        now: The last forward pass.
        calls: Calls of the attention function in that pass.
        codec: Format in which keys and values travel.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: SequenceRanks,
        first_position: int,
        codec: Codec | None,
        sparsity: SparsityConfig | None,
    ):
        self._sparsity = sparsity
        self.ranks, self.now, self.calls = ranks, _Pass(ranks.pieces(0)), 0
        self._first_position, self.codec = first_position, codec
        self._sees_all = not all(_is_causal(module) for module in model.modules() if hasattr(module, "is_causal"))
        self._labels: tuple[Tensor, Tensor | float] | None = None
        self._names = list(inspect.signature(model.forward).parameters)

    def __deepcopy__(self, memo: dict[int, object]) -> _Holder:
        """Of a copied model: its own pieces, and the same transport."""
        return copy.copy(self)

    def cut(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """The hook before forward: this rank's piece of its arguments."""
        rank = self.ranks.rank
        given = {name: x for name, x in (dict(zip(self._names, args, strict=False)) | named).items() if x is not None}
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if tokens is None:
            raise ValueError(f"rank {rank}: expected input_ids or inputs_embeds of the whole sequence")
        b, length = tokens.shape[:2]
        tensors = [given[name] for name in sorted(given) if isinstance(given[name], Tensor)]
        check_same(self.ranks, tensors, f"{tuple(tokens.shape)}, {sorted(given)}")
        self.now, self.calls = _Pass(self.ranks.pieces(length)), 0
        _under_way.set(self)
        self._check(tokens, given)
        found: dict[str, Any] = {
            name: self.pieces.cut(x, rank) if name in _CUT else x
            for name, x in given.items()
            if name not in ("labels", "num_items_in_batch")
        }
        size = self.pieces.size(rank)
        places = given["position_ids"] if "position_ids" in given else self._positions(tokens)
        found["position_ids"] = self.pieces.cut(places, rank).expand(b, size)
        self.now = _Pass(self.pieces, self._packed(given))
        # transformers would take the jump between a piece's chunks for the border of two packed documents.
        found["attention_mask"] = torch.ones(b, size, dtype=torch.int64, device=tokens.device)
        if "use_cache" in self._names:
            found["use_cache"] = False
        self._labels = self._cut_labels(model, given) if "labels" in given else None
        return (), found

    @property
    def pieces(self) -> Pieces:
        """Of the sequences of the last forward pass."""
        return self.now.pieces

    def place(
        self, pieces: Callable[[], Pieces], base: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The hook before a stage's forward, whose arguments are of a piece: its positions, of those of the whole."""
        places = named.get("position_ids")
        documents = None if places is None else self._packed(named)
        if (now := pieces()) != self.pieces or documents is not None or self.now.documents is not None:
            self.now = _Pass(now, documents)
        _under_way.set(self)
        x = next(named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None)
        its = now.positions(self.ranks.rank, x.device) if places is None else now.cut(places, self.ranks.rank)
        ones = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)  # as in `cut`
        return args, named | {"position_ids": its.expand(x.shape[:2]), "attention_mask": ones}

    def sight(self, of: _Pass, *, is_causal: bool, window: int | None, heads: int) -> Sight:
        """What tokens see in a layer of a pass, with this many query heads."""
        key = is_causal, window, heads
        if key not in of.sights:
            sparsity, length = self._sparsity, of.pieces.length
            of.sights[key] = Sight(
                of.pieces,
                is_causal=is_causal,
                window=window,
                documents=of.documents,
                layout=None if sparsity is None else build_layout(sparsity.of_model(is_causal), heads, length),
                rank=self.ranks.rank,
            )
        return of.sights[key]

    def _positions(self, tokens: Tensor) -> Tensor:
        """The model's own positions of the whole sequence."""
        if self._first_position == 0 or tokens.dim() == 3:
            return self._first_position + _count(tokens.shape[1], tokens).unsqueeze(0)
        is_token = (tokens != self._first_position - 1).to(torch.int64)
        return is_token.cumsum(1) * is_token + self._first_position - 1

    def _packed(self, given: Mapping[str, Any]) -> Tensor | None:
        """The documents of the batch, with padding as one more; None: padding comes last, where it hides itself."""
        mask, places = given.get("attention_mask"), given.get("position_ids")
        if mask is not None:
            shown = mask.to(torch.bool)
            if bool(shown.all()) or (not self._sees_all and bool(shown[:, 0].all())):
                return None
            borders = shown[:, 1:] != shown[:, :-1]
        elif places is not None and not self._sees_all:  # the rule of transformers: without a mask, positions tell
            borders = places[:, 1:] != places[:, :-1] + 1
        else:
            return None
        return F.pad(borders.to(torch.int64).cumsum(1), (1, 0)) if bool(borders.any()) else None

    def _cut_labels(self, model: nn.Module, given: Mapping[str, Any]) -> tuple[Tensor, Tensor | float]:
        """The piece of the labels, shifted over its borders, and by how many the sum of its losses is divided."""
        labels, kind = given["labels"], type(model).__name__
        has_own_loss = getattr(model, "_loss_function", None) is not None  # set in place of transformers'
        has_router_loss = getattr(model.config, "output_router_logits", False)
        if not kind.endswith(_SHIFTED + _UNSHIFTED) or has_own_loss or has_router_loss:
            raise ValueError(
                f"rank {self.ranks.rank}: it is not known how the loss of {kind} follows from pieces; leave labels "
                "out, and compute it from the outputs"
            )
        count = given.get("num_items_in_batch")
        if kind.endswith(_SHIFTED):
            return shifted_labels(labels, self.pieces, self.ranks.rank, count)
        count = (labels != _IGNORED).sum() if count is None else count
        return self.pieces.cut(labels, self.ranks.rank), count / self.pieces.world_size

    def _check(self, tokens: Tensor, given: Mapping[str, Any]) -> None:
        rank, length = self.ranks.rank, tokens.shape[1]
        self.pieces.check_length(rank)
        for name, x in given.items():
            if name in ("attention_mask", "labels", "position_ids", "num_items_in_batch") or isinstance(x, _PLAIN):
                continue
            if name not in _CUT:
                raise ValueError(
                    f"rank {rank}: {name} is not known here, so it is not clear how to cut it; leave it out"
                )
        if given.get("use_cache"):
            raise ValueError(f"rank {rank}: use_cache=True: keys of other ranks are not kept; leave it out")
        mask, places = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"rank {rank}: expected attention_mask {list(tokens.shape[:2])} (sequences, tokens), got "
                f"{list(mask.shape)}"
            )
        if mask is not None and bool((_runs_of_ones(mask) > 1).any()):
            raise ValueError(
                f"rank {rank}: attention_mask has padding between tokens; pad before or after those of a row"
            )
        if places is not None and (places.dim() != 2 or places.shape[1] != length):
            raise ValueError(f"rank {rank}: expected position_ids [sequences, {length}], got {list(places.shape)}")

    def finish(self, model: nn.Module, args: object, output: Any) -> Any:
        """The hook after forward: attention must have been ours; the loss comes first in the output, as usual."""
        if self.calls == 0:
            raise ValueError(
                f"rank {self.ranks.rank}: {type(model).__name__} has called no attention function of transformers' "
                "registry, so tokens have seen only their own piece; its sequences cannot be split over ranks"
            )
        if self._labels is None:
            return output
        (labels, count), self._labels = self._labels, None
        logits = (output[0] if isinstance(output, tuple) else output.logits).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="sum") / count
        return (loss, *output) if isinstance(output, tuple) else type(output)(**{"loss": loss, **output})


def _count(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, dtype=torch.int64, device=like.device)


def _runs_of_ones(mask: Tensor) -> Tensor:
    """How often tokens begin in each row."""
    shown = mask.to(torch.bool)
    return shown[:, 0].to(torch.int64) + (shown[:, 1:] & ~shown[:, :-1]).sum(1)


def _is_causal(module: nn.Module) -> bool:
    return bool(module.is_causal) and bool(getattr(getattr(module, "config", None), "is_causal", True))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The registry's function: returns [B, S, H, D] and no weights."""
    holder: _Holder | None = module.__dict__.get(_HOLDER)
    if holder is None:
        raise ValueError(f"{type(module).__name__} is not of a model that was given to sequence_parallel()")
    asked = [name for name in _UNSUPPORTED if options.get(name) is not None and options[name] is not False]
    if asked:
        raise ValueError(
            f"rank {holder.ranks.rank}: ring attention has no {asked[0]}; set it to none in the model's configuration"
        )
    holder.calls += 1
    said = options.get("is_causal")
    is_causal = _is_causal(module) if said is None else bool(said)
    mask = attention_mask if isinstance(attention_mask, _Mask) else _Mask(holder.now)
    window = mask.window
    if window is not None and mask.is_causal != is_causal:
        raise ValueError(
            f"rank {holder.ranks.rank}: {type(module).__name__} is {'' if is_causal else 'not '}causal, and its "
            "mask's window is of the other kind: it is not clear what its tokens see"
        )
    its = options.get("sliding_window")
    length = mask.of.pieces.length
    if window is None and its is not None and not (isinstance(its, int) and its >= length):
        raise ValueError(
            f"rank {holder.ranks.rank}: {type(module).__name__} asks for a window of {its} tokens, which its mask "
            f"does not have, for a sequence of {length}: it is not clear what its tokens see"
        )
    out = attention_by_sight(
        query,
        key,
        value,
        holder.ranks,
        holder.sight(mask.of, is_causal=is_causal, window=window, heads=query.shape[1]),
        scale=scaling,
        softcap=cast("float | None", options.get("softcap")),
        dropout=dropout,
        codec=holder.codec,
    )
    return out.transpose(1, 2).contiguous(), None


def _window_of_mask(
    *args: object, mask_function: Callable[..., Any] | None = None, local_size: object = None, **options: object
) -> _Mask:
    """The registry's mask: at most a window and documents, as the ring knows what else a token sees.

    Raises:
        ValueError: The model hides more than the future and what is outside of a window.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    now = _under_way.get().now
    if mask_function in (None, causal_mask_function, bidirectional_mask_function):
        return _Mask(now)
    if isinstance(local_size, int) and local_size >= now.pieces.length and not options.get("use_vmap"):
        return _Mask(now)  # to whichever side it is, it hides nothing
    if isinstance(local_size, int) and not options.get("use_vmap"):
        for is_causal in (True, False):
            size = local_size if is_causal else local_size + 1
            if _is_window(mask_function, size, is_causal=is_causal):
                return _Mask(now, size, is_causal)
    raise ValueError(
        "this model hides other tokens than the future and those outside of a window (chunks, tokens seen both ways), "
        "which ring attention cannot express"
    )


def _is_window(mask_function: Callable[..., Any], size: int, *, is_causal: bool) -> bool:
    """Whether a token sees a window of this size: looked up at both edges, from several places."""
    place = torch.arange(size, 2 * size + 8, dtype=torch.int64, device=torch.device("cpu"))
    none = torch.zeros((), dtype=torch.int64, device=place.device)
    last = 0 if is_causal else size - 1
    try:
        seen = [bool(mask_function(none, none, place, place - k).all()) for k in (-last, 0, size - 1)]
        hidden = [bool(mask_function(none, none, place, place - k).any()) for k in (-last - 1, size)]
    except IndexError:  # it looks up tokens of the batch
        return False
    return all(seen) and not any(hidden)
