"""transformers' experts in one module: which parameters they have, and along which dimensions ranks divide them.

Shape legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

STYLE = "moe_tp_experts"
"""transformers' name for experts that are each cut into parts, whose outputs the ranks add up."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module is transformers' experts with matrices [E, N, K] or [E, K, N]."""
    return hasattr(module, "_is_expert_parallel") and isinstance(getattr(module, "down_proj", None), nn.Parameter)


def up_name(experts: nn.Module) -> str:
    """The parameter of the first product."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def stacked_in_up(experts: nn.Module) -> int:
    """Number of matrices in the first product, one after the other: gate and up, or one (alternating rows count so)."""
    return 2 if experts.has_gate and experts.is_concatenated else 1


def inputs_dim(experts: nn.Module) -> int:
    """The dimension of the matrices' inputs."""
    return 1 if experts.is_transposed else 2


def why_undividable(experts: nn.Module) -> str:
    """Why ranks cannot add up the outputs of parts of these experts; "" if they can."""
    if getattr(experts, "has_post_expert_norm", False):
        return "normalises each expert's output, which a rank would have to know whole"
    return ""


def aligned(experts: nn.Module, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rank's parts of the parameters by name, with zeros between the two products up to a multiple of 16 bytes.

    torch's grouped product takes no other strides, and a part of an expert may be narrower than the whole. The zeros
    meet zeros in the second product and add nothing. Parts that are aligned already are returned as they are.
    """
    up, inner, count = up_name(experts), inputs_dim(experts), stacked_in_up(experts)
    down = parts["down_proj"]
    width = down.shape[inner]
    spare = -width % max(1, 16 // down.itemsize)
    if not spare:
        return dict(parts)

    def longer(x: Tensor, dim: int, matrices: int) -> Tensor:
        apart = x.unflatten(dim, (matrices, -1))
        shape = list(apart.shape)
        shape[dim + 1] = shape[dim + 1] // width * spare  # gate and up may alternate in one matrix of twice the width
        return torch.cat([apart, apart.new_zeros(shape)], dim + 1).flatten(dim, dim + 1)

    made = dict(parts) | {up: longer(parts[up], 3 - inner, count), "down_proj": longer(down, inner, 1)}
    if (bias := parts.get(f"{up}_bias")) is not None:
        made[f"{up}_bias"] = longer(bias, 1, count)
    return made
