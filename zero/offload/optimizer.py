"""`Offload`: any torch optimizer whose state, and gradients, lie in host memory or in a file, stepped chunk by chunk.

    none       everything with the parameters; the same arithmetic, for comparison
    state      float32 masters and optimizer state in the store; gradients stay with the parameters until the step
    gradients  gradients too: each leaves as backward finishes it

A step reads chunk k+1 and writes chunk k-1 while chunk k is computed. Rests on `layout.py`, `inner.py`, `gradients.py`
and a store.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ...lamb import Lamb
from ...model_parallel import local
from ...usage.contract import Group, State, loss_of
from .files import FileStore
from .gradients import GRAD, ResidentGradients, StoredGradients, global_norm
from .inner import Inner, Part, is_elementwise
from .layout import UNIT, Chunk, Layout, Piece, cut
from .memory import MemoryStore
from .state import StateOfParams, load_entries, sharded_as
from .store import Store

log = logging.getLogger(__name__)

MODES = ("none", "state", "gradients")
MASTER = "master"


@dataclass
class OffloadStats:
    """Since construction. grad_norm: of the last step, before clipping; None behind a skipped one.

    wait_s: seconds that steps and hooks waited for the stores. read_bytes, written_bytes: of files.
    """

    steps: int = 0
    skipped_steps: int = 0
    grad_norm: float | None = None
    wait_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


class Offload(torch.optim.Optimizer):
    """The optimizer that `make` makes of the parameters, with its state in a store.

    model: its parameters that require gradients, or parameters or groups of them. make: called once with these; any
    optimizer that steps each parameter for itself. mode: see the module. to: "cpu", or a folder for this run's files.
    chunk_mb: of a chunk's state; buffer_count: chunks in memory at once, where there are files. max_grad_norm: clip by
    the global norm (0: off). split: whether large parameters may be stepped in pieces; default: where the optimizer is
    known to look at each element alone. pin_memory: page-locked buffers, where the parameters are on a GPU. rank: in
    the files' names.

    Parameters in bfloat16 or float16 have float32 masters in the store, which the step moves and rounds into them;
    values written into a parameter by others are taken over. State by parameter is what the optimizer keeps, and
    "master"; `state_dict` shows the store's own bytes, so that torch.save streams them. A step with a gradient that is
    not finite changes nothing but `stats`. Sends nothing; with several ranks average gradients first. `close` gives
    memory and files back.

    Raises ValueError and TypeError on arguments, StoreError where a store fails, here and in `step` and backward.
    """

    def __init__(
        self,
        model: nn.Module | ParamsT,
        make: Callable[[ParamsT], torch.optim.Optimizer],
        mode: str = "state",
        to: str | os.PathLike[str] = "cpu",
        *,
        chunk_mb: float = 64.0,
        buffer_count: int = 4,
        max_grad_norm: float = 0.0,
        split: bool | None = None,
        pin_memory: bool = True,
        threads: int = 2,
        rank: int = 0,
    ):
        if mode not in MODES:
            raise ValueError(f"expected mode of {', '.join(MODES)}, got {mode!r}")
        if chunk_mb <= 0 or max_grad_norm < 0:
            raise ValueError(f"expected chunk_mb > 0 and max_grad_norm >= 0, got {chunk_mb} and {max_grad_norm}")
        self.mode, self.max_grad_norm, self.stats = mode, max_grad_norm, OffloadStats()
        self._store: Store | None = None
        made = _made(model, make)
        super().__init__(made.param_groups, made.defaults)
        self._params: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self._groups_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        _check_parameters(self._params, made)
        devices = {local(p).device for p in self._params}
        self.device = devices.pop() if mode == "none" and len(devices) == 1 else torch.device("cpu")
        self._inner = Inner(made)
        self._may_split = is_elementwise(made) if split is None else split
        is_pinned = pin_memory and any(p.device.type == "cuda" for p in self._params)
        fields = self._inner.fields(self.param_groups)
        self._needs_master = [local(p).dtype != torch.float32 or local(p).device != self.device for p in self._params]
        if any(self._needs_master):
            fields = {MASTER: torch.float32} | fields
        self.layout = Layout(self._cut(chunk_mb, fields), fields)

        def open_store(layout: Layout) -> Store:
            if mode == "none" or to == "cpu":
                return MemoryStore(layout.nbytes, self.device, is_pinned=is_pinned and self.device.type == "cpu")
            options = {"buffer_count": buffer_count, "threads": threads, "rank": rank}
            return FileStore(to, layout.nbytes, layout.lease_bytes, is_pinned=is_pinned, **options)

        self._store = open_store(self.layout)
        self._stores = [self._store]
        self._gradients: ResidentGradients | StoredGradients
        if mode == "gradients":
            dtypes = {local(p).dtype for p in self._params}
            kept = dtypes.pop() if len(dtypes) == 1 else torch.float32
            waiting = Layout(self.layout.chunks, {GRAD: kept})
            self._stores.append(open_store(waiting))
            self._gradients = StoredGradients(self._params, waiting, self._stores[-1])
        else:
            largest = max((chunk.size for chunk in self.layout.chunks), default=0)
            self._gradients = ResidentGradients(self._params, largest, self.device)
        self._numbers: dict[Piece, dict[str, object]] = {}
        self._versions: list[int] = []
        self._take_masters()
        if rank == 0:
            log.info("%s of %s: %s", mode, self._inner.name, "; ".join(store.describe() for store in self._stores))

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the steps; its options and state are here."""
        return self._inner.optimizer

    def _cut(self, chunk_mb: float, fields: dict[str, torch.dtype]) -> list[Chunk]:
        per_element = max(4, sum(dtype.itemsize for dtype in fields.values()))
        limit = max(1, int(chunk_mb * 2**20 / per_element) // UNIT) * UNIT
        held = [local(p) for p in self._params]
        splits = [self._may_split and x.is_contiguous() for x in held]
        is_cut = not self._may_split and any(hasattr(p, "to_local") for p in self._params)
        return cut([x.numel() for x in held], limit, may_split=splits, may_share=not is_cut)

    # ---------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of the parameters that have a gradient, or a skip; see the class. Raises StoreError."""
        loss = loss_of(closure)
        has = self._gradients.has
        chunks = [chunk for chunk in self.layout.chunks if any(has(piece.param) for piece in chunk.pieces)]
        self.stats.steps += 1
        norm = global_norm(self._gradients.norms(chunks), is_clipped=self.max_grad_norm > 0)
        self.stats.grad_norm = norm
        if norm is None:
            self.stats.skipped_steps += 1
            log.warning("step %d is skipped: a gradient is not finite", self.stats.steps)
        else:
            clipped = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
            for chunk, tensors in self._walk(chunks):
                self._step_chunk(chunk, tensors, clipped)
            self._versions = [p._version for p in self._params]
        self._gradients.drop()
        self._count()
        return loss

    def _walk(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """Each chunk and its fields, to be changed: the next is read meanwhile, the one before written."""
        store = self._open_store()
        lease = store.read(self.layout.extents(chunks[0])) if chunks else None
        for k, chunk in enumerate(chunks):
            assert lease is not None
            now = lease
            if k + 1 < len(chunks):
                lease = store.read(self.layout.extents(chunks[k + 1]))
            yield chunk, now.wait()
            store.write(now)

    def _step_chunk(self, chunk: Chunk, tensors: list[Tensor], clipped: float) -> None:
        views = self._views(tensors)
        stepped: list[tuple[Piece, Part]] = []
        for piece, grad in zip(chunk.pieces, self._gradients.of(chunk), strict=True):
            if self._gradients.has(piece.param):
                if clipped < 1.0:
                    grad.mul_(clipped)
                stepped.append((piece, self._part(piece, grad, views)))
        self._inner.step(self.param_groups, [part for _, part in stepped])
        for piece, part in stepped:
            self._numbers[piece] = part.numbers or {}
            if self._needs_master[piece.param]:
                _elements(self._params[piece.param], piece).copy_(local(part.weight))

    def _views(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        fields = self.layout.fields.items()
        return {name: x.view(field.dtype) for (name, field), x in zip(fields, tensors, strict=True)}

    def _part(self, piece: Piece, grad: Tensor, views: dict[str, Tensor]) -> Part:
        p, numel = self._params[piece.param], piece.stop - piece.start
        weight = _elements(p, piece)
        mine = {name: x[piece.at : piece.at + numel].view(weight.shape) for name, x in views.items()}
        if self._needs_master[piece.param]:
            self._settle(piece.param, weight, mine[MASTER])
            weight = mine[MASTER]
        mine.pop(MASTER, None)
        grad = grad.view(weight.shape)
        if not self._may_split and hasattr(p, "device_mesh"):
            weight, grad = (sharded_as(p, x) for x in (weight, grad))
        return Part(self._groups_of[piece.param], weight, grad, mine, self._numbers.get(piece))

    def _settle(self, param: int, weight: Tensor, master: Tensor) -> None:
        """Where others have written a parameter, its master takes those elements that it no longer rounds to."""
        if self._params[param]._version != self._versions[param]:
            now = weight.to(master.device)
            master.copy_(torch.where(master.to(now.dtype) == now, master, now.float()))

    def _take_masters(self) -> None:
        """The parameters as they are become the masters."""
        self._versions = [p._version for p in self._params]
        if MASTER not in self.layout.fields:
            return
        store = self._open_store()
        with torch.no_grad():
            for chunk in self.layout.chunks:
                lease = store.read(self.layout.extents(chunk, [MASTER]), fresh=True)
                master = lease.wait()[0].view(torch.float32)
                for piece in chunk.pieces:
                    held = _elements(self._params[piece.param], piece)
                    master[piece.at : piece.at + held.numel()].copy_(held.reshape(-1))
                store.write(lease)

    def _count(self) -> None:
        self.stats.wait_s = sum(store.wait_s for store in self._stores)
        self.stats.read_bytes = sum(store.read_bytes for store in self._stores)
        self.stats.written_bytes = sum(store.written_bytes for store in self._stores)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those in the store too."""
        super().zero_grad(set_to_none)
        self._gradients.drop()

    # ---------------------------------------------------------------- state

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """Of each parameter that has been stepped, or has a master: views of the store, valid until the next step."""
        if self._store is None:
            return defaultdict(dict)
        self._store.flush()
        shown = StateOfParams(self._params, self.layout, self._store, self._numbers, self._needs_master)
        return defaultdict(dict, shown.entries(as_dtensors=not isinstance(self._inner.optimizer, Lamb)))

    @state.setter
    def state(self, value: object) -> None:
        """torch's constructor sets an empty one; there is no other way than `load_state_dict`."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: State) -> None:
        """Take over a state of this optimizer or of the one that it makes, resident; streamed into the store.

        Raises ValueError, before anything has changed, where it is of other groups, parameters or shapes.
        """
        groups = cast(list[Group], state_dict["param_groups"])
        entries = load_entries(self._params, self.param_groups, self.layout, state_dict)
        for group, there in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in there.items() if key not in ("params", "param_names")})
        self._versions = [p._version for p in self._params]
        self._numbers.clear()
        store, names = self._open_store(), list(self.layout.fields)
        for chunk in self.layout.chunks:
            lease = store.read(self.layout.extents(chunk))
            views = self._views(lease.wait())
            for piece in chunk.pieces:
                entry, numel = entries.get(piece.param, {}), piece.stop - piece.start
                masters = {MASTER: self._params[piece.param].detach()} if self._needs_master[piece.param] else {}
                for name, values in (masters | entry).items():
                    if name in names:
                        whole = local(values).reshape(-1)
                        views[name][piece.at : piece.at + numel].copy_(whole[piece.start : piece.stop])
                numbers = {name: _own(value) for name, value in entry.items() if name not in names}
                if numbers or any(name in entry for name in names if name != MASTER):
                    self._numbers[piece] = numbers
            store.write(lease)
        store.flush()

    def _open_store(self) -> Store:
        if self._store is None:
            raise RuntimeError("this Offload is closed; make another one")
        return self._store

    def add_param_group(self, param_group: Group) -> None:
        """Only while it is constructed: what lies where is settled then."""
        if self._store is not None:
            raise RuntimeError("Offload takes all parameters when it is made; make another one with more of them")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Give memory and files back. Parameters stay as they are."""
        if self._store is not None:
            self._gradients.close()
            for store in self._stores:
                store.close()
            self._store = None


def _made(model: nn.Module | ParamsT, make: Callable[[ParamsT], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    given = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else model
    made = make(given)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"make(params) gave a {type(made).__name__}; expected a torch.optim.Optimizer")
    if made.state:
        raise ValueError(f"make(params) gave a {type(made).__name__} that has state; offload begins with a fresh one")
    return made


def _check_parameters(params: Sequence[Tensor], made: torch.optim.Optimizer) -> None:
    if not params:
        raise ValueError("there are no parameters to train")
    for k, p in enumerate(params):
        if not p.is_floating_point() or p.is_meta:
            raise TypeError(f"parameter {k} is {p.dtype} on {p.device}; expected floats that have been materialised")
    if any(hasattr(p, "device_mesh") for p in params) and not (is_elementwise(made) or isinstance(made, Lamb)):
        raise ValueError(
            f"{type(made).__name__} looks at whole parameters, and these are sharded; "
            "offload Adam, AdamW, LaProp or Lamb, or leave the parameters whole"
        )


def _elements(p: Tensor, piece: Piece) -> Tensor:
    """A piece's elements where they lie; a whole parameter keeps its shape."""
    held = local(p.detach())
    return held if piece.stop - piece.start == held.numel() else held.view(-1)[piece.start : piece.stop]


def _own(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
