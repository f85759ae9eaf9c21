"""DeepSpeed's `deepspeed.runtime.pipe.topology`: ranks as places on named axes, the last of which runs fastest.

Of a topology this package's engine takes the number of stages; its own layout is `onebit.zero.grid`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]


class ProcessTopology:
    """Ranks in row-major order over named axes.

    Args:
        axes: Names of the axes.
        dims: Number of ranks along each of them.

    Raises:
        ValueError: There are not as many names as numbers, or a number is below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        if len(axes) != len(dims) or min(dims, default=1) < 1:
            raise ValueError(f"expected a number of ranks above 0 for each of the axes {list(axes)}, got {list(dims)}")
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places: Iterable[Any] = product(*(range(size) for size in dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}
        self._coords = list(self.mapping)

    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._coords)

    def get_axis_names(self) -> list[str]:
        """Names of the axes, in order."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Number of ranks along an axis; 0: there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a place, which names every axis. Raises ValueError if there is none."""
        if coord_kwargs.keys() != set(self.axes):
            raise ValueError(f"expected a place on each of the axes {self.axes}, got {coord_kwargs}; or filter_match()")
        rank = self.mapping.get(self.ProcessCoord(**coord_kwargs))
        if rank is None:
            raise ValueError(f"there is no place {coord_kwargs} on axes {self.axes} of {self.dims} ranks")
        return rank

    def get_coord(self, rank: int) -> Any:
        """The place of a rank, with an attribute for each axis. Raises ValueError if there is no such rank."""
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"there is no rank {rank} on axes {self.axes} of {self.dims} ranks")
        return self._coords[rank]

    def get_rank_repr(
        self, rank: int, omit_axes: Collection[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's place as text, e.g. "model_01"."""
        place = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{k:02d}" for axis, k in place.items() if axis not in omit_axes)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks along an axis, for each place on the others; []: there is no such axis."""
        if axis not in self.axes:
            return []
        lists: dict[tuple[int, ...], list[int]] = {}
        k = self.axes.index(axis)
        for place, rank in self.mapping.items():
            lists.setdefault((*place[:k], *place[k + 1 :]), []).append(rank)
        return list(lists.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks at these places on some axes."""
        wanted = filter_kwargs.items()
        return [rank for place, rank in self.mapping.items() if all(getattr(place, axis) == k for axis, k in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one place on an axis."""
        return self.filter_match(**{axis: idx})

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, and replicas.

    Args:
        num_pp: Stages.
        num_dp: Replicas.
    """

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, replicas, and ranks that compute each layer together.

    Args:
        num_pp: Stages.
        num_mp: Ranks of a layer.
        num_dp: Replicas.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's place in a topology, and a process group for each axis. All ranks construct it together.

    Args:
        topology: A topology of all ranks, with axes among "pipe", "data" and "model".
        process_group: Must be None: it is of all ranks.

    Raises:
        ValueError: The topology is not of all ranks, or an argument is not supported.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: None = None):
        if topology is None or process_group is not None:
            raise ValueError("expected topology=, of all ranks, and no process_group=")
        self.global_rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if topology.world_size() != self.world_size:
            raise ValueError(
                f"rank {self.global_rank}: the topology has {topology.world_size()} ranks, and {self.world_size} are "
                "running; give one of all ranks"
            )
        self._topo = topology
        coord = topology.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = getattr(coord, "pipe", 0), getattr(coord, "data", 0)
        self._slice_id = getattr(coord, "model", 0)
        sizes = {axis: max(1, topology.get_dim(axis)) for axis in ("pipe", "data", "model")}
        self.pipe_parallel_size, self.data_parallel_size, self.slice_parallel_size = sizes.values()
        self.model_parallel_size = self.slice_parallel_size
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        alone = [[rank] for rank in range(self.world_size)]
        replicas = [topology.get_axis_list("data", k) for k in range(topology.get_dim("data"))]
        self.pp_group, self.pp_proc_group = self._group(topology.get_axis_comm_lists("pipe") or alone)
        self.dp_group, self.dp_proc_group = self._group(topology.get_axis_comm_lists("data") or alone)
        self.slice_group, self.slice_proc_group = self._group(topology.get_axis_comm_lists("model") or alone)
        self.mp_group, self.mp_proc_group = self._group(replicas or [list(range(self.world_size))])

    def _group(self, lists: Sequence[list[int]]) -> tuple[list[int], ProcessGroup]:
        """This rank's list, and its group. All ranks make the groups of all lists."""
        made = [(ranks, torch.distributed.new_group(ranks)) for ranks in lists]
        return next((ranks, group) for ranks, group in made if self.global_rank in ranks)

    @property
    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """This rank's replica."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage at this rank's place on the other axes, or at those of kwargs."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def get_pipe_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """The stages of this rank's pipeline."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """This rank's replica."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Number of replicas."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """The replicas of this rank's part of the model."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The ranks of `get_data_parallel_group`."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those of its replica."""
        return self.mp_group.index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks of a replica: stages times the ranks of a layer."""
        return len(self.mp_group)

    def get_model_parallel_group(self) -> ProcessGroup:
        """The ranks of this replica."""
        return self.mp_proc_group

    def get_slice_parallel_rank(self) -> int:
        """This rank's place among those that compute each layer together."""
        return self._slice_id

    def get_slice_parallel_world_size(self) -> int:
        """Number of ranks that compute each layer together."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> ProcessGroup:
        """The ranks that compute each layer together with this one."""
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
