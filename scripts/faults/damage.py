"""Checkpoint files that are not as they were written: flipped, cut, empty, missing, stale, of another content, hostile.

Two checkpoints are saved, one file of the newer is damaged, and another process loads. Promised is an error on all
ranks that names the file and offers the older checkpoint, or what was saved, to the bit.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch

from faults.case import AS_PROMISED, CRASH, HUNG, NAMELESS, OTHER, SILENT, Case, End, Outcome, Tools, first_line
from faults.hostile import Hostile, seal, write_bomb, write_script, write_tar
from faults.kinds import ENGINE, REPLICAS, Kind, named
from faults.ranks import call_in_fork
from onebit.cli.convert import read_weights
from onebit.comm import SimTransport
from onebit.zero import export_weights, materialize, read_checkpoint_weights

_OLD, _NEW = 1.0, 2.0
_OLD_NAME, _NEW_NAME = "step_00000001", "step_00000002"
_MARK = "code-ran"


Damage = Callable[[Path, Random], str]
"""Spoils a file; what was done to it."""


def _flip(path: Path, random: Random) -> str:
    data = bytearray(path.read_bytes())
    at, bit = random.randrange(len(data)), random.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {len(data)} flipped"


def _cut(path: Path, random: Random) -> str:
    size, left = path.stat().st_size, random.randrange(1, path.stat().st_size)
    os.truncate(path, left)
    return f"cut to {left} of {size} bytes"


def _empty(path: Path, random: Random) -> str:
    path.write_bytes(b"")
    return "empty"


def _missing(path: Path, random: Random) -> str:
    path.unlink()
    return "missing"


def _folder(path: Path, random: Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder of this name instead"


def _longer(path: Path, random: Random) -> str:
    path.write_bytes(path.read_bytes() + b"\0")
    return "a byte longer"


def _zeros(path: Path, random: Random) -> str:
    data = bytearray(path.read_bytes())
    at = random.randrange(max(1, len(data) - 64))
    data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.write_bytes(data)
    return f"64 zero bytes at {at}"


def _noise(path: Path, random: Random) -> str:
    path.write_bytes(random.randbytes(path.stat().st_size))
    return "random bytes of the same length"


def _other_content(path: Path, random: Random) -> str:
    if path.suffix == ".json":
        path.write_text(json.dumps(random.choice([{}, [], 1, {"step": "x", "files": 3}])))
        return "other JSON"
    if path.suffix in ("", ".distcp") and path.name.startswith("."):
        path.write_bytes(pickle.dumps({"a": 1}))
        return "another pickle"
    torch.save(random.choice([{"a": 1}, [1, 2], torch.ones(3)]), path)
    return "another torch.save"


def _stale(path: Path, random: Random) -> str:
    shutil.copyfile(path.parent.parent / _OLD_NAME / path.name, path)
    return "the older checkpoint's file"


def _huge(path: Path, random: Random) -> str:
    path.write_bytes(b"\x80\x04\x8e" + (2**60).to_bytes(8, "little"))
    return "a pickle that asks for 2^60 bytes"


def _hostile(path: Path, random: Random) -> str:
    path.write_bytes(pickle.dumps(Hostile(path.parent.parent / _MARK)))
    return "a pickle that runs code"


def _hostile_zip(path: Path, random: Random) -> str:
    file = io.BytesIO()
    torch.save({"model": Hostile(path.parent.parent / _MARK)}, file)
    path.write_bytes(file.getvalue())
    return "a torch.save that runs code"


def _hostile_script(path: Path, random: Random) -> str:
    write_script(path, path.parent.parent / _MARK)
    return "a TorchScript archive that runs code"


def _hostile_tar(path: Path, random: Random) -> str:
    write_tar(path, path.parent.parent / _MARK)
    return "a tar file of torch's first form that runs code"


def _hostile_legacy(path: Path, random: Random) -> str:
    content = {"model": Hostile(path.parent.parent / _MARK)}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return "a bare pickle of torch's second form that runs code"


def _bomb(path: Path, random: Random) -> str:
    write_bomb(path, path.parent.parent / _MARK)
    return "a zip file of a few kilobytes that becomes 16 MiB"


_HOSTILE = (_huge, _hostile, _hostile_zip, _hostile_script, _hostile_tar, _hostile_legacy, _bomb)
"""These come with a stamp that fits."""

_FILES: dict[Damage, int] = {
    _flip: 24, _cut: 5, _empty: 1, _missing: 1, _folder: 1, _longer: 1, _zeros: 4, _noise: 1, _other_content: 2,
    _stale: 1, **dict.fromkeys(_HOSTILE, 1),
}  # fmt: skip
_LATEST: dict[Damage, int] = {_flip: 6, _cut: 3, _empty: 1, _missing: 1, _folder: 1, _noise: 1}


def _save_two(kind: Kind, folder: Path) -> None:
    def work() -> None:
        save, _ = kind.open(folder)
        save(_OLD)
        save(_NEW)

    end = call_in_fork(work)
    if end.what != "returned":
        raise RuntimeError(f"two saves of {kind.name} fail without any fault: {end.text}")


def _damage(kind: Kind, name: str, tools: Tools) -> Iterator[Outcome]:
    """All damages of the files of the newer checkpoint that match a name; or of `latest`."""
    whole, folder = tools.folder / "whole", tools.folder / "damaged"
    _save_two(kind, whole)
    files = sorted(path.relative_to(whole) for path in whole.glob(name))
    kinds = _LATEST if name == "latest" else _FILES
    faults = [(file, damage) for file in files for damage, count in kinds.items() for _ in range(count)]
    for file, damage in tools.some(faults, 6):
        shutil.copytree(whole, folder)
        done = damage(folder / file, tools.random)
        if damage in _HOSTILE and file.name != "stamp.json":
            seal((folder / file).parent)
        fault = f"{file}: {done}"
        if damage is not _stale or (folder / file).read_bytes() != (whole / file).read_bytes():
            yield _judge(fault, kind, folder, file)
        shutil.rmtree(folder)


def _judge(fault: str, kind: Kind, folder: Path, file: Path) -> Outcome:
    end = call_in_fork(lambda: kind.open(folder)[1]())
    if (folder / _MARK).exists():
        return Outcome(fault, SILENT, "code in the file ran")
    if end.what == "running":
        return Outcome(fault, HUNG, "the load did not end")
    if end.what == "died":
        return Outcome(fault, CRASH, f"the load died of {end.number}: {first_line(end.text)}")
    if end.what == "returned":
        right = end.value == _NEW
        return Outcome(fault, AS_PROMISED if right else SILENT, "" if right else f"loads {named(end.value)}")  # type: ignore[arg-type]
    error = first_line(end.text)
    if not error.startswith("CheckpointError: "):
        return Outcome(fault, OTHER, f"not a CheckpointError: {error}")
    # A `latest` that names another step blames that step's files.
    blamed = r"latest|step_\d+/" if file.name == "latest" else re.escape(file.name)
    if not re.search(blamed, end.text):
        return Outcome(fault, NAMELESS, f"does not name {file.name}: {error}")
    offered = _NEW_NAME if file.name == "latest" else _OLD_NAME
    if offered not in end.text:
        return Outcome(fault, NAMELESS, f"does not offer {offered}: {error}")
    return Outcome(fault)


_EXPORT, _GIVEN = "model.safetensors", "mp_rank_00_model_states.pt"


def _export(tools: Tools) -> Iterator[Outcome]:
    """An export that is damaged, in a file or in a folder of them, and each of its readers."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7))
    damages = (_flip, _cut, _empty, _longer, _zeros, _noise, _hostile_script, _hostile_tar)
    for name, most in (("file", None), ("folder", 3000)):
        whole, folder = tools.folder / name, tools.folder / "x" / "damaged"
        whole.mkdir()
        export_weights(model, whole if most else whole / _EXPORT, SimTransport(), max_file_bytes=most)
        faults = [(damage, reader) for reader in _READERS for damage in damages for _ in range(_FILES.get(damage, 1))]
        for damage, reader in tools.some(faults, 6):
            shutil.copytree(whole, folder)
            path = tools.random.choice(sorted(folder.glob("*.safetensors")))
            fault = f"{name}, {reader}: {damage(path, tools.random)}"
            end = call_in_fork(partial(_READERS[reader], folder))
            if end.what == "returned":
                same = all(torch.equal(x, torch.tensor(end.value[key])) for key, x in model.state_dict().items())  # type: ignore[index]
                yield Outcome(fault, AS_PROMISED if same else SILENT, "" if same else "loads other weights")
            else:
                yield _refusal(fault, end, folder.parent / _MARK, str(folder))
            shutil.rmtree(folder.parent)


def _materialized(folder: Path) -> dict:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7))
    return {name: x.tolist() for name, x in materialize(model, folder).state_dict().items()}


def _read_whole(folder: Path) -> dict:
    return {name: x.tolist() for name, x in read_checkpoint_weights(folder).items()}


_READERS = {"materialize": _materialized, "read_checkpoint_weights": _read_whole}


def _convert(tools: Tools) -> Iterator[Outcome]:
    """A folder as DeepSpeed's, with one file in it that is no such file."""
    for damage in (*_HOSTILE, _noise, _empty, _cut):
        folder = tools.folder / "run" / "given"
        folder.mkdir(parents=True)
        torch.save({"module": {"weight": torch.ones(3)}}, folder / _GIVEN)
        fault = damage(folder / _GIVEN, tools.random)
        end = call_in_fork(lambda folder=folder: {n: x.tolist() for n, x in read_weights(folder).items()})
        yield _refusal(fault, end, folder.parent / _MARK, _GIVEN)
        shutil.rmtree(folder.parent)


def _refusal(fault: str, end: End, mark: Path, names: str) -> Outcome:
    """Of a read that must be an error that names the file."""
    if mark.exists():
        return Outcome(fault, SILENT, "code in the file ran")
    if end.what == "running":
        return Outcome(fault, HUNG, "the read did not end")
    if end.what == "died":
        return Outcome(fault, CRASH, f"the read died of {end.number}: {first_line(end.text)}")
    if end.what == "returned":
        return Outcome(fault, SILENT, "is read")
    error = first_line(end.text)
    if not error.startswith(("CheckpointError: ", "ValueError: ")):
        return Outcome(fault, OTHER, f"neither a CheckpointError nor a ValueError: {error}")
    return Outcome(fault) if names in end.text else Outcome(fault, NAMELESS, f"does not name {names}: {error}")


def cases() -> Iterator[Case]:
    yield Case(
        "exports: a file and a folder",
        "an error that names the file, or what was exported, to the bit",
        "bits flipped, cut, empty, longer, zeros, noise; a TorchScript archive, a tar file",
        "what `materialize` and `read_checkpoint_weights` give or raise; whether code ran",
        _export,
        is_quick=True,
        cost_s=8.0,
    )
    yield Case(
        "onebit convert: DeepSpeed's folder",
        "an error that names the file",
        "pickles, zip files, TorchScript archives and tar files that run code or ask for much; noise, empty, cut",
        "what `onebit convert` reads or raises; whether code ran",
        _convert,
        is_quick=True,
        cost_s=3.0,
    )
    tables = {
        REPLICAS: {
            "the stamp": f"{_NEW_NAME}/stamp.json",
            "what ranks share": f"{_NEW_NAME}/shared.pt",
            "a rank's own": f"{_NEW_NAME}/rank_*",
        },
        ENGINE: {
            "the stamp": f"{_NEW_NAME}/stamp.json",
            "the table of contents": f"{_NEW_NAME}/.metadata",
            "the data": f"{_NEW_NAME}/*.distcp",
        },
    }
    for kind, files in tables.items():
        for what, name in files.items():
            yield Case(
                f"{kind.name}: {what}",
                f"CheckpointError on all ranks that names the file and offers {_OLD_NAME}, or what was saved",
                "bits flipped, cut, empty, missing, a folder, longer, zeros, noise, other, stale or hostile content",
                "what another process loads or raises; whether code ran; whether the model was touched",
                partial(_damage, kind, name),
                is_quick=what in ("a rank's own", "the data"),
                cost_s=8.0,
            )
        yield Case(
            f"{kind.name}: latest",
            "CheckpointError that names `latest`, or the newest checkpoint; never a start at step 0",
            "a bit flipped, cut, empty, missing, a folder, noise",
            "what another process loads or raises",
            partial(_damage, kind, "latest"),
            cost_s=3.0,
        )
