"""Gives values to a model that was built without any (device "meta"): each rank allocates and reads only its part.

    with torch.device("meta"):
        model = Net(config)
    fsdp.shard(model, grid, stage=3, dtype=torch.bfloat16)     # or not
    materialize(model, "folder-of-safetensors", transport=grid.world)

`initialize(model=model, weights=...)` calls it between sharding and the optimizer. A rank's memory holds its shards and
one slice of a file; for initial values (`RESET`), one complete module. Only errors are sent.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...checkpoint.files import CheckpointError
from ...comm import SimTransport, Transport
from ...comm.messages import raise_on_all_ranks
from ...model_parallel import local
from .reshard import fill
from .weight_files import Outline, open_weights
from .weights import plain, set_extra_states

M = TypeVar("M", bound=nn.Module)

RESET = "reset_parameters"
"""Value of `weights` for initial values: each module draws its own, by its `reset_parameters`."""

_DRAW = ("reset_parameters", "_reset_parameters")


def is_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer of the model has no values yet."""
    return any(x.is_meta for x in (*model.parameters(), *model.buffers()))


def to_device(model: M, device: torch.device) -> M:
    """model.to(device), in place, for all tensors that have values."""
    if is_meta(model):
        model._apply(lambda x: x if x.is_meta else x.to(device))  # type: ignore[no-untyped-call]
        return model
    return model.to(device)


@torch.no_grad()
def materialize(
    model: nn.Module,
    weights: str | os.PathLike[str],
    *,
    transport: Transport | None = None,
    device: torch.device | str | None = None,
    tag: str | None = None,
    seed: int = 0,
    is_stage: bool = False,
) -> nn.Module:
    """Give a model its values, in place, and return it. All ranks.

    The model may be plain, sharded by FSDP2, or cut by a tensor plan. Each rank reads the files itself. Parameters that
    have values already are overwritten. Floating-point dtypes are converted. Buffers that no file contains are computed
    by their module's `reset_buffers()`, or by `reset_parameters()` if it has no parameters.

    Args:
        model: The model, on device "meta" or not.
        weights: A folder of safetensors files (with Hugging Face's index, if there is one), such a file, or a folder of
            an engine's checkpoints; or "reset_parameters": initial values, for one seed the same in every layout.
        transport: Connection between all ranks. Default None: one rank.
        device: Device of tensors that are on "meta". Default None: the transport's.
        tag: Checkpoint in an engine's folder. Default None: the latest.
        seed: Seed of initial values. Default 0.
        is_stage: Whether the files may contain other layers, too. Default False.

    Raises:
        ValueError: Names, shapes or kinds of dtypes differ, or a buffer's values cannot be computed. On all ranks;
            nothing has changed.
        CheckpointError: Files cannot be read. On all ranks.
    """
    transport = SimTransport() if transport is None else transport
    files, problem = None, _unknown(model)
    try:
        if problem is None and weights != RESET:
            files = open_weights(weights, tag)
            problem = _difference(weights, files.outlines, model, is_stage=is_stage)
        elif problem is None:
            problem = _undrawn(model)
    except CheckpointError as error:
        problem = str(error)
    problem = None if problem is None else f"rank {transport.rank}: {problem}"
    raise_on_all_ranks(transport, problem, ValueError)
    recomputed = [module for module in model.modules() if _is_recomputed(module, also_saved=files is None)]
    allocate(model, torch.device(device) if device is not None else getattr(transport, "device", torch.device("cpu")))
    for module in recomputed:
        if (way := _recomputing(model, module)) is not None:  # if None, its reset_parameters() does both
            way()
    if files is None:
        _draw(model, seed)
        return model
    problem = None
    found: dict[str, Tensor] = {}
    try:
        for names, x in _saved(model):
            files.copy_to(next(name for name in names if name in files.outlines), x)
            found.update((plain(name), x) for name in names)
        set_extra_states(model, found)
    except CheckpointError as error:
        problem = f"rank {transport.rank}: {error}"
    raise_on_all_ranks(transport, problem, CheckpointError)
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory, without values, for tensors on "meta"; for a sharded parameter, this rank's shard. In place.

    Plain parameters stay the same objects, so an optimizer's groups and tied modules keep their references.
    """
    for p in list(model.parameters()):
        if p.is_meta and not hasattr(p, "to_local"):
            made = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, made)
    made_buffers: dict[int, Tensor] = {}
    for module in model.modules():
        for name, x in module._buffers.items():
            if x is not None and x.is_meta:
                module._buffers[name] = made_buffers.setdefault(id(x), torch.empty_like(x, device=device))
    if any(p.is_meta for p in model.parameters()):
        for part in getattr(model, "parts", (model,)):
            part._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)


# -------------------------------------------------------------------------------- checks


def _saved(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """The tensors that files contain: (names, the first one first; tensor); tied ones once."""
    places: dict[int, tuple[list[str], Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor):
            places.setdefault(id(x), ([], x))[0].append(name)
    yield from places.values()


def _difference(weights: object, there: Mapping[str, Outline], model: nn.Module, *, is_stage: bool) -> str | None:
    known = set()
    for names, x in _saved(model):
        known.update(names)
        if (name := next((name for name in names if name in there), None)) is None:
            near = next((other for other in there if other.endswith(f".{names[0]}") or names[0].endswith(other)), None)
            hint = "" if near is None else f"; it has {near}: build the model whose names these are"
            return f"{weights} has no {names[0]}, which the model has{hint}"
        found = there[name]
        if found.shape != tuple(x.shape):
            return f"{weights}: {name} has shape {found.shape}, the model's {tuple(x.shape)}"
        if found.dtype != x.dtype and not (found.dtype.is_floating_point and x.dtype.is_floating_point):
            dtypes = f"{name} is {found.dtype}, the model's {x.dtype}"
            return f"{weights}: {dtypes}; only floating-point dtypes are converted"
    if not is_stage and (strange := sorted(there.keys() - known)):
        return (
            f"{weights} has {strange[0]} and {len(strange) - 1} more, which the model does not; build the model of "
            "these files"
        )
    return None


def _unsaved(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's own buffers that no file contains."""
    names = module._non_persistent_buffers_set
    return [(name, x) for name, x in module._buffers.items() if name in names and x is not None]


def _is_recomputed(module: nn.Module, *, also_saved: bool) -> bool:
    own = [x for x in module._buffers.values() if x is not None] if also_saved else [x for _, x in _unsaved(module)]
    return any(x.is_meta for x in own)


def _recomputing(root: nn.Module, module: nn.Module) -> Callable[[], object] | None:
    """The function that computes a module's own buffers; None: there is none.

    Its `reset_buffers()`; its `reset_parameters()` if it has no parameters; or `_init_weights` of transformers' models.
    """
    if hasattr(module, "reset_buffers"):
        return module.reset_buffers  # type: ignore[return-value]
    if any(True for _ in module.parameters()):
        return None
    if hasattr(module, "reset_parameters"):
        return module.reset_parameters  # type: ignore[return-value]
    own: Any = root
    if hasattr(module, "original_inv_freq") and hasattr(root, "_init_weights"):
        return lambda: own._init_weights(module)
    return None


def _unknown(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        missing = [key for key, x in _unsaved(module) if x.is_meta]
        if missing and _recomputing(model, module) is None:
            return (
                f"{name}.{missing[0]} is a buffer without values, and no file contains it (persistent=False): give "
                f"{type(module).__name__} a reset_buffers() that computes it, or build it on a device"
            )
        plain = next((key for key, x in vars(module).items() if isinstance(x, Tensor) and x.is_meta), None)
        if plain is not None:
            return (
                f"{name}.{plain} is a tensor without values that is neither a parameter nor a buffer: register it as a "
                "buffer (register_buffer), or build it on a device"
            )
    return None


# -------------------------------------------------------------------------------- initial values


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


def _drawing(module: nn.Module) -> Callable[[], object] | None:
    return next((getattr(module, name) for name in _DRAW if hasattr(module, name)), None)


def _undrawn(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if _own(module) and _drawing(module) is None:
            return (
                f"{name or 'the model'} ({type(module).__name__}) has parameters and no reset_parameters(); give it "
                "one, or pass a folder as weights="
            )
        empty = [key for key, x in module._buffers.items() if x is not None and x.is_meta]
        # Only a module with parameters is drawn, by a function that is there by now.
        if empty and not _own(module) and _recomputing(model, module) is None:
            return (
                f"{name}.{empty[0]} is a buffer without values: give {type(module).__name__} a reset_buffers() that "
                "computes it, build it on a device, or pass a folder as weights="
            )
    return None


def _draw(model: nn.Module, seed: int) -> None:
    """Draw each module's initial values completely, seeded by its name, and copy the slices that are held here."""
    done: set[int] = set()
    for name, module in model.named_modules():
        own = _own(module)
        if not own:
            continue
        whole = {key: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=local(p).device)) for key, p in own}
        devices = [p.device for p in whole.values() if p.device.type == "cuda"]
        try:
            module._parameters.update(whole)
            with torch.random.fork_rng(devices=devices[:1]):
                torch.manual_seed(seed + zlib.crc32(name.encode()))
                way = _drawing(module)
                assert way is not None  # checked by `_undrawn`
                way()
        finally:
            module._parameters.update(dict(own))
        for key, p in own:
            if id(p) not in done:
                fill(p, whole[key])
                done.add(id(p))
