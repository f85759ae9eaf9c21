"""Which gradients a step takes: dense ones, of parameters that are not frozen and are where they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model_parallel import local


def gradient_of(p: Tensor) -> Tensor | None:
    """p's gradient; None while p is frozen, even if p.grad contains one."""
    return p.grad if p.requires_grad else None


def refuse_sparse(who: str, grad: Tensor) -> Tensor:
    """The gradient. Raises RuntimeError if it is sparse.

    Args:
        who: Name of the optimizer that needs a dense one, for the message.
        grad: The gradient.
    """
    if grad.layout != torch.strided:
        raise RuntimeError(f"{who} needs dense gradients, got {grad.layout}; use nn.Embedding(..., sparse=False)")
    return grad


def with_gradient(who: str, params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that have elements and a gradient. Raises RuntimeError if a gradient is sparse.

    Args:
        who: Name of the optimizer, for the message.
        params: The parameters.
    """
    found = [p for p in params if p.grad is not None and p.numel() > 0]
    for p in found:
        assert p.grad is not None
        refuse_sparse(who, p.grad)
    return found


def dense_gradients(
    rank: int, params: Sequence[Tensor], names: Sequence[str], shapes: Sequence[torch.Size], device: torch.device
) -> list[Tensor | None]:
    """The gradients of this rank's parts of the parameters, not copied; None for a parameter without one or frozen now.

    Args:
        rank: This rank, for messages.
        params: The parameters.
        names: Their names, for messages.
        shapes: The shapes of this rank's parts at construction.
        device: Their device at construction.

    Raises:
        RuntimeError: A gradient is sparse or placed otherwise than its parameter, or a parameter was moved or resized.
    """
    for p, name, shape in zip(params, names, shapes, strict=True):
        check_place(rank, p, name, shape, device)
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                f"rank {rank}: {name} has a {p.grad.layout} gradient; onebit needs dense ones "
                "(nn.Embedding(..., sparse=False))"
            )
        if p.grad is not None and getattr(p.grad, "placements", None) != getattr(p, "placements", None):
            raise RuntimeError(
                f"rank {rank}: the gradient of {name} is placed as "
                f"{getattr(p.grad, 'placements', 'a plain tensor')}, the parameter as "
                f"{getattr(p, 'placements', 'a plain tensor')}; redistribute it in a hook"
            )
    grads = map(gradient_of, params)
    return [grad if grad is None or type(grad) is Tensor else local(grad) for grad in grads]


def check_place(rank: int, p: Tensor, name: str, shape: torch.Size, device: torch.device) -> None:
    """Raise RuntimeError if p has another shape or device than at construction.

    Args:
        rank: This rank, for the message.
        p: The parameter.
        name: Its name, for the message.
        shape: Shape of this rank's part at construction.
        device: Its device at construction.
    """
    held = p if type(p) is torch.nn.Parameter else local(p)
    if held.shape != shape or held.device != device:
        raise RuntimeError(
            f"rank {rank}: {name} is now {tuple(held.shape)} on {held.device}, at construction it was {tuple(shape)} "
            f"on {device}; move and resize a model before its optimizer is constructed, or construct another one"
        )
