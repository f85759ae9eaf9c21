"""Parameters that all ranks hold in parts while a model is built, before there is an engine: `zero.Init`.

    with divided(transport):
        model = Net()             # a rank holds its part of each complete module, and the module being built
    parts = take_parts(model)     # the model is on "meta" from here on, so that it can be sharded
    give_parts(model, parts, transport=grid.world, device=grid.device)

A parameter is divided when its module becomes part of another one, or at the end of the block. A DTensor replaces it,
of which each rank holds a piece of the longest dimension; its values are those of rank 0. Whatever writes to it in
place, as the functions of `nn.init` do, writes to the complete parameter.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ...agreement.replicas import check_same_lines, make_equal
from ...comm import Transport
from ...comm.messages import gather_bytes, gather_texts
from ...model_parallel import gathered
from ..checkpoint.materialize import allocate
from ..checkpoint.reshard import fill
from ..checkpoint.weights import plain

log = logging.getLogger(__name__)

Marks = Callable[[Tensor], Mapping[str, object]]
"""Returns attributes for a divided parameter, which it has until it is complete or taken."""

_MARKS, _CELL, _NUMBER = "divided_marks", "divided_cell", "divided_number"
_numbers = itertools.count()  # of divided parameters, the same on all ranks
_AXIS = "divided"  # the only dimension of the mesh, which no other mesh has

# Names of functions and properties that concern the part. All others see the complete parameter.
_SAME_PART = {"data", "detach", "requires_grad_"}
_NEW_PART = {"to", "type", "cpu", "cuda", "half", "bfloat16", "float", "double", "clone", "contiguous"}
_ABOUT = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "get_device", "is_inference", "is_shared", "is_pinned",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "__repr__",
    "__len__",
}  # fmt: skip
# A reader of the bytes would take a part for the parameter.
_MEMORY = {"data_ptr", "storage", "untyped_storage", "share_memory_"}
_LAYERS = {"linear", "embedding", "conv1d", "conv2d", "conv3d"}  # of nn.functional, for a warning
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}  # of the properties


class _World(NamedTuple):
    """All ranks, what marks a divided parameter, and those that there are, by the whole ones of which they were made.

    A whole parameter that a script keeps is thus the same divided one in each block that uses it: it stays tied.
    """

    transport: Transport
    mesh: DeviceMesh
    marks: Marks
    made: WeakTensorKeyDictionary


_worlds: list[_World] = []  # the last one counts


class Divided(DTensor):
    """A parameter in parts. What computes with it, on all ranks, sees the complete parameter, and may write to it.

    Values that are written are those of rank 0. What is the same on each part, as `p.data`, `p.detach()` or
    `p.to(...)`, is of this class as well, and sends nothing. No gradient flows to it.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, is_property = kwargs or {}, func.__name__ in ("__get__", "__set__", "__delete__")
        name: str = func.__self__.__name__ if is_property else func.__name__
        if name == "data" and func.__name__ == "__set__" and not isinstance(args[1], DTensor):
            made = _divide(args[1], args[0].requires_grad, args[0])
            torch.utils.swap_tensors(args[0], made)
            return None
        if name in _MEMORY:
            raise _of_a_part(args[0], name)
        # torch's own methods of tensors, and functions that write to lists of parts, but not torch._weight_norm.
        is_private = name[0] == "_" and name[:2] != "__" and (hasattr(Tensor, name) or name[-1] == "_")
        is_about = name not in _VIEWS if is_property else name in _ABOUT or is_private
        if not (is_about or name in _SAME_PART | _NEW_PART):
            if name in _LAYERS and torch.is_grad_enabled():
                _warn_of_gradients()
            with torch.no_grad():
                made = func(*tree_map_only(cls, _complete, args), **tree_map_only(cls, _complete, kwargs))
            if _writes(name) and args and isinstance(made, Complete) and made.whole is None and made.part is args[0]:
                return args[0]  # module.weight += 1 assigns it again
            return made
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
        if name in _SAME_PART | _NEW_PART and isinstance(made, DTensor) and made is not args[0]:
            made.__class__ = cls
            made.__dict__.update(args[0].__dict__)
            if name in _NEW_PART:
                made.__dict__[_CELL] = []
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        copy = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        copy.__dict__.update(_worlds[-1].marks(copy))  # which tell it from this one
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _of_a_part(self, "pickling")

    def to_local(self, **named: object) -> Tensor:
        """The parameter itself, as its layer computes with all of it: PEFT takes a layer's sizes from here."""
        return self

    def __get_tensor_shard__(self, index: Any) -> Tensor:  # for torch.distributed.checkpoint
        return as_dtensor(self).to_local()


@functools.cache
def _warn_of_gradients() -> None:
    log.warning(
        "a layer whose parameters zero.Init has divided computes without an engine: no gradient flows to them. Pass "
        "the model to initialize() before training; torch.no_grad() around a forward pass avoids this warning"
    )


def _of_a_part(p: Tensor, what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} of a parameter of shape {tuple(p.shape)} that zero.Init has divided over ranks: this one has a part. "
        "Save the model by its engine, after initialize(); or copy it in zero.GatheredParameters(p), on all ranks"
    )


class Complete(Tensor):
    """The complete values of a divided parameter, or a view of them. What is written to them is written to the parts.

    part: The divided parameter. whole: All of its values, if this is a view; else None.
    """

    part: Tensor
    whole: Complete | None

    @classmethod
    def of(cls, x: Tensor, part: Tensor, whole: Complete | None = None) -> Complete:
        made = x.as_subclass(cls)
        made.part, made.whole = part, whole
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tree_map_only(Divided, _complete, args)
        kwargs = tree_map_only(Divided, _complete, kwargs or {})
        given = args[0] if args else kwargs.get("tensor")  # as the functions of nn.init call it
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
            out = kwargs.get("out")
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, cls):
                    write(x.part, (x if x.whole is None else x.whole).as_subclass(Tensor))
            if out is not None or not isinstance(given, cls):
                return made
            whole = given if given.whole is None else given.whole
            if _writes(func.__name__):
                write(given.part, whole.as_subclass(Tensor))
                return made
            storage = whole.untyped_storage().data_ptr()

            def view(x: Tensor) -> Tensor:
                is_view = x is not given and not isinstance(x, cls) and x.untyped_storage().data_ptr() == storage
                return cls.of(x, given.part, whole) if is_view else x

            return tree_map_only(Tensor, view, made)


def _writes(name: str) -> bool:
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "share_memory_")
    )


def _complete(p: Tensor) -> Complete:
    """The complete values of a divided parameter; the same object while it is in use. All ranks."""
    cell: list[weakref.ref[Complete]] = p.__dict__.setdefault(_CELL, [])
    found = cell[0]() if cell else None
    # One rank may still have them, in garbage or in a script's variable, and another not.
    rows = gather_bytes(_worlds[-1].transport, struct.pack("<Q?", p.__dict__[_NUMBER], found is not None))
    if len({row[:-1] for row in rows}) > 1:
        check_same_order([p])
    if any(row[-1] == 0 for row in rows):
        with torch._C.DisableTorchFunctionSubclass():
            values = gathered(p.detach()).clone()
        found = found if found is not None else Complete.of(values, p)
        cell[:] = [weakref.ref(found)]
    assert found is not None
    return found


def as_dtensor(p: Tensor) -> DTensor:
    """A divided parameter as any DTensor, of which a rank sees its part. The same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return cast(DTensor, p.detach())


def check_same_order(params: Sequence[Tensor]) -> None:
    """Raise ValueError, on all ranks, if ranks would mix up parts of different parameters. All ranks."""
    lines = [f"number {p.__dict__[_NUMBER]}, {p.dtype} {tuple(p.shape)}" for p in params]
    check_same_lines(_worlds[-1].transport, "the parameters of zero.Init that ranks gather", lines)


def is_divided(x: object) -> bool:
    """Whether this is a parameter that `divided` has divided, or what was made of one."""
    return isinstance(x, DTensor) and x.device_mesh.mesh_dim_names == (_AXIS,)


@torch.no_grad()
def write(p: Tensor, values: Tensor, rank: int | None = None) -> None:
    """Give every rank its part of a rank's complete values. All ranks.

    Args:
        p: A divided parameter.
        values: Its complete values.
        rank: The rank. Default None: rank 0, and these are probably the same on all.
    """
    if values.shape != p.shape:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} that zero.Init has divided gets values of shape "
            f"{tuple(values.shape)}; assign a new parameter to the module, or p.data"
        )
    transport, mesh = _worlds[-1].transport, _worlds[-1].mesh
    near = values.detach().to(mesh.device_type).contiguous()
    if rank is None:
        make_equal(transport, [near])
    else:
        transport.broadcast(near.view(-1).view(torch.uint8), rank).wait()
    fill(as_dtensor(p), near)
    found = p.__dict__[_CELL][0]() if p.__dict__.get(_CELL) else None
    if found is not None and found.data_ptr() != near.data_ptr():
        found.as_subclass(Tensor).copy_(near)


# -------------------------------------------------------------------------------- building


@contextmanager
def divided(transport: Transport, marks: Marks = lambda p: {}) -> Iterator[None]:
    """A block in which models are built in parts. All ranks, which build the same.

    All ranks draw rank 0's random numbers in it, so that values are the same; those that are not are sent.

    Args:
        transport: Between all ranks of torch.distributed.
        marks: See `Marks`. Default: none.
    """
    builder = _Builder(transport, marks)
    hooks = (
        register_module_module_registration_hook(lambda parent, name, child: builder.divide(child)),
        register_module_parameter_registration_hook(lambda module, name, p: builder.note(module)),
    )
    try:
        with _draws_of_rank_0(transport):
            yield
    finally:
        for hook in hooks:
            hook.remove()
    for module in builder.undivided():
        builder.divide(module)


def divide(model: nn.Module, transport: Transport, marks: Marks = lambda p: {}) -> None:
    """Divide the parameters of a complete model. All ranks; arguments as of `divided`."""
    _Builder(transport, marks).divide(model)


class _Builder:
    """Divides the parameters of modules."""

    def __init__(self, transport: Transport, marks: Marks):
        if not _worlds or _worlds[-1].transport is not transport:
            device = "cpu" if transport.reaches(torch.device("cpu")) else "cuda"
            mesh = init_device_mesh(device, (transport.world_size,), mesh_dim_names=(_AXIS,))
            _worlds.append(_World(transport, mesh, marks, WeakTensorKeyDictionary()))
        self._transport, self._made = transport, _worlds[-1].made
        self._owners = weakref.WeakKeyDictionary[nn.Module, int]()  # with parameters that may not be divided yet
        self._numbers = itertools.count()

    def note(self, module: nn.Module) -> None:
        """Keep in mind that a module gets a parameter. The ranks number modules in the same order."""
        if module not in self._owners:
            self._owners[module] = next(self._numbers)

    def undivided(self) -> list[nn.Module]:
        """The modules that still have whole parameters and that every rank still has, in the same order. All ranks.

        Others are garbage, which one rank may have collected and another not.
        """
        here = {f"{number} {type(module).__name__}": module for module, number in list(self._owners.items())}
        rows = [set(json.loads(row)) for row in gather_texts(self._transport, json.dumps(list(here)))]
        return [here[key] for key in sorted(set.intersection(*rows), key=lambda key: int(key.split()[0]))]

    def divide(self, root: nn.Module | None) -> None:
        """Divide what is still whole in this module. Tied parameters stay tied."""
        if root is None:
            return
        found = [  # by name: a whole parameter is kept no longer than its module keeps it
            (module, name, f"{type(module).__name__}.{name}: {p.dtype} {tuple(p.shape)}")
            for module in root.modules()
            for name, p in module._parameters.items()
            if p is not None and (may_divide(p) or p in self._made)
        ]
        if found:
            lines = [line for _, _, line in found]
            check_same_lines(self._transport, "parameters that zero.Init divides", lines)
        for module, name, _ in found:
            whole: Any = module._parameters[name]
            if whole not in self._made:
                self._made[whole] = _divide(whole, whole.requires_grad, whole)
            setattr(module, name, self._made[whole])
        for module in root.modules():
            self._owners.pop(module, None)


@torch.no_grad()
def _divide(values: Tensor, requires_grad: bool, given: Tensor) -> nn.Parameter:
    """A divided parameter with rank 0's values and the attributes of the given one. All ranks."""
    transport, mesh, marks, _ = _worlds[-1]
    near = values.detach().as_subclass(Tensor).to(mesh.device_type).contiguous()
    make_equal(transport, [near])
    dim = max(range(near.dim()), key=lambda dim: near.shape[dim])
    pieces = near.chunk(transport.world_size, dim)
    mine = pieces[transport.rank].clone() if transport.rank < len(pieces) else near.narrow(dim, 0, 0).clone()
    part = DTensor.from_local(
        mine.contiguous(), mesh, [Shard(dim)], run_check=False, shape=near.shape, stride=near.stride()
    )
    made = nn.Parameter(part.to(values.device), requires_grad=requires_grad)
    own = marks(made)
    made.__dict__.update(given.__dict__)
    made.__dict__.update(own, **{_NUMBER: next(_numbers), _CELL: [], _MARKS: (_MARKS, _CELL, _NUMBER, *own)})
    made.__class__ = Divided  # type: ignore[assignment]
    return made


def may_divide(p: Tensor) -> bool:
    """Whether a parameter is plain, has values, and a dimension to divide."""
    is_plain = type(p) in (nn.Parameter, Complete) and not p.is_meta
    return is_plain and p.is_floating_point() and p.dim() > 0 and p.numel() > 0


@contextmanager
def _draws_of_rank_0(transport: Transport) -> Iterator[None]:
    """Let torch's random numbers on the host be rank 0's. Afterwards a rank with other ones has its own again."""
    own = torch.get_rng_state()
    first = own.clone().to(_worlds[-1].mesh.device_type)
    transport.broadcast(first, 0).wait()
    torch.set_rng_state(first.cpu())
    try:
        yield
    finally:
        if not torch.equal(own, first.cpu()):
            torch.set_rng_state(own)


# -------------------------------------------------------------------------------- into an engine


def has_parts(model: nn.Module) -> bool:
    """Whether parameters of this model are divided."""
    return any(is_divided(p) for p in model.parameters())


@torch.no_grad()
def complete(model: nn.Module) -> None:
    """Give every rank the complete parameters, in place. All ranks. Raises ValueError if their names differ."""
    names = [name for name, p in model.named_parameters() if is_divided(p)]
    check_same_lines(_worlds[-1].transport, "the model's parameters", names)
    _replace(model, lambda p: gathered(p.detach()).clone())


def take_parts(model: nn.Module) -> dict[str, Tensor]:
    """Leave the divided parameters without values (device "meta"), and return their parts by name.

    Sends nothing. The model can then be sharded in any way, and `give_parts` gives it the values.
    """
    names = {id(p): plain(name) for name, p in reversed(list(model.named_parameters())) if is_divided(p)}
    parts = {names[id(p)]: p.detach() for p in model.parameters() if is_divided(p)}
    _replace(model, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    return parts


def _replace(model: nn.Module, values: Callable[[Tensor], Tensor]) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and is_divided(p):
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(values(p), requires_grad=p.requires_grad)
                    marks = p.__dict__.get(_MARKS, ())
                    made[id(p)].__dict__.update({key: x for key, x in p.__dict__.items() if key not in marks})
                setattr(module, name, made[id(p)])


@torch.no_grad()
def give_parts(model: nn.Module, parts: dict[str, Tensor], *, transport: Transport, device: torch.device) -> nn.Module:
    """Give a model that was sharded without values its part of each parameter. All ranks. Empties `parts`.

    A rank holds one complete parameter at a time, beside its parts of before and after.

    Args:
        model: The sharded model.
        parts: From `take_parts`.
        transport: Without effect.
        device: Device of the values.
    """
    allocate(model, device)
    named = {plain(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    for name in list(parts):
        fill(named[name], gathered(parts.pop(name)))
    return model
