"""Muon's arithmetic (Jordan et al., 2024, kellerjordan.github.io/posts/muon): a momentum's nearest orthogonal matrix.

`newton_schulz` on one matrix, `orthogonalise_` on those of a model, `muon_groups` says which parameters are hidden
matrices. The optimizer is in `onebit_muon.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Of the odd quintic a·x + b·x³ + c·x⁵, chosen by Jordan for the steepest slope at 0 that keeps singular values near 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """U·Vᵀ of x = U·S·Vᵀ, but for singular values, which come out within about 0.7 and 1.2. float32 [r, c], new.

    In bfloat16 on a GPU, as the source has it, in float32 on the host. A zero matrix stays zero.
    """
    is_tall = x.shape[0] > x.shape[1]
    y: Tensor = x.mT if is_tall else x
    y = y.to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = _A * y + (_B * gram + _C * gram @ gram) @ y
    return (y.mT if is_tall else y).float()


def orthogonalise_(updates: Sequence[Tensor], params: Sequence[Tensor], steps: int) -> None:
    """u ← `newton_schulz`(u) for the update of each parameter, of what this rank holds, in place; float32.

    A parameter of more than two dimensions is a matrix of its first by all others. One that is sharded (a DTensor) is
    gathered, orthogonalised by one rank of its mesh, the k-th by rank k in turn, and handed out again: its ranks call
    this together. That moves (S-1)/S·8 bytes per element, S ranks.
    """
    for k, (u, p) in enumerate(zip(updates, params, strict=True)):
        if hasattr(p, "to_local"):
            _orthogonalise_shard_(u, p, k, steps)
        elif u.numel() > 0:
            u.copy_(newton_schulz(u.view(len(u), -1), steps).view_as(u))


def _orthogonalise_shard_(u: Tensor, p: Any, k: int, steps: int) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = p.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"a matrix of shape {tuple(p.shape)} is sharded over {mesh.ndim} axes; 1-bit Muon takes those of one "
            "(onebit.zero.fsdp.shard); give others a group with use_muon=False"
        )
    held = DTensor.from_local(u, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    whole, owner = held.full_tensor(), k % mesh.size()
    if mesh.get_local_rank() == owner:
        whole = newton_schulz(whole.view(len(whole), -1), steps).view(p.shape)
    u.copy_(distribute_tensor(whole.contiguous(), mesh, p.placements, src_data_rank=owner).to_local())


def adjustment(shape: Sequence[int], how: str) -> float:
    """What the learning rate of a matrix is multiplied by. how: "match_rms_adamw" or "original".

    match_rms_adamw: 0.2·√max(r, c), after which an update's root mean square is AdamW's usual 0.2 (Liu et al., arXiv
    2502.16982): one learning rate does for both. original: √max(1, r/c), Jordan's.
    """
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return float(0.2 * max(rows, columns) ** 0.5 if how == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5)


def muon_groups(model: nn.Module, *, head: nn.Module | None) -> list[dict[str, Any]]:
    """Two param groups of a model: its hidden matrices, use_muon True; all other parameters, False.

    The others are embeddings, vectors and scalars, and those of the head. head: the module that makes the outputs; None
    where there is none, or its matrix is an embedding's. No default: a head that is orthogonalised trains badly, and
    nothing else tells. Frozen parameters stay in their group.
    """
    apart = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    apart |= set() if head is None else set(head.parameters())
    params = list(model.named_parameters())
    groups: list[dict[str, Any]] = [{"params": [], "use_muon": True}, {"params": [], "use_muon": False}]
    for name, p in params:
        groups[p.dim() < 2 or p in apart]["params"].append((name, p))
    return [group for group in groups if group["params"]]
