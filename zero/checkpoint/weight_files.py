"""Weights in files, read slice by slice: a folder of safetensors as Hugging Face's, one such file, or a checkpoint.

A `WeightFiles` lists the tensors without reading them, and gives slices; `materialize.py` fills models from one. One
process, no communication; `whole.py` reads the same files completely.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ...checkpoint.files import STAMP, CheckpointError, check_files, read_stamp, reason
from ...comm import torch_versions
from .files import in_boxes, knowing_that_it_is_alone
from .reshard import boxes_of
from .storage import Reader, read_table
from .weights import check_piece, read_sums, safetensors_form
from .whole import INDEX, checkpoint_in, files_of

_REOPENED_BYTES = 16 * 2**20  # mapped pages of a file count as this process's memory until it is closed

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Outline:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles(Protocol):
    """Files with weights. outlines: shape and dtype of the tensors, by name."""

    @property
    def outlines(self) -> Mapping[str, Outline]: ...

    def copy_to(self, name: str, out: Tensor) -> None:
        """Read this rank's slice of a tensor into `out`, a DTensor or a plain tensor. Converts the dtype."""


def open_weights(source: str | os.PathLike[str], tag: str | None = None) -> WeightFiles:
    """The weights of a folder or file. tag: of an engine's checkpoints; None: the latest.

    Raises CheckpointError if there are none or they cannot be read, ImportError if safetensors is missing.
    """
    path = Path(source)
    try:
        if path.is_file():
            return SafetensorsFiles(path, [path])
        folder = checkpoint_in(path, tag)
        if (folder / STAMP).is_file():
            return EngineFiles(folder)
        if tag is None and (files := files_of(path)):
            return SafetensorsFiles(path, files)
    except (CheckpointError, ImportError):
        raise
    except Exception as error:  # safetensors' own among them
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    raise CheckpointError(
        f"{path} holds no weights: expected a folder with {INDEX} or *.safetensors files, such a file, or a folder of "
        "onebit.zero's checkpoints"
    )


class SafetensorsFiles:
    """One or several safetensors files. If they have checksums, every piece that a slice touches is checked.

    A rank reads such pieces completely: for a shard of rows up to one more at either end, for a shard of columns all.
    """

    def __init__(self, path: Path, files: list[Path]):
        self._torch_form: ModuleType = safetensors_form()
        self.outlines: dict[str, Outline] = {}
        self._file_of: dict[str, Path] = {}
        self._sums: dict[str, list[int]] = {}
        self._open: tuple[Path, Any] | None = None
        self._read_bytes = 0
        for file in files:
            with self._torch_form.safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (no mapping)
                    if name in self.outlines:
                        raise CheckpointError(f"{path}: {name} is in {self._file_of[name].name} and in {file.name}")
                    about = opened.get_slice(name)
                    if (dtype := _DTYPES.get(about.get_dtype())) is None:
                        raise CheckpointError(f"{file}: {name} is {about.get_dtype()}, which is not known here")
                    self.outlines[name] = Outline(tuple(about.get_shape()), dtype)
                    self._file_of[name] = file
                try:
                    self._sums |= read_sums(opened)
                except ValueError as error:
                    raise CheckpointError(f"{file} cannot be read: {error}") from error

    def copy_to(self, name: str, out: Tensor) -> None:
        """As `WeightFiles.copy_to`. Memory: the slice, or with checksums a piece at a time."""
        held = out.to_local() if isinstance(out, DTensor) else out
        if held.numel() == 0:
            return
        try:
            for box in boxes_of(out):
                if name in self._sums:
                    self._copy_checked(name, box.there(), held[box.here()])
                else:
                    held[box.here()].copy_(self._read(name, box.there()))
        except Exception as error:  # safetensors' own among them
            raise CheckpointError(f"{self._file_of[name]}: {name} cannot be read: {reason(error)}") from error

    def _copy_checked(self, name: str, place: tuple[slice, ...], held: Tensor) -> None:
        there, sums = self.outlines[name], self._sums[name]
        if not there.shape:
            check_piece(name, whole := self._read(name, ()), there.shape, sums[0])
            held.copy_(whole)
            return
        length = -(-there.shape[0] // len(sums))
        first, last, _ = place[0].indices(there.shape[0])
        columns = (slice(None), *place[1:])
        for k in range(first // length, -(-last // length)):
            begin, end = k * length, min((k + 1) * length, there.shape[0])
            piece = self._read(name, (slice(begin, end),))
            check_piece(name, piece, there.shape, sums[k])
            rows = slice(max(first, begin), min(last, end))
            part = piece[rows.start - begin : rows.stop - begin]
            held[rows.start - first : rows.stop - first].copy_(part[columns])

    def _read(self, name: str, place: tuple[slice, ...]) -> Tensor:
        file, there = self._opened(self._file_of[name]), self.outlines[name]
        found: Tensor = file.get_slice(name)[place] if there.shape else file.get_tensor(name)
        rows = len(found) if found.dim() else 1
        self._read_bytes += rows * math.prod(there.shape[1:]) * there.dtype.itemsize  # a column touches every page
        return found

    def _opened(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path or self._read_bytes > _REOPENED_BYTES:
            self._open, self._read_bytes = None, 0
            self._open = path, self._torch_form.safe_open(path, framework="pt")
        return self._open[1]


class EngineFiles:
    """A checkpoint that an engine saved, in any layout; its files are checked by their sums first."""

    def __init__(self, folder: Path):
        stamp = read_stamp(folder)
        check_files(folder, stamp, stamp["files"])
        self._folder, self._table = folder, read_table(folder, stamp["files"])
        self._prefix = "model/model." if "form" in stamp else "model/"  # an engine's, or one of `Checkpoints` alone
        entries = {
            name.removeprefix(self._prefix): cast(TensorStorageMetadata, entry)
            for name, entry in self._table.state_dict_metadata.items()
            if name.startswith(self._prefix)
        }
        self.outlines = {name: Outline(tuple(at.size), at.properties.dtype) for name, at in entries.items()}

    def copy_to(self, name: str, out: Tensor) -> None:
        """As `WeightFiles.copy_to`. Memory: one saved rank's piece of the tensor at a time."""
        try:
            with knowing_that_it_is_alone():
                reader = Reader(self._folder, self._table)
                torch_versions.load_alone(in_boxes({self._prefix + name: out.detach()}), reader)
        except Exception as error:  # damaged files make torch raise many kinds
            raise CheckpointError(f"{self._folder} cannot be read: {reason(error)}") from error
