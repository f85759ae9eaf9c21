"""Changes the number of ranks: one optimizer state made from the states of all ranks.

State that is the same on all ranks stays as it is. Of state that differs (worker errors, and between synchronisations
momentum, accumulated moves and parameters) every new rank takes the mean. An exchange only uses the mean over ranks, so
the residual that it will deliver is kept, to rounding. In two levels each rank's worker error is that of its node, on
one L-th of the elements: it weighs L times as much.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..comm import Codec, Transport
from ..comm.messages import raise_on_all_ranks
from ..layout.flat import Layout
from ..step.under_way import fold_into_error
from ..usage.contract import State

PLACE = ("rank", "world_size", "local_size")
"""The fields of a record that name its rank and its world."""

Tensors: TypeAlias = dict[tuple[Any, ...], Tensor]  # by where they are in a state


@dataclass
class World:
    """The combined state of all ranks of a world. server_errors: per bucket, the owners' chunks in order.

    If a model is sharded, the ranks are those of one shard's transport: all replicas of that shard.
    """

    size: int
    local_size: int
    shard: int
    state: State
    server_errors: list[Tensor | None]

    def has(self, record: State) -> bool:
        """Whether this is the record of one of its ranks."""
        found = (record["world_size"], record.get("local_size", 1), record.get("shard", 0))
        return found == (self.size, self.local_size, self.shard)

    def ranks_by_row(self) -> list[int]:
        """The rank that owns each row of a bucket; see `comm/hierarchy.py`."""
        return [rank for local_rank in range(self.local_size) for rank in range(local_rank, self.size, self.local_size)]


def gather_states(states: Iterable[State]) -> World:
    """Combine the states of a whole world, in rank order, read one at a time. Raises ValueError if some are missing."""
    world: World | None = None
    sums: Tensors = {}
    servers: list[list[Tensor | None]] = []
    for rank, state in enumerate(map(fold_into_error, states)):
        record = state.get("onebit")
        if record is None or record["rank"] != rank or (world is not None and not world.has(record)):
            raise ValueError(
                "expected the states of ranks 0, 1, 2, ... of one world, each saved by its rank; number "
                f"{rank} is " + ("no state of such an optimizer" if record is None else _whose(record))
            )
        if world is None:
            size, local_size, shard = record["world_size"], record.get("local_size", 1), record.get("shard", 0)
            world = World(size, local_size, shard, _copy(state), [])
        if "waiting" in record:  # true if it is on any rank: the mean contains that rank's move
            waiting = world.state["onebit"]
            waiting["waiting"] = [a or b for a, b in zip(waiting["waiting"], record["waiting"], strict=True)]
        _add(sums, _own_tensors(state))
        servers.append([bucket["server_error"] for bucket in record["buckets"]])
    if world is None or len(servers) != world.size:
        raise ValueError(f"expected the states of all {world.size if world else ''} ranks, got {len(servers)}")
    by_row = [servers[rank] for rank in world.ranks_by_row()]
    world.server_errors = [None if chunks[0] is None else torch.cat(chunks) for chunks in zip(*by_row, strict=True)]
    _put_means(world, sums)
    return world


def check_own(transport: Transport, state: State) -> None:
    """Raise ValueError, on all ranks, unless each was given the state of its own rank, or a dense optimizer's."""
    record, problem = state.get("onebit"), None
    if record is not None and (record["rank"], record["world_size"]) != (transport.rank, transport.world_size):
        problem = (
            f"rank {transport.rank}: expected the states of ranks 0, 1, 2, ... of one world, each saved by its rank; "
            f"number {transport.rank} is {_whose(record)}; one rank's state alone is taken by load_state_dict"
        )
    raise_on_all_ranks(transport, problem, ValueError)


def is_of_other_rank(record: State, own: Mapping[str, object]) -> bool:
    """Whether a record belongs to another replica of this rank's parameters. own: the fields of this rank's record.

    False if only the levels differ in a world of the same size: there every rank has its state, for
    `load_state_dicts`.
    """
    rank, world_size, local_size = (record[key] == own[key] for key in PLACE)
    is_elsewhere = not world_size or (local_size and not rank)
    return is_elsewhere and all(record[key] == own[key] for key in own if key not in PLACE)


def owing_nothing(state: State) -> dict[Any, State]:
    """The entries of a state by parameter, with worker errors of zero."""
    return {
        key: {name: torch.zeros_like(x) if name == "worker_error" else x for name, x in entry.items()}
        for key, entry in state["state"].items()
    }


def warn_of_other_rank(log: logging.Logger, record: State, rank: int) -> None:
    """Log what is lost when a rank continues from the state of another."""
    apart = "; between synchronisations it takes that rank's parameters, too" if record.get("parameters") else ""
    log.warning(
        "rank %d: this optimizer state is %s: momentum and variance are taken over, this rank's residuals begin at "
        "zero%s; save on every rank to keep them",
        rank,
        _whose(record),
        apart,
    )


def _copy(state: State) -> State:
    """The same tensors in new dicts and lists."""
    record = dict(state["onebit"])
    if "parameters" in record:
        record["parameters"] = list(record["parameters"])
    return {**state, "state": {key: dict(entry) for key, entry in state["state"].items()}, "onebit": record}


def _whose(record: State) -> str:
    shard = f", shard {record['shard']} of {record['shards']}" if record.get("shards", 1) > 1 else ""
    return f"that of rank {record['rank']} of {record['world_size']}{shard}"


def _own_tensors(state: State) -> Tensors:
    """Every floating-point tensor that may differ between ranks, by where it is."""
    found: Tensors = {
        ("state", key, name): value
        for key, entry in state["state"].items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }
    return found | {("parameters", k): p for k, p in enumerate(state["onebit"].get("parameters", ()))}


def _add(sums: Tensors, tensors: Tensors) -> None:
    for where, tensor in tensors.items():
        sums[where] = sums[where].add_(tensor) if where in sums else tensor.to(torch.float64, copy=True)


def _put_means(world: World, sums: Tensors) -> None:
    """Replace the tensors by their means. Equal values stay as they are: n of them add up exactly in float64."""
    state, n = world.state, world.size
    for where, total in sums.items():
        if where[0] == "state":
            entry, name = state["state"][where[1]], where[2]
            ranks = n // world.local_size if name == "worker_error" else n
            entry[name] = total.div_(ranks).to(entry[name].dtype)
        else:
            parameters = state["onebit"]["parameters"]
            parameters[where[1]] = total.div_(n).to(parameters[where[1]].dtype)


def resize(flat: Tensor, numel: int) -> Tensor:
    """The flat tensor with padding added or removed at its end, so that it has numel elements."""
    return torch.nn.functional.pad(flat, (0, numel - flat.numel()))


def reframe(frames_WB: Tensor, codec: Codec, old_numel: int, layout: Layout) -> Tensor:
    """The same blocks in frames for another number of ranks. Lossless: a block of ±s compresses to itself."""
    old_W = len(frames_WB)
    values = torch.empty(old_W, old_numel // old_W, device=frames_WB.device, dtype=torch.float32)
    codec.decode(frames_WB, values)
    rows = resize(values.view(-1), layout.numel).view(layout.world_size, -1)
    out = torch.empty(layout.world_size, codec.frame_bytes(layout.chunk), dtype=torch.uint8, device=frames_WB.device)
    codec.encode(rows, None, out, layout.counts(frames_WB.device))
    assert not rows.any()
    return out
