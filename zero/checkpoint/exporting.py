"""Writes a model's complete weights into safetensors files, from any sharding."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ...checkpoint.files import reason
from ...comm import Transport
from ...comm.messages import call_of_all, gather_texts, raise_on_all_ranks
from ...model_parallel import gathered
from ..grid import Grid
from .weight_folder import export_folder
from .weights import check_can_export, error_of_safetensors, plain, tied, write_weights


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

    Tied weights are written once, under the first of their names. A file is written in a hidden folder, flushed and
    renamed, with a CRC-32 of each MiB of a tensor in its metadata and mode 0600 (chmod it to share it).

    Args:
        model: The model, or this rank's pipeline stage.
        file: File to write; with max_file_bytes, a folder.
        transport: Connection between all ranks.
        dtype: dtype of floating-point weights in the file. Default None: as in the model.
        grid: The grid, if the model is one of several pipeline stages; rank 0 then writes those of all. Default None.
        max_file_bytes: Bytes of tensors per file, in a folder with an index as Hugging Face's; a larger tensor gets a
            file to itself. No rank then holds more than a file, see `export_folder`. Default None: one file.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: dtype is not a floating-point dtype of torch; or a module's get_extra_state() is no tensor, on all
            ranks.
        OSError: The file cannot be written. On all ranks; an older file is unchanged.
    """
    check_can_export()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"rank {transport.rank}: dtype must be a floating-point dtype, as torch.bfloat16, got {dtype!r}; packed "
            "integers are written by onebit.zero.compression's export_compressed"
        )
    with call_of_all(transport, "export_weights()"):
        raise_on_all_ranks(transport, _no_tensor(model, transport.rank), TypeError)
        if max_file_bytes is not None:
            export_folder(model, Path(file), transport, dtype, grid=grid, max_file_bytes=max_file_bytes)
        else:
            _export_file(model, Path(file), transport, dtype, grid)


def _no_tensor(model: nn.Module, rank: int) -> str | None:
    for name, x in model.state_dict().items():
        if not isinstance(x, Tensor):
            return (
                f"rank {rank}: a file of weights holds tensors, {name} is a {type(x).__name__}; let the module's "
                "get_extra_state() return a tensor, or export without it"
            )
    return None


def _export_file(
    model: nn.Module, path: Path, transport: Transport, dtype: torch.dtype | None, grid: Grid | None
) -> None:
    if grid is not None and grid.shape.size("pipe") > 1:
        whole = _of_all_stages(model, grid)
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = cast(dict[str, Tensor], get_model_state_dict(model, options=options))
        later = {plain(name) for name in tied(model)}
        whole = {name: x for name, x in whole.items() if name not in later}
    problem = None
    if transport.rank == 0:
        try:
            write_weights(path, {name: _in(dtype, x) for name, x in whole.items()})
        except (OSError, error_of_safetensors()) as error:
            problem = f"rank 0: {path} cannot be written: {reason(error)}"
    raise_on_all_ranks(transport, problem, OSError)


@torch.no_grad()
def _of_all_stages(model: nn.Module, grid: Grid) -> dict[str, Tensor]:
    """On rank 0 every stage's weights, in host memory; {} elsewhere. A stage sends its weights once."""
    here, pipe, whole, later = grid.coordinates, grid.transports["pipe"], {}, tied(model)
    is_first = not any(place for axis, place in here.items() if axis != "pipe")
    for name, x in model.state_dict().items():
        all_ranks = gathered(x)
        if is_first and name not in later:  # of its stage
            whole[name] = all_ranks.cpu()
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


def _in(dtype: torch.dtype | None, x: Tensor) -> Tensor:
    return x if dtype is None or not x.is_floating_point() else x.to(dtype)
