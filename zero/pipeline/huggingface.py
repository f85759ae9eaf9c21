"""Decoders of transformers as pipelines: a stage is the model itself, without the layers of other stages.

A later stage runs the model's own forward with the activations that it receives as `inputs_embeds`, so the model
computes masks and positions, and nothing is traced. Parameters keep the model's names. A family is a line in
`_FAMILIES`; `run.py` runs the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from ..config.sections import Pipelining
from ..sequence.huggingface import split_stage
from ..sequence.stages import Split, TargetPiece
from .layers import Loss, PipelineModule, Stage
from .run import Batch, chunks_of


class _Family(NamedTuple):
    """Names of a base model's modules: the table of words, others before the layers, the layers, the last norm."""

    table: str
    layers: str
    norm: str
    dropout: str = ""
    positions: str = ""


_FAMILIES: Mapping[str, _Family] = {
    "gpt2": _Family("wte", "h", "ln_f", dropout="drop", positions="wpe"),
    "gpt_neox": _Family("embed_in", "layers", "final_layer_norm", dropout="emb_dropout"),
    **dict.fromkeys(
        ("gemma", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"), _Family("embed_tokens", "layers", "norm")
    ),
}
FAMILIES = tuple(_FAMILIES)
"""transformers' model types that a pipeline can cut."""


def is_decoder(model: object) -> bool:
    """Whether the model is of one of these families, with its head."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return isinstance(model, nn.Module) and kind in _FAMILIES and hasattr(model, "lm_head")


def loss_of(model: object) -> Loss:
    """The model's own loss of logits and labels: the next token's cross-entropy."""
    own = cast(Any, model)

    def loss(logits: object, labels: object) -> Tensor:
        given: dict[str, object] = {"labels": labels}
        if isinstance(labels, TargetPiece):
            given = {"labels": None, "shift_labels": labels.target, "num_items_in_batch": labels.tokens}
        found: Tensor = own.loss_function(logits=logits, vocab_size=own.config.vocab_size, **given)
        return found

    return loss


def own_loss(output: object, labels: object) -> Tensor:
    """The loss that a decoder in one module has computed, as it was called with labels: also of split sequences."""
    return cast(Tensor, cast(Any, output).loss)


class DecoderPipeline(PipelineModule):
    """A decoder as a list of layers: the embeddings, each layer, and the last norm with the head.

    Args:
        model: A causal language model of one of `FAMILIES`, with the same values on all ranks, or on "meta".
        settings: The configuration's block "pipeline".

    Raises:
        ValueError: The settings need what a model that is built already does not have.
    """

    def __init__(self, model: nn.Module, settings: Pipelining):
        if chunks_of(settings) > 1:
            raise ValueError(
                f"a {type(model).__name__} is cut into one stage for each rank, and pipeline.schedule "
                f'{settings.schedule!r} has {chunks_of(settings)}; use "1f1b" or "gpipe"'
            )
        if settings.activation_checkpoint_interval:
            raise ValueError(
                "pipeline.activation_checkpoint_interval is for a PipelineModule; call "
                "model.gradient_checkpointing_enable() before initialize(), which recomputes each layer"
            )
        if settings.partition == "time":
            raise ValueError(
                'pipeline.partition "time" is for a PipelineModule; use "parameters", "uniform" or "type:REGEX"'
            )
        self._model = cast(Any, model)
        self._family = _FAMILIES[self._model.config.model_type]
        table, layers, norm, *others = (getattr(self._base, name) for name in self._family if name)
        first, last = nn.ModuleList([table, *others]), nn.ModuleList([norm, self._model.lm_head])
        super().__init__([first, *layers, last], loss_fn=loss_of(model))

    @property
    def _base(self) -> Any:
        return getattr(self._model, self._model.base_model_prefix)

    @property
    def loss_of_pieces(self) -> Loss:
        return self.loss_fn

    def outline(self) -> Any:
        return self._model

    def stages(self, parts: Sequence[range]) -> list[Stage]:
        """Cut the model down to this part, in place: the other layers are freed."""
        (part,) = parts
        base, family = self._base, self._family
        is_first, is_last = part.start == 0, part.stop == len(self.layers)
        layers = getattr(base, family.layers)
        mine = [layers[k - 1] for k in part if 0 < k < len(self.layers) - 1]
        for k in range(len(layers)):
            if k + 1 not in part:
                layers[k] = _Elsewhere()
        if not is_first:
            is_tied = self._model.lm_head.weight is getattr(base, family.table).weight
            if not (is_last and is_tied):
                setattr(base, family.table, None)
            if family.dropout:
                setattr(base, family.dropout, nn.Identity())
            if family.positions:
                setattr(base, family.positions, _NoPositions())
        if not is_last:
            setattr(base, family.norm, nn.Identity())
            self._model.lm_head = None
        self.layers = []
        return [DecoderStage(self._model, mine, is_first=is_first, is_last=is_last)]


class DecoderStage(Stage):
    """The part of a decoder that a rank keeps; a module with the model's own names."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], *, is_first: bool, is_last: bool):
        nn.Module.__init__(self)
        self._modules = model._modules  # one table of children for both, so that whoever replaces one finds it
        self._model, self._blocks = (model,), list(layers)  # a tuple and a list: not children a second time
        self._is_first, self._is_last = is_first, is_last
        self.split = None
        self._init_weights = cast(Any, model)._init_weights  # `materialize` computes tables of rotations by it

    def forward(self, *inputs: object) -> object:
        """Return the logits of the last stage, the activations of another, with positions if they came with some."""
        model: Any = self._model[0]
        x, *positions = inputs
        given = {"input_ids" if self._is_first else "inputs_embeds": x, "use_cache": False}
        if positions:
            given["position_ids"] = positions[0]
        if self._is_last:
            return model(**given).logits
        x = getattr(model, model.base_model_prefix)(**given).last_hidden_state
        return (x, *positions) if positions else x

    def split_sequences(self, split: Split) -> None:
        self.split = split
        split_stage(self._model[0], split.ranks, split.codec, lambda: split.pieces, split.sparsity)

    def cut(self, batches: list[Batch]) -> list[Batch]:
        """Return pieces, as other stages do, but positions whole: they tell what a piece's tokens see of others."""
        whole = [(_columns(inputs), target) for inputs, target in batches]
        pieces: Sequence[Batch] = whole if self.split is None else self.split.cut(whole, shifts=True)
        return [
            ((cast("tuple[Tensor, ...]", its)[0], *positions), target)
            for (its, target), ((_, *positions), _) in zip(pieces, whole, strict=True)
        ]

    def train(self, mode: bool = True) -> DecoderStage:
        self._model[0].train(mode)
        self.training = mode
        return self

    def blocks(self) -> list[nn.Module]:
        return self._blocks


def _columns(inputs: object) -> tuple[Tensor, ...]:
    """What goes through stages: input_ids and, if `pair_of` has found some, position_ids.

    Raises:
        ValueError: There is another input, and no name.
    """
    if isinstance(inputs, Mapping):
        return inputs["input_ids"], inputs["position_ids"]
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        raise ValueError(
            f"stages of a decoder take input_ids, got {len(inputs)} inputs; give a dict that names them, with labels"
        )
    return tuple(inputs) if isinstance(inputs, tuple | list) else (cast(Tensor, inputs),)


class _Elsewhere(nn.Module):
    """In place of a layer that another stage has."""

    def forward(self, x: Tensor, *args: object, **named: object) -> Tensor:
        return x


class _NoPositions(nn.Module):
    """In place of a table of positions: the first stage has added them."""

    def forward(self, positions: Tensor) -> Tensor:
        return positions.new_zeros(())


def pair_of(batch: object) -> Batch:
    """(inputs, target) of a micro-batch: as given, or of a dict as transformers' collators make it.

    Inputs of a dict are input_ids, or a dict of them and position_ids, which begin anew with each packed document.

    Raises:
        ValueError: The dict has no labels, other inputs, position_ids as well as a mask, or rows that are padded
            anywhere but at the end, where labels must be -100.
    """
    if not isinstance(batch, Mapping):
        return cast(Batch, batch)
    strange = sorted(batch.keys() - {"input_ids", "labels", "attention_mask", "position_ids"})
    if strange or not {"input_ids", "labels"} <= batch.keys():
        raise ValueError(
            f"train_batch() takes micro-batches with input_ids and labels, got {', '.join(batch)}; drop the others"
        )
    mask, labels, positions = batch.get("attention_mask"), batch["labels"], batch.get("position_ids")
    if mask is not None and positions is not None:
        raise ValueError(
            "a micro-batch has position_ids and an attention_mask; drop the mask if positions begin anew with each "
            "packed document, or else the positions"
        )
    if mask is not None and bool(((mask.diff(dim=1) > 0).any()) | (labels[mask == 0] != -100).any()):
        raise ValueError(
            "attention_mask is not sent through stages: pad rows at the end (padding_side='right') with "
            "labels of -100, which needs no mask, or pack the rows"
        )
    ids = batch["input_ids"]
    return (ids if positions is None else {"input_ids": ids, "position_ids": positions}), labels
