"""torch.distributed.checkpoint's files, written with checksums and read without trusting them.

torch pickles its table of contents (`.metadata`), and unpickling can run code from the file. Here it is read into inert
classes, checked, and rebuilt; from the other files torch reads only tensors.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from ...checkpoint.archive import check_archive
from ...checkpoint.files import Sum, create, open_regular, reason

TABLE = ".metadata"


class Writer(FileSystemWriter):
    """Writes into an existing, empty folder. sums: of the files that this process has written."""

    def __init__(self, folder: Path):
        super().__init__(folder, sync_files=False, overwrite=False)  # `create` flushes them
        self.fs = self._files = _NewFiles()

    @property
    def sums(self) -> dict[str, Sum]:
        return self._files.sums

    def storage_meta(self) -> StorageMeta:
        """Leaves out the hidden path, under which the files are written."""
        return StorageMeta(save_id=self.save_id)


class _NewFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with create(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.sums[Path(path).name] = file.raw.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Does nothing: the folder exists."""


class Reader(FileSystemReader):
    """Reads a checkpoint with a table of contents from `read_table`."""

    def __init__(self, folder: Path, table: Metadata):
        super().__init__(folder)
        self._table = table

    def read_metadata(self, *args: object, **named: object) -> Metadata:
        return self._table

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        """The part that `read_data` passes to torch.load: one tensor, as torch.save wrote it. Checked first."""
        part: IO[bytes] = super()._slice_file(file, sinfo)
        check_archive(part)
        return part

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except Exception as error:  # damaged files make torch raise many kinds
            files = sorted({self._table.storage_data[item.storage_index].relative_path for item in plan.items})
            raise ValueError(f"{self.path}: {', '.join(files)} cannot be read: {reason(error)}") from error


def read_table(folder: Path, files: Collection[str]) -> Metadata:
    """The table of contents of a checkpoint: only tensors, in these files. Runs no code from the file.

    files: those of the stamp. Raises ValueError if it contains anything else, and pickle's errors if it is damaged.
    """
    if TABLE not in files:
        raise ValueError(f"the stamp does not list {TABLE}")
    with open_regular(folder / TABLE) as file:
        stored = _Unpickler(io.BytesIO(file.readall())).load()
    if not isinstance(stored, _Record):
        raise ValueError(f"{folder / TABLE} holds a {type(stored).__name__}, not a table of contents")
    return Metadata(
        {_str(name): _tensor(entry) for name, entry in stored["state_dict_metadata"].items()},
        storage_data={
            MetadataIndex(_str(at["fqn"]), _ints(at["offset"])): _place(place, files)
            for at, place in stored["storage_data"].items()
        },
    )


def _tensor(stored: _Record) -> TensorStorageMetadata:
    dtype = stored["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected a dtype, got a {type(dtype).__name__}")
    chunks = [ChunkStorageMetadata(_ints(one["offsets"]), _ints(one["sizes"])) for one in stored["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype), _ints(stored["size"]), chunks)


def _place(stored: _Record, files: Collection[str]) -> _StorageInfo:
    name, (start, length) = _str(stored["relative_path"]), _ints((stored["offset"], stored["length"]))
    if name not in files or "transform_descriptors" in stored.state:
        raise ValueError(f"expected a plain file of this checkpoint, got {name[:99]!r}")
    return _StorageInfo(name, start, length)


def _ints(stored: object) -> torch.Size:
    if isinstance(stored, tuple) and all(type(x) is int and x >= 0 for x in stored):
        return torch.Size(stored)
    raise ValueError(f"expected whole numbers, got a {type(stored).__name__} of others")


def _str(stored: object) -> str:
    if isinstance(stored, str):
        return stored
    raise ValueError(f"expected a name, got a {type(stored).__name__}")


class _Record:
    """An object of any class: its state, as its pickle describes it."""

    state: Any = {}  # noqa: RUF012  (if a pickle gives none)

    def __init__(self, *_: object):
        """Accepts and ignores all arguments."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _Unpickler(pickle.Unpickler):
    """Makes tuples, dtypes and `_Record`s, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return tuple if (module, name) == ("torch", "Size") else _Record
