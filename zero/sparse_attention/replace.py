"""Sparse attention for existing models: replaces their attention modules, and extends their position tables.

    replace_attention(model, {"mode": "bslongformer", "block": 64}, max_positions=16384)

Models of Hugging Face are recognised by the classes in `huggingface.py`. Any other model can take part if its attention
is a module with the attributes `heads`, `is_causal` and `core_attention`, which is called as core_attention(query, key,
value) with tensors [B, heads, S, D].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from . import huggingface
from .attention import SparseSelfAttention
from .config import SparsityConfig, read_sparsity

# Attributes under which models keep their position table, and buffers as long as it.
_POSITION_TABLES = ("wpe", "position_embeddings", "positions")
_POSITION_BUFFERS = ("position_ids", "token_type_ids")


@runtime_checkable
class HasCoreAttention(Protocol):
    """A module whose attention over heads can be replaced. `heads` counts those of the whole model, not of a rank."""

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
    """Make all self-attention of a model sparse. Changes the model in place; its parameters stay as they are.

    Call it on every rank before the model is sharded and, with max_positions, before the optimizer is made.

    Args:
        model: A model of Hugging Face, or one whose attention modules have core_attention, heads and is_causal.
        config: The layout, as a `SparsityConfig` or the block "sparse_attention" of a DeepSpeed JSON. Its key
            `attention` may be left out: the model decides.
        max_positions: The sequence length in tokens to extend the model to, as `extend_positions`; None (default) to
            leave it.
        executor: "auto" (default), "flex" or "gather", as in `sparse_attention`.
        is_part: Whether the model is a pipeline stage, which may have no attention; False by default.

    Returns:
        The names of the modules whose attention is now sparse.

    Raises:
        ValueError: No attention module of the model is known, or `attention` contradicts the model's.
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
    """The attention that `replace_attention` would put into each module, by module name; changes nothing.

    Raises:
        ValueError: As `replace_attention`.
    """
    found = dict(_own(model, config, executor)) | dict(huggingface.found(model, config, executor))
    if not found and not is_part:
        raise ValueError(
            f"{type(model).__name__} has no attention module that onebit knows: expected modules of the classes "
            f"{', '.join(huggingface.ATTENTION)}, or modules with the attributes core_attention, heads and is_causal"
        )
    return found


def place_heads(model: nn.Module, rank: int, ranks: int) -> None:
    """Tell a model's sparse attention which heads this tensor-parallel rank has: the rank-th of `ranks` equal parts.

    `onebit.zero.initialize` does it for "onebit": {"tensor": ...}.

    Args:
        model: The model, after `replace_attention`.
        rank: This rank among the tensor-parallel ranks.
        ranks: How many tensor-parallel ranks there are.

    Raises:
        ValueError: `ranks` does not divide the number of heads.
    """
    for module in model.modules():
        if isinstance(module, SparseSelfAttention):
            if module.heads % ranks:
                raise ValueError(f"{ranks} tensor ranks cannot divide {module.heads} heads; use a number that does")
            module.first_head = rank * (module.heads // ranks)


def extend_positions(model: nn.Module, positions: int) -> None:
    """Let a model take longer sequences, in place: the rows of its learned position table are repeated.

    The table becomes a new parameter, so call this before the optimizer is made. Rotary positions have no table; only
    their limit is raised.

    Args:
        model: The model.
        positions: The new longest sequence in tokens.

    Raises:
        ValueError: The table is longer already.
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
        raise ValueError(f"expected max_positions of at least {had}, which the model already has, got {positions}")
    with torch.no_grad():
        rows = table.weight[torch.arange(positions, device=table.weight.device) % had]
    table.weight = nn.Parameter(rows, requires_grad=table.weight.requires_grad)
    table.num_embeddings = positions


def _own(model: nn.Module, config: SparsityConfig, executor: str) -> Iterator[tuple[str, SparseSelfAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, HasCoreAttention):
            of_it = config.of_model(module.is_causal)
            yield name, SparseSelfAttention(of_it, module.heads, executor=executor)
