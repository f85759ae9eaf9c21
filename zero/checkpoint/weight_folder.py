"""A model's weights as a Hugging Face folder: several safetensors files of bounded size, and an index of names.

Ranks gather one parameter after another, and rank 0 writes a file as soon as it is full: no rank ever holds the model.
`weight_files.py` reads such folders slice by slice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...checkpoint.files import create, reason, remove, sync_folder
from ...comm import Transport
from ...comm.messages import gather_texts, raise_on_all_ranks
from ...model_parallel import gathered
from ..grid import Grid
from .weights import error_of_safetensors, tied, write_weights
from .whole import INDEX, WHOLE


class Entry(NamedTuple):
    """A tensor of the folder. stage: the pipeline stage whose ranks have it."""

    name: str
    shape: list[int]
    dtype: str
    stage: int

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """Bytes in the file."""
        own = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * (dtype if dtype and own.is_floating_point else own).itemsize


@torch.no_grad()
def export_folder(
    model: nn.Module,
    folder: Path,
    transport: Transport,
    dtype: torch.dtype | None = None,
    *,
    grid: Grid | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write the weights to files of at most max_file_bytes of tensors, and their index last. All ranks; rank 0 writes.

    Rank 0 holds one file's tensors in host memory, every rank one whole parameter. See `export_weights` for dtype and
    grid. An earlier model in the folder stays whole until all files are written, so there must be room for both. Raises
    ValueError if max_file_bytes is below 1, and OSError, on all ranks, if the folder cannot be written.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
    files = _share_out(_entries(model, grid), dtype, max_file_bytes)
    own = model.state_dict()
    names = [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))]
    hidden = folder / hidden_beside(INDEX)
    if transport.rank == 0:
        remove(hidden)  # of an export that was killed
    try:
        for name, entries in zip(names, files, strict=True):
            tensors: dict[str, Tensor] = {}
            for entry in entries:
                whole = _gathered(entry, own, grid)
                if transport.rank == 0:
                    tensors[entry.name] = whole.to(dtype) if dtype and whole.is_floating_point() else whole
            problem = None
            if transport.rank == 0:
                try:
                    write_weights(hidden / name, tensors)
                except (OSError, error_of_safetensors()) as error:
                    problem = f"rank 0: {folder / name} cannot be written: {reason(error)}"
            raise_on_all_ranks(transport, problem, OSError)
        problem = None
        if transport.rank == 0:
            try:
                _write_index(hidden, names, files, dtype)
            except OSError as error:
                problem = f"rank 0: {folder / INDEX} cannot be written: {reason(error)}"
        raise_on_all_ranks(transport, problem, OSError)
    except BaseException:
        if transport.rank == 0:
            remove(hidden)
        raise
    problem = None
    if transport.rank == 0:
        try:
            publish(hidden)
        except OSError as error:
            problem = f"rank 0: {error}"
    raise_on_all_ranks(transport, problem, OSError)


def publish(written: Path, whole: str = WHOLE, index: str = INDEX) -> None:
    """Move a model's files, and their index if there is one, to the folder above, in place of the model there.

    They are on the disk by now, so little can fail. Files of two models are never together under one index, nor under
    names that readers without an index would put together.

    Args:
        written: The folder with the files.
        whole: Name of the only file of a model, which readers take before an index.
        index: Name of the index of several files.

    Raises:
        OSError: A file cannot be moved. The message names the folder where the new ones stay.
    """
    folder, names = written.parent, {path.name for path in written.iterdir()}
    old = _named_by(folder / index)
    try:
        for name in (names | {index, whole}) - (names & {whole}):
            (folder / name).unlink(missing_ok=True)
        for name in sorted(names, key=lambda name: (name == index, name)):
            os.replace(written / name, folder / name)
        sync_folder(folder)
        for name in old - names:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise OSError(
            f"the model in {folder} cannot be replaced: {reason(error)}; its new files are in {written}: move them to "
            f"{folder} yourself, {index} last"
        ) from error
    written.rmdir()


def hidden_beside(index: str) -> str:
    """Name of the folder in which a model with this index is written, beside the model that it will replace."""
    return f".{index}.new"


def _entries(model: nn.Module, grid: Grid | None) -> list[Entry]:
    """All tensors once, each from the first stage that has it. The same on all ranks."""
    later = tied(model)
    held = [
        (name, list(x.shape), str(x.dtype).removeprefix("torch."))
        for name, x in model.state_dict().items()
        if name not in later
    ]
    every = [held]
    if grid is not None and grid.shape.size("pipe") > 1:
        every = [json.loads(text) for text in gather_texts(grid.transports["pipe"], json.dumps(held))]
    known: dict[str, Entry] = {}
    for stage, tensors in enumerate(every):
        for name, shape, dtype in tensors:
            known.setdefault(name, Entry(name, shape, dtype, stage))
    return list(known.values())


def _share_out(entries: list[Entry], dtype: torch.dtype | None, most: int) -> list[list[Entry]]:
    """Fill files in order; each gets at least one tensor."""
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        nbytes = entry.nbytes(dtype)
        if files[-1] and filled + nbytes > most:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += nbytes
    return files


def _gathered(entry: Entry, own: dict[str, Tensor], grid: Grid | None) -> Tensor:
    """A whole tensor, in host memory. Rank 0 keeps it; all ranks take part."""
    stages = 1 if grid is None else grid.shape.size("pipe")
    has_it = stages == 1 or grid is None or grid.coordinates["pipe"] == entry.stage
    whole = torch.empty(0, dtype=torch.float32, device="cpu")
    if has_it:
        whole = gathered(own[entry.name].detach())
    if grid is not None and entry.stage > 0:
        pipe = grid.transports["pipe"]
        if not has_it:
            whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=grid.device)
        whole = whole.to(grid.device).contiguous()
        if whole.numel():
            pipe.broadcast(whole, entry.stage).wait()
    return whole.cpu()


def _write_index(folder: Path, names: list[str], files: list[list[Entry]], dtype: torch.dtype | None) -> None:
    total = sum(entry.nbytes(dtype) for entries in files for entry in entries)
    table = {entry.name: name for name, entries in zip(names, files, strict=True) for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": table}
    with create(folder / INDEX) as file:
        file.write(json.dumps(index, indent=2).encode())


def _named_by(index: Path) -> set[str]:
    """The files beside an index that it names; none without one."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # none, another program's index, or a damaged one
    beside = {path.name for path in index.parent.iterdir() if path.is_file()}
    return {name for name in names if isinstance(name, str)} & beside
