"""Parameters made ready to be moved: checked, with memory of their own, and emptied onto the device that computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def check_movable(params: Sequence[Tensor], names: Mapping[Tensor, str], *, may_be_meta: bool) -> None:
    """Raise TypeError or ValueError, with the name, where a parameter cannot leave its device and come again."""
    storages: dict[int, str] = {}
    for p in params:
        if p not in names:
            raise ValueError("make(params) trains a parameter that is not the model's; mode full moves the model's own")
        name = names[p]
        if type(p) is not nn.Parameter:
            raise TypeError(
                f"{name} is a {type(p).__name__}; mode full takes plain parameters: leave FSDP2 and lazy modules to "
                'mode "gradients", or close the other Offload first'
            )
        if p.is_meta:
            if not may_be_meta:
                raise TypeError(f"{name} is on meta; pass fill=, which gives it values, or materialize it")
            continue
        storage = p.untyped_storage()
        if (other := storages.setdefault(storage._cdata, name)) != name:
            raise ValueError(f"{name} and {other} share memory; make them one Parameter, and both modules' own")
        if p.numel() and storage.nbytes() != p.numel() * p.element_size():
            raise ValueError(
                f"{name} is a view of {storage.nbytes()} bytes, its own are {p.numel() * p.element_size()}; "
                "give it memory of its own: p.data = p.data.clone()"
            )


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """All of floats; buffers stay as they are, as under FSDP2."""
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)


def own_memory(params: Sequence[Tensor]) -> None:
    """Copy what lies in mapped files or numpy's memory: storages that cannot be emptied."""
    for p in params:
        if not p.is_meta and not p.untyped_storage().resizable():
            p.data = p.data.clone()


def vacate(p: Tensor, device: torch.device) -> None:
    """A parameter of this device, without memory. It stays the same object, on whatever device it was."""
    hollow = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device)
    hollow.untyped_storage().resize_(0)
    if p.is_meta:
        torch.utils.swap_tensors(p, nn.Parameter(hollow, requires_grad=p.requires_grad))
    else:
        p.data = hollow


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """To the device that computes; those that have no values stay as they are, for `fill`."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, x in module._buffers.items():
            if x is not None and not x.is_meta:
                module._buffers[name] = moved.setdefault(id(x), x.to(device))
