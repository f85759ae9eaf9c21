"""The experts of a mixture in inference: this rank's part of each, or some whole ones, in floats or in int8 by rows.

transformers keeps the experts of a layer in one module, as matrices of three dimensions; its own forward runs over
them. Models that keep a linear layer for each expert are handled by `layers.py`.

Shape legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import weakref
from typing import cast

import torch
from torch import Tensor, nn

from ..parallel.experts import aligned, inputs_dim, stacked_in_up, up_name
from ..parallel.stacked import by_stack
from .layers import Join
from .packed import quantize_rows


def cut(experts: nn.Module, rank: int, ranks: int, join: Join) -> None:
    """Keep only this rank's part of every expert, in place. `join` adds up the outputs of all ranks."""
    up, inputs, count = up_name(experts), inputs_dim(experts), stacked_in_up(experts)
    made = {up: by_stack(getattr(experts, up), 3 - inputs, count, ranks, rank)}
    made["down_proj"] = cast(Tensor, experts.down_proj).tensor_split(ranks, inputs)[rank]
    if experts.has_bias:
        made[f"{up}_bias"] = by_stack(getattr(experts, f"{up}_bias"), 1, count, ranks, rank)
        bias = cast(Tensor, experts.down_proj_bias)
        made["down_proj_bias"] = bias if rank == 0 else torch.zeros_like(bias)  # only rank 0 adds it to the sum
    for name, x in aligned(experts, made).items():
        setattr(experts, name, nn.Parameter(x.detach().contiguous(), requires_grad=False))
    experts.register_forward_hook(lambda module, inputs, out: join(out))


def keep_own(experts: nn.Module, rank: int, ranks: int, join: Join) -> None:
    """Keep only this rank's experts, whole, in place. `join` adds up the outputs of all ranks.

    Tokens that the router sends to another rank's experts take none here, as in transformers' expert parallelism.
    """
    own = torch.arange(len(cast(Tensor, experts.down_proj)), device="cpu").tensor_split(ranks)[rank]
    first, count = int(own[0]), len(own)
    biases = [f"{name}_bias" for name in (up_name(experts), "down_proj")] if experts.has_bias else []
    for name in (up_name(experts), "down_proj", *biases):
        mine = cast(Tensor, getattr(experts, name)).detach()[first : first + count].clone()
        setattr(experts, name, nn.Parameter(mine, requires_grad=False))
    vars(experts).update(num_experts=count, _is_expert_parallel=True)

    def route(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, ids, weights = inputs
        is_own = (ids >= first) & (ids < first + count)
        return x, torch.where(is_own, ids - first, count), weights.masked_fill(~is_own, 0)

    experts.register_forward_pre_hook(route)
    experts.register_forward_hook(lambda module, inputs, out: join(out))


def quantize_experts(experts: nn.Module) -> None:
    """Keep the experts' matrices in int8, in place.

    Each forward pass converts the experts that tokens go to, one at a time. It runs transformers' "eager" form as one
    custom operation, since its loop depends on the tokens and cannot be compiled.

    Raises:
        ValueError: Each rank has some experts whole, and they have biases: their "eager" form knows no other ranks.
    """
    if experts._is_expert_parallel and experts.has_bias:
        raise ValueError(
            f"{type(experts).__name__} in few bits cannot skip the tokens of other ranks' experts: give them the style "
            "'moe_tp_experts', or keep floats"
        )
    for name in (up_name(experts), "down_proj"):
        matrices = ExpertRows(cast(Tensor, getattr(experts, name)), is_transposed=bool(experts.is_transposed))
        delattr(experts, name)
        setattr(experts, name, matrices)
    experts.config._experts_implementation = "eager"  # type: ignore[union-attr]
    number = id(experts)
    _EAGER[number] = experts
    experts.forward = lambda *inputs: torch.ops.onebit.experts(*inputs, number)


class ExpertRows(nn.Module):
    """The experts' matrices in int8, with a float32 scale for each output. `self[expert]` is one matrix in floats."""

    def __init__(self, weight: Tensor, *, is_transposed: bool):
        super().__init__()
        self.dtype, self.is_transposed = weight.dtype, is_transposed
        each = [quantize_rows(matrix.detach().t() if is_transposed else matrix.detach()) for matrix in weight]
        self.rows_ENK = nn.Buffer(torch.stack([rows for rows, _ in each]))
        self.scale_EN = nn.Buffer(torch.stack([scale for _, scale in each]))

    def __getitem__(self, expert: Tensor) -> Tensor:
        matrix = (self.rows_ENK[expert] * self.scale_EN[expert][..., None]).to(self.dtype)
        return matrix.mT if self.is_transposed else matrix


# A custom operation, because which experts run depends on the tokens. Graphs cannot hold modules, so it takes a number.
_EAGER: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


@torch.library.custom_op("onebit::experts", mutates_args=())
def _run(x: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    module = _EAGER[experts]
    y: Tensor = type(module).forward(module, x, ids, weights)
    return y


@_run.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
