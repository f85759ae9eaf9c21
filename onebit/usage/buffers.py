"""Module buffers: each rank updates its own BatchNorm statistics; `sync_buffers` makes them the same on all ranks.

    onebit.sync_buffers(model, optimizer.transport)      # before an evaluation, and before a checkpoint

DistributedDataParallel sends rank 0's buffers to all ranks in every forward pass. Training does not read statistics,
evaluation and checkpoints do: it is enough to make them equal there, and their mean over the ranks covers the batches
of all of them. The mean of other buffers may make no sense: the mean of two unit vectors of spectral norm is shorter
than either, or zero. Those become rank 0's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..agreement.replicas import check_same_lines, differing, make_equal
from ..comm import Transport, check_transport
from ..comm.messages import gather_tensors, gather_texts, sum_in_order
from ..comm.transports.notes import calling
from ..model_parallel import local

_OF_NORMS = ("running_mean", "running_var")


@torch.no_grad()
def sync_buffers(model: nn.Module, transport: Transport) -> None:
    """Make the buffers of a model equal on all ranks: running statistics become their mean, all others rank 0's.

    All ranks call it between two steps. `Engine` does so itself in eval(), eval_batch() and before it writes a
    checkpoint or exports weights.

    Statistics are those of torch's BatchNorm, SyncBatchNorm and InstanceNorm and of their subclasses, and the buffers
    that another module's class names: `averaged_buffers = ("mean",)`. Only buffers that a state_dict contains are
    synchronised: the others are caches, which each rank computes for itself. Equal buffers stay as they are, to the
    bit. The mean is taken in float64, in rank order: the same bits on all ranks. A DTensor's local elements are
    compared with those of the other ranks of the transport.

    Sends 48 bytes to each peer if all are equal; else also 8 bytes for each buffer, and the whole of those that differ.

    Args:
        model: The model, wrapped or not.
        transport: Connection to the other ranks: `optimizer.transport`.

    Raises:
        ValueError: On all ranks, if names, shapes or dtypes of buffers differ.
    """
    with calling("sync_buffers()"):
        sync_tensors(list(persistent_buffers(model)), averaged_buffers(model), transport)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of all buffers that a state_dict contains and that have values: not on the device "meta"."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set and not buffer.is_meta:
                yield name, buffer


def averaged_buffers(model: nn.Module) -> set[str]:
    """Names of the running statistics in a model, for which the mean over ranks is a valid value."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in (
            *(_OF_NORMS if isinstance(module, _NormBase) else ()),
            *getattr(type(module), "averaged_buffers", ()),
        )
    }


def sync_tensors(named: Sequence[tuple[str, Tensor]], averaged: Collection[str], transport: Transport) -> None:
    """`sync_buffers` for these tensors. All ranks.

    Args:
        named: (name, buffer) pairs, the same names on all ranks.
        averaged: Names of the buffers that become their mean, if they are floating-point.
        transport: Connection to the other ranks.
    """
    check_transport(transport, may_change=True)
    device = transport.device  # a buffer in other memory (a cached mask under NCCL) is sent as a copy
    held = [local(buffer).detach() for _, buffer in named]
    lines = [f"{name}: {x.dtype} {tuple(x.shape)}" for (name, _), x in zip(named, held, strict=True)]
    check_same_lines(transport, "the model's buffers", lines, device)
    there = [x.to(device) for x in held]
    unlike = differing(transport, there)
    for k in sorted({k for indices in unlike.values() for k in indices}):
        rows = gather_tensors(transport, there[k])
        if named[k][0] in averaged and rows.is_floating_point():
            held[k].copy_(sum_in_order(rows.double()).div_(transport.world_size))
        else:
            held[k].copy_(rows[0])


@torch.no_grad()
def begin_equal(model: nn.Module, transport: Transport) -> None:
    """Give every rank rank 0's buffers, as training begins with rank 0's parameters. All ranks.

    This includes buffers that no state_dict contains: drawn at random, they would make ranks compute different
    functions. Caches with shapes that differ between ranks are left alone.

    Args:
        model: The model; its buffers are modified.
        transport: Connection to the other ranks.
    """
    check_transport(transport, may_change=True)
    held = {name: local(x).detach() for name, x in model.named_buffers() if not x.is_meta and local(x).numel() > 0}
    lines = {name: f"{name}: {x.dtype} {tuple(x.shape)}" for name, x in held.items()}
    every = [set(text.split("\n")) for text in gather_texts(transport, "\n".join(lines.values()), transport.device)]
    common = [x for name, x in held.items() if all(lines[name] in theirs for theirs in every)]
    there = [x.to(transport.device) for x in common]
    make_equal(transport, there, are_parameters=False)
    for mine, given in zip(common, there, strict=True):
        if mine is not given:
            mine.copy_(given)
