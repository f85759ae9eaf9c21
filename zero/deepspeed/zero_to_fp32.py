"""DeepSpeed's `deepspeed.utils.zero_to_fp32`: complete float32 weights of the engine's checkpoints, without a GPU.

python -m onebit.zero.utils.zero_to_fp32 CHECKPOINTS OUTPUT
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...checkpoint.files import reason, remove
from ...comm.launch import detect
from ..checkpoint.weight_folder import hidden_beside, publish
from ..checkpoint.weights import write_weights
from ..checkpoint.whole import read_checkpoint_weights

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict", "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]  # fmt: skip

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
_SCRIPT = '''"""Write complete float32 weights of the checkpoints in a folder: python zero_to_fp32.py FOLDER OUTPUT"""

from onebit.zero.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Complete weights and buffers of a checkpoint in any layout, floating-point ones in float32, in host memory.

    Args:
        checkpoint_dir: Folder of the checkpoints.
        tag: Name of the checkpoint. Default None: the latest.
        exclude_frozen_parameters: Must be False; it is an argument of save_checkpoint.
        lazy_mode: Must be False: the weights are read at once.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
        ValueError: An argument is not supported.
    """
    _refuse(exclude_frozen_parameters=exclude_frozen_parameters, lazy_mode=lazy_mode)
    whole = read_checkpoint_weights(Path(checkpoint_dir), tag)
    return {name: x.float() if x.is_floating_point() else x for name, x in whole.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write complete float32 weights of a checkpoint, in files under Hugging Face's names with an index.

    An earlier model in the folder stays whole until all files are written. One rank suffices; all may call it.

    Args:
        checkpoint_dir: Folder of the checkpoints.
        output_dir: Folder of the files, which is made.
        max_shard_size: Largest file, in bytes or as "5GB"; a larger tensor gets a file to itself. None: one file.
            Default "5GB".
        safe_serialization: Write safetensors, with checksums, instead of torch.save's pytorch_model.bin. Default False.
        tag: Name of the checkpoint. Default None: the latest.
        exclude_frozen_parameters: Must be False; it is an argument of save_checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
        ValueError: An argument is not supported or not understood.
        ImportError: safe_serialization without safetensors.
    """
    _refuse(exclude_frozen_parameters=exclude_frozen_parameters)
    most = None if max_shard_size is None else _bytes_of(max_shard_size)
    whole, folder = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), Path(output_dir)
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    files = _divided(whole, most)
    places = [f"{stem}-{k + 1:05d}-of-{len(files):05d}.{ending}" for k in range(len(files))]
    one, table = f"{stem}.{ending}", f"{stem}.{ending}.index.json"
    if len(files) == 1:
        places = [one]
    hidden = folder / hidden_beside(f"{table}.{detect(os.environ).rank}")  # scripts call this on every rank
    remove(hidden)  # of a call that was killed
    hidden.mkdir(parents=True)
    try:
        place_of: dict[str, str] = {}
        for file, names in zip(places, files, strict=True):
            place_of |= dict.fromkeys(names, file)
            part = {name: whole[name] for name in names}
            if safe_serialization:
                write_weights(hidden / file, part)
            else:
                torch.save(part, hidden / file)
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(x.nbytes for x in whole.values())}, "weight_map": place_of}
            (hidden / table).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    except BaseException:
        remove(hidden)
        raise
    publish(hidden, one, table)


def load_state_dict_from_zero_checkpoint(model: M, checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> M:
    """Move the model to the CPU, load a checkpoint's complete weights into it, and return it.

    Args:
        model: A plain model, not that of an engine. Weights that the checkpoint lacks stay, with a warning.
        checkpoint_dir: Folder of the checkpoints.
        tag: Name of the checkpoint. Default None: the latest.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
        ValueError: The checkpoint has weights that the model lacks.
    """
    model = model.cpu()
    whole = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if unknown := sorted(whole.keys() - model.state_dict().keys()):  # before anything is loaded
        raise ValueError(f"{checkpoint_dir} has weights of another model: {type(model).__name__} has no {unknown[0]}")
    missing, _ = model.load_state_dict(whole, strict=False)
    if missing:
        log.warning("%s has no weights for %s, which stay as they are", checkpoint_dir, ", ".join(missing))
    return model


def _refuse(**asked: bool) -> None:
    remedies = {
        "exclude_frozen_parameters": "save the checkpoint with exclude_frozen_parameters=True",
        "lazy_mode": "complete weights are read at once",
    }
    for name, value in asked.items():
        if value:
            raise ValueError(f"{name}=True is not supported: {remedies[name]}")


def _bytes_of(size: str | int) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", str(size).upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f'expected max_shard_size in bytes or as "5GB", got {size!r}')
    return int(match[1]) * _UNITS[match[2]]


def _divided(whole: dict[str, Tensor], most: int | None) -> Sequence[list[str]]:
    """Names for each file, in order; a file has at most `most` bytes, or one tensor."""
    files: list[list[str]] = [[]]
    used = 0
    for name, x in whole.items():
        if most is not None and files[-1] and used + x.nbytes > most:
            files.append([])
            used = 0
        files[-1].append(name)
        used += x.nbytes
    return files


def write_script(folder: Path) -> None:
    """Put the command into a folder of checkpoints, as DeepSpeed does. A file of that name stays as it is."""
    path = folder / "zero_to_fp32.py"
    try:
        if not path.exists():
            path.write_text(_SCRIPT)
    except OSError as e:
        log.warning("%s is not written (%s); python -m onebit.zero.utils.zero_to_fp32 does the same", path, reason(e))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command, with DeepSpeed's options."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Write complete float32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder of the engine's checkpoints")
    parser.add_argument("output_dir", help="folder of the files to write")
    parser.add_argument("--max_shard_size", default="5GB", help='largest file, e.g. "5GB"')
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="name of the checkpoint; default: the latest")
    given = vars(parser.parse_args(arguments))
    convert_zero_checkpoint_to_fp32_state_dict(**given)
