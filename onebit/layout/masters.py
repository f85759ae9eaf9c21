"""float32 masters of parameters in bfloat16 or float16, in which small updates would be lost.

A step modifies `Masters.local_values`, which are float32 if there are masters, and `write_back` rounds them into the
parameters. A float32 parameter is its own master. `Masters` has those of a bucket, or of local steps; a dense optimizer
keeps its masters in its state (`own_master`). Rests on `model_parallel.local`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from ..model_parallel import local
from ..usage.contract import State

NAME = "master"
"""Name of the master in a parameter's state: `optimizer.state[p]["master"]`."""

_LOW = (torch.bfloat16, torch.float16)


def is_low(p: Tensor) -> bool:
    """Whether this parameter needs a master."""
    return p.dtype in _LOW


def master_of(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    """The float32 master of a parameter, in the shape of this rank's part; that part itself if it has no master.

    Args:
        optimizer: The optimizer that trains it.
        p: The parameter.
    """
    master: Tensor | None = optimizer.state.get(p, {}).get(NAME)
    return local(p) if master is None else master


def settled_(master: Tensor, held: Tensor) -> Tensor:
    """master ← held in elements that differ from their rounded master, because they were written elsewhere."""
    return master.copy_(torch.where(master.to(held.dtype) == held, master, held.to(master.dtype)))


def own_master(state: State, held: Tensor) -> Tensor:
    """The tensor that a dense optimizer modifies for a parameter: its master, made and settled here; or itself.

    Args:
        state: State of the parameter, which holds the master.
        held: This rank's part of the parameter.
    """
    if not is_low(held):
        return held
    state[NAME] = held.float() if NAME not in state else settled_(state[NAME], held)
    master: Tensor = state[NAME]
    return master


def round_into_(held: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Copy masters into their parameters, rounded to nearest even, except if both are the same tensor."""
    pairs = [(p, master) for p, master in zip(held, masters, strict=True) if p is not master]
    if pairs:
        params, rounded = zip(*pairs, strict=True)
        torch._foreach_copy_(params, rounded)


def check_master(where: str, name: str, entry: State, p: Tensor) -> None:
    """Raise ValueError if a parameter's saved state has a master that does not fit.

    Args:
        where: Beginning of the message.
        name: Name of the parameter.
        entry: Its saved state.
        p: The parameter.
    """
    if (master := entry.get(NAME)) is None:
        return
    if not is_low(p):
        raise ValueError(
            f"{where}{name} is float32 here, and was trained there in less, with a float32 master: write the masters "
            'into this model (p.copy_(state["master"]) for each parameter) and take them out of the state'
        )
    if master.dtype != torch.float32:
        raise ValueError(f"{where}the master of {name} is {master.dtype}, expected torch.float32")


class Masters:
    """The masters of some parameters on one device. At first they have the parameters' values.

    If a parameter is written outside of a step, torch's count of writes shows it: see `settle`.

    Args:
        params: The parameters.

    Attributes:
        has_any: Whether there are masters, even if they have no elements.
        flat: float32, all masters one after another, without padding.
        views: The part of flat for each parameter that has a master; None for the others.
    """

    def __init__(self, params: Sequence[Tensor]):
        self._params, self._dtypes = list(params), [p.dtype for p in params]
        sizes = [local(p).numel() if is_low(p) else 0 for p in params]
        device = local(params[0]).device if params else torch.device("cpu")
        self.flat = torch.zeros(sum(sizes), device=device, dtype=torch.float32)
        parts = zip(params, self.flat.split(sizes), strict=True)
        self.views = [part.view(local(p).shape) if is_low(p) else None for p, part in parts]
        self.has_any = any(view is not None for view in self.views)
        self._versions: list[int] | None = None
        self.settle()

    @property
    def local_values(self) -> list[Tensor]:
        """The tensor of each parameter that a step reads and writes: its master, or this rank's part of it."""
        held = (p if type(p) is Parameter else local(p) for p in self._params)
        return [p if view is None else view for p, view in zip(held, self.views, strict=True)]

    def check(self, rank: int, names: Sequence[str]) -> None:
        """Raise RuntimeError if a parameter has another dtype than when the optimizer was made."""
        for p, dtype, name in zip(self._params, self._dtypes, names, strict=True):
            if p.dtype != dtype:
                raise RuntimeError(
                    f"rank {rank}: {name} was {dtype} when the optimizer was made and is {p.dtype} now: its float32 "
                    "master would be missing, or be one too many; cast the model first, then make its optimizer"
                )

    @torch.no_grad()
    def settle(self, *, looks: bool = True) -> None:
        """Take over, element by element, values that were written into parameters since `write_back`.

        An element that still equals its rounded master keeps the master: a value that was swapped out and back loses
        nothing, nor does a checkpoint, whichever of model and optimizer is loaded first.

        Args:
            looks: Whether to look also if torch has counted no write, as for writes through `.data`. Default True.
        """
        if not self.has_any:
            return
        now = [local(p)._version for p in self._params]
        versions = self._versions or [-1] * len(now)
        for p, view, version, seen in zip(self._params, self.views, now, versions, strict=True):
            if view is not None and (looks or version != seen):
                settled_(view, local(p))
        self._versions = now

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """In this block parameters are their masters, and gradients float32, for an optimizer that knows neither."""
        low = [(p, view) for p, view in zip(self._params, self.views, strict=True) if view is not None]
        before = [(p.data, p.grad) for p, _ in low]
        try:
            for (p, view), (_, grad) in zip(low, before, strict=True):
                p.grad = None
                p.data = view
                p.grad = None if grad is None else grad.float()
            yield
        finally:
            for (p, _), (held, grad) in zip(low, before, strict=True):
                p.grad = None
                p.data, p.grad = held, grad

    def load(self, saved: Sequence[Tensor | None]) -> None:
        """Masters ← those of a state. The next `settle` compares them with the parameters' values of that time.

        Args:
            saved: The saved master of each parameter. None: there is none, and the parameter becomes the master.
        """
        for view, master in zip(self.views, saved, strict=True):
            if view is not None and master is None:
                view.fill_(torch.nan)  # equals no parameter, so that `settle` takes the parameter
            elif view is not None:
                view.copy_(master)
        self._versions = None

    @torch.no_grad()
    def write_back(self, seen: Sequence[bool] | None = None) -> None:
        """Parameters ← masters, rounded to nearest even.

        Args:
            seen: Which parameters a step has moved. Default None: all.
        """
        if not self.has_any:
            return
        moved = [True] * len(self._params) if seen is None else seen
        triples = zip(self._params, self.views, moved, strict=True)
        pairs = [(local(p), view) for p, view, has_moved in triples if view is not None and has_moved]
        if pairs:
            params, views = zip(*pairs, strict=True)
            torch._foreach_copy_(params, views)
        self._versions = [local(p)._version for p in self._params]
