"""What `Offload` is made of, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ...lamb import Lamb
from .inner import is_elementwise


def made_of(model: nn.Module | ParamsT, make: Callable[[ParamsT], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The optimizer of the parameters to be trained. Raises ValueError and TypeError."""
    given = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else model
    made = make(given)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"make(params) gave a {type(made).__name__}; expected a torch.optim.Optimizer")
    if made.state:
        raise ValueError(f"make(params) gave a {type(made).__name__} that has state; offload begins with a fresh one")
    return made


def check_parameters(params: Sequence[Tensor], made: torch.optim.Optimizer) -> None:
    """Raise ValueError or TypeError where these cannot be offloaded."""
    if not params:
        raise ValueError("there are no parameters to train")
    for k, p in enumerate(params):
        if not p.is_floating_point() or p.is_meta:
            raise TypeError(f"parameter {k} is {p.dtype} on {p.device}; expected floats that have been materialised")
    if any(hasattr(p, "device_mesh") for p in params) and not (is_elementwise(made) or isinstance(made, Lamb)):
        raise ValueError(
            f"{type(made).__name__} looks at whole parameters, and these are sharded; "
            "offload Adam, AdamW, LaProp or Lamb, or leave the parameters whole"
        )


def check_mode(mode: str, model: object) -> None:
    """Raise where parameters should be moved, and there is no model to move them for."""
    if mode == "full" and (not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule)):
        raise TypeError(
            f'mode "full" brings parameters where modules use them; expected the nn.Module, got {type(model).__name__}'
        )
    if mode == "full" and hasattr(model, "_orig_mod"):
        raise TypeError('mode "full" moves parameters from Python; give Offload the model that is not compiled')
