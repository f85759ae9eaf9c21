"""What torch.optim and its users expect of every optimizer: checks of arguments and groups, closures, states, copies.

Each rank runs these checks alone: no function here sends anything.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypedDict

import numpy
import torch
from torch import Tensor, nn

from ..comm import Transport
from .graphs import Optimizer

Group: TypeAlias = dict[str, Any]
"""A param group."""
State: TypeAlias = dict[str, Any]
"""The result of state_dict(), or a part of it."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Adam's state of a parameter, as torch.optim names it.
ADAM_STATE = ("exp_avg", "exp_avg_sq")
# Arguments of torch.optim's optimizers that we do not support, and why.
_NO_FORM = {
    "amsgrad": "a running maximum of the variance has no one-bit form",
    "maximize": "negate the loss instead",
    "capturable": "a step decides on the host and waits for the network, which no CUDA graph records",
    "differentiable": "what comes back from the network has no derivative",
}
# Arguments that choose how torch runs the same mathematics: any value is accepted.
_WITHOUT_EFFECT = ("foreach", "fused")


class TorchOptions(TypedDict, total=False):
    """torch.optim.AdamW's other arguments, so that a script's can stay as they are.

    foreach, fused: how torch runs the same mathematics; without effect.
    amsgrad, maximize, capturable, differentiable: no such form exists; only False is accepted.
    """

    amsgrad: bool
    maximize: bool
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


class SharedOptions(TorchOptions, total=False):
    """Keyword arguments of both families, beside those of `TorchOptions`.

    max_grad_norm: clip by the norm of the mean gradient (0: off).
    transport: connection to the other ranks. Default `onebit.comm.init()`.
    bucket_cap_mb: float32 MiB per bucket at most, see `layout.flat.partition`. None: 16 in host memory, 64 on a GPU.
    check_replicas_every: steps, taken or skipped, between votes on the bits that replicas have in common (0: never).
    max_consecutive_skips: this many skipped steps in a row are an error (0: never); see `agreement/skips.py`.
    """

    max_grad_norm: float
    transport: Transport | None
    bucket_cap_mb: float | None
    check_replicas_every: int
    max_consecutive_skips: int


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """The result of a step's closure, evaluated once with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# ---------------------------------------------------------------- arguments and groups


def check_arguments(name: str, given: Mapping[str, object]) -> None:
    """Check the further keyword arguments of an optimizer.

    Args:
        name: Name of the optimizer.
        given: The arguments.

    Raises:
        TypeError: The optimizer does not have such an argument.
        ValueError: The argument asks for a form of the optimizer that does not exist here.
    """
    for key in given:
        if key not in _NO_FORM and key not in _WITHOUT_EFFECT:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
    _check_forms(name, given)


def listed_parameters(name: str, params: object) -> list[Any]:
    """The parameters or groups that an optimizer was given, as a list for torch.

    Args:
        name: Name of the optimizer, for messages.
        params: What the user passed.

    Raises:
        TypeError: It is no iterable of parameters or groups; the message names the remedy.
        ValueError: It is empty, or a group has no "params".
    """
    if isinstance(params, nn.Module):
        raise TypeError(f"{name} takes parameters, got a {type(params).__name__}: pass model.parameters()")
    if isinstance(params, Mapping):
        raise TypeError(
            f"{name} takes parameters or groups, got a {type(params).__name__}: pass its values, or [group]"
        )
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"{name} takes an iterable of parameters or groups, got {type(params).__name__}: pass a list")
    listed = list(params)
    if not listed:
        raise ValueError(
            f"{name} got no parameters; a generator such as model.parameters() gives them once: make a list of it "
            "where it is used twice"
        )
    for k, each in enumerate(listed):
        if isinstance(each, dict) and "params" not in each:
            raise ValueError(f'{name}: group {k} has no "params", only {", ".join(map(str, each))}')
        for one in (each, each.get("params") if isinstance(each, dict) else None):
            if isinstance(one, nn.Module):
                raise TypeError(
                    f"{name} takes parameters, got a {type(one).__name__} (number {k}): pass its .parameters()"
                )
    return listed


def check_group(where: str, group: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError if a param group has an option that is not supported, or out of its range.

    Args:
        where: Beginning of the message.
        group: The param group.
    """
    _check_forms(where, group)
    check_options(where, group)


def check_options(where: str, group: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError if a param group's hyper-parameter is not a number, or out of its range.

    Args:
        where: Beginning of the message.
        group: The param group.
    """
    numbers = ["lr", "weight_decay", *(["eps"] if "eps" in group else [])]  # Lion divides by nothing
    for key in numbers:
        check_number(where, key, group[key])
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"{where}: betas must be two numbers, got {betas!r}")
    for beta in betas:
        check_number(where, "betas", beta)
        if float(beta) >= 1.0:
            raise ValueError(f"{where}: betas must be in [0, 1), got {betas}")
    for key, value in (*((key, group[key]) for key in numbers[1:]), *(("betas", beta) for beta in betas)):
        if not isinstance(value, int | float):
            raise TypeError(
                f"{where}: {key} must be a Python number, got {value!r}: only lr may be a tensor; pass its .item()"
            )


def eps_of(group: Mapping[str, Any]) -> float:
    """A group's eps as denominators use it: at least 2⁻⁶³, the square of which is float32's smallest normal number.

    So an element that has seen no gradient, or only gradients that eight bits have rounded to 0, moves by 0/D = 0; with
    eps=0 it would move by 0/0. Compared with the root of any variance that is a normal number, 2⁻⁶³ is negligible.
    """
    return max(float(group["eps"]), 2.0**-63)


def check_number(where: str, key: str, value: object) -> None:
    """Raise as `check_is_number` does, and ValueError unless the value is finite and at least 0.

    Args:
        where: Beginning of the message.
        key: Name of the value.
        value: The value.
    """
    if not 0.0 <= check_is_number(where, key, value) < math.inf:
        raise ValueError(f"{where}: {key} must not be negative, infinite or nan, got {value}")


def check_is_number(where: str, key: str, value: object) -> float:
    """The value as a float. Raises TypeError unless it is a number, or a tensor of one element.

    Args:
        where: Beginning of the message.
        key: Name of the value.
        value: The value.
    """
    if not isinstance(value, numbers.Real) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(f"{where}: {key} must be a number, got {value!r}")
    return float(value)


def check_is_switch(where: str, key: str, value: object) -> None:
    """Raise TypeError unless the value is True or False, NumPy's as well, or 1 or 0: "no" would count as True.

    Args:
        where: Beginning of the message.
        key: Name of the value.
        value: The value.
    """
    if not isinstance(value, int | numpy.bool_) or value not in (0, 1):
        raise TypeError(f"{where}: {key} must be True or False, got {value!r}")


def _check_forms(where: str, options: Mapping[str, object]) -> None:
    for key, reason in _NO_FORM.items():
        if options.get(key):
            raise ValueError(f"{where}: {key}={options[key]!r} is not supported ({reason}); leave {key}=False")


def check_parameters(rank: int, named: Iterable[tuple[Tensor, str]]) -> None:
    """Raise an error at the first parameter that cannot be trained.

    One with requires_grad=False may have any dtype: quantised weights under adapters (QLoRA) are uint8.

    Args:
        rank: This rank, for messages.
        named: (parameter, name) pairs.

    Raises:
        TypeError: A trained parameter is not float32, bfloat16 or float16.
        ValueError: A parameter comes twice, or belongs to FSDP1, which averages gradients itself and has other elements
            on every rank.
    """
    seen: dict[Tensor, str] = {}
    for p, name in named:
        if p in seen:
            raise ValueError(f"rank {rank}: {name} is also {seen[p]}: the same tensor; pass each parameter once")
        if getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"rank {rank}: {name} belongs to FullyShardedDataParallel (FSDP1), which averages gradients itself; "
                "shard the model with FSDP2 (onebit.zero.initialize, or onebit.zero.fsdp.shard, and "
                "model_parallel_group=)"
            )
        if p.requires_grad and p.dtype not in _DTYPES:
            remedy = "train torch.view_as_real of it" if p.is_complex() else "cast it first: model.float()"
            raise TypeError(f"rank {rank}: {name} is {p.dtype}; onebit trains float32, bfloat16 and float16: {remedy}")
        seen[p] = name


# ---------------------------------------------------------------- states and copies


def load_checked(optimizer: torch.optim.Optimizer, state_dict: State, check: Callable[[State], None]) -> State:
    """Load a state as torch.optim.Optimizer.load_state_dict does, which also casts it.

    Args:
        optimizer: The optimizer.
        state_dict: The state.
        check: Raises an error if the state, after the user's hooks, does not fit. Nothing has changed then.

    Returns:
        The state after the user's hooks, not cast.
    """
    checked: list[State] = []

    def check_last(_: torch.optim.Optimizer, state: State) -> None:
        check(state)
        checked.append(state)

    last_hook = optimizer.register_load_state_dict_pre_hook(check_last)
    try:
        Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        last_hook.remove()
    return checked[0]


def check_saved_groups(where: str, saved: list[Group], groups: list[Group]) -> None:
    """Raise ValueError if a state's groups do not fit: other sizes, another optimizer's, or other mathematics.

    Args:
        where: Beginning of the message.
        saved: Groups of the state.
        groups: Groups of this optimizer.
    """
    sizes, expected = ([len(group["params"]) for group in one] for one in (saved, groups))
    if sizes != expected:
        raise ValueError(f"{where}it has groups of {sizes} parameters, this optimizer of {expected}")
    for g, group in enumerate(saved):
        names = [key for key in ("lr", "betas", "eps", "weight_decay") if key in groups[g]]
        if missing := [key for key in names if key not in group]:
            raise ValueError(f"{where}its group {g} has no {missing[0]}: it is not of Adam's family")
        _check_forms(f"{where}its group {g}", group)
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError(
                f"{where}its group {g} has weight_decay={group['weight_decay']} as a term of the gradient; here it "
                "would act beside it, as in AdamW. Set it to 0 there, or train with torch.optim.Adam"
            )


def check_identity(where: str, record: State, identity: Mapping[str, object], numels: list[int]) -> None:
    """Raise ValueError if a record belongs to another rank, or to other buckets.

    Args:
        where: Beginning of the message.
        record: The record.
        identity: Entries that must be the same, with their values here.
        numels: Elements of each bucket here.
    """
    for key, value in identity.items():
        if record[key] != value:
            raise ValueError(
                f"{where}{key} is {record[key]} there and {value} here; each rank loads its own, or all ranks load "
                "those of all ranks with load_state_dicts"
            )
    if (there := [saved["numel"] for saved in record["buckets"]]) != numels:
        raise ValueError(
            f"{where}its buckets hold {there} elements, these {numels}; construct with the same groups, shapes and "
            "bucket_cap_mb"
        )


def check_adam_entry(where: str, name: str, entry: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raise ValueError if a parameter's saved state is neither empty nor Adam's for a parameter of this shape.

    Args:
        where: Beginning of the message.
        name: Name of the parameter.
        entry: Its saved state.
        shape: Its shape.
    """
    if entry and (missing := [key for key in ("step", *ADAM_STATE) if key not in entry]):
        raise ValueError(
            f"{where}{name} has {', '.join(sorted(entry))} there and no {missing[0]}: it is not Adam's. If it is of an "
            'optimizer of onebit, its part "onebit" is missing, as torch.distributed.checkpoint.state_dict leaves it '
            "out: save each rank's optimizer.state_dict()"
        )
    for key in ADAM_STATE if entry else ():
        if entry[key].shape != shape:
            raise ValueError(f"{where}{key} of {name} has shape {tuple(entry[key].shape)}, expected {tuple(shape)}")


def refuse_copy(optimizer: torch.optim.Optimizer) -> TypeError:
    """The error for copy.deepcopy and pickle: hooks on parameters and connections cannot be copied."""
    name = type(optimizer).__name__
    return TypeError(
        f"{name} can be neither copied nor pickled: it holds connections to the other ranks and hooks on its "
        "parameters. Save optimizer.state_dict(); for a twin construct another on the copied parameters, on all ranks, "
        "and give that to its load_state_dict"
    )
