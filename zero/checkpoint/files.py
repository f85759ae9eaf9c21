"""Checkpoints on torch.distributed.checkpoint: one folder per step, complete or absent; `latest` names the newest.

    DIR/latest                        step_00000123
    DIR/step_00000123/stamp.json      step, ranks, facts about the run, size and checksum of every other file
    DIR/step_00000123/.metadata, *    torch.distributed.checkpoint's files: the model, and each rank's own state

DIR is one folder that all ranks share. The model is saved once, under its own names, from any sharding, and loads into
any other. A rank's own state (optimizer state, residuals, random numbers) is saved as tensors under its number and one
JSON text (`tree.py`). Loading runs no code from a file (`storage.py`). For modes, atomicity and deletion see
`onebit/checkpoint/files.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim.optimizer import StateDict

from ...checkpoint.files import CheckpointError, Sum, check_files, reason, remove
from ...checkpoint.folder import AS_BEFORE, Checkpointing
from ...comm import Transport, torch_versions
from ...comm.messages import gather_texts
from ...model_parallel import like, local
from ..parallel.stacked import stack_of
from .reshard import Box, boxes_of
from .storage import TABLE, Reader, Writer, read_table
from .tree import pack, select, unpack


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that is being read.

    folder: its folder. stamp: the `about` of `save`, plus "step" and "world_size". own: each old rank's own state.
    """

    folder: Path
    stamp: Mapping[str, object]
    own: Own

    @property
    def step(self) -> int:
        return int(cast(int, self.stamp["step"]))


class Checkpoints(Checkpointing):
    """The checkpoints of one run in one folder. All ranks construct it and call every method.

    If torch.distributed runs, construction makes a separate process group, so that writing in the background does not
    disturb training.

    Args:
        folder: Folder that all ranks share.
        transport: Connection between all ranks.
        keep: Number of this run's newest checkpoints to keep. Default None: all.
        group: Process group of another `Checkpoints` to use instead; then only one of them may write at a time.
            Default None: a new one.

    Raises:
        ValueError: There are several ranks, and torch.distributed does not run.
    """

    _unreadable: ClassVar = (Exception, CheckpointException)

    def __init__(
        self, folder: Path, transport: Transport, keep: int | None = None, group: dist.ProcessGroup | None = None
    ):
        super().__init__(folder, transport, keep)
        self.group = group
        self._writing = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        if dist.is_initialized():
            self.group = self.group or dist.new_group(backend="gloo")
        elif self.transport.world_size > 1:
            raise ValueError(
                f"{self.transport.world_size} ranks without torch.distributed: checkpoints are written through it; "
                "start the run with a grid (onebit.zero.grid.start) or torch.distributed.init_process_group"
            )

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        own: object,
        about: Mapping[str, object] | None = None,
        *,
        in_background: bool = False,
        is_latest: bool = True,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint. On return, or after `wait`, it is on disk for all ranks. All ranks.

        Args:
            step: Number of the step, which names the checkpoint.
            model: A state dict; tensors of one name are the same on all ranks, or DTensors.
            own: This rank's own state: nested values and tensors, see `tree.pack`.
            about: More facts about the run, for JSON. Default None.
            in_background: Whether to return once the tensors are copied to host memory. Default False.
            is_latest: Whether `latest` names it. Default True.
            then: Called on one rank once it is on disk. Default None.

        Raises:
            CheckpointError: A rank cannot write, or the folder has a checkpoint of another run of this step or later.
                On all ranks; `latest` and all checkpoints are unchanged, and no partial file is left.
        """
        self.wait()  # one write at a time: both would use the process group, and `latest` must not go back
        is_foreground = self.group is None or not in_background
        state = self.together(_flat_state, self.transport.rank, model, own)
        if not is_foreground:
            state = self.together(_staged, state)
        hidden, is_maker = self._begin(step, is_shared=True)
        stamp = dict(about or {}) | {"step": step, "world_size": self.transport.world_size}
        writer = Writer(hidden)

        def write() -> None:
            try:
                state_dict_saver.save(in_boxes(state), storage_writer=writer, process_group=self.group)
                sums = self._sums_of_all(writer.sums)
                if is_maker:
                    self._files.commit(hidden, stamp, sums, self.keep, is_latest=is_latest)
                    if then is not None:
                        then()
            except BaseException:
                if is_maker:
                    remove(hidden)
                raise

        if is_foreground:
            with knowing_that_it_is_alone():
                self.together(write, hint=lambda: AS_BEFORE)
        else:
            self._pending = self._writing.submit(write)

    def wait(self) -> None:
        """Wait until the checkpoint in the background is on disk. All ranks. Raises CheckpointError as `save`."""
        pending, self._pending = self._pending, None
        if pending is not None:  # the same on all ranks
            self.together(pending.result, hint=lambda: AS_BEFORE)

    def find(self, tag: str | None = None) -> str | None:
        """The name of the checkpoint that `load` reads, or None if there is none yet. All ranks."""
        self.wait()
        return self._find(tag)

    def load(
        self,
        model: Mapping[str, Tensor],
        tag: str | None = None,
        *,
        check: Callable[[Loaded], None] = lambda loaded: None,
        may_lack: Callable[[Loaded, str], bool] = lambda loaded, name: False,
    ) -> Loaded | None:
        """Read a checkpoint into the tensors of a state dict, in place. All ranks.

        If `latest` is lost, it reads the newest undamaged one. Each rank first reads its share of the files to check
        them.

        Args:
            model: The state dict; if ranks hold different layers, this rank's part.
            tag: Name of the checkpoint's folder. Default None: `latest`.
            check: Called with the checkpoint before anything is changed; raises CheckpointError to refuse it.
            may_lack: Whether to skip a tensor of this name that the checkpoint or the model lacks. Default: never.

        Returns:
            The checkpoint, or None if there is none yet.

        Raises:
            CheckpointError: It is damaged or holds another model. On all ranks; nothing has changed. The text names the
                newest other checkpoint that is undamaged.
        """
        name = self.find(tag)
        if name is None:
            return None
        stamp, target = self._whole(name), self.folder / name
        metadata = self.together(self._read_table, target, stamp, hint=lambda: self._offer(name))
        loaded = Loaded(target, stamp, Own(target, metadata, stamp["world_size"]))
        # Ranks may hold different layers, and the checkpoint has those of all.
        names = {name for text in gather_texts(self.transport, "\n".join(model)) for name in text.splitlines()}
        self.together(check, loaded)
        found = self.together(_check_model, target, metadata, model, names, partial(may_lack, loaded))
        # All that can be refused has been: from here on the model's tensors change.
        state = in_boxes({f"model/{key}": tensor for key, tensor in model.items() if key in found})
        with knowing_that_it_is_alone():
            self.together(
                lambda: state_dict_loader.load(
                    state, storage_reader=Reader(target, metadata), process_group=self.group
                ),
                hint=lambda: self._offer(name),
            )
        self._go_on_from(stamp)
        return loaded

    def _check(self, name: str) -> StateDict:
        stamp = self._files.stamp(name)
        check_files(self.folder / name, stamp, sorted(stamp["files"])[self.transport.rank :: self.transport.world_size])
        return stamp

    def _read_table(self, target: Path, stamp: Mapping[str, object]) -> Metadata:
        try:
            table = read_table(target, cast(Mapping[str, int], stamp["files"]))
        except Exception as error:  # damaged pickles raise many kinds of errors
            raise CheckpointError(f"{target / TABLE}: no table of contents: {reason(error)}") from error
        ranks = sum(1 for key in table.state_dict_metadata if re.fullmatch(r"own/\d+/text", key))
        if ranks != stamp["world_size"]:
            raise CheckpointError(f"{target} holds the states of {ranks} ranks, not of {stamp['world_size']}")
        return table

    def _advice(self, name: str) -> str:
        return f'load it with tag="{name}"'

    def _sums_of_all(self, mine: dict[str, Sum]) -> dict[str, Sum]:
        """Sums of all ranks' files. Runs in the writing thread, so it uses the separate process group."""
        every: list[dict[str, Sum]] = [mine]
        if self.group is not None:
            every = [{} for _ in range(self.transport.world_size)]
            dist.all_gather_object(every, mine, self.group)
        return {name: one for sums in every for name, one in sums.items()}

    def _problem(self, error: BaseException) -> str:
        """The error of the rank that failed in torch.distributed.checkpoint, without torch's traceback."""
        if isinstance(error, CheckpointException) and error.failures:
            rank, (error, _) = min(error.failures.items())
            return f"rank {rank}: {reason(error)}"
        return super()._problem(error)


@dataclass(frozen=True)
class Own(Sequence[object]):
    """Each old rank's own state, in rank order, read from disk on access. No communication."""

    folder: Path
    metadata: Metadata
    world_size: int

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, rank: int) -> object:  # type: ignore[override]
        text = self._text(rank)
        return unpack(text, self._load(self._tensors(rank)))

    def read(self, rank: int, *names: str) -> StateDict:
        """Some entries of a rank's own state; tensors of other entries are not read."""
        text, numbers = select(self._text(rank), names)
        return cast(StateDict, unpack(text, self._load([f"own/{rank}/{k}" for k in numbers])))

    def outline(self, rank: int) -> object:
        """A rank's own state, with tensors on device "meta"."""
        return unpack(self._text(rank), [self._empty(key, "meta") for key in self._tensors(rank)])

    def _text(self, rank: int) -> str:
        if not 0 <= rank < self.world_size:
            raise IndexError(rank)
        return bytes(self._load([f"own/{rank}/text"])[0].tolist()).decode()

    def _tensors(self, rank: int) -> list[str]:
        entries = self.metadata.state_dict_metadata
        keys = (f"own/{rank}/{k}" for k in range(len(entries)))
        return list(takewhile(lambda key: key in entries, keys))

    def _load(self, keys: Sequence[str]) -> list[Tensor]:
        state = {key: self._empty(key, "cpu") for key in keys}
        with knowing_that_it_is_alone():
            torch_versions.load_alone(state, Reader(self.folder, self.metadata))
        return [state[key] for key in keys]

    def _empty(self, key: str, device: str) -> Tensor:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)  # `read_table` makes only these
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _check_model(
    target: Path,
    metadata: Metadata,
    model: Mapping[str, Tensor],
    names: Set[str],
    may_lack: Callable[[str], bool] = lambda name: False,
) -> Set[str]:
    """The names in the checkpoint. Raises CheckpointError unless names and shapes are the same.

    names: of all ranks' parts of the model. may_lack: whether to skip a name that either side lacks.
    """
    saved = {
        key.removeprefix("model/"): entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("model/")
    }
    if missing := sorted(name for name in names ^ saved.keys() if not may_lack(name)):
        where = "the checkpoint has no" if missing[0] in names else "the model has no"
        raise CheckpointError(f"{target} is of another model: {where} {missing[0]}")
    for name in model.keys() & saved.keys():
        entry, tensor = saved[name], model[name]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != tensor.shape:
            shapes = f"shape {tuple(entry.size)} there and {tuple(tensor.shape)} here"
            raise CheckpointError(f"{target} is of another model: {name} has {shapes}")
    return saved.keys()


@contextmanager
def knowing_that_it_is_alone() -> Iterator[None]:
    """Suppress torch's warning that one process saves or loads alone, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def in_boxes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict for torch.distributed.checkpoint, in which tensors held in several boxes say so. Shares memory.

    torch asks the local tensor of a DTensor for its pieces, if that knows them, and takes it for one slice otherwise.
    """
    return {name: x if stack_of(x) is None else _boxed(x) for name, x in state.items()}


def _boxed(x: Tensor) -> Tensor:
    held = x.detach()
    pieces = local(held).as_subclass(_Pieces)
    pieces.shape_of_whole, pieces.boxes = x.shape, boxes_of(held)
    held._local_tensor = pieces  # type: ignore[attr-defined]  # from_local would return a plain view of it
    return held


class _Pieces(Tensor):
    """A DTensor's local elements, which are several boxes of the whole: what torch asks of a tensor in pieces.

    shape_of_whole: the DTensor's. boxes: in order.
    """

    shape_of_whole: torch.Size
    boxes: Sequence[Box]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        about = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, about, self.shape_of_whole),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self.boxes if torch.Size(box.offsets) == index.offset)
        return self.as_subclass(Tensor)[box.here()]


def _own_tensors(rank: int, text: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    spelled = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return {f"own/{rank}/text": spelled} | {f"own/{rank}/{k}": tensor for k, tensor in enumerate(tensors)}


def _staged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, which training does not change. Of a shard its own elements, not those it is a view of."""
    return {name: like(x, local(x).detach().to("cpu", copy=True)) for name, x in state.items()}


def _flat_state(rank: int, model: Mapping[str, Tensor], own: object) -> dict[str, Tensor]:
    """The state dict that torch.distributed.checkpoint saves."""
    text, tensors = pack(own)
    for name, x in model.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"a checkpoint holds tensors, {name} is a {type(x).__name__}")
    return {f"model/{name}": x for name, x in model.items()} | _own_tensors(rank, text, tensors)
