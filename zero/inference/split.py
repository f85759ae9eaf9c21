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
from collections.abc import Iterable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ...comm import Transport
from ...comm.messages import gather_tensors
from ..parallel.experts import STYLE, is_experts, why_undividable
from ..parallel.model_plan import WIDTHS, check_heads, matches, own_plan, patterns, stack_sizes
from ..parallel.styles import divide
from .experts import cut, keep_own
from .layers import Join, ServedEmbedding, ServedLinear, has_hooks, is_linear, matrix_of, replace
from .packed import Packed
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
_TABLES = (nn.Embedding, ServedEmbedding)


def plan_of(model: nn.Module, policy: object, ranks: int) -> dict[str, str]:
    """The style of each layer by its full name.

    Raises:
        ValueError: The plan does not fit the model or the number of ranks. Nothing has been changed.
        TypeError: The policy has another form.
    """
    layers = [name for name, m in model.named_modules() if is_linear(m) or is_experts(m) or isinstance(m, ServedLinear)]
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
        elif isinstance(module, _TABLES):
            if (heads := module.embedding_dim) % ranks:
                raise ValueError(f"{name} has {heads} columns, which {ranks} ranks do not divide; use another tp_size")
        else:
            _sizes(style, module, model)
        check_heads(model.get_submodule(name.rpartition(".")[0]), ranks, "tp_size")
    return found


def split(model: nn.Module, plan: Plan, transport: Transport) -> None:
    """Keep only this rank's part of each layer in the plan, in place: a copy, packed if the layer is."""
    rank, W = transport.rank, transport.world_size
    number = _number_of(transport)
    for name, style in plan.items():
        module = model.get_submodule(name)
        if style in (STYLE, *BY_RANK):
            keep = cut if style == STYLE else keep_own
            keep(module, rank, W, partial(torch.ops.onebit.sum_over_ranks, transport=number))
            continue
        matrix = _matrix_of(module)
        N, K = matrix.shape
        if isinstance(module, _TABLES):
            part = _part(matrix, _numbers(N), _own(K, rank, W))
            made = nn.Embedding.from_pretrained(part) if isinstance(part, Tensor) else ServedEmbedding(part)
            replace(model, name, made)
            continue
        bias = cast("Tensor | None", module.bias)
        bias = None if bias is None else bias.detach()
        join: Join | None = None
        inputs: slice | None = None
        rows, columns = _numbers(N), range(K)
        if style in ("rowwise", *_TAKE):
            columns, join = _own(K, rank, W), partial(torch.ops.onebit.sum_over_ranks, transport=number)
            if style in _TAKE:
                inputs = slice(columns.start, columns.stop)
        elif style in _GATHER:
            # The transport gathers equal parts, so the last ranks may repeat a row, which is dropped.
            rows = (_own(N, rank, W).start + _numbers(-(-N // W))).clamp(max=N - 1)
            join = partial(torch.ops.onebit.gather_from_ranks, transport=number, ranks=W, outputs=N)
        else:
            stack = rows.split(_sizes(style, module, model))
            rows = torch.cat([each.tensor_split(W)[rank] for each in stack])
            bias = None if bias is None else bias[rows]
        has_int8_inputs = isinstance(module, ServedLinear) and module.has_int8_inputs
        replace(model, name, ServedLinear(_part(matrix, rows, columns), bias, join, has_int8_inputs, inputs))
    divided = ("colwise", "packed_colwise")
    for holder in {name.rpartition(".")[0] for name, style in plan.items() if style.partition(":")[0] in divided}:
        above = model.get_submodule(holder)
        divide(above, WIDTHS.get(type(above).__name__, ()), W)


def _matrix_of(module: nn.Module) -> Tensor | Packed:
    return module.matrix if isinstance(module, ServedLinear | ServedEmbedding) else matrix_of(module)


def _part(matrix: Tensor | Packed, rows: Tensor, columns: range) -> Tensor | Packed:
    """A copy of these rows and columns, packed if the matrix is. An empty part is a tensor."""
    if isinstance(matrix, Tensor):
        return matrix[rows, columns.start : columns.stop].contiguous()
    return matrix.part(rows, columns) if columns else matrix.of_products.new_empty(len(rows), 0)


def _numbers(n: int) -> Tensor:
    return torch.arange(n, device="cpu", dtype=torch.int64)


def _own(n: int, rank: int, ranks: int) -> range:
    """This rank's part of n columns, as by torch's tensor_split."""
    least, longer = divmod(n, ranks)
    first = rank * least + min(rank, longer)
    return range(first, first + least + (rank < longer))


def _sizes(style: str, layer: nn.Module, model: nn.Module) -> tuple[int, ...]:
    """The outputs of each matrix that a layer stacks. Raises ValueError if it is no such stack."""
    kind, _, detail = style.partition(":")
    return stack_sizes(detail, layer, model) if kind == "packed_colwise" else (_matrix_of(layer).shape[0],)


def _by_names(model: nn.Module, layers: Iterable[str], policy: Plan | None) -> dict[str, str]:
    """The styles from patterns of names; without a policy from the model's own plan."""
    plan = policy or own_plan(model)
    tables = [name for name, module in model.named_modules() if type(module) in _TABLES]
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
