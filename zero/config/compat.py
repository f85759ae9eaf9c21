"""Reads a DeepSpeed JSON file: parses it, refuses duplicate keys, and replaces old names by current ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from .reader import Reading, read_object
from .schema import AUTO, BOOL, INT, Key

_SWITCH, _RANKS = Key(BOOL), Key(INT, least=0)

# Names of stage 3's keys in DeepSpeed's Python, which its files may have, too.
_STAGE_3 = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
# Other names of blocks and keys, with the block they are in: their usual names.
_OTHER_NAMES = {
    ("", "bfloat16"): "bf16",
    ("zero_optimization", "stage3_gather_fp16_weights_on_model_save"): "stage3_gather_16bit_weights_on_model_save",
    **{("zero_optimization", name): f"stage3_{name}" for name in _STAGE_3},
}
_OLD_SWITCHES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_params": "offload_param",
    "cpu_offload_param": "offload_param",
}
# DeepSpeed ignores these blocks below a stage, and scripts write them at every one: the least, and what is there.
_OFFLOADED_FROM = {
    "offload_param": (3, "parameters are offloaded at stage 3"),
    "offload_optimizer": (1, "optimizer state is offloaded at stages 1, 2 and 3"),
}


def modernised(data: dict[str, object], reading: Reading) -> dict[str, object]:
    """The data with current names instead of old ones; each replacement adds a warning."""
    zero = data.get("zero_optimization")
    if isinstance(zero, bool):
        reading.warnings.append(f'{reading.at("zero_optimization")} is an old form: write {{"stage": {int(zero)}}}')
        zero = {"stage": int(zero)}
    if isinstance(zero, Mapping):
        zero = read_object(zero, "zero_optimization", reading)
        for old, new in _OLD_SWITCHES.items():
            if old in zero:
                reading.warnings.append(
                    f'{reading.at("zero_optimization", old)} is an old name: write "{new}": {{"device": "cpu"}}'
                )
                if _SWITCH.read(zero.pop(old), reading.at("zero_optimization", old)):
                    zero.setdefault(new, {"device": "cpu"})
        _switch_off_offloads(zero, reading)
        data["zero_optimization"] = zero
    _take_tensor_ranks(data, reading)
    if isinstance(sparse := data.get("sparse_attention"), Mapping):
        data["sparse_attention"] = {"mode": "fixed", **sparse}  # DeepSpeed's default if the block exists
    for (where, old), new in _OTHER_NAMES.items():
        inside = data.get(where, {}) if where else data
        if isinstance(inside, dict) and old in inside:
            if new in inside:
                raise ValueError(f'{reading.at(where, old)} is another name of "{new}", which is also there; drop it')
            reading.warnings.append(f'{reading.at(where, old)} is another name: write "{new}"')
            inside[new] = inside.pop(old)
    return data


def _switch_off_offloads(zero: dict[str, object], reading: Reading) -> None:
    """Set the device of blocks to "none" that have no effect at this stage, each with a warning."""
    stage = zero.get("stage", 0)
    for name, (least, why) in _OFFLOADED_FROM.items():
        block = zero.get(name)
        is_on = isinstance(block, Mapping) and block.get("device", "none") != "none"
        if isinstance(stage, int) and stage < least and is_on:
            reading.warnings.append(f"{reading.at('zero_optimization', name)} has no effect at stage {stage}: {why}")
            zero[name] = read_object(block, name, reading) | {"device": "none"}


def _take_tensor_ranks(data: dict[str, object], reading: Reading) -> None:
    """DeepSpeed's tensor_parallel.autotp_size is onebit.tensor here."""
    theirs = data.get("tensor_parallel")
    if not isinstance(theirs, Mapping) or theirs.get("autotp_size") in (None, AUTO):
        return
    theirs, ours = dict(theirs), data.get("onebit")
    size = _RANKS.read(theirs.pop("autotp_size"), reading.at("tensor_parallel", "autotp_size"))
    ours = read_object({} if ours is None else ours, "onebit", reading)
    if ours.get("tensor") not in (None, size):
        raise ValueError(
            f"{reading.at('tensor_parallel', 'autotp_size')} is {size}, but onebit.tensor is {ours['tensor']}; keep one"
        )
    data["tensor_parallel"] = theirs
    if size != 0:  # 0: off, DeepSpeed's default
        data["onebit"] = ours | {"tensor": size}


class _Object(dict[str, object]):
    """A JSON object that remembers its duplicate keys."""

    def __init__(self, pairs: list[tuple[str, object]]):
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = [name for name in self if names.count(name) > 1]


def contents_of(config: Mapping[str, object] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The entries of a configuration, a file's name or a dict, as they are written."""
    return cast(Mapping[str, Any], load(Path(config)) if isinstance(config, str | os.PathLike) else config)


def load(path: Path) -> object:
    """The content of a JSON file. Raises ValueError if it is not JSON, or an object has a key twice."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_Object)
    except json.JSONDecodeError as wrong:
        raise ValueError(f"{path.name}: not JSON: {wrong.msg}, at line {wrong.lineno} column {wrong.colno}") from wrong
    for place in _twice(content, ""):
        raise ValueError(f"{path.name}: {place} is there twice; keep one of them")
    return content


def _twice(content: object, where: str) -> Iterator[str]:
    """The places of duplicate keys."""
    if isinstance(content, _Object):
        yield from (where + name for name in content.twice)
        for name, item in content.items():
            yield from _twice(item, f"{where}{name}.")
    elif isinstance(content, list):
        for item in content:
            yield from _twice(item, where)
