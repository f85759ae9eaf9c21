"""What a step asks of a device, counted on the host: fused calls, small operations, messages, and the host's waits.

`counted()` counts what this thread does: a rank of `run_ranks` counts its own. Every tensor counts as one of a device,
but those that a wait has brought to the host, and those that `on_host` names.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onebit.comm import SimTransport, Work, kernels

# No launch: they make or cut tensors, or run on the host alone.
FREE = {
    "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "new_empty", "permute", "reshape", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "_local_scalar_dense",
    "is_same_size", "is_pinned", "unfold",
}  # fmt: skip
_FUSED = (
    "encode",
    "decode",
    "decode_mean",
    "encode_mean",
    "encode_momentum",
    "encode_gradients",
    "apply",
    "local_step",
    "owner_step",
    "step_masters",
    "correct_residual",
    "momentum_sums",
)
_local = threading.local()


@dataclass
class Counts:
    """By name. fused: calls of kernels; small: torch's operations; messages: of the transport; waits: for a device."""

    fused: Counter[str] = field(default_factory=Counter)
    small: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    hosted: list[Tensor] = field(default_factory=list, repr=False)  # held, so that no other takes their place
    is_paused: bool = False

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """fused, small, messages, waits."""
        return self.fused.total(), self.small.total(), self.messages.total(), self.waits.total()

    def is_hosted(self, x: Tensor) -> bool:
        storage = x.untyped_storage().data_ptr()
        return any(storage == host.untyped_storage().data_ptr() for host in self.hosted)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused, before = True, self.is_paused
        try:
            yield
        finally:
            self.is_paused = before


class _Dispatch(TorchDispatchMode):
    """Counts operations, and those that wait: torch.tensor (`lift_fresh`) too, which copies from memory not pinned."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        counts, tensors = self.counts, [x for x in args if isinstance(x, Tensor)]
        result = func(*args, **(kwargs or {}))
        if counts.is_paused or (tensors and counts.is_hosted(tensors[0])):
            return result
        if name in ("lift_fresh", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique"):
            counts.waits[name] += 1
        if name not in FREE:
            counts.small[name] += 1
        return result


def _current() -> Counts | None:
    return getattr(_local, "counts", None)


def _watched(name: str, original: Callable) -> Callable:
    """Tensor.cpu, .tolist, .numpy: a wait, unless the tensor is on the host already. What comes of it is."""

    def watched(self: Tensor, *args: object, **options: object) -> object:
        counts = _current()
        if counts is None or counts.is_paused or counts.is_hosted(self):
            return original(self, *args, **options)
        counts.waits[name] += 1
        with counts.paused():
            if name != "cpu":
                return original(self, *args, **options)
            copy = self.detach().clone()
            counts.hosted.append(copy)
            return copy

    return watched


class CountedTransport(SimTransport):
    """Counts its operations for the rank that counts; what it copies in the network's place is not counted."""

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        return self._counted("all_to_all", lambda: SimTransport.all_to_all(self, out_WB, in_WB))

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        return self._counted("all_gather", lambda: SimTransport.all_gather(self, out_WB, in_B))

    @staticmethod
    def _counted(name: str, launch: Callable[[], Work]) -> Work:
        counts = _current()
        if counts is None:
            return launch()
        counts.messages[name] += not counts.is_paused
        with counts.paused():
            return _Uncounted(launch(), counts)


@dataclass
class _Uncounted:
    work: Work
    counts: Counts

    def wait(self) -> None:
        with self.counts.paused():
            self.work.wait()

    def is_ready(self) -> bool:
        return self.work.is_ready()


class _CountedKernel:
    """A kernel's module: one fused call each, whatever the host's form of it does inside."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> object:
        found = getattr(self._module, name)
        if not name.endswith(_FUSED):
            return found

        def call(*args: object, **options: object) -> object:
            counts = _current()
            if counts is None:
                return found(*args, **options)
            counts.fused[name] += not counts.is_paused
            if any(getattr(each, "sums_KJ2", None) is not None for each in args):
                counts.fused["momentum_sums"] += not counts.is_paused  # a device's are a call of their own
            with counts.paused():
                return found(*args, **options)

        return call


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Kernels and tensors tell the counts of their thread. Around all ranks."""
    functions, kept = kernels._functions, {name: getattr(Tensor, name) for name in ("cpu", "tolist", "numpy")}
    kernels._functions = lambda name, frame: _CountedKernel(functions(name, frame))  # type: ignore[assignment]
    for name, original in kept.items():
        setattr(Tensor, name, _watched(name, original))
    try:
        yield
    finally:
        kernels._functions = functions
        for name, original in kept.items():
            setattr(Tensor, name, original)


@contextlib.contextmanager
def counted(on_host: Sequence[Tensor] = ()) -> Iterator[Counts]:
    """What this thread does in here, within `watching`."""
    counts = Counts(hosted=list(on_host))
    _local.counts = counts
    try:
        with _Dispatch(counts):
            yield counts
    finally:
        del _local.counts
