"""Parameters of which ranks hold parts, complete or this rank's part: `GatheredParameters`, `safe_get_*`, `safe_set_*`.

    with zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
        if rank == 0:
            engine.module.head.weight.zero_()
    print(zero.utils.safe_get_full_fp32_param(p).norm())

All ranks that hold the parameter call all functions except `safe_get_local_*`, in the same order, as they communicate.
They use the engine that trains it, which `initialize` registers here; before that, and without an engine, parameters
are whole.
"""

from __future__ import annotations

import copy
import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ...comm import SimTransport, torch_versions
from ...comm.messages import call_of_all, gather_bytes, gather_texts
from ...layout.masters import master_of
from ...model_parallel import gathered, like, local
from ..checkpoint.reshard import fill
from ..config.compat import contents_of
from ..initializing import ConfigLike
from ..parallel import divided as parts
from . import stand_in
from .comm import world
from .engine import DeepSpeedEngine


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of `p.ds_status`.

    Parameters that are divided over ranks (stage 3, tensor slices) have `ds_id`, `ds_status`, `ds_shape`, `ds_numel`
    and `partition_numel()`, which is how scripts recognise them. Unlike DeepSpeed's, their `p.shape` and `p.numel()`
    are those of the complete parameter.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_engines = weakref.WeakKeyDictionary["DeepSpeedEngine", None]()  # in the same order on all ranks
_ids = itertools.count()

# In a block of GatheredParameters these still act on the shard, which is what the engine trains.
_OF_SHARDS = {
    *(getattr(Tensor.grad, act) for act in ("__get__", "__set__", "__delete__")),
    getattr(Tensor.requires_grad, "__set__"),  # noqa: B009  # mypy knows no __set__ of a property
    Tensor.requires_grad_,
    Tensor.__hash__,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}


class _Gathered(DTensor):
    """A shard in a block of `GatheredParameters`: operations take the complete parameter, `ds_whole`, in its place.

    A shard takes this class for the length of the block, so that variables from before the block are complete as well.
    It adds no slots, without which Python would not assign `__class__`.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        if func in _OF_SHARDS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(cls, _whole_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    # Of DTensor in Python, or of nn.Parameter, which has others than Tensor: these do not reach the function above.

    def __repr__(self, **named: Any) -> str:  # type: ignore[override]
        return repr(_whole_of(self))

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        return copy.deepcopy(_whole_of(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _whole_of(self).__reduce_ex__(protocol)

    def full_tensor(self, **named: object) -> Tensor:
        """Return the complete parameter."""
        return _whole_of(self)


def _whole_of(p: Tensor) -> nn.Parameter:
    """The complete parameter of a shard in a block, a copy of its own until the block ends."""
    return cast(nn.Parameter, p.__dict__["ds_whole"])


def make_known(engine: DeepSpeedEngine) -> None:
    """Register an engine, so that its parameters are found, and mark those that are divided over ranks.

    The registry does not keep the engine alive.
    """
    _engines[engine] = None
    if stand_in.is_installed():
        # TRL asks parameters for their mark in a forward pass, where they are whole; shards have another of their own.
        nn.Parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for p in engine.module.parameters():
        if isinstance(p, DTensor):
            p.__dict__.update(_marks(p))


def is_zero_param(parameter: object) -> bool:
    """Whether ranks hold parts of a parameter: it has a `ds_id`.

    Args:
        parameter: A parameter, or anything else.
    """
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


class _Held(NamedTuple):
    """A parameter of an engine's module, the engine that trains it, and its name there.

    p: as it is in the module between steps, i.e. a shard at stage 3. shard: the optimizer's parameter for it.
    """

    p: nn.Parameter
    engine: DeepSpeedEngine
    name: str
    shard: Tensor


def _find(given: Tensor) -> _Held | None:
    """The parameter with its engine; None: it belongs to no engine."""
    if parts.is_divided(given):
        return None
    for engine in _engines:
        p = engine.sharding.resident(given)
        engine.sharding.release()
        for name, other in engine.module.named_parameters(remove_duplicate=False):
            if other is p:
                return _Held(other, engine, name, engine.sharding.shard_of(other))
    return None


def _held(given: Tensor) -> _Held:
    found = _find(given)
    if found is None:
        raise ValueError(
            f"a tensor of shape {tuple(given.shape)} is a parameter of no engine's module; take it from "
            "engine.module.named_parameters() after initialize()"
        )
    return found


# -------------------------------------------------------------------------------- building and gathering


def Init(
    module: nn.Module | None = None,
    data_parallel_group: object = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: ConfigLike | None = None,
    config: ConfigLike | None = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: object = None,
) -> AbstractContextManager[object]:
    """A block in which models are built in parts, for stage 3: no rank ever holds a complete model. All ranks.

    A parameter is divided over all ranks when its module becomes part of another one, or at the end of the block; its
    values are rank 0's. From then on `p.shape` is still that of the complete parameter, functions that write in place
    (those of `nn.init`) write to the complete parameter on all ranks, and `GatheredParameters` shows it. `initialize`
    then shards the model as its configuration says. It calls `init_distributed`, as DeepSpeed's does.

    Sends 8 bytes per parameter tensor and 32 per module from each rank to each; all values only if ranks have built
    different ones.

    Args:
        module: A complete model, which is divided at once. Default None.
        data_parallel_group: Without effect: all ranks divide it.
        mem_efficient_linear: Without effect.
        remote_device: "meta": build without values, for `initialize(weights=...)`. Default None.
        pin_memory: Without effect.
        config_dict_or_path: The configuration of `initialize`; nothing is divided if its stage is not 3. Default None.
        config: The same, by its older name.
        enabled: False: nothing of this. Default True.
        dtype: Without effect: the model keeps its own until `initialize`.
        mpu: Without effect.

    Raises:
        ValueError: On all ranks: their models have other parameters, or in another order.
    """
    if not enabled:
        return nullcontext()
    if remote_device == "meta":
        return torch.device("meta")
    transport = world()
    given = config_dict_or_path if config is None else config
    if transport.world_size == 1 or not _shards_parameters(given):
        return nullcontext()
    if module is not None:
        parts.divide(module, transport, _marks)
    return _Blocks(partial(parts.divided, transport, _marks))


class _Blocks(AbstractContextManager[None]):
    """Makes a new block each time it is entered, also within itself."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        block = self._make()
        block.__enter__()
        self._entered.append(block)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _shards_parameters(config: ConfigLike | None) -> bool:
    """Whether a configuration has stage 3, or there is none."""
    return config is None or (contents_of(config).get("zero_optimization") or {}).get("stage") == 3


def _marks(p: Tensor) -> dict[str, object]:
    """How scripts recognise a parameter that is divided."""
    return {
        "ds_id": next(_ids),
        "ds_status": ZeroParamStatus.NOT_AVAILABLE,
        "ds_shape": p.shape,
        "ds_numel": p.numel(),
        "partition_numel": partial(int, local(parts.as_dtensor(p)).numel()),  # copied and pickled with p
    }


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Does nothing: what a block of stage 3 computes with is gathered with the block.

    Args:
        module: The module that uses the parameter.
        parameter: A parameter of another module.
    """


@contextmanager
def GatheredParameters(
    params: Tensor | Iterable[Tensor | None],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[list[Tensor]]:
    """In this block parameters are complete, float32 masters. Yields them, in order.

    All ranks that hold them. Whichever variable refers to a parameter, operations on it take the complete values: `p`,
    `p.data`, `engine.module.head.weight`. Its `grad` is still that of the shard.

    Args:
        params: Parameters of an engine's module, or of a model that `Init` divides; others are whole already. None
            stands for none, as the bias that a layer lacks. All ranks give the same, in one order or as a set.
        modifier_rank: After the block, all ranks take the values of this rank. Default None: values that are written to
            gathered shards are lost.
        fwd_module: Without effect.
        enabled: False: yield the parameters unchanged. Default True.

    Raises:
        ValueError: modifier_rank is not a rank, or the model is a pipeline; params is a set whose order is unknown; or
            ranks give divided parameters of a model without an engine in different orders, on all ranks.
    """
    given: list[Tensor] = [params] if isinstance(params, Tensor) else [p for p in params if p is not None]
    if not enabled or not given:
        yield given
        return
    if isinstance(params, Set):  # which has tensors in the order of addresses, another one on each rank
        given.sort(key=_place)
        if modifier_rank is not None and _ranks() > 1 and len(set(map(_place, given))) < len(given):
            raise ValueError(
                "GatheredParameters got a set with parameters that no engine has, each whole: ranks have them in "
                "different orders, and modifier_rank would mix them up; give a list in place of the set"
            )
    found = [_find(p) for p in given]
    engines = list(dict.fromkeys(held.engine for held in found if held is not None))
    if modifier_rank is not None:
        _check_is_rank(modifier_rank, engines)
        for engine in engines:
            _check_can_modify(engine)
            engine.synchronise()
    given = [p if held is None else held.p for p, held in zip(given, found, strict=True)]
    shown = _gather(given, found)
    try:
        yield given
        whole = [_whole_of(p) if isinstance(p, _Gathered) else p for p in given]
    finally:
        for p in shown:
            p.__class__ = parts.Divided if parts.is_divided(p) else DTensor
            p.__dict__["ds_status"] = ZeroParamStatus.NOT_AVAILABLE
            del p.__dict__["ds_whole"]
    if modifier_rank is not None:
        with torch.no_grad():
            for p, held, values in zip(given, found, whole, strict=True):
                _take_from(modifier_rank, p, held, values)
        for engine in engines:
            engine.adopt_weights()


def _place(p: Tensor) -> tuple[int, int, str]:
    """The same order on all ranks."""
    held = _find(p)
    engine, name = (-1, "") if held is None else (list(_engines).index(held.engine), held.name)
    return p.__dict__.get("ds_id", -1), engine, name


def _check_can_modify(engine: DeepSpeedEngine) -> None:
    if engine.pipeline is not None:
        raise ValueError(
            "modifier_rank in a pipeline: other stages do not hold these layers; change the weights of this stage in "
            "the same way on all its ranks, with modifier_rank=None"
        )


def _check_is_rank(rank: int, engines: Sequence[DeepSpeedEngine]) -> None:
    """Raise ValueError if these engines, or without one torch.distributed, have no such rank."""
    ranks = min([engine.world_size for engine in engines], default=_ranks())
    if ranks and not 0 <= rank < ranks:
        raise ValueError(f"modifier_rank {rank} is no rank of {ranks}")


def _ranks() -> int:
    """The number of ranks of torch.distributed; 0 if it is not running."""
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if running else 0


def _gather(params: Sequence[Tensor], found: Sequence[_Held | None]) -> list[Tensor]:
    """Complete the parts among these parameters, and return them. The ranks that hold parts of any meet first.

    Those of a block around this one are complete already.
    """
    divided = {
        p: held
        for p, held in zip(params, found, strict=True)
        if (held or parts.is_divided(p)) and isinstance(p, DTensor) and not isinstance(p, _Gathered)
    }
    if in_parts := [p for p, held in divided.items() if held is None]:
        parts.check_same_order(in_parts)
    group = next((held.engine.grid.model_parallel_group for held in divided.values() if held), None)
    with call_of_all(SimTransport() if group is None else group.transport, "GatheredParameters()"):
        whole = [nn.Parameter(gathered(p).detach().clone(), requires_grad=p.requires_grad) for p in divided]
    for p, full in zip(divided, whole, strict=True):
        p.__dict__.update(ds_whole=full, ds_status=ZeroParamStatus.AVAILABLE)
        p.__class__ = _Gathered
    return list(divided)


def _take_from(rank: int, p: Tensor, held: _Held | None, full: Tensor) -> None:
    """Send the values of one rank to all, and write each rank's part."""
    sent = full.detach().contiguous()
    if held is not None:
        held.engine.grid.world.broadcast(sent, rank).wait()
        _write(held.p, sent)
    elif parts.is_divided(p):
        parts.write(p, sent, rank)
    elif _ranks():
        torch.distributed.broadcast(sent, rank)
        full.detach().copy_(sent)


def _write(p: Tensor, full: Tensor) -> None:
    """Write this rank's part of a complete value into its parameter, moment or gradient."""
    with torch.no_grad():
        fill(p, full.reshape(p.shape))


# -------------------------------------------------------------------------------- one parameter, whole


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """The complete float32 master of a parameter, a copy. All ranks that hold it.

    Args:
        param: A parameter of an engine's module.

    Raises:
        ValueError: It belongs to no engine.
        RuntimeError: Masters are divided over nodes.
    """
    held = _held(param)
    _refuse_divided(held, "the float32 masters are divided over their owners")
    return _full(held, like(held.shard, master_of(held.engine.optimizer, held.shard)), "param").detach().float().clone()


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set a parameter and its master to a complete value. All ranks that hold it, with the same value.

    Args:
        param: A parameter of an engine's module.
        value: The complete value, in the parameter's shape.

    Raises:
        ValueError: It belongs to no engine, or value has another shape. The latter on all ranks if on one.
    """
    held = _held(param)
    _raise_together(held, _misfit(held, value))
    held.engine.synchronise()
    _write(held.shard, value)
    with torch.no_grad():
        mine = master_of(held.engine.optimizer, held.shard)
        fill(held.shard, value.reshape(held.shard.shape), mine)
    held.engine.sharding.gather()
    held.engine.adopt_weights()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The complete mean gradient over all ranks, float32, without loss scale. All ranks, between backward and step().

    It is sent in float32 for this call, because a one-bit optimizer averages momentum instead.

    Args:
        param: A parameter of an engine's module.

    Returns:
        The gradient; None if no rank has one: before backward, after step(), and if backward frees it (stage 2 across
        nodes).

    Raises:
        ValueError: It belongs to no engine.
    """
    held = _held(param)
    engine, shard = held.engine, held.shard
    is_here = shard.grad is not None or held.p.grad is not None or engine.has_gradients
    if b"\1" not in gather_bytes(engine.grid.world, bytes([is_here])):
        return None
    engine.sharding.reduce(is_last=True)
    grad = shard.grad
    if b"\1" not in gather_bytes(engine.grid.world, bytes([grad is not None])):
        return None
    part = (torch.zeros_like(local(shard)) if grad is None else local(grad).detach()).float().contiguous().clone()
    if part.numel():
        engine.grid.transport.all_reduce(part).wait()
    mean = like(shard, part).div_(engine.grid.transport.world_size * engine.fp16_scale.value)
    return _full(held, mean, "grad")


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set a parameter's gradient to a complete value. All ranks, between backward and step(), with the same value.

    If the gradient has been sent already, it is sent once more. Ranks whose loss does not use the parameter get one.

    Args:
        param: A parameter of an engine's module.
        value: The complete gradient, without loss scale.

    Raises:
        ValueError: It belongs to no engine, value has another shape, or no rank has a gradient. The latter two on all
            ranks.
    """
    held = _held(param)
    _raise_together(held, _misfit(held, value))
    if held.engine.has_gradients:
        held.engine.sharding.reduce(is_last=True)
    given = list(dict.fromkeys((held.shard, held.p)))  # stage 1 sends the gradient of p once more in step()
    here = bytes(x.grad is not None for x in given)
    for transport in (held.engine.grid.transports["shard"], held.engine.grid.transport):
        here = bytes(max(column) for column in zip(*gather_bytes(transport, here), strict=True))
    if not here[0]:
        raise _no_gradient(held)
    scaled = value * held.engine.fp16_scale.value
    for x, is_anywhere in zip(given, here, strict=True):
        if is_anywhere:
            if x.grad is None:  # the loss of another rank uses it
                x.grad = torch.zeros_like(x, dtype=torch_versions.grad_dtype(x))
            _write(x.grad, scaled)


def safe_update_full_grad_vectorized(
    param_list: Sequence[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace the complete gradients of several parameters. All ranks, between backward and step().

    Parameters without a gradient on any rank are left alone.

    Args:
        param_list: Parameters of an engine's module.
        update_func: Called with a complete mean gradient, float32, without loss scale, and its parameter; returns the
            new one, the same on all ranks.

    Raises:
        ValueError: As of `safe_set_full_grad`.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A complete tensor of the optimizer's state of a parameter, float32, a copy. All ranks that hold it.

    Args:
        param: A parameter of an engine's module.
        optim_state_key: Name of the tensor: "exp_avg", "exp_avg_sq".

    Returns:
        The tensor; None if the parameter is frozen and has no state.

    Raises:
        ValueError: The parameter belongs to no engine.
        KeyError: There is no tensor of that name, e.g. because a one-bit optimizer packs its momentum after the
            warm-up. The message lists the names that exist.
        RuntimeError: State is divided over nodes.
    """
    held = _held(param)
    _refuse_divided(held, "moments are divided over their owners")
    if _is_without_state(held):
        return None
    return _full(held, like(held.shard, _state(held, optim_state_key)), "optimizer_state").float().clone()


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a tensor of a dense optimizer's state to a complete value. All ranks that hold it, with the same value.

    Args:
        param: A parameter of an engine's module.
        value: The complete value, in the parameter's shape.
        optim_state_key: Name of the tensor: "exp_avg", "exp_avg_sq".

    Raises:
        ValueError: The parameter belongs to no engine, or value has another shape.
        KeyError: There is no tensor of that name.
        RuntimeError: The optimizer is not dense: its state belongs together with the residuals of all ranks.
    """
    held = _held(param)
    _refuse_packed(held)
    _check(_misfit(held, value))
    _write(like(held.shard, _state(held, optim_state_key)), value)


# -------------------------------------------------------------------------------- one parameter, this rank's part


def safe_get_local_fp32_param(param: Tensor) -> Tensor:
    """This rank's elements of a parameter, float32, a copy. Sends nothing.

    Args:
        param: A parameter of an engine's module.

    Raises:
        ValueError: It belongs to no engine.
    """
    return local(_held(param).shard).detach().float().clone()


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's gradient of its elements, float32, not averaged over replicas, with loss scale. Sends nothing.

    Args:
        param: A parameter of an engine's module.

    Returns:
        The gradient, a copy; None if there is none. At stages 1 and 2 it exists after `safe_get_full_grad`.

    Raises:
        ValueError: It belongs to no engine.
    """
    grad = _held(param).shard.grad
    return None if grad is None else local(grad).detach().float().clone()


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's elements of a tensor of the optimizer's state, float32, a copy. Sends nothing.

    Args:
        param: A parameter of an engine's module.
        optim_state_key: Name of the tensor: "exp_avg", "exp_avg_sq".

    Returns:
        The elements; None if the parameter is frozen and has no state.

    Raises:
        ValueError: The parameter belongs to no engine.
        KeyError: There is no tensor of that name.
    """
    held = _held(param)
    return None if _is_without_state(held) else local(_state(held, optim_state_key)).detach().float().clone()


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's elements of a parameter and of its master, at stage 3. All ranks that hold it, each its own part.

    Ranks that hold the same elements, i.e. those of other replicas, set the same values.

    Args:
        param: A parameter of an engine's module.
        value: This rank's elements, in the shape that `safe_get_local_fp32_param` returns.

    Raises:
        ValueError: It belongs to no engine, value has another shape, or ranks hold the parameter whole. The latter two
            on all ranks if on one.
    """
    held = _held(param)
    _raise_together(held, _misfit_of_part(held, value))
    held.engine.synchronise()
    with torch.no_grad():
        local(held.shard).copy_(value)
        master_of(held.engine.optimizer, held.shard).copy_(value)
    held.engine.adopt_weights()


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set this rank's gradient of its elements, at stage 3, between backward and step(). Sends nothing.

    Args:
        param: A parameter of an engine's module.
        value: As `safe_get_local_grad` returns it: not averaged over replicas, with loss scale.

    Raises:
        ValueError: It belongs to no engine, value has another shape, ranks hold the parameter whole, or this rank has
            no gradient.
    """
    held = _held(param)
    _check(_misfit_of_part(held, value))
    if held.shard.grad is None:
        raise _no_gradient(held)
    with torch.no_grad():
        local(held.shard.grad).copy_(value)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of a tensor of a dense optimizer's state, at stage 3. Sends nothing.

    Ranks that hold the same elements, i.e. those of other replicas, set the same values.

    Args:
        param: A parameter of an engine's module.
        value: This rank's elements, in the shape that `safe_get_local_optimizer_state` returns.
        optim_state_key: Name of the tensor: "exp_avg", "exp_avg_sq".

    Raises:
        ValueError: The parameter belongs to no engine, value has another shape, or ranks hold the parameter whole.
        KeyError: There is no tensor of that name.
        RuntimeError: The optimizer is not dense: its state belongs together with the residuals of all ranks.
    """
    held = _held(param)
    _refuse_packed(held)
    _check(_misfit_of_part(held, value))
    with torch.no_grad():
        local(_state(held, optim_state_key)).copy_(value)


def _misfit_of_part(held: _Held, value: Tensor) -> str | None:
    if held.p is not held.shard or not isinstance(held.p, DTensor):
        return (
            f"{held.name}: below stage 3 ranks hold parameters whole, and safe_set_local_* is for parts; use "
            "safe_set_full_*"
        )
    if value.shape != local(held.shard).shape:
        return (
            f"rank {held.engine.global_rank}: this rank's part of {held.name} has shape "
            f"{tuple(local(held.shard).shape)}, got a value of {tuple(value.shape)}"
        )
    return None


def _misfit(held: _Held, value: Tensor) -> str | None:
    if value.shape == held.p.shape:
        return None
    rank = held.engine.global_rank
    return f"rank {rank}: {held.name} has shape {tuple(held.p.shape)}, got a value of {tuple(value.shape)}"


def _check(problem: str | None) -> None:
    if problem:
        raise ValueError(problem)


def _raise_together(held: _Held, problem: str | None) -> None:
    """Raise on all ranks that hold the parameter if one of them has a problem."""
    grid = held.engine.grid
    for transport in (grid.model_parallel_group.transport, grid.transport):
        problem = next(filter(None, gather_texts(transport, problem or "")), None)
    _check(problem)


def _is_without_state(held: _Held) -> bool:
    return not held.p.requires_grad and not held.engine.optimizer.state.get(held.shard)


def _state(held: _Held, key: str) -> Tensor:
    state: dict[str, Any] = held.engine.optimizer.state.get(held.shard, {})
    known = [name for name, x in state.items() if isinstance(x, Tensor) and x.dim() > 0]
    if key not in known:
        none = "nothing before the first step" if held.p.requires_grad else "nothing of a frozen parameter"
        raise KeyError(
            f"{type(held.engine.optimizer).__name__} has no {key!r} of {held.name} now; it has "
            f"{', '.join(known) or none}"
        )
    found: Tensor = state[key]
    return found


def _no_gradient(held: _Held) -> ValueError:
    return ValueError(
        f"rank {held.engine.global_rank}: {held.name} has no gradient; call this between engine.backward(loss) of a "
        "step's last micro-batch and engine.step()"
    )


def _refuse_packed(held: _Held) -> None:
    if not held.engine.form.has_plain_state:
        raise RuntimeError(
            f"the state of {type(held.engine.optimizer).__name__} belongs together with the residuals of all ranks; "
            "only engine.load_checkpoint can set it"
        )


def _refuse_divided(held: _Held, what: str) -> None:
    if held.engine.form.divides_state:
        raise RuntimeError(
            f'in the form "{held.engine.form.name}" {what}; save_checkpoint writes them, and '
            "engine.module_state_dict() gives the replica's weights"
        )


def _full(held: _Held, x: Tensor, what: str) -> Tensor:
    if not hasattr(x, "full_tensor"):
        return x
    with call_of_all(held.engine.grid.model_parallel_group.transport, f"safe_get_full_{what}()"):
        return gathered(x).reshape(held.p.shape)
