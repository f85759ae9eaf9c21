"""Every rank's optimizer state in the checkpoint of a framework that writes only rank 0's.

    optimizer.pt               rank 0's, written by the framework
    optimizer_rank_00001.pt    rank 1's, beside it; and so on

A rank's residuals are in no other rank's file, so all files are needed. A state contains the mark of its save, the
run's number and the step, which distinguishes files of different saves.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast, overload

import torch

from ..checkpoint.archive import load_archive
from ..checkpoint.files import CheckpointError, create, reason, replacing
from ..comm import PeerError, Transport
from ..comm.messages import gather_texts, raise_on_all_ranks
from ..optimizer import CompressedOptimizer
from ..usage.contract import State

MARK = "onebit_save"

T = TypeVar("T")


def new_run(transport: Transport) -> str:
    """A number for this run, the same on all ranks. All ranks."""
    return gather_texts(transport, secrets.token_hex(8))[0]


def marked(optimizer: CompressedOptimizer, run: str) -> State:
    """This rank's state, with the mark of a save by this run, now."""
    return {**optimizer.state_dict(), MARK: {"run": run, "step": int(optimizer.steps[0])}}


def path_of(file: Path, rank: int) -> Path:
    """Path of a rank's state, beside the framework's file."""
    return file if rank == 0 else file.with_name(f"{file.stem}_rank_{rank:05d}{file.suffix}")


def write(file: Path, state: State, rank: int) -> None:
    """Write this rank's state beside the framework's file, which contains rank 0's. Replaces an old file atomically."""
    if rank == 0:
        return
    with replacing(path_of(file, rank)) as hidden, create(hidden) as out:
        torch.save(state, out)


def load(file: Path, first: State, optimizer: CompressedOptimizer) -> None:
    """Continue from the states in a checkpoint. All ranks, after the framework has read its own file on each.

    In a world of another size all ranks read all files.

    Args:
        file: The framework's file.
        first: Its content: rank 0's state, or that of a torch.optim.AdamW, which counts as a warm-up's.
        optimizer: Takes over the state.

    Raises:
        CheckpointError: A file is missing, from another save, or does not fit. On all ranks; nothing has changed.
    """
    transport, record = optimizer.transport, first.get("onebit")
    mine: State | None = None
    if record is None:
        mine = first
    elif (record["world_size"], record.get("local_size", 1)) == (
        transport.world_size,
        optimizer.placement.hierarchy.local_size,
    ):
        mine = together(transport, lambda: _read(file, first, transport.rank))
    if mine is not None:
        own = mine
        together(transport, lambda: optimizer.load_state_dict(own))
        return
    states = _States(file, first)
    together(transport, lambda: optimizer.load_state_dicts(states))


def together(transport: Transport, work: Callable[[], T]) -> T:
    """Run work() on every rank; if it fails on one, raise CheckpointError on all."""
    result: T | None = None
    problem = None
    try:
        result = work()
    except PeerError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, CheckpointError | ValueError) else reason(error)
        problem = text if text.startswith("rank ") else f"rank {transport.rank}: {text}"
    raise_on_all_ranks(transport, problem, CheckpointError)
    return cast(T, result)


class _States(Sequence[State]):
    """The states of all ranks that saved, each read on access."""

    def __init__(self, file: Path, first: State):
        self._file, self._first = file, first

    def __len__(self) -> int:
        return int(self._first["onebit"]["world_size"])

    @overload
    def __getitem__(self, rank: int) -> State: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[State]: ...

    def __getitem__(self, rank: int | slice) -> State | Sequence[State]:
        if isinstance(rank, slice):
            return [self[k] for k in range(*rank.indices(len(self)))]
        if not -len(self) <= rank < len(self):
            raise IndexError(rank)
        return _read(self._file, self._first, rank % len(self))


def _read(file: Path, first: State, rank: int) -> State:
    """The state of one of the ranks that saved. first: the one in the framework's file."""
    if first["onebit"]["rank"] == rank:
        return first
    path = path_of(file, rank)
    try:
        state: State = load_archive(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: all {first['onebit']['world_size']} ranks that trained must save, and every rank must "
            "see the files; save on all ranks, or copy the files to one folder"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{error}; take another checkpoint") from error
    if not isinstance(state, dict) or "onebit" not in state:
        raise CheckpointError(f"{path} holds no state of such an optimizer; take another checkpoint")
    if state.get(MARK) != first.get(MARK):
        raise CheckpointError(
            f"{path} is of another save than {file.name}: {_said(state)} there, {_said(first)} here; a save was "
            "interrupted, take another checkpoint"
        )
    return state


def _said(state: State) -> str:
    mark = state.get(MARK)
    return f"step {mark['step']} of run {mark['run']}" if mark else "no mark of a save"
