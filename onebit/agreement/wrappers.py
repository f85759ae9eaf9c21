"""Finds and names other libraries that average gradients: all data-parallel traffic belongs to the optimizer.

DistributedDataParallel leaves no mark on parameters. So gradients are compared in the first steps: if all ranks have
the same bits, a library has averaged them, or all ranks read the same data. Only then are the live wrappers searched.
Lightning's Trainer is searched for among the callers of the step: it may treat each rank as the only one, and give all
of them the same data in another order.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..comm import Transport
from ..comm.messages import raise_on_all_ranks
from ..model_parallel import ModelParallelGroup
from ..usage.marks import gradient_bits

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)

COMPARED_STEPS = 2
NOT_COMPARED = b"\0" * 8


class WrapperWatch:
    """Compares the ranks' gradients in the first steps; if they are the same, looks for a wrapper that averages them.

    Args:
        transport: Between the replicas.
        parts: The ranks that hold the parts of this replica.

    Attributes:
        is_on: Whether gradients are compared in this step: in the first `COMPARED_STEPS`, which the optimizer counts.
    """

    def __init__(self, transport: Transport, parts: ModelParallelGroup):
        self._transport, self._parts, self.is_on = transport, parts, True
        self._is_alike = self._is_warned = self._has_looked = False

    def note(self, digests: Sequence[bytes]) -> None:
        """Note the digests of all ranks' gradients, in rank order."""
        self._is_alike |= are_alike(digests)

    def look(self, params: Iterable[Tensor], *, in_any_case: bool = False) -> None:
        """Refuse a wrapper that averages gradients, and warn of gradients that look averaged. All parts of the model.

        Args:
            params: The parameters that are trained.
            in_any_case: Whether to look also if no gradients were noted that are the same on all ranks. Default False.

        Raises:
            RuntimeError: A wrapper, or a Lightning Trainer, was found.
        """
        if not self._has_looked:
            self._has_looked = True
            refuse_lone_trainer(self._transport, params)
        is_alike, self._is_alike = self._is_alike, False
        if any(flag for (flag,) in self._parts.gather(float(is_alike or in_any_case))):
            self._parts.raise_on_all_ranks(RuntimeError, lambda: refuse_wrapper(self._transport, params))
            if is_alike and not self._is_warned:
                self._is_warned = True
                warn_of_averaging(self._transport)


def gradient_digest(grads_by_bucket: Iterable[Sequence[Tensor | None]]) -> bytes:
    """8 bytes, the same for gradients with the same bits; `NOT_COMPARED` if none differs from zero.

    Args:
        grads_by_bucket: The gradients of each bucket; None for a parameter without one.
    """
    bits = [gradient_bits(grads).cpu() for grads in grads_by_bucket]
    if not any(bool(each.any()) for each in bits):
        return NOT_COMPARED
    return hashlib.blake2b(b"".join(each.numpy().tobytes() for each in bits), digest_size=8).digest()


def are_alike(digests: Sequence[bytes]) -> bool:
    """Whether several ranks have the same gradients, among those that were compared."""
    return len(digests) > 1 and len(set(digests)) == 1 and digests[0] != NOT_COMPARED


def wrapper_of(params: Iterable[Tensor]) -> str:
    """The name of a wrapper that averages the gradients of any of these parameters; "" if none is found.

    A wrapper does not count if a communication hook other than ours replaces its averaging. Searches the referrers of
    the wrapper classes among all live objects: 60 ms per million.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    from torch.nn.parallel import DistributedDataParallel

    kinds, ours = _with_subclasses(DistributedDataParallel), set(params)
    # An object refers to its class. Not gc.get_objects(): that shows tuples which another thread is still making, and
    # its tuple() then raises SystemError.
    for found in gc.get_referrers(*kinds):
        # By type, not isinstance: isinstance would ask proxies for their class, and so load the objects behind them.
        if type(found) in kinds and _averages(found) and any(p in ours for p in found.parameters()):
            return type(found).__name__
    return ""


def _averages(wrapped: DistributedDataParallel) -> bool:
    return all(hook.__name__ == "ddp_hook" for hook, _ in wrapped._comm_hooks)


def refuse_lone_trainer(transport: Transport, params: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a Lightning Trainer trains these parameters as if this rank were the only one.

    Looks at the callers of this step. Sends nothing.
    """
    if transport.world_size == 1:
        return
    ours = set(params)
    for found in _calling_trainers():
        module = found.lightning_module
        if found.world_size == 1 and module is not None and any(p in ours for p in module.parameters()):
            raise RuntimeError(
                f"rank {transport.rank}: Lightning's {type(found.strategy).__name__} takes this rank for the only one, "
                f"and gives the same data to all {transport.world_size}; use Trainer(strategy=OnebitStrategy()) "
                "(onebit.integrations.lightning)"
            )


def _calling_trainers() -> Iterator[Any]:
    """Lightning's Trainers of which this thread is in a method.

    Not by gc.get_objects(): it shows tuples that another thread is still making, and their tuple() raises SystemError.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if str(frame.f_globals.get("__name__")).startswith(("lightning.pytorch.trainer", "pytorch_lightning.trainer")):
            found = frame.f_locals.get("self")
            if type(found).__name__ == "Trainer":
                yield found


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def refuse_wrapper(transport: Transport, params: Iterable[Tensor]) -> None:
    """Raise RuntimeError on all ranks if a wrapper averages these gradients on any. All ranks. Sends 16 bytes."""
    problem, name = None, wrapper_of(params)
    if name:
        problem = (
            f"rank {transport.rank}: {name} averages the gradients of these parameters, in 32 bits each, before the "
            "optimizer can do so in one. Do not wrap the model, and call the model itself (wrapped.module). Where a "
            "framework wraps it, take that framework's class from onebit.integrations (docs/frameworks.md)"
        )
    raise_on_all_ranks(transport, problem, RuntimeError)


def warn_of_averaging(transport: Transport) -> None:
    """Warn, on rank 0, that all ranks have the same gradients, and name the likely causes."""
    if transport.rank == 0:
        log.warning(
            "all %d ranks have the same gradients, to the bit. Either they are averaged before the optimizer does so, "
            "by a framework or an all_reduce of your own, in 32 bits each: remove that. Or all ranks read the same "
            "data: give each its own part (DistributedSampler)",
            transport.world_size,
        )
