"""Checks that all ranks have the same parameters, in the same order, with the same bits.

This is checked at construction (descriptions, then values), and by a vote every N steps. All ranks call all functions
that take a transport, and these end the same way on all of them.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.messages import gather_bytes, gather_texts
from ..comm.transports.notes import calling

log = logging.getLogger(__name__)

_CHUNK = 1 << 17  # elements, whose int64 products stay in the cache


class ReplicaError(RuntimeError):
    """The replicas of a parameter are no longer bit-identical."""


@dataclass
class ReplicaCheck:
    """Decides when replicas are compared: every N steps, taken or skipped, except while they are meant to differ.

    Attributes:
        every: Steps between comparisons; 0: never compare.
        counted: Number of steps so far. Default 0.
        compared: Value of counted at the last comparison. Default 0.
    """

    every: int
    counted: int = 0
    compared: int = 0

    def is_due(self, *, are_synchronised: bool) -> bool:
        """Count a step, and return whether to compare after it.

        Args:
            are_synchronised: Whether the replicas are meant to be the same now.
        """
        self.counted += 1
        if not self.every or not are_synchronised or self.counted // self.every <= self.compared // self.every:
            return False
        self.compared = self.counted
        return True

    def restart(self, step: int) -> None:
        """Begin to count at this number of steps, because a state was loaded."""
        self.counted = self.compared = step


def check_same_lines(
    transport: Transport, what: str, lines: Sequence[str], device: torch.device | str | None = None
) -> None:
    """Raise ValueError with the message of `unequal_lines`, on all ranks, if there is one. All ranks. Sends as it."""
    if problem := unequal_lines(transport, what, lines, device):
        raise ValueError(problem)


def unequal_lines(
    transport: Transport, what: str, lines: Sequence[str], device: torch.device | str | None = None, *, stage: int = 0
) -> str:
    """A message that names the first line in which two ranks differ; "" if there is none. All ranks.

    Sends 32 bytes to each peer; the lines as well if they differ.

    Args:
        transport: Between the ranks that compare.
        what: Name of the lines, for the message.
        lines: This rank's lines.
        device: Device of the messages. Default None: the transport's.
        stage: Only ranks of the same stage are compared: stages have other layers. Default 0.
    """
    text = "\n".join(lines)
    mine = struct.pack("<I", stage) + hashlib.sha224(text.encode()).digest()
    rows = gather_bytes(transport, mine, device)
    stages = [row[:4] for row in rows]
    if len(set(rows)) == len(set(stages)):
        return ""
    texts = [t.split("\n") for t in gather_texts(transport, text, device)]
    for rank, other in enumerate(texts):
        first = stages.index(stages[rank])
        for k, (a, b) in enumerate(zip_longest(texts[first], other, fillvalue="nothing")):
            if a != b:
                return (
                    f"rank {transport.rank}: {what} differ between ranks: entry {k} is {a} on rank {first} and {b} on "
                    f"rank {rank}; build the same model and the same parameter groups, in the same order, on all ranks"
                )
    raise AssertionError("digests differ, and the lines do not")


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A hash of the bits of each tensor, int64 [len(tensors)].

    It depends on positions, and is computed in integers, so it is the same on every device.
    """
    return (
        torch.stack([_fingerprint(t) for t in tensors]) if tensors else torch.zeros(0, dtype=torch.int64, device="cpu")
    )


def differing(transport: Transport, tensors: Sequence[Tensor]) -> dict[int, list[int]]:
    """For each rank that differs from rank 0: the indices of the tensors that differ. Empty if all are bit-identical.

    All ranks. Sends 16 bytes per peer, and 8 more per tensor if they differ. Reads the tensors once, and not at all in
    a world of one rank.

    Args:
        transport: Between the ranks that compare.
        tensors: The same number of tensors on all ranks, in the same order.
    """
    rows = _unequal_fingerprints(transport, tensors)
    return {
        rank: [k for k, (a, b) in enumerate(zip(row, rows[0], strict=True)) if a != b]
        for rank, row in enumerate(rows)
        if row != rows[0]
    }


def _unequal_fingerprints(transport: Transport, tensors: Sequence[Tensor]) -> list[list[int]]:
    """The fingerprints of each rank; [] if they are equal."""
    if transport.world_size == 1:
        return []
    mine = fingerprints(tensors).cpu()
    weights = torch.arange(1, len(mine) + 1, device="cpu")
    total = int((mine * (2 * weights + 1)).sum()) & (2**64 - 1)
    if len(set(gather_bytes(transport, total.to_bytes(16, "little")))) == 1:
        return []
    rows = gather_bytes(transport, mine.numpy().tobytes())
    return [torch.frombuffer(bytearray(b), dtype=torch.int64).tolist() for b in rows]


@calling("check_replicas()")
def check_replicas(transport: Transport, tensors: Sequence[Tensor], names: Sequence[str], step: int) -> None:
    """Raise ReplicaError on all ranks unless every replica has the same bits. All ranks. Sends as `differing` does.

    Args:
        transport: Between the replicas.
        tensors: Tensors that must be the same.
        names: Their names, for the message.
        step: Number of the last step, for the message.

    Raises:
        ReplicaError: They differ; names ranks and a parameter.
    """
    ranks = differing(transport, tensors)
    if ranks:
        drifted = sorted({index for indices in ranks.values() for index in indices})
        where = f"{names[drifted[0]]} (and {len(drifted) - 1} more)"
        raise ReplicaError(
            f"rank {transport.rank}: after step {step} rank {sorted(ranks)} holds other values than rank 0 in {where}: "
            "something changed a parameter on one rank only, or the ranks compute differently; resume from a checkpoint"
        )


def make_equal(transport: Transport, tensors: Sequence[Tensor], *, are_parameters: bool = True) -> None:
    """Give every rank the values of rank 0, unless all have the same already. All ranks.

    Sends as `differing` does, and if they differ all tensors from rank 0.

    Args:
        transport: Between the replicas.
        tensors: Of any dtype, modified in place. A quantised tensor is sent as the plain tensors of which it consists.
        are_parameters: Whether to look for another order. Not so of buffers: two flags may well change places. Default
            True.

    Raises:
        ValueError: A rank has the values of rank 0 in another order, so it has other tensors in these places. On all
            ranks; nothing is modified.
    """
    tensors = [part for tensor in tensors for part in _parts(tensor)]
    rows = _unequal_fingerprints(transport, tensors)
    if not rows:
        return
    for rank, row in enumerate(rows if are_parameters else []):
        if row != rows[0] and sorted(row) == sorted(rows[0]):
            k = next(k for k, (a, b) in enumerate(zip(row, rows[0], strict=True)) if a != b)
            raise ValueError(
                f"rank {transport.rank}: rank {rank} has the parameters of rank 0 in another order: its entry {k} is "
                f"entry {rows[0].index(row[k])} of rank 0; give all ranks the same order, e.g. that of "
                "model.named_parameters(): a set has another one in each process"
            )
    if transport.rank == 0:
        log.info("initial parameters differ between ranks; rank 0's are sent to all")
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        transport.broadcast(whole.view(-1).view(torch.uint8), 0).wait()  # as bytes: no transport knows every dtype
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that contain the bits of this one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]


def _fingerprint(tensor: Tensor) -> Tensor:
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.reshape(-1).contiguous().view(word)
    # Odd factors are invertible modulo 2^64: a change of one element always changes the hash.
    weights = torch.arange(min(len(bits), _CHUNK), device=bits.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for k, piece in enumerate(bits.split(_CHUNK)):
        total = total + (k * 2 + 1) * (piece.to(torch.int64) * weights[: len(piece)]).sum()
    return total
