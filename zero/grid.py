"""The grid of ranks: the position of each rank on every axis, and process groups and transports along the axes.

`shape_of` is pure and rejects sizes that do not fit before any process group is made; `start` makes the grid. It rests
on `comm/launch.py` (what started this process) and `comm/transports/base.py`; `parallel/fsdp.py` shards a model over
it.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm import Transport, in_hops, init, torch_versions
from ..comm.launch import Launch, detect
from ..comm.transports.torch_distributed import TorchTransport
from ..model_parallel import ModelParallelGroup

_log = logging.getLogger(__name__)

# From the slowest network to the fastest: the last axis joins neighbouring ranks. pipe: stages, each with its layers;
# replica: copies of a stage, one or more for each node; shard: ranks that divide its parameters among them (ZeRO);
# tensor: ranks that compute each of its layers together.
AXES = ("pipe", "replica", "shard", "tensor")

_closed: list[weakref.ref[DeviceMesh]] = []
"""Meshes of closed grids whose groups may be open. torch keeps meshes, and with them their groups' sockets."""


@dataclass(frozen=True)
class GridShape:
    """Number of ranks along each of the `AXES`. Ranks are numbered along the last axis first.

    Attributes:
        sizes: Ranks along each axis, in the order of `AXES`.
        sequence: Ranks that share each sequence. It is no axis but a fold of the data ranks (replica x shard): to the
            optimizer, and to sharding, a rank of the sequence is a rank of the data. Default 1.
    """

    sizes: tuple[int, ...]
    sequence: int = 1

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.sizes[AXES.index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis."""
        places: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at a position; the inverse of `coordinates`."""
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + coordinates[axis]
        return rank

    def along(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that differ from this one at most on this axis, ascending, itself among them."""
        here = self.coordinates(rank)
        return [self.rank(here | {axis: k}) for k in range(self.size(axis))]

    def across(self, axes: Collection[str], rank: int) -> list[int]:
        """Return the ranks that differ from this one at most on these axes, ascending, itself among them."""
        here = self.coordinates(rank)
        kept = {axis: place for axis, place in here.items() if axis not in axes}
        return [r for r in range(self.world_size) if kept.items() <= self.coordinates(r).items()]

    @property
    def data_ranks(self) -> int:
        """Number of ranks over which the gradients of a stage, or of a slice of it, are averaged."""
        return self.size("replica") * self.size("shard")

    def data_rank(self, rank: int) -> int:
        """Return a rank's place among those over which its gradients are averaged: ranks of a replica are adjacent."""
        here = self.coordinates(rank)
        return here["replica"] * self.size("shard") + here["shard"]

    def along_sequence(self, rank: int) -> list[int]:
        """Return the ranks that share sequences with this one, ascending, itself among them: adjacent data ranks."""
        here, first = self.coordinates(rank), self.data_rank(rank) // self.sequence * self.sequence
        places = (divmod(k, self.size("shard")) for k in range(first, first + self.sequence))
        return [self.rank(here | {"replica": replica, "shard": shard}) for replica, shard in places]

    def __str__(self) -> str:
        shape = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True))
        return shape if self.sequence == 1 else f"{shape}, sequence={self.sequence}"


def shape_of(
    world_size: int, local_size: int | None, given: Mapping[str, int | None], *, sequence: int | None = None
) -> GridShape:
    """Compute the grid's sizes. Pure.

    An axis without a size has one rank, except two: "shard" takes the ranks of a node that the tensor axis leaves, at
    most those of a stage, and "replica" the ranks that remain.

    Args:
        world_size: Number of ranks.
        local_size: Ranks on each node; None: not known.
        given: Sizes by axis; None: not given.
        sequence: Ranks that share each sequence. Default None: one.

    Raises:
        ValueError: The product of the sizes is not the world size, an axis has no such name, the sizes cannot be
            derived, or the data ranks cannot be divided into sequences.
    """
    unknown = [axis for axis in given if axis not in AXES]
    if unknown:
        raise ValueError(f"the grid has the axes {', '.join(AXES)}, not {unknown[0]!r}")
    sizes = {axis: size for axis, size in given.items() if size is not None}
    if any(size < 1 for size in sizes.values()):
        raise ValueError(f"every axis of the grid has at least one rank, got {_spell(sizes)}")
    if len({"shard", "replica"} & sizes.keys()) == 0 and local_size is None:
        raise ValueError(
            f"the launcher does not say how many of the {world_size} ranks share a node; give shard=, the ranks that a "
            "model is sharded over (those of a node), or set LOCAL_WORLD_SIZE"
        )
    fixed = math.prod(size for axis, size in sizes.items() if axis not in ("shard", "replica"))
    if "shard" not in sizes and "replica" not in sizes:
        assert local_size is not None
        tensor = {axis: size for axis, size in sizes.items() if axis == "tensor"}
        in_node = _share(local_size, sizes.get("tensor", 1), f"the {local_size} ranks of a node", tensor)
        _share(world_size, in_node, f"{world_size} ranks", {"shard": in_node})
        sizes["shard"] = math.gcd(in_node, _share(world_size, fixed, f"{world_size} ranks", sizes))
    for axis, other in (("replica", "shard"), ("shard", "replica")):
        if axis not in sizes:
            sizes[axis] = _share(world_size, fixed * sizes[other], f"{world_size} ranks", sizes)
    shape = GridShape(tuple(sizes.get(axis, 1) for axis in AXES), 1 if sequence is None else sequence)
    if shape.world_size != world_size:
        raise ValueError(
            f"a grid of {shape} has {shape.world_size} ranks, but {world_size} were started; leave out replica=, which "
            "follows from the others"
        )
    if shape.sequence < 1 or shape.data_ranks % shape.sequence:
        raise ValueError(
            f"{shape.sequence} ranks cannot share each sequence: expected a divisor of the {shape.data_ranks} data "
            f"ranks of a grid of {shape}"
        )
    return shape


def _share(ranks: int, divisor: int, what: str, sizes: Mapping[str, int]) -> int:
    if ranks % divisor:
        raise ValueError(f"{what} cannot be divided by {_spell(sizes)}; give sizes whose product divides {ranks}")
    return ranks // divisor


def _spell(sizes: Mapping[str, int]) -> str:
    """Format the sizes for a message, without axes of one rank if there are others."""
    told = {axis: size for axis, size in sizes.items() if size != 1} or sizes
    return " x ".join(f"{axis}={size}" for axis, size in told.items())


class Closes(Protocol):
    """A transport, or several."""

    def close(self) -> None:
        """Release it. All ranks; idempotent."""


@dataclass(frozen=True)
class Grid:
    """One rank's view of the grid. `start` makes it.

    Optimizers take `transport` and `model_parallel_group`.

    Attributes:
        shape: Number of ranks along each axis.
        device_mesh: torch's device mesh, over the process groups of the transports; None over members that come and go.
        world: Transport between all ranks.
        transports: A transport along each axis.
        transport: Transport between the ranks that hold the same part of different replicas, in hops if they are many.
        model_parallel_group: The ranks that hold the parts of this replica.
        sequence: Transport between the ranks that share sequences with this one.
    """

    shape: GridShape
    device_mesh: DeviceMesh | None
    world: Transport
    transports: Mapping[str, Transport]
    transport: Transport
    model_parallel_group: ModelParallelGroup
    sequence: Transport
    _parts: list[Closes] = field(default_factory=list, init=False, repr=False)

    def close_first(self, part: Closes) -> None:
        """Close something that was split off a transport of this grid before the grid itself.

        Args:
            part: The same on all ranks.
        """
        self._parts.append(part)

    @property
    def mesh(self) -> DeviceMesh:
        """torch's device mesh. Raises RuntimeError over members that come and go, which have none."""
        if self.device_mesh is None:
            raise RuntimeError("members that come and go have no device mesh; stage 0 in float32 needs none")
        return self.device_mesh

    @property
    def coordinates(self) -> dict[str, int]:
        """Position of this rank on each axis."""
        return self.shape.coordinates(self.world.rank)

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        if self.device_mesh is None:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            kind = self.device_mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.cuda.current_device())

    @property
    def data(self) -> tuple[int, int]:
        """(this rank's share of the data, number of shares). Only ranks of a sequence, slice or stage read the same."""
        shape = self.shape
        return shape.data_rank(self.world.rank) // shape.sequence, shape.data_ranks // shape.sequence

    def close(self) -> None:
        """Wait for all ranks, then release transports and process groups. All ranks; idempotent."""
        for transport in (
            *self._parts,
            *self.transports.values(),
            self.sequence,
            self.model_parallel_group.transport,
            self.model_parallel_group.whole,
            self.world,
        ):
            transport.close()
        meshes = [mesh for each in _closed if (mesh := each()) is not None]
        if self.device_mesh is not None:
            meshes.append(self.device_mesh)
        is_over = not torch.distributed.is_initialized()  # else another grid, or the script, uses the groups
        if is_over:
            for mesh in meshes:
                torch_versions.forget_groups(mesh)
        _closed[:] = () if is_over else map(weakref.ref, meshes)


def start(
    *,
    backend: str | None = None,
    timeout_s: float = 300.0,
    sequence: int | None = None,
    launch: Launch | None = None,
    **sizes: int | None,
) -> Grid:
    """Make the grid: process groups, mesh, transports. All ranks, once, before anything else that communicates.

    The launcher's environment gives the ranks of a node.

    Args:
        backend: Of torch.distributed. Default None: an initialised torch.distributed as it is, else "nccl" with CUDA
            and "gloo" without.
        timeout_s: How long an operation waits for a peer, in seconds. Default 300.
        sequence: Ranks that share each sequence. Default None: one.
        launch: What `comm.launch.detect` has found. Default None: asked here.
        **sizes: pipe=, replica=, shard=, tensor=; `shape_of` computes those left out.

    Raises:
        ValueError: The sizes do not fit. Raised before any process group is made.
    """
    launch = detect(os.environ) if launch is None else launch
    is_there = torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if is_there else launch.world_size
    knows_nodes = launch.world_size == world_size
    shape = shape_of(world_size, launch.local_size if knows_nodes else None, sizes, sequence=sequence)
    if backend is None and not is_there:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if is_there and knows_nodes and "nccl" in torch.distributed.get_backend_config():
        choose_device(launch)
    world = init(backend, timeout_s, levels=1, hops=1, launch=launch)
    assert isinstance(world, TorchTransport)
    device_type = "cuda" if "nccl" in torch.distributed.get_backend_config() else "cpu"
    transports = {axis: world.split(shape.along(axis, world.rank)) for axis in AXES}
    # Use these groups, not new ones: they have this timeout, and NCCL allocates buffers for each group.
    ranks = torch.arange(world_size, device="cpu").view(shape.sizes)
    groups = [transport.group for transport in transports.values()]
    mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=AXES)
    parts = _model_parallel_group(shape, world, transports)
    if world.rank == 0:
        _log.info("a grid of %s", shape)
        inner = shape.size("shard") * shape.size("tensor")
        if launch.local_size is not None and knows_nodes and launch.local_size % inner:
            _log.warning(
                "replicas of %d ranks do not divide the %d of a node: shards are gathered over the slow network",
                inner,
                launch.local_size,
            )
    # Whole sequences: the group is this rank alone, which an axis of one rank has already.
    alone = next((transports[axis] for axis in AXES if shape.sequence == shape.size(axis) == 1), None)
    sequence_ranks = alone or world.split(shape.along_sequence(world.rank))
    replicas = in_hops(transports["replica"], "auto")
    grid = Grid(shape, mesh, world, transports, replicas, parts, sequence_ranks)
    grid.close_first(replicas)
    return grid


def choose_device(launch: Launch) -> None:
    """Compute on the GPU with this rank's number in its node, unless the script has chosen one (as in DeepSpeed).

    `init` does so for the groups that it makes itself.
    """
    if torch.cuda.current_device() == 0 and 0 < launch.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(launch.local_rank)


def _model_parallel_group(
    shape: GridShape, world: TorchTransport, transports: Mapping[str, TorchTransport]
) -> ModelParallelGroup:
    """Return the ranks that hold the parts of this replica, over existing transports if one axis has all of them."""
    tensor, part, stages = shape.size("tensor"), transports["shard"], None
    if tensor > 1:
        both = ("shard", "tensor")
        part = transports["tensor"] if shape.size("shard") == 1 else world.split(shape.across(both, world.rank))
    if shape.size("pipe") > 1:
        parts = ("pipe", "shard", "tensor")
        stages = transports["pipe"] if part.world_size == 1 else world.split(shape.across(parts, world.rank))
    return ModelParallelGroup(part, stages, tensor)
