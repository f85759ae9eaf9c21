"""Muon's arithmetic (Jordan et al., 2024, kellerjordan.github.io/posts/muon): a momentum's nearest orthogonal matrix.

`newton_schulz` works on one matrix, `orthogonalise_` on those of a model; `muon_groups` and `with_use_muon` select the
parameters that are hidden matrices. The optimizers are in `../muon.py`, dense, and `../onebit_muon.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import torch_versions
from ..usage.contract import check_is_number
from .schedule import at_least_one

# The odd quintic a·x + b·x³ + c·x⁵, chosen by Jordan for the steepest slope at 0 that keeps singular values near 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315

ADJUSTMENTS = ("match_rms_adamw", "original")
"""Rules by which a matrix's learning rate follows from its shape; see `adjustment`."""


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """U·Vᵀ of x = U·S·Vᵀ, but with singular values between about 0.7 and 1.2. float32 [r, c], new.

    Computed in bfloat16 on a GPU, as in the source, and in float32 on the host. A zero matrix stays zero.

    Args:
        x: A matrix [r, c].
        steps: Number of iterations. Default 5.
    """
    is_tall = x.shape[0] > x.shape[1]
    y: Tensor = x.mT if is_tall else x
    y = y.to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / y.norm(dtype=torch.float64).clamp(min=1e-7)  # squares beyond float32 would make every element 0
    for _ in range(steps):
        gram = y @ y.mT
        y = _A * y + (_B * gram + _C * gram @ gram) @ y
    return (y.mT if is_tall else y).float()


def orthogonalise_(updates: Sequence[Tensor], params: Sequence[Tensor], steps: int, *, first: int = 0) -> None:
    """u ← `newton_schulz`(u) for the update of each parameter, in place.

    A parameter of more than two dimensions is a matrix of its first by all others. A sharded parameter (a DTensor) is
    gathered; its ranks call this together. Over a mesh of one axis, S ranks, the k-th parameter is orthogonalised by
    rank k mod S and sent out again: (S-1)/S·8 bytes per element. Over several axes (tensor slices that are sharded
    again) every rank orthogonalises for itself: half the bytes, all of the computing.

    Args:
        updates: This rank's parts of the updates, float32, modified in place.
        params: Their parameters.
        steps: Number of iterations.
        first: Number k of the first parameter. Default 0.
    """
    for k, (u, p) in enumerate(zip(updates, params, strict=True), first):
        if hasattr(p, "to_local"):
            _orthogonalise_shard_(u, p, k, steps)
        elif u.numel() > 0:
            u.copy_(newton_schulz(u.view(len(u), -1), steps).view_as(u))


def _orthogonalise_shard_(u: Tensor, p: Any, k: int, steps: int) -> None:
    from torch.distributed.tensor import DTensor

    mesh = p.device_mesh
    held = DTensor.from_local(u, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    whole, owner = held.full_tensor(), k % mesh.size() if mesh.ndim == 1 else None
    if owner is None or mesh.get_local_rank() == owner:
        whole = newton_schulz(whole.view(len(whole), -1), steps).view(p.shape)
    u.copy_(torch_versions.distribute(whole.contiguous(), mesh, p.placements, source=owner).to_local())


def adjustment(shape: Sequence[int], how: str) -> float:
    """The factor of the learning rate for a matrix of this shape.

    Args:
        shape: Shape of the parameter, [r, ...]; c is the product of the other dimensions.
        how: "match_rms_adamw": 0.2·√max(r, c), after which an update's root mean square is AdamW's usual 0.2 (Liu et
            al., arXiv 2502.16982), so that one learning rate serves both. "original": √max(1, r/c), Jordan's.
    """
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return float(0.2 * max(rows, columns) ** 0.5 if how == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5)


def check_rule(momentum: float, ns_steps: int, adjust_lr: str) -> None:
    """Raise TypeError or ValueError if an option of Muon's has the wrong type, or is out of its range."""
    if not 0.0 <= check_is_number("Muon", "momentum", momentum) < 1.0:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    at_least_one("ns_steps", ns_steps)
    if adjust_lr not in ADJUSTMENTS:
        raise ValueError(f"adjust_lr must be one of {', '.join(ADJUSTMENTS)}, got {adjust_lr!r}")


def check_use_muon(where: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError if a param group has no use_muon, or does not fit it.

    Args:
        where: Beginning of the message.
        group: The param group.
    """
    if not isinstance(group.get("use_muon"), bool):
        raise ValueError(
            f"{where} has no use_muon: set it to True for hidden matrices, to False for embeddings, head and "
            "vectors; onebit.muon_groups(model, head=...) makes such groups"
        )
    vectors = [tuple(p.shape) for p in group["params"] if p.dim() < 2]
    if group["use_muon"] and vectors:
        raise ValueError(
            f"{where} has use_muon and a parameter of shape {vectors[0]}, which is no matrix; move it to a group "
            "with use_muon=False, as onebit.muon_groups does"
        )


def muon_groups(model: nn.Module, *, head: nn.Module | None) -> list[dict[str, Any]]:
    """Divide a model's parameters into two param groups: hidden matrices with use_muon True, all others with False.

    The others are embeddings, vectors and scalars, and the parameters of the head. Frozen parameters stay in their
    group.

    Args:
        model: The model.
        head: The module that makes the outputs; None if there is none, or if its matrix is an embedding's. There is no
            default: an orthogonalised head trains badly, and nothing else shows why.

    Raises:
        TypeError: head is not a module.
        ValueError: A parameter of head is not one of the model.
    """
    if not isinstance(head, nn.Module | None):
        raise TypeError(f"head must be a module, or None if there is none, got {head!r}: write head=model.head")
    if head is not None and not set(head.parameters()) <= set(model.parameters()):
        raise ValueError(f"head, a {type(head).__name__}, has parameters that model does not have: pass its own module")
    return with_use_muon(model.named_parameters(), hidden_matrices(model, head=head))


def hidden_matrices(model: nn.Module, *, head: nn.Module | None) -> set[Tensor]:
    """The parameters of a model, sharded or not, that are matrices, except those of embeddings and of the head."""
    apart = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    apart |= set() if head is None else set(head.parameters())
    return {p for p in model.parameters() if p.dim() >= 2 and p not in apart}


def with_use_muon(params: Iterable[Any], hidden: Set[Tensor]) -> list[dict[str, Any]]:
    """Split each group in up to two, which have the option use_muon. A group that has it already stays as it is.

    Args:
        params: Parameters, (name, parameter) pairs, or groups of either.
        hidden: The parameters that are hidden matrices.
    """
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [part for group in groups for part in ([group] if "use_muon" in group else _split(group, hidden))]


def _split(group: dict[str, Any], hidden: Set[Tensor]) -> Iterator[dict[str, Any]]:
    members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    masks = group.get("exp_avg_mask")
    for use_muon in (True, False):
        chosen = [k for k, x in enumerate(members) if ((x[1] if isinstance(x, tuple) else x) in hidden) == use_muon]
        own = {"exp_avg_mask": [masks[k] for k in chosen]} if isinstance(masks, Sequence) else {}
        if chosen:
            yield group | {"params": [members[k] for k in chosen], "use_muon": use_muon} | own
