"""Tensor parallelism for inference: each rank keeps a part of every linear layer. Works over any transport.

1. A plan gives each layer a style by name: injection_policy, otherwise the model's own (`own_plan`).
2. "colwise": a rank keeps its part of the outputs, or of a table's columns (T5's biases of heads).
   "packed_colwise:P": the same for each of P matrices stacked in one. "colwise_gather_output": then all ranks get all
   outputs. "rowwise": a rank keeps its part of the inputs, and the ranks add up their products; with
   "rowwise_split_input" it takes its inputs out of all. "moe_tp_experts": the same for the experts of a mixture in one
   module; with "experts_by_rank" a rank has some of them whole. Other embeddings, norms and layers without a style stay
   whole on every rank. If the ranks do not divide a width, the first ranks have one more; heads they must divide.
3. A forward pass of T tokens sends float32: for each "rowwise" layer (W-1)·4·T·D bytes if these are few, and every rank
   adds up all parts, otherwise 2·(W-1)/W·4·T·D in an all-reduce; and (W-1)/W·4·T·N for each gathered output. `plan.py`
   counts them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...comm import Transport
from ...comm.messages import gather_tensors
from ..parallel.experts import STYLE, is_experts, why_undividable
from ..parallel.model_plan import WIDTHS, check_heads, matches, own_plan, patterns, stack_sizes
from ..parallel.styles import divide
from .experts import cut, keep_own
from .layers import Join, ServedLinear, has_hooks, is_linear, matrix_of, replace
from .plan import is_gathered

Plan = Mapping[str, str]

BY_RANK = ("experts_by_rank", "ep_dispatch_experts")
"""Our name and transformers' for experts of which each rank has some whole ones."""
WHOLE = (
    "grouped_gemm",
    "ep_router",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "replicated",
    "mla_kv_a_proj",
)
"""Styles in transformers' plans whose layers stay whole here."""
_GATHER = ("colwise_gather_output", "colwise_rep")
_TAKE = ("rowwise_split_input", "rowwise_rep")


def plan_of(model: nn.Module, policy: object, ranks: int) -> dict[str, str]:
    """The style of each layer by its full name.

    Raises:
        ValueError: The plan does not fit the model or the number of ranks. Nothing has been changed.
        TypeError: The policy has another form.
    """
    layers = [name for name, module in model.named_modules() if is_linear(module) or is_experts(module)]
    if isinstance(policy, Mapping) and policy and not all(isinstance(key, str) for key in policy):
        found = _by_blocks(model, layers, policy)
    elif policy is None or (isinstance(policy, Mapping) and policy):
        found = _by_names(model, layers, policy)
    else:
        raise TypeError(f'expected injection_policy as {{"pattern": "colwise" or "rowwise"}}, got {policy!r}')
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no tensor plan to divide it among {ranks} ranks: give it a _tp_plan, or pass "
            'injection_policy={pattern: "colwise" if ranks keep a part of the outputs, "rowwise" if they keep a part '
            f"of the inputs}}; its linear layers are {patterns(layers)}"
        )
    if any(style.startswith(("colwise", "packed_colwise")) and style not in _GATHER for style in found.values()):
        check_heads(model, ranks, "tp_size")
    for name, style in found.items():
        module = model.get_submodule(name)
        if is_experts(module) != (style in (STYLE, *BY_RANK)):
            raise ValueError(
                f"{name} cannot be {style!r}: {STYLE!r} and {BY_RANK[0]!r} are for experts in one module, and only for "
                "these"
            )
        if has_hooks(module):
            raise ValueError(
                f"{name} has hooks, such as quantized inputs, which its parts would not run: use tp_size 1, or leave "
                "activation_quantization out of the compression"
            )
        if style == STYLE:
            if why := why_undividable(module):
                raise ValueError(f"{name} {why}: leave the experts out of the plan")
        elif style in BY_RANK:
            if (E := module.num_experts) < ranks:  # type: ignore[operator]
                raise ValueError(f"{name} has {E} experts for {ranks} ranks: use {STYLE!r}, or a smaller tp_size")
        elif isinstance(module, nn.Embedding):
            if module.embedding_dim % ranks:  # its columns are heads
                raise ValueError(
                    f"{name} has {module.embedding_dim} columns, which {ranks} ranks do not divide; use another tp_size"
                )
        else:
            _sizes(style, module, model)
        check_heads(model.get_submodule(name.rpartition(".")[0]), ranks, "tp_size")
    return found


def split(model: nn.Module, plan: Plan, transport: Transport) -> None:
    """Keep only this rank's part of each layer in the plan, in place. Matrices that are cut are copied."""
    rank, W = transport.rank, transport.world_size
    number = _number_of(transport)
    for name, style in plan.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            replace(model, name, nn.Embedding.from_pretrained(module.weight.detach().chunk(W, 1)[rank].contiguous()))
            continue
        if style in (STYLE, *BY_RANK):
            keep = cut if style == STYLE else keep_own
            keep(module, rank, W, partial(torch.ops.onebit.sum_over_ranks, transport=number))
            continue
        matrix_NK, bias = matrix_of(module), getattr(module, "bias", None)
        bias = None if bias is None else bias.detach()
        join: Join | None = None
        inputs: slice | None = None
        if style in ("rowwise", *_TAKE):
            parts = matrix_NK.tensor_split(W, 1)
            part, join = parts[rank], partial(torch.ops.onebit.sum_over_ranks, transport=number)
            if style in _TAKE:
                before = sum(other.shape[1] for other in parts[:rank])
                inputs = slice(before, before + part.shape[1])
        else:
            sizes = _sizes(style, module, model)
            part = _rows(matrix_NK, sizes, rank, W)
            if style in _GATHER:
                (N,) = sizes
                part = nn.functional.pad(part, (0, 0, 0, -(-N // W) - len(part)))  # the transport gathers equal parts
                join = partial(torch.ops.onebit.gather_from_ranks, transport=number, ranks=W, outputs=N)
            elif bias is not None:
                bias = _rows(bias, sizes, rank, W)
        replace(model, name, ServedLinear(part.contiguous(), bias, join, inputs=inputs))
    divided = ("colwise", "packed_colwise")
    for holder in {name.rpartition(".")[0] for name, style in plan.items() if style.partition(":")[0] in divided}:
        above = model.get_submodule(holder)
        divide(above, WIDTHS.get(type(above).__name__, ()), W)


def _rows(x: Tensor, sizes: Sequence[int], rank: int, ranks: int) -> Tensor:
    """This rank's rows of each stacked matrix."""
    return torch.cat([part.tensor_split(ranks)[rank] for part in x.split(list(sizes))])


def _sizes(style: str, layer: nn.Module, model: nn.Module) -> tuple[int, ...]:
    """The outputs of each matrix that a layer stacks. Raises ValueError if it is no such stack."""
    kind, _, detail = style.partition(":")
    return stack_sizes(detail, layer, model) if kind == "packed_colwise" else (len(matrix_of(layer)),)


def _by_names(model: nn.Module, layers: Iterable[str], policy: Plan | None) -> dict[str, str]:
    """The styles from patterns of names; without a policy from the model's own plan."""
    plan = policy or own_plan(model)
    tables = [name for name, module in model.named_modules() if type(module) is nn.Embedding]
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        places = [*layers, *tables] if style == "colwise" else layers
        matched = [name for name in places if matches(name, pattern)]
        if not matched and policy is not None and style not in WHOLE:
            raise ValueError(f"injection_policy: {pattern!r} matches no linear layer; there are {patterns(layers)}")
        if matched and style not in WHOLE:
            known = (r"colwise|rowwise|packed_colwise(:\d+|:qkv)?", STYLE, *BY_RANK, *_GATHER, *_TAKE)
            if not re.fullmatch("|".join(known), style):
                raise ValueError(
                    f"the tensor plan of {type(model).__name__} gives {pattern} the style {style!r}, unknown here; "
                    f"write injection_policy= with colwise and rowwise for {patterns(layers)}"
                )
            found |= dict.fromkeys(matched, style)
    return found


def _by_blocks(model: nn.Module, layers: Iterable[str], policy: Mapping[object, object]) -> dict[str, str]:
    """The styles from DeepSpeed's form, which names the "rowwise" layers of each block. The others are "colwise"."""
    found: dict[str, str] = {}
    for cls, outputs in policy.items():
        names = [outputs] if isinstance(outputs, str) else list(outputs)  # type: ignore[call-overload]
        blocks = [name for name, module in model.named_modules() if isinstance(module, cls)]  # type: ignore[arg-type]
        for block in blocks:
            inner = [name for name in layers if name.startswith(f"{block}.")]
            ends = {name for name in inner if any(name.endswith(f".{end}") for end in names)}
            if len(ends) < len(names):
                raise ValueError(
                    f"injection_policy: not all of {names} are linear layers of {block}: {patterns(inner)}"
                )
            found |= {name: "rowwise" if name in ends else "colwise" for name in inner}
            found |= {name: STYLE for name in inner if is_experts(model.get_submodule(name))}
        if not blocks:
            raise ValueError(f"injection_policy: the model has no {cls}; its linear layers are {patterns(layers)}")
    return found


# -------------------------------------------------------------------------------- what ranks send each other

# Custom operations, so that a compiled step keeps each as one call. Graphs cannot hold transports, only numbers.
_TRANSPORTS: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()


def _number_of(transport: Transport) -> int:
    _TRANSPORTS[id(transport)] = transport
    return id(transport)


@torch.library.custom_op("onebit::sum_over_ranks", mutates_args=())
def _sum_over_ranks(x: Tensor, transport: int) -> Tensor:
    between = _TRANSPORTS[transport]
    total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if is_gathered(total.nbytes, between.world_size):
        total = gather_tensors(between, total).sum(0)
    else:
        between.all_reduce(total).wait()
    return total.to(x.dtype)


@_sum_over_ranks.register_fake
def _(x: Tensor, transport: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("onebit::gather_from_ranks", mutates_args=())
def _gather_from_ranks(x: Tensor, transport: int, ranks: int, outputs: int) -> Tensor:
    """Concatenate the parts of all ranks along the last dimension. The last ranks may have one element of padding."""
    rows = gather_tensors(_TRANSPORTS[transport], x.contiguous())
    if not outputs % ranks:
        return rows.movedim(0, -2).flatten(-2)
    widths = [outputs // ranks + (rank < outputs % ranks) for rank in range(ranks)]
    return torch.cat([row[..., :width] for row, width in zip(rows, widths, strict=True)], -1)


@_gather_from_ranks.register_fake
def _(x: Tensor, transport: int, ranks: int, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)
