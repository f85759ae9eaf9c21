"""Reads complete weights from files: an engine's checkpoint of any layout, or safetensors. No communication.

`weights.py` writes and reads one safetensors file for all ranks of a run; `files.py` the checkpoints of a run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...checkpoint.files import STAMP, CheckpointError, check_files, open_regular, read_stamp, reason
from ...comm import torch_versions
from .files import knowing_that_it_is_alone
from .storage import TABLE, Reader, read_table
from .weights import read_weights

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_checkpoint_weights(source: str | Path, tag: str | None = None) -> dict[str, Tensor]:
    """Read complete weights, by their names in the model. Each rank that calls it reads all of them; no communication.

    Args:
        source: A folder of an engine's checkpoints in any layout, a folder of safetensors files, or such a file.
        tag: Checkpoint in an engine's folder: a tag, or the name of a step. Default None: the latest.

    Returns:
        Tensors in host memory, by name.

    Raises:
        CheckpointError: There are none, or they are damaged.
    """
    source = Path(source)
    if source.is_file():
        return _read_safetensors(source)
    folder = checkpoint_in(source, tag)
    if (folder / STAMP).is_file():
        return _read_engine(folder)
    if tag is None and (files := files_of(source)):
        whole: dict[str, Tensor] = {}
        for file in files:
            found = _read_safetensors(file)
            if twice := sorted(found.keys() & whole.keys()):
                raise CheckpointError(f"{source}: {twice[0]} is in {file.name} and in another file")
            whole |= found
        return whole
    raise CheckpointError(
        f"{source} holds no weights: expected a folder of onebit.zero's checkpoints, a .safetensors file or a folder "
        "of them; `onebit convert` makes such a file from DeepSpeed's and torch's checkpoints"
    )


def checkpoint_in(source: Path, tag: str | None) -> Path:
    """The folder with a checkpoint's files: source itself, or the folder that a tag or `latest` names, two levels deep.

    Raises CheckpointError if it does not exist. It does not look for another undamaged one, as ranks might differ.
    """
    folder = source if tag is None else _inside(source, tag, f"{source} has no checkpoint")
    for _ in range(2):
        latest = folder / "latest"
        if (folder / STAMP).is_file() or not os.path.lexists(latest):
            break
        try:
            with open_regular(latest) as file:
                name = file.readall().decode().strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{latest} cannot be read: {reason(error)}") from error
        folder = _inside(folder, name, f"{latest} names")
    return folder


def files_of(folder: Path) -> list[Path]:
    """The files that an index names, or all without an index. Raises CheckpointError if one is missing.

    As in transformers, a file of the whole model comes before an index of others.
    """
    if not (index := folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strays = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    except Exception as error:  # other content raises many kinds of errors
        raise CheckpointError(
            f"{index} names no files: expected a weight_map of names to files: {reason(error)}"
        ) from error
    if strays:
        raise CheckpointError(f"{index} names {strays[0][:99]!r}, which is no file beside it; fetch the folder whole")
    if not names:
        raise CheckpointError(f"{index} names no files: expected a weight_map of names to files")
    if WHOLE not in names and (folder / WHOLE).is_file():
        return [folder / WHOLE]
    return [folder / name for name in names]


def _inside(folder: Path, name: str, what: str) -> Path:
    try:
        if name and Path(name).name == name and (folder / name).is_dir():
            return folder / name
        there = [path.name for path in sorted(folder.glob("[!.]*")) if path.is_dir()]
    except (OSError, ValueError) as error:  # a name that no system takes
        raise CheckpointError(f"{what} {name[:99]!r}: {reason(error)}") from error
    there_is = f"it holds {', '.join(there)}: name one by its tag" if there else "it holds none"
    raise CheckpointError(f"{what} {name[:99]!r}, which is no folder there; {there_is}")


def _read_engine(folder: Path) -> dict[str, Tensor]:
    stamp = read_stamp(folder)
    if TABLE not in stamp["files"]:
        files = ", ".join(sorted(stamp["files"])[-4:])
        raise CheckpointError(
            f"{folder} is no checkpoint of an engine: it holds files of torch.save ({files}); name the one with the "
            "weights, and `onebit convert` makes a .safetensors file of it"
        )
    check_files(folder, stamp, stamp["files"])
    try:
        table = read_table(folder, stamp["files"])
        names = [name for name in table.state_dict_metadata if name.startswith("model/")]
        if "form" in stamp:  # an engine's checkpoint, which has shared optimizer state beside the model
            names = [name for name in names if name.startswith("model/model.")]
        entries = {name: cast(TensorStorageMetadata, table.state_dict_metadata[name]) for name in names}
        state = {name: torch.empty(at.size, dtype=at.properties.dtype, device="cpu") for name, at in entries.items()}
        with knowing_that_it_is_alone():
            torch_versions.load_alone(state, Reader(folder, table))
    except Exception as error:  # damaged files make torch raise many kinds
        raise CheckpointError(f"{folder} cannot be read: {reason(error)}") from error
    prefix = "model/model." if "form" in stamp else "model/"
    return {name.removeprefix(prefix): x for name, x in state.items()}


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return read_weights(file)
    except ImportError:
        raise
    except Exception as error:  # safetensors' own among them
        raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error
