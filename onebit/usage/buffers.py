"""Module buffers, such as BatchNorm's running statistics: each rank moves its own; `sync_buffers` makes them equal.

    onebit.sync_buffers(model, optimizer.transport)      # before an evaluation, and before a checkpoint

DistributedDataParallel sends rank 0's buffers to all ranks in every forward pass. Training does not read statistics,
evaluation and checkpoints do: it is enough to make them equal there, and their mean over the ranks knows the batches of
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..agreement.replicas import check_same_lines, differing
from ..comm import Transport, check_transport
from ..comm.messages import gather_tensors, sum_in_order
from ..model_parallel import local


@torch.no_grad()
def sync_buffers(model: nn.Module, transport: Transport) -> None:
    """Make the buffers of a model equal on all ranks: floating-point ones their mean, others those of rank 0.

    All ranks, between two steps; `Engine` does it by itself in eval(), eval_batch() and before it writes a checkpoint
    or exports weights. Only buffers that a state_dict holds: the others are caches, which each rank computes for
    itself. What is equal stays as it is, to the bit. The mean is taken in float64, in rank order: the same bits on all
    ranks. A DTensor's local elements are compared with those that other ranks of the transport hold in their place.

    Sends 48 bytes to each peer where all are equal; else also 8 bytes for each buffer, and those that differ, whole.
    Raises ValueError, on all ranks, where names, shapes or dtypes of buffers differ.
    """
    sync_tensors(list(persistent_buffers(model)), transport)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of all that a state_dict holds and that have values: not on the device "meta"."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set and not buffer.is_meta:
                yield name, buffer


def sync_tensors(named: Sequence[tuple[str, Tensor]], transport: Transport) -> None:
    """`sync_buffers`, of these."""
    check_transport(transport)
    device = transport.device  # what lies in other memory (a cached mask under NCCL) travels in a copy
    held = [local(buffer).detach() for _, buffer in named]
    lines = [f"{name}: {x.dtype} {tuple(x.shape)}" for (name, _), x in zip(named, held, strict=True)]
    check_same_lines(transport, "the model's buffers", lines, device)
    there = [x.to(device) for x in held]
    unlike = differing(transport, there)
    for k in sorted({k for indices in unlike.values() for k in indices}):
        rows = gather_tensors(transport, there[k])
        if rows.is_floating_point():
            held[k].copy_(sum_in_order(rows.double()).div_(transport.world_size))
        else:
            held[k].copy_(rows[0])
