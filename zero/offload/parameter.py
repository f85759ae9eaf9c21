"""A parameter whose values come when a torch function asks for them, and what autograd keeps of it.

`StoredParameter` replaces the class of a model's parameters, the objects stay. `stored_params.py` moves the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...comm import torch_versions

plain = torch._C.DisableTorchFunctionSubclass


class Home(Protocol):
    """What moves the values of parameters."""

    def call(self, used: list[StoredParameter], run: Callable[[], object], func: object) -> object:
        """Run a torch function that uses these parameters, with their values in place."""

    def replace(self, param: StoredParameter, values: Tensor) -> None:
        """Do `param.data = values`."""


class StoredParameter(nn.Parameter):
    """A parameter whose values are in a store: every torch function that takes it brings them to its device."""

    _home: Home

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        with plain():
            if func in _ABOUT:
                return func(*args, **named)
            if func == _SET_DATA:
                args[0]._home.replace(*args)
                return None
            used = list(_parameters_in([*args, *named.values()]))
            return _through([*{id(p._home): p._home for p in used}.values()], used, func, lambda: func(*args, **named))

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied = memo[id(self)]
        assert isinstance(copied, nn.Parameter)
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, {})


def _through(homes: list[Home], used: list[StoredParameter], func: object, run: Callable[[], object]) -> object:
    """Let each home bring its own parameters; there is nearly always only one."""
    if not homes:
        return run()
    first, *rest = homes
    mine = [p for p in used if p._home is first]
    return first.call(mine, lambda: _through(rest, used, func, run), func)


def _parameters_in(values: object) -> Iterator[StoredParameter]:
    if isinstance(values, StoredParameter):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _parameters_in(value)
    elif isinstance(values, dict):
        yield from _parameters_in(list(values.values()))


def _getters(*names: str) -> set[object]:
    return {getattr(Tensor, name).__get__ for name in names}


def _setters(*names: str) -> set[object]:
    return {getattr(getattr(Tensor, name), way) for name in names for way in ("__set__", "__delete__")}


def _methods(*names: str) -> set[object]:
    return {getattr(Tensor, name) for name in names}


_SET_DATA = getattr(Tensor.data, "__set__")  # noqa: B009
_ABOUT = (
    _getters(
        "shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "_version", "ndim",
        "nbytes", "itemsize", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested",
        "is_xpu", "is_mps", "_base", "output_nr", "retains_grad", "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
    | _methods(
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size",
        "is_floating_point", "is_complex", "is_inference", "is_conj", "is_neg", "get_device", "__len__",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "_is_view", "_is_zerotensor",
    )
    | torch_versions.about_names()
    | _setters("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    | {
        torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip
"""Functions that need no values."""

UNSEEN: frozenset[object] = frozenset(
    _getters("data")
    | _methods("detach", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "set_")
    | {torch.detach}
)
"""Functions whose results allow writing to a parameter without changing its version counter."""


class Saved(NamedTuple):
    """What autograd keeps instead of a parameter or a view of it: how to find the values again, and their version."""

    param: StoredParameter
    edition: int
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Saving:
    """Hooks for the tensors that autograd saves: for parameters they keep only where to find them.

    All other tensors go to the hooks that were active before (such as torch.utils.checkpoint's), if there are any.
    """

    def __init__(self, describe: Callable[[Tensor], Saved | None], restore: Callable[[Saved], Tensor]):
        self._describe, self._restore = describe, restore
        torch_versions.watch_hooks()
        self._ours: dict[int, object] = {}

    def into(self, stack: ExitStack) -> None:
        """Activate the hooks until the stack closes, unless they are active already."""
        before = torch_versions.hooks_in_use()
        if torch.is_grad_enabled() and (before is None or getattr(before[0], "saving", None) is not self):
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks(before)))

    def _hooks(self, before: torch_versions.Hooks | None) -> torch_versions.Hooks:
        def pack(x: Tensor) -> object:
            with plain():
                saved = self._describe(x)
                if saved is not None:
                    return saved
                return (x, x._version) if before is None else before[0](x)

        def unpack(kept: Any) -> Tensor:
            with plain():
                if isinstance(kept, Saved):
                    return self._restore(kept)
                if before is not None:
                    return before[1](kept)
                x: Tensor = kept[0]
                if x._version != kept[1]:
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace "
                        f"operation: {list(x.shape)} of {x.dtype} is at version {x._version}, it was saved at {kept[1]}"
                    )
                return x

        pack.saving = self  # type: ignore[attr-defined]
        return pack, unpack


def names_of(model: nn.Module) -> Mapping[Tensor, str]:
    """Every parameter once, by its first name."""
    return {p: name for name, p in model.named_parameters()}
