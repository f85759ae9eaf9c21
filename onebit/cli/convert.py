"""`onebit convert`: weights of an engine's, DeepSpeed's or torch's files as one file, and our state as plain AdamW's.

No code from a file is run: DeepSpeed's files are pickles that name its classes, which are read as inert records, and no
other form of file is read at all (`checkpoint/archive.py`). Each kind of source has a function here that returns
{name: tensor}.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.archive import load_archive
from ..checkpoint.change_world_size import gather_states
from ..checkpoint.files import STAMP, CheckpointError, create, reason, replacing
from ..checkpoint.portable import take_apart
from ..comm import SimTransport
from ..onebit_adam import OnebitAdam
from . import UserError
from .output import Screen

Weights = dict[str, Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ABOUT = """\
Writes weights from several kinds of checkpoints as one file, and the state of OnebitAdam as that of torch.optim.AdamW.

  onebit convert checkpoints model.safetensors --dtype bf16     a folder of onebit.zero's checkpoints
  onebit convert global_step500 model.safetensors               DeepSpeed's, ZeRO stages 0 to 3; or the folder above it
  onebit convert model.pt model.safetensors                     a file of torch.save, and back
  onebit convert --adamw rank0.pt rank1.pt adamw.pt             optimizer states of all ranks, in rank order
"""
_EPILOG = """\
The other direction needs no conversion: OnebitAdam.load_state_dict accepts a state of torch.optim.AdamW, for its
warm-up, and onebit.zero.import_weights loads a safetensors file into any layout. Checkpoints in DeepSpeed's layout are
not written. Exit status: 0 success; 1 a file cannot be read or written; 2 wrong arguments.
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="onebit convert", description=_ABOUT, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("sources", nargs="+", type=Path, metavar="FROM", help="folder or file to read; with --adamw, "
                        "one file per rank")  # fmt: skip
    parser.add_argument("target", type=Path, metavar="TO", help="new file: .safetensors, or .pt for torch.load")
    parser.add_argument("--dtype", choices=DTYPES, help="convert floating-point weights to this (default: keep)")
    parser.add_argument("--tag", help="read this checkpoint of the folder (default: the newest)")
    parser.add_argument("--adamw", action="store_true", help="convert optimizer states, not weights")
    args = parser.parse_args(argv)
    if args.target.suffix not in (".safetensors", ".pt"):
        parser.error(f"{args.target}: expected a name that ends in .safetensors or .pt")
    if args.adamw and args.target.suffix != ".pt":
        parser.error("--adamw writes a state_dict: name a file that ends in .pt")
    if not args.adamw and len(args.sources) > 1:
        parser.error("weights come from one folder or file; --adamw takes a file of every rank")
    try:
        if args.target.exists():
            raise ValueError(f"{args.target} exists already; name a new file, or remove it")
        if args.adamw:
            states = [_optimizer_state(source) for source in args.sources]
            try:
                state = adamw_state(states)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
                raise ValueError(f"{args.sources[0]}: not a complete state of OnebitAdam: {reason(error)}") from error
            _save(state, args.target)
            Screen().line(f"{args.target}: the state of {len(state['state'])} parameters for torch.optim.AdamW")
            return 0
        weights = _in(DTYPES.get(args.dtype or ""), read_weights(args.sources[0], args.tag))
        _write(weights, args.target)
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        raise UserError(str(error)) from error
    elements = sum(x.numel() for x in weights.values())
    Screen().line(f"{args.target}: {len(weights)} tensors, {elements / 1e6:.4g} M elements")
    return 0


def read_weights(source: Path, tag: str | None = None) -> Weights:
    """Weights by name. Raises ValueError or CheckpointError if they are damaged, or of no known kind."""
    from ..zero.checkpoint.whole import checkpoint_in, read_checkpoint_weights

    if source.is_file():
        if tag is not None:
            raise ValueError(f"--tag {tag} chooses among a folder's checkpoints, {source} is a file")
        return _plain(source, read_checkpoint_weights(source) if source.suffix == ".safetensors" else _of_torch(source))
    if not source.is_dir():
        raise ValueError(f"{source} does not exist")
    folder = checkpoint_in(source, tag)
    for path in (folder, *folder.iterdir()):
        if not path.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"{path} is a link to {path.resolve()}, outside of {source}; replace it by a copy")
    if (folder / STAMP).is_file():
        return _plain(folder, read_checkpoint_weights(folder))
    if any(folder.glob("*_model_states.pt")):
        try:
            return _plain(folder, _of_deepspeed(folder))
        except (ValueError, CheckpointError):
            raise
        except Exception as error:  # other content can make this reader raise anything
            raise ValueError(f"{folder} is damaged, or not as DeepSpeed 0.19 writes it: {reason(error)}") from error
    raise ValueError(
        f"{folder} holds no checkpoint of a known kind: expected {STAMP} (onebit.zero) or *_model_states.pt (DeepSpeed)"
    )


def _plain(source: Path, weights: Weights) -> Weights:
    """The same weights. Raises ValueError unless all have names, and a value in memory for each element."""
    for name, x in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"{source}: a tensor's name is {name!r}, expected text: this is no state dict of a model")
        if x.layout != torch.strided or x.is_nested or x.is_quantized or x.is_meta:
            raise ValueError(f"{source}: {name} is sparse, nested, quantized or without values; save it as it computes")
        if x.numel() * x.element_size() > x.untyped_storage().nbytes():
            raise ValueError(f"{source}: {name} has {x.numel()} elements, of which the file holds fewer; save it whole")
    return weights


# ---------------------------------------------------------------- DeepSpeed


def _of_deepspeed(folder: Path) -> Weights:
    """The float32 masters if the ranks' optimizer files exist, else the module's weights as they are."""
    models = _by_rank(folder.glob("*_model_states.pt"))
    if len(parts := {path.name.partition("mp_rank_")[2] for path in models}) > 1:
        raise ValueError(f"{folder} is of a model in {len(parts)} tensor slices; merge them with DeepSpeed's own tools")
    model = load_archive(models[0], _RECORDS)
    if not isinstance(model, dict) or not isinstance(model.get("module"), dict):
        raise ValueError(f"{models[0]} is damaged, or not as DeepSpeed 0.19 writes it: it holds no state of a module")
    optimizers = _by_rank(folder.glob("*_optim_states.pt"))
    module = {name: x for name, x in model["module"].items() if isinstance(x, Tensor)}
    if not optimizers:
        return module
    states = [load_archive(path, _RECORDS)["optimizer_state_dict"] for path in optimizers]
    stage, partitions = states[0]["zero_stage"], states[0]["partition_count"]
    if stage not in (1, 2, 3):
        raise ValueError(f"{optimizers[0]} is of ZeRO stage {stage!r}; expected 1, 2 or 3, as DeepSpeed 0.19 writes it")
    for path, state in zip(optimizers, states, strict=True):
        if (state["zero_stage"], state["partition_count"]) != (stage, partitions):
            raise ValueError(f"{path} is of another run than {optimizers[0]}: its stage or number of ranks differs")
    expected = max(partitions) if isinstance(partitions, list) else partitions
    if [_rank_of(path) for path in optimizers] != list(range(expected)):
        raise ValueError(
            f"{folder} holds the optimizer states of {len(states)} ranks, it was written by {expected}: expected one "
            f"file of each rank from 0 to {expected - 1}"
        )
    groups: list[Mapping[str, torch.Size]] = model["param_shapes"]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    flats = [list(state[key]) for state in states]
    for path, rank in zip(optimizers, flats, strict=True):
        if any(x.dtype != torch.float32 or x.dim() != 1 for x in rank):
            raise ValueError(f"{path} is damaged: expected the masters as flat float32 tensors")
    buffers = set(model["buffer_names"])
    found = _in(torch.float32, {name: x for name, x in module.items() if name in buffers})
    if model.get("frozen_param_shapes"):
        if stage == 3 and [_rank_of(path) for path in models] != list(range(expected)):
            raise ValueError(f"{folder} holds the models of {len(models)} ranks, it was written by {expected}")
        found |= _frozen(model, [load_archive(path, _RECORDS) for path in models], stage)
    found |= _of_stage_3(groups, flats) if stage == 3 else _of_stage_2(groups, flats)
    for name, first in dict(model["shared_params"]).items():
        if first in found:
            found[name] = found[first].clone()
    missing = {name: x for name, x in module.items() if name not in found}
    if stage == 3 and missing:
        raise ValueError(f"{models[0]} is damaged: {next(iter(missing))} is in the model, and in no rank's shards")
    return found | missing  # stage 1 lists no frozen weights: they are complete in the module


def _of_stage_2(groups: Sequence[Mapping[str, torch.Size]], flats: Sequence[Sequence[Tensor]]) -> Weights:
    """Stages 1 and 2: a group's parameters are one after another in the ranks' partitions, padded at the end."""
    found: Weights = {}
    for g, shapes in enumerate(groups):
        whole, at = torch.cat([rank[g] for rank in flats]), 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            if at + numel > whole.numel():
                raise ValueError(f"group {g} holds {whole.numel()} elements, {name} would end at {at + numel}: damaged")
            found[name] = whole[at : at + numel].view(shape).clone()
            at += numel
    return found


def _of_stage_3(groups: Sequence[Mapping[str, torch.Size]], flats: Sequence[Sequence[Tensor]]) -> Weights:
    """Every parameter is cut over the ranks, padded to equal shards; a rank's shards are one after another."""
    ranks = [torch.cat(list(rank)) for rank in flats]
    found: Weights = {}
    at = 0
    for shapes in groups:
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            shard = -(-numel // len(ranks))
            if at + shard > ranks[0].numel():
                raise ValueError(f"a rank holds {ranks[0].numel()} elements, {name} would end at {at + shard}: damaged")
            found[name] = torch.cat([rank[at : at + shard] for rank in ranks])[:numel].view(shape).clone()
            at += shard
    return found


def _frozen(model: Mapping[str, Any], models: Sequence[Mapping[str, Any]], stage: int) -> Weights:
    """Parameters that are not trained: complete, or at stage 3 in shards, one in each rank's model file."""
    found: Weights = {}
    for name, shape in model["frozen_param_shapes"].items():
        numel = torch.Size(shape).numel()
        shards = [each["frozen_param_fragments"][name].reshape(-1) for each in (models if stage == 3 else models[:1])]
        found[name] = torch.cat(shards)[:numel].view(shape)
    return found


def _rank_of(path: Path) -> int:
    """The data-parallel rank of a file; 0 for files of all ranks together."""
    found = re.search(r"zero_pp_rank_(\d+)", path.name)
    return int(found[1]) if found else 0


def _by_rank(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=_rank_of)


# ---------------------------------------------------------------- torch's files


def _of_torch(path: Path) -> Weights:
    """A state dict, or the state dict inside a larger dict."""
    content = load_archive(path)
    for key in ("model", "module", "state_dict", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    weights = {name: x for name, x in content.items() if isinstance(x, Tensor)} if isinstance(content, dict) else {}
    if not weights:
        raise ValueError(
            f'{path} holds no state dict of a model: expected tensors by name, at the top level or under "model"'
        )
    return weights


class Record:
    """Replaces objects of unknown classes in a pickle. It does nothing."""

    def __init__(self, *args: object, **named: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def append(self, item: object) -> None: ...

    def __setitem__(self, key: object, item: object) -> None: ...


def _without_attributes(make: Callable[..., Any], kind: object, args: tuple[object, ...], state: object) -> Any:
    """A tensor, without additional attributes as DeepSpeed's shards have. make: one of `_KNOWN`, or Record."""
    return make(*args)


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("builtins", "set"): set,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): int,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if isinstance(found := getattr(torch, name, None), torch.dtype) and module == "torch":
            return found
        return _KNOWN.get((module, name), Record)


_RECORDS = SimpleNamespace(Unpickler=_Unpickler, __name__="records")
"""For `load_archive`: unknown objects become `Record`."""


# ---------------------------------------------------------------- the optimizer's state


def _optimizer_state(path: Path) -> dict[str, Any]:
    """The state of one rank: the file's content, or its entry "optimizer"."""
    content = load_archive(path)
    for state in (content, content.get("optimizer") if isinstance(content, dict) else None):
        if isinstance(state, dict) and "onebit" in state:
            return state
    raise ValueError(
        f'{path} holds no state of OnebitAdam: expected its state_dict(), at the top level or under "optimizer"'
    )


def adamw_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A state for torch.optim.AdamW.load_state_dict, from the states of all ranks.

    exp_avg: m, decoded from the frames; the ranks' residuals are dropped. exp_avg_sq: (D - eps)², with the bias that
    AdamW takes out again: v where it is above `variance_floor` of its block's mean, the floor elsewhere. Raises
    ValueError if the states are another optimizer's, or not of all ranks.
    """
    optimizer = OnebitAdam(
        [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))],
        transport=SimTransport(),
        compression="always",
    )
    world = gather_states(states)
    parameters, _ = take_apart(optimizer, world.state, world.server_errors)
    groups, entries = [], {}
    for group in world.state["param_groups"]:
        names = ("lr", "betas", "eps", "weight_decay", "params", "param_names", "initial_lr")
        groups.append({"amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
                       "differentiable": False, "fused": None, "decoupled_weight_decay": True}
                      | {name: group[name] for name in names if name in group})  # fmt: skip
        for key in group["params"]:
            if key not in parameters:
                continue
            one, step = parameters[key], float(parameters[key].numbers["step"])
            if one.phase == "warmup":
                v = one.elements["exp_avg_sq"]
                m = one.elements["exp_avg"] if "exp_avg" in one.elements else _gradients_of(one.elements, group, step)
            else:
                D = one.elements["denominator"]
                m = one.elements["momentum"] * D
                v = (D - group["eps"]).square() * (1.0 - group["betas"][1] ** step)
            entries[key] = {
                "step": torch.tensor(step, dtype=torch.float32, device="cpu"),
                "exp_avg": m.clone(),
                "exp_avg_sq": v.clone(),
            }
    return {"state": entries, "param_groups": groups}


def _gradients_of(elements: dict[str, torch.Tensor], group: dict[str, Any], step: float) -> torch.Tensor:
    """m of a warm-up whose momentum averages moves, with D as it is now."""
    total = 1.0 - group["betas"][1] ** step if step else 1.0
    D: torch.Tensor = (elements["exp_avg_sq"] / total).sqrt() + group["eps"]
    return elements["exp_avg_update"] * D


# ---------------------------------------------------------------- writing


def _in(dtype: torch.dtype | None, weights: Weights) -> Weights:
    found = {name: x if dtype is None or not x.is_floating_point() else x.to(dtype) for name, x in weights.items()}
    for name, x in found.items():
        given = weights[name]
        is_narrower = x.is_floating_point() and torch.finfo(x.dtype).max < torch.finfo(given.dtype).max
        if is_narrower and bool((x.isinf() & given.isfinite()).any()):
            most = torch.finfo(x.dtype).max
            raise ValueError(
                f"{name} has elements beyond {most:g}, the largest of {x.dtype}; leave out --dtype, or give one with a "
                "larger range"
            )
    return found


def _write(weights: Weights, target: Path) -> None:
    if target.suffix == ".pt":
        _save(weights, target)
        return
    from ..zero.checkpoint.weights import write_weights

    try:
        write_weights(target, {name: x.contiguous() for name, x in weights.items()})
    except (OSError, ImportError):
        raise
    except Exception as error:  # safetensors' own errors, e.g. an unknown dtype
        raise ValueError(f"{target} cannot be written: {reason(error)}") from error


def _save(content: object, target: Path) -> None:
    with replacing(target) as hidden, create(hidden) as file:
        torch.save(content, file)
