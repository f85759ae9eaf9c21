"""An offloaded optimizer's state by parameter, in torch's form, and the checks before one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ...layout.masters import NAME as MASTER
from ...layout.masters import settled_
from ...model_parallel import local
from ...usage.contract import Group, State
from .layout import Layout, Piece
from .store import Store


@dataclass
class OffloadStats:
    """What an `Offload` has done since its construction.

    Attributes:
        steps: Steps, skipped ones included.
        skipped_steps: Steps skipped because of a gradient.
        grad_norm: The gradient norm of the last step before clipping; None after a skipped step.
        wait_s: Seconds that steps and hooks waited for the stores.
        network_s: Seconds that steps waited for other ranks.
        read_bytes: Bytes read from files.
        written_bytes: Bytes written to files.
    """

    steps: int = 0
    skipped_steps: int = 0
    grad_norm: float | None = None
    wait_s: float = 0.0
    network_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class StateOfParams:
    """The state in a store by parameter. `numbers` holds what is no field, by piece; `has_master` is by parameter."""

    params: Sequence[Tensor]
    layout: Layout
    store: Store
    numbers: Mapping[Piece, Mapping[str, object]]
    has_master: Sequence[bool]

    def entries(self, *, as_dtensors: bool) -> dict[Tensor, State]:
        """Each parameter's fields as views of the store, and its first piece's numbers.

        as_dtensors: whether fields of sharded parameters are DTensors.
        """
        found: dict[Tensor, State] = {}
        for piece in (piece for chunk in self.layout.chunks for piece in chunk.pieces if piece.start == 0):
            p, numbers = self.params[piece.param], self.numbers.get(piece)
            names = [name for name in self.layout.fields if numbers is not None or name == MASTER]
            if not self.has_master[piece.param]:
                names = [name for name in names if name != MASTER]
            fields: State = {name: self._field(piece.param, p, name, as_dtensors=as_dtensors) for name in names}
            if entry := {**(numbers or {}), **fields}:
                found[p] = entry
        return found

    def _field(self, param: int, p: Tensor, name: str, *, as_dtensors: bool) -> Tensor:
        offset, nbytes = self.layout.home(param, name)
        dtype = self.layout.fields[name].dtype
        held = local(p)
        flat = self.store.view(offset, nbytes).view(dtype) if nbytes else torch.empty(0, dtype=dtype, device="cpu")
        mine = flat.view(held.shape)
        return sharded_as(p, mine) if as_dtensors and hasattr(p, "device_mesh") else mine


def sharded_as(p: Tensor, held: Tensor) -> Tensor:
    """This rank's elements as a DTensor, sharded as the parameter is."""
    from torch.distributed.tensor import DTensor

    like = cast(DTensor, p)
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def load_entries(
    params: Sequence[Tensor], groups: Sequence[Group], moments: Iterable[str], state_dict: State
) -> dict[int, State]:
    """The entries of a state dict by parameter.

    Raises:
        ValueError: It belongs to other parameters, shapes or another optimizer.
    """
    there = cast(list[Group], state_dict["param_groups"])
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in there]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"cannot load this optimizer state: its groups have {sizes[1]} parameters, this optimizer's {sizes[0]}; "
            "make it of the same model and groups"
        )
    keys = [key for group in there for key in group["params"]]
    state = cast(dict[object, State], state_dict["state"])
    entries = {k: state[key] for k, key in enumerate(keys) if key in state}
    for k, entry in entries.items():
        for name in (MASTER, *moments):
            value = entry.get(name)
            if value is not None and local(value).shape != local(params[k]).shape:
                raise ValueError(
                    f"cannot load this optimizer state: {name} of parameter {k} has shape {tuple(local(value).shape)} "
                    f"there, the parameter {tuple(local(params[k]).shape)} here"
                )
        if (set(entry) - {MASTER, "step"}) and (missing := [name for name in moments if name not in entry]):
            raise ValueError(
                f"cannot load this optimizer state: parameter {k} has no {missing[0]} there, so it is of another "
                "optimizer; load one of the same class and options"
            )
    return entries


def load_into(
    store: Store,
    layout: Layout,
    entries: Mapping[int, State],
    masters_of: Callable[[int], State],
    numbers: MutableMapping[Piece, dict[str, object]],
) -> None:
    """Stream checked entries into the store, chunk by chunk, and what is no field into `numbers`.

    For a state without masters `masters_of` gives the parameters; masters that round to these stay.
    """
    for chunk in layout.chunks:
        lease = store.read(layout.extents(chunk))
        views = layout.views(lease.wait())
        for piece in chunk.pieces:
            entry, numel = entries.get(piece.param, {}), piece.stop - piece.start
            for name, values in (masters_of(piece.param) | entry).items():
                if name in views:
                    mine = local(values).reshape(-1)[piece.start : piece.stop]
                    held = views[name][piece.at : piece.at + numel]
                    held.copy_(mine) if name in entry else settled_(held, mine.to(held.device))
            own = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in entry.items()
                if name not in views and name != MASTER
            }
            if own or any(name in entry for name in views if name != MASTER):
                numbers[piece] = own
        store.write(lease)
