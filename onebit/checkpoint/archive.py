"""Reads files of torch.save without trusting them: only in its zip form, and without running code from the file.

`torch.load` passes a zip with `constants.pkl` to `torch.jit.load`, whatever unpickler it was given, and a TorchScript
archive is a program. The older forms, tar files and bare pickles, can contain more than tensors as well. So torch's own
zip reader looks at a file first, and every form other than that of torch.save is refused by name.
"""

from __future__ import annotations

import os
import pickle
import re
import tarfile
from pathlib import Path
from typing import IO, Any

import torch

from ..comm import torch_versions
from .files import CheckpointError, open_regular, reason

_REMEDY = "save it again with torch.save as it is by default"


def load_archive(path: Path, pickle_module: Any = None) -> Any:
    """The content of a file of torch.save, on the CPU. pickle_module: reads its table; None: torch's, only tensors.

    Raises FileNotFoundError if it does not exist, and a CheckpointError that names it for every other problem.
    """
    try:
        with open_regular(path) as file:
            return read_archive(file, pickle_module)
    except FileNotFoundError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # damaged files make torch raise many kinds
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error


def read_archive(file: IO[bytes], pickle_module: Any = None) -> Any:
    """As `load_archive`, for an open file. Raises as `check_archive`, and torch's own errors for damaged files."""
    check_archive(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=pickle_module is None, pickle_module=pickle_module)
    except pickle.UnpicklingError as error:  # torch's advice is to run what is in the file
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"it holds {found[1]}, and of Python's objects only tensors and plain values are read here, as nothing "
                "of a file is run; save the module's state_dict() alone with torch.save"
            ) from error
        raise


def check_archive(file: IO[bytes]) -> None:
    """Raise CheckpointError unless torch.save wrote the file: a zip without compression. Rewinds it."""
    file.seek(0, os.SEEK_END)
    size = file.tell()  # a part of a file returns another position from seek
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    if magic != b"PK\x03\x04":
        raise CheckpointError(f"it is {_form(file, magic)}, expected the zip form of torch.save; {_REMEDY}")
    archive = torch._C.PyTorchFileReader(file)  # torch.load's own reader, so that both see the same archive
    records = archive.get_all_records()
    if any(name == "constants.pkl" or name.startswith("code/") for name in records):
        raise CheckpointError(
            "it is a TorchScript archive (torch.jit.save), which is a program, and programs are not run here; save the "
            "module's state_dict() with torch.save"
        )
    if "data.pkl" not in records:
        raise CheckpointError(f"it is a zip file without data.pkl, which torch.save did not write; {_REMEDY}")
    if (declared := torch_versions.record_bytes(file, archive)) > size:
        raise CheckpointError(
            f"its records would take {declared} bytes, the file has {size}: they are compressed or overlap, and "
            f"torch.save writes neither; {_REMEDY}"
        )
    file.seek(0)


def _form(file: IO[bytes], magic: bytes) -> str:
    if not magic:
        return "empty"
    if magic[:1] == b"\x80":
        return "a bare pickle (torch.save with _use_new_zipfile_serialization=False, or pickle.dump)"
    is_tar = tarfile.is_tarfile(file)
    file.seek(0)
    return "a tar file (torch.save before version 0.1.10)" if is_tar else "no zip file"
