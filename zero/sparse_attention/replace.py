"""Sparse attention in models that are there: by the names of their attention modules, and with longer position tables.

    replace_attention(model, {"mode": "bslongformer", "block": 64}, max_positions=16384)

Models of Hugging Face are known by the classes of `huggingface.py`. Any other model takes part whose attention is a
module with an attribute `core_attention`, called as core_attention(query, key, value) with [B, heads, S, D], and with
`heads` and `is_causal`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from . import huggingface
from .attention import SparseSelfAttention
from .config import SparsityConfig, read_sparsity

# Modules and attributes of position tables: (a parent with the embedding, the name of it).
_POSITION_TABLES = ("wpe", "position_embeddings", "positions")
_POSITION_BUFFERS = ("position_ids", "token_type_ids")


@runtime_checkable
class HasCoreAttention(Protocol):
    """A module whose attention over heads can be replaced. heads: of the whole model."""

    core_attention: object
    heads: int
    is_causal: bool


def replace_attention(
    model: nn.Module,
    config: SparsityConfig | Mapping[str, object],
    *,
    max_positions: int | None = None,
    executor: str = "auto",
    is_part: bool = False,
) -> list[str]:
    """Let all self-attention of a model see what the configuration's layout shows; the names of the modules.

    In place; parameters stay as they are. Before sharding, and before the optimizer is made where max_positions adds
    positions, see `extend_positions`. `attention` of the configuration may be left out: the model says it. executor:
    see `sparse_attention`. is_part: a pipeline's stage, which may have no attention.
    Raises ValueError where the model has no attention that is known, or `attention` contradicts the model's.
    """
    found = attention_of(model, read_sparsity(config), executor=executor, is_part=is_part)
    for name, attention in found.items():
        module = model.get_submodule(name)
        if isinstance(module, HasCoreAttention):
            module.core_attention = attention
        else:
            module.sparse_attention = attention
    huggingface.switch(model)
    if max_positions is not None:
        extend_positions(model, max_positions)
    return list(found)


def attention_of(
    model: nn.Module, config: SparsityConfig, *, executor: str = "auto", is_part: bool = False
) -> dict[str, SparseSelfAttention]:
    """What `replace_attention` would put into which modules, by their names; changes nothing. Raises as it does."""
    found = dict(_own(model, config, executor)) | dict(huggingface.found(model, config, executor))
    if not found and not is_part:
        raise ValueError(
            f"{type(model).__name__} has no attention that is known by name: expected modules of the classes "
            f"{', '.join(huggingface.ATTENTION)}, or modules with the attributes core_attention, heads and is_causal"
        )
    return found


def place_heads(model: nn.Module, rank: int, ranks: int) -> None:
    """Tell sparse attention which heads this one of this many tensor-parallel ranks has: the rank-th part of them."""
    for module in model.modules():
        if isinstance(module, SparseSelfAttention):
            if module.heads % ranks:
                raise ValueError(f"{ranks} tensor ranks cannot divide {module.heads} heads; take a number that does")
            module.first_head = rank * (module.heads // ranks)


def extend_positions(model: nn.Module, positions: int) -> None:
    """Let a model take sequences of this many tokens: its learned tables of positions are repeated up to there.

    The table's rows repeat from the first one on. The table is a new parameter: call it before the optimizer is made.
    Rotary positions have no table; their limit is raised. Raises ValueError where a table is longer already.
    """
    for module in list(model.modules()):
        for name in _POSITION_TABLES:
            table = getattr(module, name, None)
            if isinstance(table, nn.Embedding):
                _repeat_rows(table, positions)
        for name in _POSITION_BUFFERS:
            if isinstance(buffer := module._buffers.get(name), torch.Tensor) and buffer.dim() == 2:
                fresh = torch.arange(positions, device=buffer.device).expand(1, -1).clone()
                module._buffers[name] = fresh if name == "position_ids" else torch.zeros_like(fresh)
        if isinstance(getattr(module, "context", None), int):
            module.context = positions  # type: ignore[assignment]
        huggingface.raise_limit(module, positions)


def _repeat_rows(table: nn.Embedding, positions: int) -> None:
    had = table.num_embeddings
    if positions < had:
        raise ValueError(f"expected max_positions of at least {had}, which the model has already, got {positions}")
    with torch.no_grad():
        rows = table.weight[torch.arange(positions, device=table.weight.device) % had]
    table.weight = nn.Parameter(rows, requires_grad=table.weight.requires_grad)
    table.num_embeddings = positions


def _own(model: nn.Module, config: SparsityConfig, executor: str) -> Iterator[tuple[str, SparseSelfAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, HasCoreAttention):
            of_it = config.of_model(module.is_causal)
            yield name, SparseSelfAttention(of_it, module.heads, executor=executor)
