"""A model's weights as one safetensors file, whole, and back into a model however it is sharded."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    ValueType,
    get_model_state_dict,
    set_model_state_dict,
)

from ...checkpoint.files import make_folder, reason, remove, sync_folder
from ...comm import Transport
from ...comm.messages import call_of_all, gather_texts, raise_on_all_ranks
from ..grid import Grid

_SUMS = "onebit.crc32"  # in the metadata of a file: {name: `sums_of` the tensor}, as JSON
_PIECE_BYTES = 1 << 20


def export_weights(
    model: nn.Module,
    file: str | os.PathLike[str],
    transport: Transport,
    dtype: torch.dtype | None = None,
    *,
    grid: Grid | None = None,
    max_file_bytes: int | None = None,
) -> None:
    """Write the weights under their names in the model, gathered from all shards. All ranks; rank 0 writes.

    dtype: of floating-point weights in the file; None: as they are. Tied weights are written once, under the first of
    their names. grid: where the model is one of several pipeline stages; rank 0 then takes the others' weights too.
    max_file_bytes: `file` is a folder, for several files of at most so many bytes of tensors (one that is larger has a
    file of its own) and an index, as Hugging Face's: no rank ever holds more than a file, see `export_folder`. Written
    in a hidden folder, flushed and renamed, with a CRC-32 of each MiB of a tensor among its metadata and mode 0600
    (chmod it to share it). Raises ImportError without safetensors, and OSError, on all ranks, where the file cannot be
    written: an older one is as it was then.
    """
    check_can_export()
    with call_of_all(transport, "export_weights()"):
        if max_file_bytes is not None:
            from .weight_folder import export_folder

            export_folder(model, Path(file), transport, dtype, grid=grid, max_file_bytes=max_file_bytes)
        else:
            _export_file(model, Path(file), transport, dtype, grid)


def _export_file(
    model: nn.Module, path: Path, transport: Transport, dtype: torch.dtype | None, grid: Grid | None
) -> None:
    if grid is not None and grid.shape.size("pipe") > 1:
        whole = _of_all_stages(model, grid)
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = cast(dict[str, Tensor], get_model_state_dict(model, options=options))
    problem = None
    if transport.rank == 0:
        try:
            write_weights(path, {name: _in(dtype, x) for name, x in whole.items()})
        except (OSError, error_of_safetensors()) as error:
            problem = f"rank 0: {path} cannot be written: {reason(error)}"
    raise_on_all_ranks(transport, problem, OSError)


@torch.no_grad()
def _of_all_stages(model: nn.Module, grid: Grid) -> dict[str, Tensor]:
    """On rank 0 every stage's weights, in host memory; elsewhere nothing that lasts. A stage sends its weights once."""
    here, pipe, whole = grid.coordinates, grid.transports["pipe"], {}
    is_first = not any(place for axis, place in here.items() if axis != "pipe")
    for name, x in model.state_dict().items():
        gathered = x.full_tensor() if hasattr(x, "full_tensor") else x
        if is_first:  # of its stage
            whole[name] = gathered.cpu()
    if not is_first:
        return {}
    held = {name: (list(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in whole.items()}
    every = [json.loads(text) for text in gather_texts(pipe, json.dumps(held))]
    known = dict(every[0])
    for stage, names in enumerate(every):
        for name, (shape, dtype) in names.items():
            if name in known and stage > 0:
                continue
            known[name] = (shape, dtype)
            if stage > 0:
                x = whole[name] if pipe.rank == stage else torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                x = x.to(grid.device).contiguous()
                pipe.broadcast(x, stage).wait()
                if pipe.rank == 0:
                    whole[name] = x.cpu()
    return whole if pipe.rank == 0 else {}


def import_weights(
    model: nn.Module, file: str | os.PathLike[str], transport: Transport, *, grid: Grid | None = None
) -> None:
    """Read weights that `export_weights` wrote into a model, sharded or not, in place. All ranks; each reads the file.

    file: of a folder, each rank reads the slices that it holds; errors are those of `materialize` then. Dtypes are
    converted. grid: where the model is one of several pipeline stages; it takes what is its own. Raises ValueError, on
    all ranks, before anything is changed, where names or shapes differ, and where the file is damaged (in a file of
    someone else's, as far as safetensors sees it) or not there.
    """
    path, problem = Path(file), None
    if path.is_dir():
        from .materialize import materialize

        materialize(model, path, transport=transport, is_stage=grid is not None and grid.shape.size("pipe") > 1)
        return
    whole: dict[str, Tensor] = {}
    try:
        whole = read_weights(path)
    except ImportError:
        raise
    except Exception as error:
        problem = f"rank {transport.rank}: {path} cannot be read: {error}"
    state = model.state_dict()
    if problem is None:
        whole |= {name: whole[first] for name, first in tied(model).items() if first in whole and name not in whole}
        if grid is not None and grid.shape.size("pipe") > 1:
            whole = {name: x for name, x in whole.items() if name in state}
        problem = _difference(path, whole, state)
    raise_on_all_ranks(transport, problem, ValueError)
    own: dict[str, ValueType] = {name: x.to(state[name].dtype) for name, x in whole.items()}
    set_model_state_dict(model, own, options=StateDictOptions(full_state_dict=True))


def _difference(path: Path, whole: dict[str, Tensor], state: dict[str, Tensor]) -> str | None:
    if names := sorted(whole.keys() ^ state.keys()):
        where = "the model has no" if names[0] in whole else "the file has no"
        return f"{path} is of another model: {where} {names[0]}"
    for name, x in state.items():
        if whole[name].shape != x.shape:
            shapes = f"shape {tuple(whole[name].shape)} there and {tuple(x.shape)} here"
            return f"{path} is of another model: {name} has {shapes}"
    return None


def _in(dtype: torch.dtype | None, x: Tensor) -> Tensor:
    return x if dtype is None or not x.is_floating_point() else x.to(dtype)


def _once(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the later names of tensors that are the same memory, which safetensors refuses to write twice."""
    first: dict[tuple[object, ...], str] = {}
    for name, x in whole.items():
        first.setdefault((x.data_ptr(), x.shape, x.numel() and x.stride()), name)
    kept = set(first.values())
    return {name: x.contiguous() for name, x in whole.items() if name in kept or x.numel() == 0}


def tied(model: nn.Module) -> dict[str, str]:
    """Names of parameters that have another, earlier name: later -> first."""
    first: dict[int, str] = {}
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if (earlier := first.setdefault(id(p), name)) != name:
            names[name] = earlier
    return names


def read_weights(path: Path) -> dict[str, Tensor]:
    """A .safetensors file's tensors, in host memory. One process.

    Raises ImportError without safetensors, ValueError where a tensor is not what `write_weights` wrote, OSError or
    SafetensorError where the file cannot be read.
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
    """The texts that a .safetensors file holds beside its tensors. One process; raises as `read_weights`."""
    with safetensors_form().safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def write_weights(path: Path, tensors: dict[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """A .safetensors file of tensors in host memory, as `export_weights` writes it. One process. about: texts beside.

    Raises ImportError without safetensors, OSError or SafetensorError where it cannot be written.
    """
    torch_form, tensors = safetensors_form(), _once(tensors)
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
    """This many runs of rows of equal length, the last one shorter: what a sum is of. Each can be read alone."""
    return x.chunk(count) if count > 1 else [x]


def sums_of(x: Tensor) -> list[int]:
    """The CRC-32 of each of its pieces, of about `_PIECE_BYTES`; none is less than a row."""
    rows = max(1, _PIECE_BYTES * len(x) // x.nbytes) if x.dim() and x.nbytes else 1
    count = -(-len(x) // rows) if x.dim() and x.nbytes else 1
    return [_crc32(piece, x.shape) for piece in pieces_of(x, count)]


def read_sums(file: Any) -> dict[str, list[int]]:
    """By name, of an open safetensors file; {} of others' files. Raises ValueError where they are not of its tensors.

    Files of earlier versions have one number for each tensor: it is one piece.
    """
    given = (file.metadata() or {}).get(_SUMS)
    if given is None:
        return {}
    said = json.loads(given)
    if not isinstance(said, dict) or said.keys() != set(file.keys()):
        raise ValueError("its header is damaged: its checksums are not of its tensors")
    sums = {name: crc32s if isinstance(crc32s, list) else [crc32s] for name, crc32s in said.items()}
    for name, crc32s in sums.items():
        shape, count = file.get_slice(name).get_shape(), len(crc32s)
        rows = shape[0] if shape else 0
        if count != 1 and not (0 < count <= rows and -(-rows // -(-rows // count)) == count):
            raise ValueError(f"its header is damaged: {name} of shape {tuple(shape)} has {count} checksums")
    return sums


def check_piece(name: str, piece: Tensor, shape: Sequence[int], crc32: int) -> None:
    """Raise ValueError where a piece of a tensor of that shape is not what `write_weights` wrote."""
    if _crc32(piece, shape) != crc32:
        raise ValueError(f"its tensor {name} is damaged; write the file again, or take it from a copy")


def _crc32(piece: Tensor, shape: Sequence[int]) -> int:
    """Of a piece's values, and of dtype and shape of its tensor."""
    values = piece.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data, zlib.crc32(f"{piece.dtype} {tuple(shape)}".encode()))


def error_of_safetensors() -> type[Exception]:
    return importlib.import_module("safetensors").SafetensorError  # type: ignore[no-any-return]


def check_can_export() -> None:
    """Raise ImportError where safetensors is missing."""
    safetensors_form()


def safetensors_form() -> ModuleType:
    """safetensors.torch. Raises ImportError where it is missing."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("weights are exported with safetensors; pip install 'onebit[zero]'") from error
