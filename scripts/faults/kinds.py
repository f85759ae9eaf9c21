"""The two kinds of checkpoint, behind one face: save a value, load a value, and know whether all of it came back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from train.checkpoint import CheckpointFolder

from onebit.comm import SimNetwork, SimTransport
from onebit.zero import Checkpoints

T = TypeVar("T")

_RANKS = 2
MIXED = -1.0
"""What a load gives where something in it is not of the save that the rest is of."""

Save = Callable[[float], None]
Load = Callable[[], "float | None"]


@dataclass(frozen=True)
class Kind:
    """A way to save. open(folder) gives (save, load) of all ranks of one run.

    save(value): the checkpoint of step int(value), all of whose numbers follow from the value. load(): the value of the
    newest one, None without one, `MIXED`. Both raise what the ranks raise; the error's text is the same on all.
    """

    name: str
    open: Callable[[Path], tuple[Save, Load]]


def named(value: float | None) -> str:
    if value is None:
        return "nothing"
    return "a mixture" if value == MIXED else f"the checkpoint of {value}"


def _model(value: float) -> dict:
    return {"weight": torch.full((33, 20), value), "bias": torch.full((33,), value, dtype=torch.bfloat16)}


def _own(value: float) -> dict:
    state = [{"momentum": torch.full((700,), value)}, {"momentum": torch.full((1,), value)}]
    return {"state": state, "groups": [{"lr": 0.25 * value, "params": [0, 1]}], "empty": None, "phase": "compressed"}


def _value(model: dict, own: object, step: object) -> float:
    """The value that all of it follows from."""
    value = float(model["weight"].reshape(-1)[0])
    return value if _same(model, _model(value)) and _same(own, _own(value)) and step == int(value) else MIXED


def _same(a: object, b: object) -> bool:
    """To the bit, through containers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    return a == b


def _open_replicas(folder: Path) -> tuple[Save, Load]:
    """`train/checkpoint.py`'s, by two ranks that are threads."""
    network = SimNetwork(_RANKS, timeout_s=20.0)
    transports = [SimTransport(network, rank) for rank in range(_RANKS)]

    def on_all(work: Callable[[SimTransport], T]) -> list[T]:
        with ThreadPoolExecutor(_RANKS) as pool:
            return list(pool.map(work, transports))

    folders = on_all(lambda transport: CheckpointFolder(folder, transport, torch.device("cpu")))

    def save(value: float) -> None:
        on_all(lambda transport: folders[transport.rank].save(int(value), {"model": _model(value)}, _own(value)))

    def load_one(transport: SimTransport) -> float | None:
        loaded = folders[transport.rank].load()
        if loaded is None:
            return None
        shared, (own,) = loaded
        own = {name: content for name, content in own.items() if name not in ("step", "world_size")}
        return _value(shared["model"], own, shared["step"])

    def load() -> float | None:
        values = set(on_all(load_one))
        return values.pop() if len(values) == 1 else MIXED

    return save, load


def _open_engine(folder: Path, in_background: bool = False) -> tuple[Save, Load]:
    """The engine's, by one rank."""
    if in_background and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    checkpoints = Checkpoints(folder, SimTransport())

    def save(value: float) -> None:
        checkpoints.save(int(value), _model(value), _own(value), {"about": "one"}, in_background=in_background)
        checkpoints.wait()

    def load() -> float | None:
        model = _model(MIXED)
        try:
            loaded = checkpoints.load(model)
        except Exception:
            if not _same(model, _model(MIXED)):
                return MIXED  # an error must leave the model as it was
            raise
        if loaded is None:
            return None
        return _value(model, loaded.own[0], loaded.step) if loaded.stamp["about"] == "one" else MIXED

    return save, load


REPLICAS = Kind("replicas", _open_replicas)
ENGINE = Kind("engine", _open_engine)
IN_BACKGROUND = Kind("engine, in background", partial(_open_engine, in_background=True))
