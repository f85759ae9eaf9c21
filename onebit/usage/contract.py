"""What torch.optim and its users expect of an optimizer, once for all: arguments, groups, closures, states, copies.

Checks at the edge, each of one rank alone: no function here sends anything.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from ..comm import Transport

Group: TypeAlias = dict[str, Any]
"""A param group."""
State: TypeAlias = dict[str, Any]
"""What a state_dict gives, or a part of it."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Adam's state of a parameter, as torch.optim names it.
ADAM_STATE = ("exp_avg", "exp_avg_sq")
# Arguments of torch.optim's that ask for other mathematics or circumstances, and why there is no such form.
_NO_FORM = {
    "amsgrad": "a running maximum of the variance has no one-bit form",
    "maximize": "negate the loss instead",
    "capturable": "a step decides on the host and waits for the network, which no CUDA graph records",
    "differentiable": "what comes back from the network has no derivative",
}
# How torch runs the same mathematics: any value will do.
_WITHOUT_EFFECT = ("foreach", "fused")


class TorchOptions(TypedDict, total=False):
    """torch.optim.AdamW's other arguments, so that a script's can stay as they are.

    foreach, fused: how torch runs the same mathematics; without effect. amsgrad, maximize, capturable, differentiable:
    no such form: False.
    """

    amsgrad: bool
    maximize: bool
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


class SharedOptions(TorchOptions, total=False):
    """Keyword arguments of both families, beside those of `TorchOptions`.

    max_grad_norm: clip by the norm of the mean gradient (0: off). transport: default `onebit.comm.init()`.
    bucket_cap_mb: float32 MiB per bucket at most; see `layout.flat.partition`. check_replicas_every: steps, taken or
    skipped, between votes on the bits of what replicas have in common (0: never).
    max_consecutive_skips: this many skipped steps in a row are an error (0: never); see `agreement/skips.py`.
    """

    max_grad_norm: float
    transport: Transport | None
    bucket_cap_mb: float
    check_replicas_every: int
    max_consecutive_skips: int


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What the closure of a step gives, evaluated once with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# ---------------------------------------------------------------- arguments and groups


def check_arguments(name: str, given: Mapping[str, object]) -> None:
    """Raise TypeError at an argument that optimizer `name` does not have, ValueError at one that has no form here."""
    for key in given:
        if key not in _NO_FORM and key not in _WITHOUT_EFFECT:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
    _check_forms(name, given)


def listed_parameters(name: str, params: object) -> list[Any]:
    """What optimizer `name` was given to train, as torch takes it. Raises TypeError or ValueError with the remedy."""
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
    """Raise TypeError or ValueError where a parameter group's option is none of Adam's, or out of its range."""
    _check_forms(where, group)
    check_options(where, group)


def check_options(where: str, group: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError where a parameter group's hyper-parameter is no number, or out of its range."""
    for key in ("lr", "eps", "weight_decay"):
        check_number(where, key, group[key])
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"{where}: betas must be two numbers, got {betas!r}")
    for beta in betas:
        check_number(where, "betas", beta)
        if float(beta) >= 1.0:
            raise ValueError(f"{where}: betas must lie in [0, 1), got {betas}")
    for key, value in (("eps", group["eps"]), ("weight_decay", group["weight_decay"]), *(("betas", b) for b in betas)):
        if isinstance(value, Tensor):
            raise TypeError(
                f"{where}: {key} must be a number, got {value!r}: only lr may be a tensor; pass its .item()"
            )


def eps_of(group: Mapping[str, Any]) -> float:
    """A group's eps as denominators take it: 2⁻⁶³ at least, whose square is float32's smallest normal number.

    So where nothing has been seen, as where eight bits have rounded a gradient to 0, a move is 0/D = 0; with eps=0 it
    would be 0/0. Beside the root of any variance that is a normal number, 2⁻⁶³ is nothing.
    """
    return max(float(group["eps"]), 2.0**-63)


def check_number(where: str, key: str, value: object) -> None:
    """Raise as `check_is_number`; ValueError unless it is finite and at least 0."""
    if not 0.0 <= check_is_number(where, key, value) < math.inf:
        raise ValueError(f"{where}: {key} must not be negative, infinite or nan, got {value}")


def check_is_number(where: str, key: str, value: object) -> float:
    """The number. Raises TypeError unless it is one, or a tensor that holds one."""
    if not isinstance(value, numbers.Real) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(f"{where}: {key} must be a number, got {value!r}")
    return float(value)


def check_is_switch(where: str, key: str, value: object) -> None:
    """Raise TypeError unless it is True or False, or 1 or 0: "no" would count as True."""
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{where}: {key} must be True or False, got {value!r}")


def _check_forms(where: str, options: Mapping[str, object]) -> None:
    for key, reason in _NO_FORM.items():
        if options.get(key):
            raise ValueError(f"{where}: {key}={options[key]!r} is not supported ({reason}); leave {key}=False")


def check_parameters(rank: int, named: Iterable[tuple[Tensor, str]]) -> None:
    """Raise TypeError at a parameter that is trained in a dtype we do not train, ValueError at others that do not do.

    These come twice, or are FSDP1's, which averages gradients itself and has other elements on every rank. One that is
    not trained may have any dtype: quantised weights under adapters (QLoRA) are uint8.
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
    """As torch.optim.Optimizer.load_state_dict, which also casts; the state after the user's hooks, not cast.

    check: raises, before anything has changed, where that state does not fit.
    """
    checked: list[State] = []

    def check_last(_: torch.optim.Optimizer, state: State) -> None:
        check(state)
        checked.append(state)

    last_hook = optimizer.register_load_state_dict_pre_hook(check_last)
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        last_hook.remove()
    return checked[0]


def check_saved_groups(where: str, saved: list[Group], groups: list[Group]) -> None:
    """Raise ValueError where a state's groups are not these: other sizes, another optimizer's, other mathematics."""
    sizes, expected = ([len(group["params"]) for group in one] for one in (saved, groups))
    if sizes != expected:
        raise ValueError(f"{where}it has groups of {sizes} parameters, this optimizer of {expected}")
    for g, group in enumerate(saved):
        if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
            raise ValueError(f"{where}its group {g} has no {missing[0]}: it is not of Adam's family")
        _check_forms(f"{where}its group {g}", group)
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError(
                f"{where}its group {g} has weight_decay={group['weight_decay']} as a term of the gradient; here it "
                "would act beside it, as in AdamW. Set it to 0 there, or train with torch.optim.Adam"
            )


def check_identity(where: str, record: State, identity: Mapping[str, object], numels: list[int]) -> None:
    """Raise ValueError where a record is another rank's, or of other buckets. numels: the elements of those here."""
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
    """Raise ValueError where a parameter's saved state is neither empty nor Adam's of a parameter of this shape."""
    if entry and (missing := [key for key in ("step", *ADAM_STATE) if key not in entry]):
        raise ValueError(f"{where}{name} has {', '.join(sorted(entry))} there and no {missing[0]}: it is not Adam's")
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
