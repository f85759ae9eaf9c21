"""Safetensors files with a checksum of each piece: written, read, checked. Extra `[zero]`."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ...checkpoint.files import make_folder, remove, sync_folder

_SUMS = "onebit.crc32"  # in the metadata of a file: {name: `sums_of` the tensor}, as JSON
_PIECE_BYTES = 1 << 20


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous and in memory apart: safetensors refuses those that overlap. Host memory."""
    apart, end = {name: x.contiguous() for name, x in tensors.items()}, 0
    for name, x in sorted(apart.items(), key=lambda item: item[1].data_ptr()):
        if x.data_ptr() < end:
            apart[name] = x.clone()
        end = max(end, x.data_ptr() + x.nbytes)
    return apart


def plain(name: str) -> str:
    """A parameter's name in the model that torch.compile has wrapped, as torch's own checkpoints have it."""
    return name.replace("_orig_mod.", "")


def tied(model: nn.Module) -> dict[str, str]:
    """Names of parameters and buffers that have another, earlier name: later -> first."""
    first: dict[int, str] = {}
    names = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if (earlier := first.setdefault(id(x), name)) != name:
            names[name] = earlier
    return names


def set_extra_states(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Call `set_extra_state` of the modules whose extra states were read, as load_state_dict does. One process.

    Args:
        model: The model.
        found: Tensors by their plain names. Those that are no extra state are left out.
    """
    extra = {name: x for name, x in found.items() if name.endswith(_EXTRA_STATE_KEY_SUFFIX)}
    if not extra:
        return
    state = model.state_dict()  # names as torch has them, and the versions of modules
    for name in list(state):
        if plain(name) in extra:
            state[name] = extra[plain(name)]
        else:
            del state[name]
    model.load_state_dict(state, strict=False)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A .safetensors file's tensors, in host memory. One process.

    Raises ImportError without safetensors, ValueError if a tensor fails its checksum, OSError or SafetensorError if the
    file cannot be read.
    """
    torch_form = safetensors_form()
    whole: dict[str, Tensor] = torch_form.load_file(path)
    with torch_form.safe_open(path, framework="pt") as file:
        sums = read_sums(file)
    for name, crc32s in sums.items():
        for piece, crc32 in zip(pieces_of(whole[name], len(crc32s)), crc32s, strict=True):
            check_piece(name, piece, whole[name].shape, crc32)
    return whole


def read_about(path: Path) -> dict[str, str]:
    """The metadata of a .safetensors file. One process; raises as `read_weights`."""
    with safetensors_form().safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def write_weights(path: Path, tensors: dict[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write tensors in host memory to a .safetensors file with checksums. One process. about: more metadata.

    Raises ImportError without safetensors, OSError or SafetensorError if it cannot be written.
    """
    torch_form, tensors = safetensors_form(), _apart(tensors)
    make_folder(path.parent)
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.mkdir(hidden, 0o700)  # safetensors makes the file itself
    try:
        sums = json.dumps({name: sums_of(x) for name, x in tensors.items()})
        metadata = {"format": "pt", _SUMS: sums, **(about or {})}
        torch_form.save_file(tensors, hidden / "new", metadata=metadata)
        os.chmod(hidden / "new", 0o600)
        with (hidden / "new").open("rb") as file:
            os.fsync(file.fileno())
        os.replace(hidden / "new", path)
        sync_folder(path.parent)
    finally:
        remove(hidden)


def pieces_of(x: Tensor, count: int) -> Sequence[Tensor]:
    """The pieces of a tensor that have a checksum each: `count` runs of rows, the last one shorter."""
    return x.chunk(count) if count > 1 else [x]


def sums_of(x: Tensor) -> list[int]:
    """The CRC-32 of each piece, of about `_PIECE_BYTES` and at least a row."""
    rows = max(1, _PIECE_BYTES * len(x) // x.nbytes) if x.dim() and x.nbytes else 1
    count = -(-len(x) // rows) if x.dim() and x.nbytes else 1
    return [_crc32(piece, x.shape) for piece in pieces_of(x, count)]


def read_sums(file: Any) -> dict[str, list[int]]:
    """Checksums by name, from an open safetensors file; {} if it has none. Raises ValueError if they do not fit.

    Files of earlier versions have one number per tensor, i.e. one piece.
    """
    given = (file.metadata() or {}).get(_SUMS)
    if given is None:
        return {}
    listed = json.loads(given)
    if not isinstance(listed, dict) or listed.keys() != set(file.keys()):
        raise ValueError("its header is damaged: its checksums are not of its tensors")
    sums = {name: crc32s if isinstance(crc32s, list) else [crc32s] for name, crc32s in listed.items()}
    for name, crc32s in sums.items():
        shape, count = file.get_slice(name).get_shape(), len(crc32s)
        rows = shape[0] if shape else 0
        if count != 1 and not (0 < count <= rows and -(-rows // -(-rows // count)) == count):
            raise ValueError(f"its header is damaged: {name} of shape {tuple(shape)} has {count} checksums")
    return sums


def check_piece(name: str, piece: Tensor, shape: Sequence[int], crc32: int) -> None:
    """Raise ValueError if a piece of a tensor of that shape fails its checksum."""
    if _crc32(piece, shape) != crc32:
        raise ValueError(f"its tensor {name} is damaged; write the file again, or take it from a copy")


def _crc32(piece: Tensor, shape: Sequence[int]) -> int:
    """CRC-32 of a piece's values, and of dtype and shape of its tensor."""
    values = piece.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data, zlib.crc32(f"{piece.dtype} {tuple(shape)}".encode()))


def error_of_safetensors() -> type[Exception]:
    return importlib.import_module("safetensors").SafetensorError  # type: ignore[no-any-return]


def check_can_export() -> None:
    """Raise ImportError if safetensors is missing."""
    safetensors_form()


def safetensors_form() -> ModuleType:
    """The module safetensors.torch. Raises ImportError if it is missing."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("weights are exported with safetensors; pip install 'onebit[zero]'") from error
