"""The tensor plan that a model brings along: styles by name, as transformers ships them in `_tp_plan`.

`styles_of` reads it, and `training_plan` translates it for `tensor.parallelize`. `zero/inference/split.py` reads the
same plans with styles for serving. Pure: nothing is sent or changed.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from .tensor import resolve, undivided

log = logging.getLogger(__name__)

KNOWN: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "bert": {
        "layer.*.attention.self.query": "colwise",
        "layer.*.attention.self.key": "colwise",
        "layer.*.attention.self.value": "colwise",
        "layer.*.attention.output.dense": "rowwise",
        "layer.*.intermediate.dense": "colwise",
        "layer.*.output.dense": "rowwise",
    },
}
"""Plans for models that have none themselves, by transformers' model_type."""

_STYLES: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    # A norm of the heads that a rank has: any dimension but the last may stand for the divided one.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=0, use_local_output=True),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
}
_BETWEEN_PARTS = ("colwise", "rowwise", "replicated_with_grad_allreduce")
"""Styles whose inputs or outputs are divided. A layer with another one may as well stay whole."""
_WHOLE = ("replicate", "replicated")


def own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan that a model has, or that is `KNOWN` for it; empty if there is none."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    return getattr(model, "_tp_plan", None) or KNOWN.get(kind) or {}


def training_plan(model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """The model's own plan for `tensor.parallelize`: a style for each layer by its full name.

    A layer between whole activations stays whole if the ranks do not divide it, as a table of 50257 words: padded, it
    would have another shape in checkpoints and exports.

    Raises:
        ValueError: The model has no plan, the plan has a style that is unknown here, or the ranks do not divide the
            attention heads; or as `tensor.resolve`.
    """
    modules, plan = dict(model.named_modules()), own_plan(model)
    names = [*modules, *(name for name, _ in model.named_parameters())]
    found: dict[str, ParallelStyle] = {}
    whole: list[str] = []
    for pattern, style in plan.items():
        for name in (name for name in names if matches(name, pattern)):
            if style in _WHOLE:
                continue
            if name not in modules or style not in _STYLES:
                raise ValueError(
                    f"the tensor plan of {type(model).__name__} gives {patterns([name])} the style {style!r}, which "
                    "training does not have: pass initialize(tensor_plan={pattern: style}) with styles of "
                    "torch.distributed.tensor.parallel, or leave the layers whole"
                )
            if style == "colwise" and "attention" in type(modules[name.rpartition(".")[0]]).__name__.lower():
                check_heads(model, ranks, "tensor")
            if style not in _BETWEEN_PARTS and undivided(modules[name], _STYLES[style], ranks):
                whole.append(name)
            else:
                found[name] = _STYLES[style]
    if not found:
        raise ValueError(
            f"{ranks} ranks compute each layer together: pass initialize(tensor_plan=...), which assigns styles to "
            f"layers; {type(model).__name__} has no plan itself (_tp_plan)"
        )
    resolve(model, found, ranks)
    if whole:
        log.info("%d tensor ranks do not divide %s, which stay whole on each", ranks, patterns(whole))
    return found


def check_heads(model: nn.Module, ranks: int, size_key: str) -> None:
    """Raise ValueError if the ranks do not divide a model's attention heads.

    Args:
        model: The model; its config has the numbers of heads.
        ranks: The ranks among which they are divided.
        size_key: For the error: the configuration's key for the number of ranks.
    """
    config = getattr(model, "config", model)
    for key in ("num_attention_heads", "num_key_value_heads", "heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(f"{key} is {heads}, which {ranks} ranks do not divide; use a {size_key} that divides it")


def matches(name: str, pattern: str) -> bool:
    """Whether the last parts of a name match the pattern; a wrapping model puts other parts in front."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts[-len(wanted) :], wanted))


def patterns(names: Iterable[str]) -> str:
    """The different names, with * for numbers, for a message."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name) for name in names)) or "none"
