"""One replica in several parts: the messages between the ranks that hold them.

An optimizer's transport connects the ranks that hold the same part of different replicas, and carries all compressed
traffic. What concerns a layer or the model as a whole (norms, whether a step is good, an error that ends it) is decided
here, by the ranks that hold the parts of one replica. A model in one piece is one part, and takes the same path.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from .agreement.replicas import fingerprints
from .arithmetic.squares import by_device, norms
from .comm import SimTransport, Transport, torch_versions
from .comm.messages import gather_bytes, gather_tensors, gather_texts, sum_in_order

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Name of the tensor-parallel axis in the mesh of a parameter.
TENSOR_AXIS = "tensor"


def local(tensor: Tensor) -> Tensor:
    """The elements of a tensor that this rank holds, not copied: a DTensor's local shard, any other tensor itself.

    Ask for it anew in every step: FSDP2 keeps the DTensor, but may move its shard.
    """
    # Not isinstance: importing torch.distributed.tensor takes a second, and a caller with a DTensor has imported it.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(p: Tensor, part: Tensor) -> Tensor:
    """This rank's elements of a tensor in a parameter's shape, as a DTensor if the parameter is one."""
    if not hasattr(p, "to_local") or hasattr(part, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.view(local(p).shape),
        p.device_mesh,  # type: ignore[attr-defined]
        p.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=p.shape,
        stride=torch.empty(p.shape, device="meta", dtype=torch.float32).stride(),
    )


def gathered(tensor: Tensor) -> Tensor:
    """A DTensor's elements of all ranks, on its device; any other tensor itself. All ranks of its mesh.

    They meet on the mesh's device: a shard may be in host memory, of which NCCL sends nothing.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return torch_versions.full_tensor(tensor.to(tensor.device_mesh.device_type)).to(tensor.device)  # type: ignore[attr-defined]


def model_parallel_group_of(given: ModelParallelGroup | Transport | None) -> ModelParallelGroup:
    """The group of an optimizer, from its argument: a group, a transport between shards, or None if it is whole.

    Raises TypeError if it is something else.
    """
    if isinstance(given, ModelParallelGroup):
        return given
    if not isinstance(given, Transport | None):
        raise TypeError(
            f"model_parallel_group must be a ModelParallelGroup or a transport between shards, got {given!r}; take it "
            "from a grid of onebit.zero, or from onebit.transports_of"
        )
    return ModelParallelGroup(SimTransport() if given is None else given)


class Transports(TypedDict):
    """Keyword arguments of an optimizer, besides the parameters, if a replica is divided into shards."""

    transport: Transport
    model_parallel_group: ModelParallelGroup


def transports_of(mesh: DeviceMesh, timeout_s: float = 300.0) -> Transports:
    """Keyword arguments of an optimizer for FSDP2 set up by hand. All ranks.

        mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3, **onebit.transports_of(mesh))

    FSDP2 averages over the shards of a replica, and knows of no other replica.

    Args:
        mesh: A mesh of two axes: replicas first, shards second.
        timeout_s: Timeout of the transports, in seconds. Default 300.

    Raises:
        ValueError: The mesh has not two axes.
    """
    from .comm.transports.torch_distributed import TorchTransport

    if mesh.ndim != 2:
        raise ValueError(
            f"transports_of takes a mesh of two axes, replicas and shards, got {mesh.mesh_dim_names or mesh.ndim}; "
            'give those two (mesh["replicate", "shard"]); where there is one replica FSDP2 has nothing left to send'
        )
    replicas, shards = (TorchTransport(mesh.get_group(axis), timeout_s) for axis in (0, 1))
    return {"transport": replicas, "model_parallel_group": ModelParallelGroup(shards)}


def _cuts(p: Tensor) -> list[tuple[str, int]]:
    """(axis, ranks) for each axis of a DTensor's mesh along which it is divided. An axis without a name is ""."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return []
    names = mesh.mesh_dim_names or [""] * len(mesh.shape)
    axes = zip(names, mesh.shape, p.placements, strict=True)  # type: ignore[attr-defined]
    return [(axis, size) for axis, size, place in axes if not place.is_replicate()]


def detach_version_(grad: Tensor | None) -> None:
    """Give a DTensor's local elements a separate version counter; any other tensor stays as it is.

    FSDP2 makes a module's gradients as views of one tensor, with one counter for all: when the next micro-batch adds to
    one of them, all would look edited.
    """
    if hasattr(grad, "_local_tensor"):
        grad._local_tensor = grad._local_tensor.data  # type: ignore[union-attr]  # the same memory, a new counter


@dataclass(frozen=True)
class ModelParallelGroup:
    """The ranks that hold the parts of this replica. All of them call each operation, and get the same bits.

    Elements that several ranks hold count once in every sum. Each of these ranks updates them for itself, from the same
    gradients, over its own transport to other replicas.

    Which parameters have a gradient needs no vote: FSDP2 reduces a gradient over all shards, or none has it.

    Attributes:
        transport: The ranks that hold the parts of this rank's layers; sums over a layer go over these.
        stages: All ranks that hold a part of the model, if others hold other layers (pipeline stages). Default None:
            those of transport.
        tensor: Number of neighbouring ranks of the transport that hold one shard together (tensor parallelism): a
            parameter is divided among them, or each holds all of it. Default 1.
        tied: For each parameter that several stages hold, their number. Default: none.
    """

    transport: Transport
    stages: Transport | None = None
    tensor: int = 1
    tied: Mapping[Tensor, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelParallelGroup:
        """The same ranks, with a copy of the parameters in `tied`."""
        return replace(self, tied={copy.deepcopy(p, memo): stages for p, stages in self.tied.items()})

    @property
    def whole(self) -> Transport:
        """The ranks that hold all of this replica."""
        return self.transport if self.stages is None else self.stages

    def pieces(self, p: Tensor) -> int:
        """Number of disjoint pieces into which the ranks of the transport divide a parameter."""
        return math.prod(size for _, size in _cuts(p))

    def copies(self, p: Tensor) -> int:
        """Number of ranks of this replica that hold each element of a parameter."""
        return self.transport.world_size // self.pieces(p) * self.tied.get(p, 1)

    def gather(self, *numbers: float) -> list[tuple[float, ...]]:
        """The numbers of every part of the model, in rank order. Sends 8 bytes per number to each peer."""
        if self.whole.world_size == 1:  # every step of an unsharded model asks
            return [numbers]
        pattern = struct.Struct(f"<{len(numbers)}d")
        return [pattern.unpack(row) for row in gather_bytes(self.whole, pattern.pack(*numbers))]

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over the parts of the model, in rank order. Sends as `gather` does."""
        return [sum(column) for column in zip(*self.gather(*numbers), strict=True)]

    def agree(self, is_so: bool) -> bool:
        """Whether it is true on all parts of the model. Sends 8 bytes to each peer."""
        return all(flag for (flag,) in self.gather(float(is_so)))

    def total_of_rows(self, table: Tensor, params: Sequence[Tensor]) -> Tensor:
        """The sums of a table over the parts of this rank's layers, in rank order. Sends (S-1)·nbytes per rank.

        Args:
            table: One row for each parameter.
            params: The parameters.
        """
        return sum_in_order(gather_tensors(self.transport, self._shares(table, params)))

    def norms(self, held: Tensor, params: Sequence[Tensor]) -> Tensor:
        """The norms of whole layers, float32, one row for each parameter. Sends as `total_of_rows` does.

        Args:
            held: The norms of this rank's parts, one row for each parameter.
            params: The parameters.
        """
        return self.total_of_rows(held.double().square(), params).sqrt().float()

    def global_norm(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> float:
        """The norm of all gradients of the model, including other ranks' parts. Sends 8 bytes to each peer.

        torch's clip_grad_norm_ needs tensors of one mesh, but a tensor-parallel model has plain ones, or ones sharded
        over one axis, besides those sharded over two.

        Args:
            params: The parameters that have a gradient.
            grads: This rank's elements of their gradients.
        """
        squares = [0.0] * len(grads)
        for those in by_device(grads):
            found = norms([grads[k] for k in those]).double().square().tolist()
            for k, square in zip(those, found, strict=True):
                squares[k] = square
        (total,) = self.total(sum(square / self.copies(p) for square, p in zip(squares, params, strict=True)))
        return math.sqrt(total)

    def _shares(self, table: Tensor, params: Sequence[Tensor]) -> Tensor:
        """A table of sums, with each parameter's row divided by the number of ranks that hold the same elements."""
        if self.tensor == 1:
            return table
        alike = [self.transport.world_size // self.pieces(p) for p in params]
        return table / torch.tensor(alike, dtype=table.dtype, device=table.device).view(-1, *[1] * (table.dim() - 1))

    def raise_on_all_ranks(self, kind: type[Exception], check: Callable[[], None]) -> None:
        """Run a check of this part; if it raises `kind` on one part, all parts raise that error.

        Args:
            kind: Type of the errors that are sent on; others are raised on this rank alone.
            check: The check.
        """
        mine: Exception | None = None
        try:
            check()
        except kind as error:
            mine = error
        texts = gather_texts(self.whole, "" if mine is None else str(mine))
        if mine is not None:
            raise mine
        if found := next(filter(None, texts), None):
            raise kind(found)

    def find_divergence(self, params: Sequence[Tensor], names: Sequence[str]) -> str:
        """A message if ranks of one shard differ in the bits of elements that all of them hold; "" if they do not.

        Sends 8 bytes for each such parameter to each peer of the transport; nothing without tensor parallelism.

        Args:
            params: The parameters.
            names: Their names, for the message.
        """
        if self.tensor == 1:
            return ""
        pairs = zip(params, names, strict=True)
        alike = [(local(p), name) for p, name in pairs if self.pieces(p) < self.transport.world_size]
        first = self.transport.rank // self.tensor * self.tensor
        nothing = torch.zeros(1, dtype=torch.float32, device=self.transport.device)
        tensors = [held for held, _ in alike] or [nothing]  # the ranks of all stages meet equally often
        prints = gather_tensors(self.transport, fingerprints(tensors))[first : first + self.tensor]
        for rank, row in enumerate(prints):
            if not torch.equal(row, prints[0]):
                found = [name for (_, name), differs in zip(alike, row != prints[0], strict=True) if differs]
                return (
                    f"tensor rank {rank} holds other values than tensor rank 0 in {found[0]} (and {len(found) - 1} "
                    "more), which should be the same: something changed a parameter on one rank only, or the ranks "
                    "compute differently"
                )
        return ""

    def check_holds(self, p: Tensor, name: str) -> None:
        """Raise ValueError unless the ranks of the transport together hold p.

        Args:
            p: The parameter.
            name: Its name, for the message.
        """
        pieces, ranks = self.pieces(p), self.transport.world_size
        by_tensor = math.prod(size for axis, size in _cuts(p) if axis == TENSOR_AXIS)
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None and by_tensor < pieces <= ranks < math.prod(mesh.shape):
            raise ValueError(
                f"shard {self.transport.rank}: {name} is on a mesh of {math.prod(mesh.shape)} ranks, the optimizer's "
                f"shards are {ranks}: FSDP2 averages its gradients over replicas too, in full. Give fully_shard the "
                'axis of the shards alone (mesh=mesh["shard"]), and the optimizer both: **onebit.transports_of(mesh)'
            )
        # If a mesh's axes have no names, a cut over one axis cannot be told from a cut over the other, and passes.
        fits = pieces // by_tensor == ranks // self.tensor and by_tensor in (1, self.tensor)
        if not fits and (by_tensor > 1 or pieces != ranks):
            found = "replicated" if mesh is not None and mesh.size() > pieces == 1 else f"in {pieces} shard"
            raise ValueError(
                f"shard {self.transport.rank}: {name} is {found}{'s' * (pieces > 1)}, the optimizer's shards are "
                f"{ranks} ranks; shard all parameters over one mesh axis (onebit.zero.fsdp.shard does) and pass "
                "model_parallel_group=, the transport between the ranks of that axis (**onebit.transports_of(mesh))"
            )
