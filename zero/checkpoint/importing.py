"""Reads exported weights into a model of any layout."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, ValueType, set_model_state_dict

from ...comm import Transport
from ...comm.messages import raise_on_all_ranks
from ..grid import Grid
from .materialize import materialize
from .weights import read_weights, tied


def import_weights(
    model: nn.Module, file: str | os.PathLike[str], transport: Transport, *, grid: Grid | None = None
) -> None:
    """Read weights that `export_weights` wrote into a model, sharded or not, in place. All ranks; each reads the file.

    dtypes are converted.

    Args:
        model: The model, or this rank's pipeline stage.
        file: A safetensors file; or a folder, from which each rank reads its slices, with the errors of `materialize`.
        transport: Connection between all ranks.
        grid: The grid, if the model is one of several pipeline stages; each takes its own weights. Default None.

    Raises:
        ValueError: Names or shapes differ, or the file is missing or damaged (in files without our checksums, as far as
            safetensors notices). On all ranks; nothing has changed.
        ImportError: safetensors is not installed.
    """
    path, problem = Path(file), None
    if path.is_dir():
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
