"""Every difference between the versions of torch (2.6 and later) that this package meets: this file alone tests them.

Each entry names the first version that no longer needs it ("until 2.9"); once that version is the oldest supported,
delete the entry and call torch directly. A feature that an older torch cannot have calls `require`. Rests on torch, and
imports its rooms when called.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OLDEST, NEWEST = (2, 6), (2, 15)
"""The versions that are tested: docs/versions.md. An older one is refused, with a newer one the doctor says so."""


def _numbers(version: str) -> tuple[int, int]:
    """(2, 6) of "2.6.0+cu124" and of "2.6.0a0+git1234"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


TORCH = _numbers(torch.__version__)
"""Major and minor version of the torch that is installed."""

if TORCH < OLDEST:
    raise ImportError(
        f"onebit needs torch {OLDEST[0]}.{OLDEST[1]} or later, this is {torch.__version__}; "
        f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
    )


def untested() -> list[str]:
    """The torch that is installed, if it is newer than those of the tests."""
    return [f"torch {torch.__version__}"] if TORCH > NEWEST else []


def require(feature: str, *, at_least: tuple[int, int]) -> None:
    """Raise ImportError, which names the feature and both versions, unless torch is at least this version."""
    if at_least > TORCH:
        major, minor = at_least
        raise ImportError(
            f"{feature} needs torch {major}.{minor} or later, this is {torch.__version__}; "
            f"pip install 'torch>={major}.{minor}'"
        )


# -------------------------------------------------------------------------------- collectives


def all_gather_single(out: Tensor, in_: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Launch the all-gather of equal tensors into one. Until 2.13, which renamed it and warns of the old name."""
    gather: Callable[..., Any] = dist.all_gather_single if TORCH >= (2, 13) else dist.all_gather_into_tensor
    return cast("dist.Work", gather(out, in_, group=group, async_op=True))


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> dist.Work:
    """Launch the broadcast of a tensor from a rank of the group, which torch.distributed need not know."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = src, 0, True
    return group.broadcast([x], options)


def gloo_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group of Gloo's beside those that torch.distributed knows; it ends with the last reference to it.

    Its ranks need no group in common. torch has no public call for such a group in any version.
    """
    group, gloo = dist.ProcessGroup(store, rank, world_size), dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, world_size, timeout))
    group._set_default_backend(gloo)
    group._set_group_name(cast("Any", "onebit"))  # torch has a type of its own for names
    return group


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store through which a group's ranks have met. Until 2.9: a group did not offer its store."""
    asked: Any = group
    if TORCH >= (2, 9):
        return cast("dist.Store", asked.get_group_store())
    return dist.distributed_c10d._get_process_group_store(group)


def own_connection(group: dist.ProcessGroup) -> dist.Store:
    """The group's store over a new connection. Until 2.8: stores could not be cloned.

    Older stores do not tell their prefix, so the new one has that of the group's name, which all its ranks know.
    """
    innermost: Any = group_store(group)
    if TORCH >= (2, 8):
        return cast("dist.Store", innermost.clone())
    while isinstance(innermost, dist.PrefixStore):
        innermost = innermost.underlying_store
    same: dist.Store = innermost
    if type(innermost) is dist.TCPStore:
        same = dist.TCPStore(innermost.host, innermost.port, is_master=False, timeout=innermost.timeout)  # type: ignore[attr-defined]
    elif type(innermost) is dist.FileStore:
        same = dist.FileStore(innermost.path, -1)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"onebit/{group.group_name}", same)


def without_first_broadcast() -> Mapping[str, Any]:
    """Options of DistributedDataParallel for replicas that are equal. Until 2.7: it broadcast them all the same."""
    return {"init_sync": False} if TORCH >= (2, 7) else {}


# -------------------------------------------------------------------------------- DTensor, FSDP2, tensor parallelism


def forget_groups(mesh: DeviceMesh) -> None:
    """Drop the references of a mesh to its process groups, which have ended. In early versions it has none.

    DTensor caches what an operation returns with its mesh, and finds it for another mesh of the same layout, too, whose
    groups are others: "Could not resolve the process group". Local.
    """
    from torch.distributed.tensor import DTensor, debug

    getattr(mesh, "_pg_registry", {}).clear()
    forget = getattr(debug, "_clear_sharding_prop_cache", None)
    if forget is None:  # in early versions
        found: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        forget = found.cache.cache_clear
    forget()


def distribute(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any], *, source: int | None) -> Any:
    """The DTensor of a whole tensor that the rank `source` of the mesh holds; None: all ranks hold it, none sends.

    Until 2.7: torch always took the values of the first rank.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if TORCH >= (2, 7):
        return distribute_tensor(whole, mesh, placements, src_data_rank=source)
    if source is not None:
        group = mesh.get_group()
        dist.broadcast(whole, dist.get_global_rank(group, source), group)
    held = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return held.redistribute(mesh, placements)


def full_tensor(x: Any) -> Tensor:
    """A DTensor's elements of all ranks. Until 2.7: torch gathered no complex numbers through Gloo, but pairs."""
    if TORCH >= (2, 7) or not x.dtype.is_complex:
        return cast("Tensor", x.full_tensor())
    from torch.distributed.tensor import DTensor

    whole = torch.empty((*x.shape, 2), device="meta", dtype=torch.float32)
    pairs: Any = DTensor.from_local(
        torch.view_as_real(x.to_local()),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return torch.view_as_complex(pairs.full_tensor())


def without_sending() -> Mapping[str, Any]:
    """Options of parallelize_module if the ranks hold the same values. Until 2.7: it always sent the first rank's."""
    return {"src_data_rank": None} if TORCH >= (2, 7) else {}


def keep_masks_apart() -> None:
    """Give each embedding divided by words its own mask. Until 2.11: the first of a shape kept it for all later ones.

    Those failed an assertion, as their placements differ only in the mask: padding_idx is not part of them. Without
    torch's cache a redistribution takes some microseconds more.
    """
    if TORCH < (2, 11):
        from torch.distributed.tensor import _redistribute

        inner: Any = _redistribute
        inner._gen_transform_infos = inner._gen_transform_infos_non_cached


def styles_of_inputs_and_outputs() -> tuple[type, ...]:
    """The parallel styles that change inputs or outputs and no parameter. Until 2.8: there was none for both."""
    from torch.distributed.tensor import parallel

    both = (parallel.PrepareModuleInputOutput,) if TORCH >= (2, 8) else ()
    return (parallel.PrepareModuleInput, parallel.PrepareModuleOutput, *both)


def require_fsdp2() -> None:
    """Raise ImportError unless FSDP2 works on every device and leaves parameters whole on request. Until 2.7."""
    require("FSDP2, which is ZeRO stage 3,", at_least=(2, 7))


def require_pipelines() -> None:
    """Raise ImportError unless torch's pipelines leave gradients unscaled, and evaluate. Until 2.9."""
    require("A model in pipeline stages", at_least=(2, 9))


def reshard_by_default() -> bool | None:
    """fully_shard's own choice of reshard_after_forward: True, but for the root. Until 2.8: it was called True."""
    return None if TORCH >= (2, 8) else True


def forget_accumulated(fsdp_param: Any) -> None:
    """Drop what FSDP2 keeps apart of a parameter's unreduced gradient. Until 2.15: then it is the gradient itself."""
    if TORCH < (2, 15):
        fsdp_param.unsharded_accumulated_grad = None


def accumulate_all(fsdp_params: Sequence[Any]) -> None:
    """Bring gradients that FSDP2 will reduce together to one dtype. Until 2.15: autograd then makes them of one."""
    if TORCH < (2, 15) and any(p.unsharded_accumulated_grad is not None for p in fsdp_params):
        for p in fsdp_params:
            has_own = hasattr(p, "_unsharded_param") and p.unsharded_param.grad is not None
            if has_own and p.unsharded_accumulated_grad is None:
                p.to_accumulated_grad_if_needed()


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters in a module's FSDP2 state. Until 2.12: there was at most one."""
    if TORCH >= (2, 12):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


# -------------------------------------------------------------------------------- autograd


def has_grad_dtype() -> bool:
    """Whether gradients may have a dtype other than their parameter's. Until 2.10: they could not."""
    return TORCH >= (2, 10)


def grad_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient."""
    x: Any = p
    found: torch.dtype | None = x.grad_dtype if has_grad_dtype() else None
    return p.dtype if found is None else found


def about_names() -> set[object]:
    """The functions that tell names of dimensions, as __torch_function__ gets them. torch 2.15 has none."""
    if not hasattr(Tensor, "has_names"):
        return set()
    named: Any = Tensor
    return {named.names.__get__, named.has_names}


Hooks = tuple[Callable[[Tensor], object], Callable[[Any], Tensor]]


def hooks_in_use() -> Hooks | None:
    """The pack and unpack hooks for saved tensors that are active in this thread."""
    if TORCH >= (2, 8):
        return cast("Hooks | None", torch._C._autograd._top_saved_tensors_default_hooks(False))
    stack = getattr(_hooks, "stack", None)
    return stack[-1] if stack else None


_hooks = threading.local()
_watching = threading.Lock()


def watch_hooks() -> None:
    """Make `hooks_in_use` work for hooks from now on. Until 2.8: torch did not tell which are active."""
    inner: Any = torch._C._autograd
    with _watching:
        if TORCH >= (2, 8) or hasattr(inner._push_saved_tensors_default_hooks, "onebit"):
            return
        push, pop = inner._push_saved_tensors_default_hooks, inner._pop_saved_tensors_default_hooks

        def watched_push(*hooks: Any) -> None:
            push(*hooks)
            _hooks.__dict__.setdefault("stack", []).append(hooks)

        def watched_pop() -> None:
            pop()
            if stack := _hooks.__dict__.get("stack"):  # empty if the hooks were there before
                stack.pop()

        watched_push.onebit = True  # type: ignore[attr-defined]
        inner._push_saved_tensors_default_hooks = watched_push
        inner._pop_saved_tensors_default_hooks = watched_pop


# -------------------------------------------------------------------------------- optimizers


def decouples_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a group's weight decay acts beside the gradient. Until 2.7: AdamW's groups did not tell."""
    if TORCH < (2, 7) and isinstance(optimizer, torch.optim.AdamW):
        return True
    return bool(group.get("decoupled_weight_decay"))


def load_flat_state(model: nn.Module, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any]) -> None:
    """Load what get_optimizer_state_dict gives with flatten_optimizer_state_dict, in place.

    Until 2.7: a flat state needed the entries of tied weights by each of their names, of which torch writes the first;
    and AdamW wrote no decoupled_weight_decay, so that of a checkpoint which lacks it stays the optimizer's.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    own: Mapping[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    whole = {name: x for name, x in own.items() if name.endswith(".decoupled_weight_decay")} | dict(flat)
    # A flat state names a group by its first parameter, so a group without any has none, and is an error to torch.
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        if TORCH >= (2, 7):
            set_optimizer_state_dict(model, optimizer, whole, options=options)
        else:
            set_optimizer_state_dict(model, optimizer, _nested(get_optimizer_state_dict(model, optimizer), whole))
    finally:
        # The dicts stay the same ones: a schedule may set the rates in them, as accelerate's does of an optimizer that
        # it has made another of.
        loaded = iter(optimizer.param_groups)
        for group in groups:
            group.update(next(loaded) if group["params"] else {})
        optimizer.param_groups = groups


def _nested(own: Any, flat: Mapping[str, Any]) -> Any:
    """A nested state with the values of a flat one."""
    state, groups = own["state"], own["param_groups"]
    for group in groups:
        for name in group["params"]:
            state[name] = {key: flat[f"state.{name}.{key}"] for key in state.get(name, ())}
        group |= {key: flat[f"param_groups.{group['params'][0]}.{key}"] for key in group if key != "params"}
    return own


# -------------------------------------------------------------------------------- files


def record_bytes(file: IO[bytes], reader: Any) -> int:
    """The bytes that the records of an archive would take, by the archive's own table. Rewinds neither.

    Until 2.13: torch's reader told no sizes. Python's reads the same table then; a file that the two read differently
    raises ValueError.

    Args:
        file: The archive, at any position.
        reader: torch._C.PyTorchFileReader of it.
    """
    names: list[str] = reader.get_all_records()
    if TORCH >= (2, 13):
        return sum(reader.get_record_size(name) for name in names)
    with zipfile.ZipFile(cast("IO[bytes]", _Bounded(file))) as table:
        entries = table.infolist()
    if sorted(entry.filename.partition("/")[2] for entry in entries) != sorted(names):
        raise ValueError("its table of contents is ambiguous")
    return sum(entry.file_size for entry in entries)


class _Bounded(io.RawIOBase):
    """A part of a file, as torch passes it, whose own view reads past its end and seeks from there the other way."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        file.seek(0, os.SEEK_END)
        self._size = file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        to = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}[whence]
        if to < 0:
            raise OSError("seek before the start of the file")
        self._file.seek(to)
        return to

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self.tell())
        return self._file.read(left if size < 0 else min(size, left))


def load_alone(state: dict[str, Any], reader: Any) -> None:
    """Fill tensors from a checkpoint of torch's, on this rank alone. Until 2.7: ranks could only load together."""
    from torch.distributed.checkpoint import state_dict_loader

    if TORCH >= (2, 7):
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    else:
        state_dict_loader._load_state_dict(state, reader, no_dist=True)


# -------------------------------------------------------------------------------- Triton


_OLDEST_TRITON = (3, 6)
"""The oldest that GPUs have run; it comes with torch 2.11. The interpreters of 3.2 and 3.4 fail at the kernels."""


def why_no_triton() -> str:
    """One sentence: why the Triton that is installed cannot run the kernels. Empty if it can. Does not import it."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a nightly's has another name, and is new
        return ""
    if _numbers(found) >= _OLDEST_TRITON:
        return ""
    major, minor = _OLDEST_TRITON
    return f"the kernels need Triton {major}.{minor} or later, as torch 2.11 brings it; this is Triton {found}"
