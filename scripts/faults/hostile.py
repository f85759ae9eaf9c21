"""Files that harm a reader which trusts them; each function writes one."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch


def seal(folder: Path, **forged: object) -> None:
    """Let a checkpoint's stamp fit its files as they are, and say what is forged, as whoever means harm would."""
    path = folder / "stamp.json"
    stamp = json.loads(path.read_text()) | forged
    del stamp["stamp_crc32"]
    for name in stamp["files"]:
        data = (folder / name).read_bytes()
        stamp["files"][name], stamp["crc32"][name] = len(data), zlib.crc32(data)
    own = zlib.crc32(json.dumps(stamp, sort_keys=True).encode())
    path.write_text(json.dumps(stamp | {"stamp_crc32": own}))


class Hostile:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, mark: Path):
        self._mark = str(mark)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._mark,)


class _Script(torch.nn.Module):
    """A module whose TorchScript archive writes a file where it is loaded. written: keeps that from being dropped."""

    def __init__(self, mark: str):
        super().__init__()
        self.mark = mark
        self.written = torch.zeros(())

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.mark, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.mark, self.training = state[0], state[1]
        self.written = torch.from_file(state[0], True, 16, dtype=torch.float32).fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def write_script(path: Path, mark: Path) -> None:
    """A TorchScript archive that writes 64 bytes to the file `mark`."""
    file = io.BytesIO()  # as a path torch takes no hidden name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(_Script(str(mark))), file)
    path.write_bytes(file.getvalue())


def write_tar(path: Path, mark: Path) -> None:
    """torch's form before 0.1.10, whose loader extracts a member and unpickles it."""
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(Hostile(mark), protocol=2)
            (member := tarfile.TarInfo(name)).size = len(data)
            archive.addfile(member, io.BytesIO(data))


def write_bomb(path: Path, mark: Path) -> None:
    """A zip file of a few kilobytes that becomes 16 MiB."""
    torch.save({"x": torch.zeros(1 << 22)}, path)
    rewrite_zip(path, zipfile.ZIP_DEFLATED)


def rewrite_zip(path: Path, compression: int, keeps: Callable[[str], bool] = lambda name: True) -> None:
    """Write a zip file's records anew, those whose names are kept."""
    whole = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w", compression) as target:
        for record in filter(keeps, source.namelist()):
            target.writestr(record, source.read(record))
