"""float32 masters of parameters in bfloat16 or float16, in which small updates would be lost.

A step works on `Masters.local_values`, always in float32 where there are masters, and `write_back` rounds them into the
parameters. A float32 parameter is its own master. Rests on `model_parallel.local`; who has buckets keeps one for each,
the dense optimizers one for all of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..model_parallel import local
from ..usage.contract import State

NAME = "master"
"""What the state of a parameter calls its master: `optimizer.state[p]["master"]`."""

_LOW = (torch.bfloat16, torch.float16)


def is_low(p: Tensor) -> bool:
    """Whether this parameter needs a master."""
    return p.dtype in _LOW


def master_of(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    """The float32 master of a parameter: the optimizer's, in the shape of what this rank holds, or what it holds."""
    master: Tensor | None = optimizer.state.get(p, {}).get(NAME)
    return local(p) if master is None else master


def settled_(master: Tensor, held: Tensor) -> Tensor:
    """master ← held in the elements that are not their rounded master any more: someone has written them."""
    return master.copy_(torch.where(master.to(held.dtype) == held, master, held.to(master.dtype)))


def own_master(state: State, held: Tensor) -> Tensor:
    """Where a dense optimizer steps on a parameter: the master in its state, made and settled here; or it itself."""
    if not is_low(held):
        return held
    state[NAME] = held.float() if NAME not in state else settled_(state[NAME], held)
    master: Tensor = state[NAME]
    return master


def round_into_(held: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Parameters ← their masters, where these are others' memory; rounded to nearest even."""
    pairs = [(p, master) for p, master in zip(held, masters, strict=True) if p is not master]
    if pairs:
        params, rounded = zip(*pairs, strict=True)
        torch._foreach_copy_(params, rounded)


def check_master(where: str, name: str, entry: State, p: Tensor) -> None:
    """Raise ValueError where a parameter's saved state has a master that is not this parameter's."""
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
    """Of these parameters, on one device. flat: float32, those of the low ones one after another, without padding.

    views: a part of it for each low parameter, None for the others. They are the parameters at first. Whatever
    is written into a parameter outside of a step is noticed by torch's count of writes: see `settle`.
    """

    def __init__(self, params: Sequence[Tensor]):
        self._params, self._dtypes = list(params), [p.dtype for p in params]
        sizes = [local(p).numel() if is_low(p) else 0 for p in params]
        device = local(params[0]).device if params else torch.device("cpu")
        self.flat = torch.zeros(sum(sizes), device=device, dtype=torch.float32)
        parts = zip(params, self.flat.split(sizes), strict=True)
        self.views = [part.view(local(p).shape) if is_low(p) else None for p, part in parts]
        self._has_any = any(view is not None for view in self.views)
        self._versions: list[int] | None = None
        self.settle()

    def __bool__(self) -> bool:
        """Whether there is any master, maybe of no elements."""
        return self._has_any

    @property
    def local_values(self) -> list[Tensor]:
        """Where a step reads and writes each parameter: its master, or what this rank holds of it."""
        pairs = zip(self._params, self.views, strict=True)
        return [local(p) if view is None else view for p, view in pairs]

    def check(self, rank: int, names: Sequence[str]) -> None:
        """Raise RuntimeError where a parameter has another dtype than when the optimizer was made."""
        for p, dtype, name in zip(self._params, self._dtypes, names, strict=True):
            if p.dtype != dtype:
                raise RuntimeError(
                    f"rank {rank}: {name} was {dtype} when the optimizer was made and is {p.dtype} now: its float32 "
                    "master would be missing, or be one too many; cast the model first, then make its optimizer"
                )

    @torch.no_grad()
    def settle(self, *, looks: bool = True) -> None:
        """Masters take what has been written into parameters since `write_back`, element by element.

        An element that still is its rounded master keeps it: a value that was swapped out and back has lost nothing,
        and so has a checkpoint's, whichever of model and optimizer is loaded first. looks: also where torch has
        counted no write, as through `.data`.
        """
        if not self:
            return
        now = [local(p)._version for p in self._params]
        versions = self._versions or [-1] * len(now)
        for p, view, version, seen in zip(self._params, self.views, now, versions, strict=True):
            if view is not None and (looks or version != seen):
                settled_(view, local(p))
        self._versions = now

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """In here parameters are their masters, and gradients float32: for an optimizer that knows of neither."""
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
        """Masters ← those of a state. None: it has none, and they will be the parameters.

        The next `settle` compares them with the parameters, whatever these are by then.
        """
        for view, master in zip(self.views, saved, strict=True):
            if view is not None and master is None:
                view.fill_(torch.nan)  # is no parameter's master
            elif view is not None:
                view.copy_(master)
        self._versions = None

    @torch.no_grad()
    def write_back(self, seen: Sequence[bool] | None = None) -> None:
        """Parameters ← masters, rounded to nearest even. seen: those that a step has moved; None: all."""
        if not self:
            return
        moved = [True] * len(self._params) if seen is None else seen
        triples = zip(self._params, self.views, moved, strict=True)
        pairs = [(local(p), view) for p, view, has_moved in triples if view is not None and has_moved]
        if pairs:
            params, views = zip(*pairs, strict=True)
            torch._foreach_copy_(params, views)
        self._versions = [local(p)._version for p in self._params]
