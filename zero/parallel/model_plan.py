"""The tensor plan that a model brings along: styles by name, as transformers ships them in `_tp_plan`.

`own_plan` reads it, and `training_plan` translates it for `tensor.parallelize`. `zero/inference/split.py` reads the
same plans with styles for serving. `KNOWN` has plans of our own, and `_STYLES` what training does for each style's
name. Pure: nothing is sent or changed.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from . import experts
from .styles import Conv1DRowwise, Divided, Experts, SharedEnd, StackedColwise, is_transposed
from .tensor import resolve, undivided

log = logging.getLogger(__name__)


def _halves(block: str, into: str, out: str) -> dict[str, str]:
    """A plan of blocks whose layers `into` are column-wise, and `out` row-wise: names in the block, with spaces."""
    columns, rows = dict.fromkeys(into.split(), "colwise"), dict.fromkeys(out.split(), "rowwise")
    return {f"{block}.{name}": style for name, style in {**columns, **rows}.items()}


_OF_BERT = _halves(
    "layer.*",
    "attention.self.query attention.self.key attention.self.value intermediate.dense",
    "attention.output.dense output.dense",
)
_OF_BART = {
    **_halves("layers.*", "self_attn.q_proj self_attn.k_proj self_attn.v_proj fc1", "self_attn.out_proj fc2"),
    **_halves("layers.*.encoder_attn", "q_proj k_proj v_proj", "out_proj"),
}
_OF_T5 = {
    **_halves("layer.*.*Attention", "q k v relative_attention_bias", "o"),
    **_halves("layer.*.DenseReluDense", "wi wi_0 wi_1", "wo"),
}
_OF_VIT = ("attention.q_proj attention.k_proj attention.v_proj mlp.fc1", "attention.o_proj mlp.fc2")

KNOWN: Mapping[str, Mapping[str, str]] = {
    "albert": _halves(
        "albert_layers.*", "attention.query attention.key attention.value ffn", "attention.dense ffn_output"
    ),
    **dict.fromkeys(
        ("bart", "mbart", "plbart", "m2m_100", "marian", "pegasus", "blenderbot", "xglm", "biogpt"), _OF_BART
    ),
    "bert": _OF_BERT,
    "clip": _halves(
        "layers.*", "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.fc1", "self_attn.out_proj mlp.fc2"
    ),
    "dinov2": _halves("encoder.layer.*", *_OF_VIT),
    "distilbert": _halves(
        "layer.*", "attention.q_lin attention.k_lin attention.v_lin ffn.lin1", "attention.out_lin ffn.lin2"
    ),
    "electra": _OF_BERT,
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise:3",
        **_halves("h.*", "mlp.c_fc", "attn.c_proj mlp.c_proj"),
    },
    "modernbert": {
        "layers.*.attn.Wqkv": "packed_colwise:3",
        "layers.*.mlp.Wi": "packed_colwise",
        **_halves("layers.*", "", "attn.Wo mlp.Wo"),
    },
    "opt": _OF_BART,
    # Its own plan gathers the outputs of both stacks, and computes attention and activation whole on each rank.
    "phi3": {
        "layers.*.self_attn.qkv_proj": "packed_colwise:qkv",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        **_halves("layers.*", "", "self_attn.o_proj mlp.down_proj"),
    },
    "roberta": _OF_BERT,
    **dict.fromkeys(("t5", "mt5", "umt5"), _OF_T5),
    "vit": _halves("layers.*", *_OF_VIT),
    "wav2vec2": _halves(
        "encoder.layers.*",
        "attention.q_proj attention.k_proj attention.v_proj feed_forward.intermediate_dense",
        "attention.out_proj feed_forward.output_dense",
    ),
    "whisper": _OF_BART,
}
"""Plans for models that have none themselves, or no good one, by transformers' model_type.

"packed_colwise:3" is for three equal matrices stacked in one, without a number two, and ":qkv" for those of attention,
of which keys and values may have fewer heads.
"""

WIDTHS: Mapping[str, tuple[str, ...]] = {
    "GPT2Attention": ("split_size",),
    "MT5Attention": ("n_heads",),
    "OPTAttention": ("num_heads",),
    "Phi3Attention": ("num_key_value_heads", "config.num_attention_heads"),
    "T5Attention": ("n_heads",),
    "UMT5Attention": ("n_heads",),
    "WhisperAttention": ("num_heads",),
    "XGLMAttention": ("num_heads", "embed_dim"),
}
"""Widths that modules keep as attributes and use in forward, to be divided with their outputs, by class."""

# From a style's name to what training does: a function of the layer, of what the name has after a colon, and the model.
_STYLES: Mapping[str, Callable[[nn.Module, str, nn.Module], ParallelStyle]] = {
    "colwise": lambda layer, *_: StackedColwise() if is_transposed(layer) else ColwiseParallel(),
    "rowwise": lambda layer, *_: Conv1DRowwise() if is_transposed(layer) else RowwiseParallel(),
    "packed_colwise": lambda layer, detail, model: StackedColwise(stack_sizes(detail, layer, model)),
    experts.STYLE: lambda *_: Experts(),
    "mla_kv_a_proj": lambda layer, detail, model: SharedEnd(config_of(model).qk_rope_head_dim),
    # A norm of the heads that a rank has: any dimension but the last may stand for the divided one.
    "replicated_with_grad_allreduce": lambda *_: SequenceParallel(sequence_dim=0, use_local_output=True),
    "colwise_gather_output": lambda *_: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda *_: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda *_: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda *_: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda *_: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda *_: ColwiseParallel(output_layouts=Replicate()),
}
_BETWEEN_PARTS = ("colwise", "rowwise", "packed_colwise", experts.STYLE, "replicated_with_grad_allreduce")
"""Styles whose inputs, outputs or insides are divided. A layer with another one may as well stay whole."""
_WHOLE = ("replicate", "replicated")


def own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan that a model has, with what is `KNOWN` for it in the place of its own; empty if there is none."""
    ours = KNOWN.get(getattr(getattr(model, "config", None), "model_type", ""), {})
    theirs: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    kept = {name: style for name, style in theirs.items() if not any(matches(name, each) for each in ours)}
    return {**kept, **ours}


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
    with_experts = {name for name, style in _named(plan, modules) if style == experts.STYLE}
    found: dict[str, ParallelStyle] = {}
    whole: list[str] = []
    for name, style in _named(plan, names):
        kind, _, detail = style.partition(":")
        holder = name.rpartition(".")[0]
        if style in _WHOLE or (name not in modules and holder in with_experts):  # the experts' style divides it
            continue
        if name not in modules or kind not in _STYLES:
            raise ValueError(
                f"the tensor plan of {type(model).__name__} gives {patterns([name])} the style {style!r}, which "
                "training does not have: pass initialize(tensor_plan={pattern: style}) with styles of "
                "torch.distributed.tensor.parallel, or leave the layers whole"
            )
        layer, above = modules[name], type(modules[holder]).__name__
        divides = kind in ("colwise", "packed_colwise")
        if divides and "attention" in above.lower():
            check_heads(model, ranks, "tensor")
            check_heads(modules[holder], ranks, "tensor")  # of towers and decoders, whose configs are not the model's
        made = _STYLES[kind](layer, detail, model)
        if kind not in _BETWEEN_PARTS and undivided(layer, made, ranks):
            whole.append(name)
        else:
            found[name] = made
        if divides and above in WIDTHS:
            found[holder] = Divided(WIDTHS[above])
    if not found:
        raise ValueError(
            f"{ranks} ranks compute each layer together: pass initialize(tensor_plan=...), which assigns styles to "
            f"layers; {type(model).__name__} has no plan itself (_tp_plan)"
        )
    resolve(model, found, ranks)
    if whole:
        log.info("%d tensor ranks do not divide %s, which stay whole on each", ranks, patterns(whole))
    return found


def _named(plan: Mapping[str, str], names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, style) for each name that a pattern of the plan matches, in the plan's order."""
    given = list(names)
    return [(name, style) for pattern, style in plan.items() for name in given if matches(name, pattern)]


def stack_sizes(detail: str, layer: nn.Module, model: nn.Module) -> tuple[int, ...]:
    """Outputs of each of the matrices that a linear layer stacks.

    Args:
        detail: What "packed_colwise:" is followed by: how many are stacked, "" for two, or "qkv".
        layer: The layer.
        model: The model; its config has the numbers of heads.

    Raises:
        ValueError: The layer's outputs are no such stack.
    """
    outputs = layer.nf if is_transposed(layer) else getattr(layer, "out_features", 0)
    assert isinstance(outputs, int)
    parts = [] if detail == "qkv" else [1] * int(detail or 2)
    if detail == "qkv":
        config = config_of(model)
        heads = getattr(config, "num_attention_heads", 1)
        groups = getattr(config, "num_key_value_heads", None) or heads
        parts = [heads, groups, groups]
    if outputs % sum(parts) or not outputs:
        raise ValueError(
            f"'packed_colwise:{detail}' is for a linear layer that stacks {len(parts)} matrices in the proportion "
            f"{parts}; {type(layer).__name__} has {outputs} outputs"
        )
    return tuple(part * outputs // sum(parts) for part in parts)


def config_of(model: nn.Module) -> Any:
    """The config with a model's numbers of heads: its own, or that of its language model. None if it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_heads(model: nn.Module, ranks: int, size_key: str) -> None:
    """Raise ValueError if the ranks do not divide a model's attention heads.

    Args:
        model: The model, or one of its attention modules; it or its config has the numbers of heads.
        ranks: The ranks among which they are divided.
        size_key: For the error: the configuration's key for the number of ranks.
    """
    for holder in (config_of(model), model):
        for key in ("num_attention_heads", "num_key_value_heads", "heads", "num_heads"):
            heads = getattr(holder, key, None)
            if isinstance(heads, int) and heads % ranks:
                raise ValueError(
                    f"{key} is {heads}, which {ranks} ranks do not divide; use a {size_key} that divides it"
                )


def matches(name: str, pattern: str) -> bool:
    """Whether the last parts of a name match the pattern; a wrapping model puts other parts in front."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts[-len(wanted) :], wanted))


def patterns(names: Iterable[str]) -> str:
    """The different names, with * for numbers, for a message."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name) for name in names)) or "none"
