"""Activation checkpointing whose inputs wait elsewhere: divided over tensor ranks, in host memory, or in a file.

A checkpointed part of a model keeps its inputs alone and computes the rest again in the backward pass (Chen et al.,
arXiv 1604.06174); torch does that. What is here is where these inputs are until then: ZeRO's P_a, each rank of a group
that computes on the same inputs keeps a share of them, and P_a+cpu (Rajbhandari et al., arXiv 1910.02054, section
6.1). Without an engine:

    keep = activations.Keep(place="host")              # or group=..., or place="/nvme/run"
    hidden = activations.checkpoint(layer, hidden, keep=keep)
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..agreement.step_vote import DesyncError

__all__ = ["Keep", "checkpoint", "checkpoint_with", "kept_by_default", "kept_within"]


class Keep:
    """Where the inputs of checkpointed parts are between their forward and their backward pass. Bits do not change.

    Only inputs that a gradient flows into are moved: others, such as masks, are shared by many parts.

    Args:
        group: Ranks that call `checkpoint` on the same inputs, in the same order, forward and backward: each keeps
            1/W of an input and receives the rest in the backward pass, 1/W from each of the others. Default None: each
            rank keeps all.
        place: "device": where they are, the default; "host": torch's `save_on_cpu`, page-locked if they come from a
            GPU; else a folder, in which each process has one file without a name, gone when the process ends.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, place: str = "device"):
        self._group, self._place = group, place
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._file: _File | None = None
        self._differ: Tensor | None = None  # on a GPU: whether sums of a gather differed that nobody has looked at

    def moves(self, tensor: Tensor) -> bool:
        """Whether this input is to wait elsewhere: one that a gradient flows into, and is not in its place already."""
        is_activation = tensor.requires_grad and not tensor.is_leaf and tensor.is_floating_point()
        is_there = self._place == "device" or (self._place == "host" and tensor.device.type == "cpu")
        return is_activation and (self._ranks > 1 or not is_there)

    def hooks(self) -> AbstractContextManager[object]:
        """Return a context in which tensors saved for the backward pass are kept so."""
        if self._differ is not None:  # waits for a GPU once after a backward pass, instead of at each gather
            differ, self._differ = self._differ, None
            if bool(differ):
                raise self._desync()
        if self._place == "device" and self._ranks == 1:
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Kept:
        flat, stride = _in_memory_order(tensor.detach())
        kept = _Kept(tensor.shape, stride, tensor.dtype, tensor.device)
        piece = flat if self._ranks == 1 else _share(flat, dist.get_rank(self._group), self._ranks)
        if self._place == "device":
            kept.piece = piece
        elif self._place == "host":
            kept.piece = _on_host(kept.device).pack_hook(piece)
        else:
            self._file = self._file or _File(self._place)
            kept.piece = self._file.write(piece)
        return kept

    def _unpack(self, kept: _Kept) -> Tensor:
        piece = kept.piece
        if isinstance(piece, _Extent):
            piece = piece.file.read(piece).to(kept.device)
        elif self._place == "host":
            piece = _on_host(kept.device).unpack_hook(piece)
        flat = cast(Tensor, piece)
        if self._ranks > 1:
            flat = self._gather(flat)[: kept.shape.numel() * kept.dtype.itemsize]
        return flat.view(kept.dtype).as_strided(kept.shape, kept.stride)

    def _gather(self, share: Tensor) -> Tensor:
        """The bytes of all ranks' shares. With each comes the sum of its rank's whole tensor."""
        shares = [torch.empty_like(share) for _ in range(self._ranks)]
        dist.all_gather(shares, share, group=self._group)
        sums = torch.stack([each[-_SUM:] for each in shares])
        differ = (sums != sums[0]).any()
        if share.device.type != "cpu":
            self._differ = differ if self._differ is None else self._differ | differ
        elif bool(differ):
            raise self._desync()
        return torch.cat([each[:-_SUM] for each in shares])

    def _desync(self) -> DesyncError:
        return DesyncError(
            f"{_rank()}a checkpointed part has other inputs on other ranks of its group, so that none of them can keep "
            "a share for all; give the ranks the same inputs and the same seeds of dropout, or keep inputs whole: "
            '"partition_activations": false'
        )


@dataclass
class _Kept:
    """A saved tensor: what it is, and what this rank keeps of it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    piece: object = None


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor's elements as they are in memory, and the strides that make it of them. Copies only if it has gaps."""
    stride = torch.empty_like(tensor, device="meta").stride()
    if stride != tensor.stride():  # expanded, or a slice
        tensor = tensor.contiguous()
        stride = tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)), stride


# ---------------------------------------------------------------- divided

_SUM = 8  # bytes after a share


def _share(flat: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's bytes of a tensor, padded to those of the others, and the sum of all its elements' bits."""
    size = flat.element_size()
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    length = -(-flat.numel() // ranks)
    mine = bits[rank * length : (rank + 1) * length].view(torch.uint8)
    share = torch.zeros(length * size + _SUM, dtype=torch.uint8, device=flat.device)
    share[: mine.numel()] = mine
    share[-_SUM:] = bits.sum(dtype=torch.int64).view(1).view(torch.uint8)
    return share


def _on_host(device: torch.device) -> save_on_cpu:
    return save_on_cpu(pin_memory=device.type == "cuda")


# ---------------------------------------------------------------- in a file


class _Extent:
    """A place in a `_File`; it is free again when nothing refers to it."""

    def __init__(self, file: _File, offset: int, nbytes: int):
        self.file, self.offset, self.nbytes = file, offset, nbytes

    def __del__(self) -> None:
        self.file.free(self.offset, self.nbytes)


class _File:
    """A file without a name, for tensors of a few sizes that come and go in every step.

    Writes end in the page cache; the kernel moves them to the disk in the background.
    """

    def __init__(self, folder: str):
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(prefix="onebit-activations-", dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise OSError(
                error.errno, f"{_rank()}the folder for activations, {folder}, cannot be written: {error.strerror}"
            ) from error
        self._folder, self._end = folder, 0
        self._lock = threading.RLock()  # the garbage collector may free an extent while this thread holds it
        self._free: dict[int, list[int]] = defaultdict(list)

    def write(self, flat: Tensor) -> _Extent:
        data = flat.view(torch.uint8).cpu().numpy().data
        with self._lock:
            free = self._free[len(data)]
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + len(data))
        extent, done = _Extent(self, offset, len(data)), 0
        while done < len(data):
            try:
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
            except OSError as error:
                what = "no room for" if error.errno == errno.ENOSPC else "cannot be written with"
                raise OSError(
                    error.errno,
                    f"{_rank()}{self._folder}: {what} {len(data)} more bytes of activations: {error.strerror}; name "
                    "another folder, or checkpoint fewer micro-batches at once",
                ) from error
        return extent

    def read(self, extent: _Extent) -> Tensor:
        found, done = torch.empty(extent.nbytes, dtype=torch.uint8, device="cpu"), 0
        data = found.numpy().data
        while done < extent.nbytes:
            count = os.preadv(self._file.fileno(), [data[done:]], extent.offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"{_rank()}{self._folder}: the file of activations is shorter than it was")
            done += count
        return found

    def free(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._free[nbytes].append(offset)


def _rank() -> str:
    return f"[rank {dist.get_rank()}] " if dist.is_available() and dist.is_initialized() else ""


# ---------------------------------------------------------------- checkpointing

_defaults = [Keep()]  # the last counts: that of the module whose forward pass runs
_calls = 0


def kept_by_default(keep: Keep) -> None:
    """Set where `checkpoint` keeps inputs from here on if it is not told: for this process, all models."""
    _defaults[0] = keep


def kept_within(module: nn.Module, keep: Keep) -> None:
    """Set it for the forward passes of this module alone: another model has other ranks with the same inputs."""
    module.register_forward_pre_hook(lambda *_: _defaults.append(keep))
    module.register_forward_hook(lambda *_: _leave(keep), always_call=True)


def _leave(keep: Keep) -> None:
    if _defaults[-1] is keep and len(_defaults) > 1:
        _defaults.pop()


def checkpoint_calls() -> int:
    """How often `checkpoint` has been called in this process."""
    return _calls


def checkpoint(function: Callable[..., object], *args: object, keep: Keep | None = None, **kwargs: object) -> object:
    """Call function(*args, **kwargs), keep its inputs alone, and compute the rest again in the backward pass.

    torch.utils.checkpoint, non-reentrant; the same bits, dropout included. With a `Keep` of a group all its ranks call
    it, in the same order, and so does their backward pass: it gathers.

    Args:
        function: A part of the model.
        *args: Its inputs: tensors, also within tuples, lists and dicts, and anything else.
        keep: Where inputs wait for the backward pass. Default None: as `kept_by_default` or the configuration's
            "activation_checkpointing" says, else on their device.
        **kwargs: Its named inputs.

    Returns:
        Its outputs.

    Raises:
        DesyncError: Ranks of the group had different inputs. In the backward pass; on a GPU at the next call.
        RuntimeError: The function has modified in place an input of which no copy was kept. In the backward pass: it
            was modified since.
        OSError: The file cannot be written, or its disk is full.
    """
    global _calls
    _calls += 1
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    keep = keep or _defaults[-1]
    hooks = keep.hooks()
    flat, spec = tree_flatten((args, kwargs))
    tensors_at = [k for k, value in enumerate(flat) if isinstance(value, Tensor)]
    # Without hooks torch itself sees that an input was modified in place; of those that stay beside others we do.
    moved = tensors_at if isinstance(hooks, nullcontext) else [k for k in tensors_at if keep.moves(flat[k])]
    versions = {k: flat[k]._version for k in tensors_at if k not in moved and not flat[k].is_inference()}
    before = [(x, x._version) for x in flat if isinstance(x, Tensor) and not x.is_inference() and not keep.moves(x)]

    def run(*tensors: Tensor) -> object:
        if any(flat[k]._version != version for k, version in versions.items()):
            raise RuntimeError(
                f"{_rank()}an input of a checkpointed part was modified in place after its forward pass, so that it "
                "cannot be computed again; write a new tensor instead"
            )
        for k, tensor in zip(moved, tensors, strict=True):
            flat[k] = tensor
        again, named = tree_unflatten(flat, spec)
        for k in moved:
            flat[k] = None  # or the closure would keep what the hooks have moved
        return function(*again, **named)

    tensors = [flat[k] for k in moved]
    with hooks:
        out: object = torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)
    if any(x._version != version for x, version in before) and any(
        isinstance(x, Tensor) and x.requires_grad for x in tree_flatten(out)[0]
    ):
        raise RuntimeError(
            f"{_rank()}a checkpointed part overwrites its input, which could not be computed with again; if it begins "
            "with an operation in place, such as nn.ReLU(inplace=True), pass inplace=False, or begin the part with the "
            "layer before it"
        )
    return out


def checkpoint_with(keep: Keep) -> Callable[..., object]:
    """Return `checkpoint` with this `Keep`, for code that takes such a function and options of torch's."""

    def call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        return checkpoint(function, *args, keep=keep, **kwargs)

    return call
