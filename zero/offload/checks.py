"""Checks of `Offload`'s arguments, before anything is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ...comm.transports.base import Transport, check_transport
from ...lamb import Lamb
from .inner import is_elementwise

MODES = ("none", "state", "gradients", "full")
"""The modes of `Offload`: nothing is moved; state; state and gradients; state, gradients and parameters."""


def build_inner(model: nn.Module | ParamsT, make: Callable[[ParamsT], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of the parameters to train.

    Raises:
        TypeError: It is no optimizer.
        ValueError: It has state already.
    """
    given = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else model
    made = make(given)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"make(params) returned a {type(made).__name__}; expected a torch.optim.Optimizer")
    if made.state:
        raise ValueError(f"make(params) returned a {type(made).__name__} that has state; offload needs a fresh one")
    return made


def check_parameters(params: Sequence[Tensor], made: torch.optim.Optimizer, *, may_be_meta: bool) -> None:
    """Raise ValueError or TypeError if these parameters cannot be offloaded."""
    if not params:
        raise ValueError("there are no parameters to train")
    for k, p in enumerate(params):
        if not p.is_floating_point() or (p.is_meta and not may_be_meta):
            raise TypeError(
                f"parameter {k} is {p.dtype} on {p.device}; expected floats with values (mode full: or fill=)"
            )
    if any(hasattr(p, "device_mesh") for p in params) and not (is_elementwise(made) or isinstance(made, Lamb)):
        raise ValueError(
            f"{type(made).__name__} looks at whole parameters, and these are sharded; "
            "offload Adam, AdamW, LaProp, Lion or Lamb, or leave the parameters whole"
        )


def check_movable(params: Sequence[Tensor], names: Mapping[Tensor, str], *, may_be_meta: bool) -> None:
    """Raise TypeError or ValueError, with the name, if a parameter cannot leave its device and come back."""
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


def check_mode(mode: str, model: object, **of_full: object) -> None:
    """Raise if there is no such mode, or if mode "full" is not given a plain model.

    `of_full` holds the arguments that only mode "full" takes, None if not given.
    """
    if mode not in MODES:
        raise ValueError(f"expected mode of {', '.join(MODES)}, got {mode!r}")
    if mode != "full":
        if given := next((name for name, value in of_full.items() if value is not None), None):
            raise ValueError(f'{given}= is for mode "full", got mode {mode!r}, which leaves parameters where they are')
        return
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f'mode "full" brings parameters where modules use them; expected the nn.Module, got {type(model).__name__}'
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError('mode "full" moves parameters from Python; give Offload the model that is not compiled')


def check_ratio(mode: str, ratio: float) -> None:
    """Raise ValueError if `ratio` is out of range, or the mode does not take it."""
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"expected 0 <= ratio <= 1, got {ratio}")
    if ratio != 1.0 and mode != "state":
        raise ValueError(f'ratio= is for mode "state", whose gradients stay with the parameters, got mode {mode!r}')


def check_sums(mode: str, grad_dtype: torch.dtype | None) -> None:
    """Raise ValueError if a dtype of sums is given in a mode whose gradients are not stored, or is no such dtype."""
    if grad_dtype is None:
        return
    if not (isinstance(grad_dtype, torch.dtype) and grad_dtype.is_floating_point):
        raise ValueError(f"grad_dtype must be a floating-point dtype, as torch.float32, got {grad_dtype!r}")
    if mode not in ("gradients", "full"):
        raise ValueError(
            f'grad_dtype= is for modes "gradients" and "full", which store gradients; in mode {mode!r} they stay in '
            "p.grad and add up in its dtype: leave it out"
        )


def check_averages(mode: str, transport: Transport | None) -> None:
    """Raise if a transport is given in a mode whose gradients are not stored, or if it is no transport."""
    if transport is None:
        return
    check_transport(transport)
    if mode not in ("gradients", "full"):
        raise ValueError(
            f'transport= is for modes "gradients" and "full", whose gradients leave with backward; in mode {mode!r} '
            "they stay in p.grad: call onebit.dense.average_gradients before step()"
        )
