"""`Offload`: any torch optimizer with state, gradients, parameters in host memory or a file, stepped chunk by chunk.

    none       everything stays with the parameters; the same arithmetic, for comparison
    state      float32 masters and optimizer state are in the store; gradients stay with the parameters until the step
    gradients  gradients too: each moves to the store as soon as backward has finished it
    full       parameters too: each is brought to its device while it is used

A step reads chunk k+1 and writes chunk k-1 while chunk k is computed. Rests on `layout.py`, `inner.py`, `gradients.py`,
`weights.py` and the stores of `places.py`.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ...comm import Transport
from ...lamb import Lamb
from ...layout.masters import NAME as MASTER
from ...layout.masters import settled_
from ...model_parallel import local
from ...usage.contract import Group, State, loss_of
from ...usage.edits import edit_of_groups
from ...usage.graphs import outside_graphs
from .checks import build_inner, check_averages, check_mode, check_parameters, check_ratio, check_sums
from .gradients import GRAD, ResidentGradients, StoredGradients, global_norm
from .inner import Inner, Part, at_step_0, empty_part, is_elementwise
from .layout import Chunk, Layout, Piece, cut, elements_of, kept
from .places import Place, Stores
from .state import OffloadStats, StateOfParams, load_entries, load_into, sharded_as
from .store import Lease, Lender, Store
from .stored_params import Blocks, StoredParams
from .streams import streams_of
from .weights import ResidentWeights, StoredWeights, take_masters

log = logging.getLogger(__name__)

Gradients = ResidentGradients | StoredGradients
_HOST = torch.device("cpu")


class Offload(torch.optim.Optimizer):
    """Keeps the state of any torch optimizer (and gradients, parameters) in host memory or files.

    Parameters in bfloat16 or float16 get float32 masters in the store, which a step updates and rounds into them. If
    other code writes into a parameter, the master takes the new values. A step with a gradient that is not finite is
    skipped and changes only `stats`. `state_dict` has what the optimizer keeps, and "master"; its tensors are views of
    the store, so torch.save streams them. Call `close` to free memory and files. docs/offload.md compares the modes.

    Without a transport nothing is sent: with several ranks call `onebit.dense.average_gradients` before `step`.

    Args:
        model: A module, whose parameters that require gradients are trained; except in mode "full" also parameters or
            groups of them.
        make: Called once with these; returns any optimizer that updates each parameter independently.
        mode: "none", "state" (default), "gradients" or "full"; each moves more to the store.
        to: "cpu" (default) for host memory, or a folder for this run's files.
        chunk_mb: The size of a chunk's state in MB; a step works chunk by chunk. 64 by default.
        buffer_count: With files, how many chunks are in memory at once, 2 or more; 4 by default.
        max_grad_norm: The global gradient norm to clip to; 0 (default) does not clip.
        split: Whether large parameters may be updated in pieces. None (default): if the optimizer is known to update
            each element independently.
        pin_memory: Whether buffers are page-locked if parameters are on a GPU; True by default.
        threads: Threads that read and write files, 2 by default.
        rank: This rank, for the files' names; 0 by default.
        ratio: Mode "state": the share of the parameters' elements whose state is in the store (a little more, as
            parameters are not divided). The first parameters keep theirs, and are updated where they are. 1 by default.
        grad_dtype: Modes "gradients" and "full": the dtype in which gradients of micro-batches add up. None (default):
            their own, as in autograd.
        transport: Modes "gradients" and "full": the ranks over which a step first averages gradients, in float32. All
            ranks must have the same parameters; each keeps all of the state. None (default) for no averaging.
        device: Mode "full": where the model computes; None (default): where each parameter is.
        dtype: Mode "full": the dtype in which the model computes; masters keep the values from before the cast. None
            (default): the parameters' own.
        fill: Mode "full": gives values to a model built on "meta". Called once with the model, when its parameters are
            in the store; what it writes into them goes there. None by default.

    Attributes:
        stats: An `OffloadStats`.

    Raises:
        ValueError: An argument is out of range, or does not fit the mode or the parameters.
        TypeError: An argument has the wrong type.
        StoreError: The store fails; `step` and backward raise it too.
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
        ratio: float = 1.0,
        grad_dtype: torch.dtype | None = None,
        transport: Transport | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fill: Callable[[nn.Module], object] | None = None,
    ):
        check_mode(mode, model, device=device, dtype=dtype, fill=fill)
        check_averages(mode, transport)
        check_ratio(mode, ratio)
        check_sums(mode, grad_dtype)
        if chunk_mb <= 0 or max_grad_norm < 0 or buffer_count < 2:
            raise ValueError(
                f"expected chunk_mb > 0, max_grad_norm >= 0 and buffer_count >= 2, got {chunk_mb}, {max_grad_norm} and "
                f"{buffer_count}"
            )
        self.mode, self.max_grad_norm, self.stats = mode, max_grad_norm, OffloadStats()
        self._places: list[Place] = []
        self._transport = transport
        made = build_inner(model, make)
        super().__init__(made.param_groups, made.defaults)
        self._params: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self._given = [list(group["params"]) for group in self.param_groups]
        self._groups_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        check_parameters(self._params, made, may_be_meta=fill is not None)
        device = (
            None if device is None else torch.empty(0, device=device, dtype=torch.float32).device
        )  # "cuda" is "cuda:0"
        held = list(model.parameters()) if mode == "full" else self._params  # type: ignore[union-attr]
        devices = {device or local(p).device for p in held}
        self._device = devices.pop() if len(devices) == 1 else None
        self._inner = Inner(made)
        self._may_split = is_elementwise(made) if split is None else split
        self._fields = self._inner.fields(self.param_groups)
        self._dtypes = [dtype or local(p).dtype for p in self._params]
        is_pinned = pin_memory and any((device or p.device).type == "cuda" for p in held)
        self._stores = Stores(to, is_pinned, buffer_count, threads, rank)
        self._needs_master: list[bool] = []
        near = kept([local(p).numel() for p in self._params], 0.0 if mode == "none" else ratio)
        places = self._open_places(near, chunk_mb)
        make_gradients = self._open_gradients(places, grad_dtype)
        self._weights: ResidentWeights | StoredWeights
        self._numbers: dict[Piece, dict[str, object]] = {}
        self._blocks: Blocks | None = None
        if fill is None:
            take_masters(self._params, places)
        if mode == "full":
            moved = self._move(cast(nn.Module, model), places, buffer_count - 2, device, dtype, fill)
            if fill is not None:
                take_masters(self._params, places)
            self._blocks = Blocks(cast(nn.Module, model), moved)
        else:
            self._weights = ResidentWeights(self._params, places, self._stores)
        self._gradients, self._places = make_gradients(), places
        if rank == 0:
            log.info("%s of %s: %s", mode, self._inner.name, self._stores.describe())

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that `make` made, which takes the steps."""
        return self._inner.optimizer

    def _open_places(self, near: int, chunk_mb: float) -> list[Place]:
        """Places for the state: the first `near` parameters' where these are, the others' in the store."""
        devices = {local(p).device for p in self._params[:near]}
        with_them = devices.pop() if len(devices) == 1 else _HOST
        found = []
        for params, device in ((range(near), with_them), (range(near, len(self._params)), _HOST)):
            if not params:
                continue
            is_away = [self.mode != "full" and local(self._params[k]).device != device for k in params]
            mine = [self._dtypes[k] != torch.float32 or away for k, away in zip(params, is_away, strict=True)]
            self._needs_master += mine
            fields = {MASTER: torch.float32} | self._fields if any(mine) else self._fields
            layout = Layout(self._cut(params, elements_of(chunk_mb, fields)), fields)
            store = self._stores.open(layout.nbytes, layout.lease_bytes, device if params.start < near else None)
            streams = None if params.start < near or self._device is None else streams_of(self._device)
            found.append(Place(layout, store, device, streams))
        return found

    def _cut(self, params: range, limit: int) -> list[Chunk]:
        held = [local(self._params[k]) for k in params]
        splits = [self._may_split and x.is_contiguous() for x in held]
        is_cut = not self._may_split and any(hasattr(p, "to_local") for p in self._params)
        return cut([x.numel() for x in held], limit, may_split=splits, may_share=not is_cut, first=params.start)

    def _open_gradients(self, places: Sequence[Place], summed: torch.dtype | None) -> Callable[[], Gradients]:
        """Reserve room for gradients. Hooks go onto the parameters only when the returned function is called."""
        if self.mode not in ("gradients", "full"):
            return lambda: ResidentGradients(self._params, places, self._stores)
        kept = summed or (self._dtypes[0] if len(set(self._dtypes)) == 1 else torch.float32)
        (place,) = places
        waiting = Layout(place.layout.chunks, {GRAD: kept})
        store = self._stores.open(waiting.nbytes, waiting.lease_bytes)
        lender = self._stores.staged(store, place.streams, self._device, waiting.lease_bytes)
        return lambda: StoredGradients(self._params, waiting, store, lender, summed)

    def _move(
        self,
        model: nn.Module,
        places: Sequence[Place],
        ahead: int,
        device: torch.device | None,
        dtype: torch.dtype | None,
        fill: Callable[[nn.Module], object] | None,
    ) -> StoredParams:
        for p in model.parameters() if dtype is not None else ():
            if p.is_floating_point():  # buffers stay as they are, as under FSDP2
                p.data = p.data.to(dtype)
        (place,) = places

        def staged(store: Store, lease_bytes: int) -> Lender:
            return self._stores.staged(store, place.streams, self._device, lease_bytes)

        moved = StoredParams(
            model, self._params, place.layout.chunks, self._stores.open, staged, ahead=ahead, device=device, fill=fill
        )
        is_master = [not needs for needs in self._needs_master]
        self._weights = StoredWeights(moved, lambda k: self._gradients.has(k), is_master)
        return moved

    # ---------------------------------------------------------------- a step

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient, or skip the step if a gradient is not finite.

        With a transport all ranks must call it. It sends about 2·(W-1)/W·4 bytes per element.

        Args:
            closure: Computes the loss again, with gradients; None by default.

        Returns:
            The closure's loss, or None.

        Raises:
            StoreError: The store fails.
            RuntimeError: `close` has been called, or parameter groups were changed by hand.
        """
        loss = loss_of(closure)
        if edit := edit_of_groups(self.param_groups, self._given):
            raise RuntimeError(edit)
        self._gradients.collect()
        if self._transport is not None and self._transport.world_size > 1:
            self.stats.network_s += cast(StoredGradients, self._gradients).average(self._transport)
        has = self._gradients.has
        chunks = [(place, chunk) for place, chunk in self._chunks() if any(has(piece.param) for piece in chunk.pieces)]
        self.stats.steps += 1
        norms = self._gradients.norms([chunk for _, chunk in chunks])
        norm = global_norm(norms, is_clipped=self.max_grad_norm > 0)
        self.stats.grad_norm = norm
        if norm is None:
            self.stats.skipped_steps += 1
            log.warning(
                "step %d is skipped: a gradient is not finite, or too large to be squared in float32", self.stats.steps
            )
        else:
            clipped = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
            self._weights.begin()
            for chunk, views in self._walk(chunks):
                self._step_chunk(chunk, views, clipped)
            self._weights.end([k for k in range(len(self._params)) if has(k)])
        self._gradients.drop()
        self._stores.count(self.stats)
        return loss

    def _chunks(self) -> list[tuple[Place, Chunk]]:
        """All chunks with their places.

        Raises:
            RuntimeError: `close` has been called.
        """
        if not self._places:
            raise RuntimeError("this Offload is closed; make another one")
        return [(place, chunk) for place in self._places for chunk in place.layout.chunks]

    def _walk(self, chunks: Sequence[tuple[Place, Chunk]]) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
        """Yield each chunk with its fields to change, while the next is read and the one before is written."""
        lease = _read(*chunks[0]) if chunks else None
        for k, (place, chunk) in enumerate(chunks):
            assert lease is not None
            now = lease
            if k + 1 < len(chunks):
                lease = _read(*chunks[k + 1])
            for _, coming in chunks[k : k + 2]:
                self._weights.ahead(coming)
                self._gradients.ahead(coming)
            yield chunk, place.layout.views(now.wait())
            place.store.write(now)

    def _step_chunk(self, chunk: Chunk, views: dict[str, Tensor], clipped: float) -> None:
        weights = self._weights.of(chunk)
        stepped: list[tuple[Piece, Part]] = []
        for piece, grad in zip(chunk.pieces, self._gradients.of(chunk), strict=True):
            if self._gradients.has(piece.param):
                if clipped < 1.0:
                    grad.mul_(clipped)
                stepped.append((piece, self._part(piece, weights[piece], grad, views)))
        self._inner.step(self.param_groups, [part for _, part in stepped])
        for piece, part in stepped:
            self._numbers[piece] = part.numbers or {}
        of_masters = [(piece, part) for piece, part in stepped if self._needs_master[piece.param]]
        self._weights.done(chunk, [(weights[piece], local(part.weight)) for piece, part in of_masters])

    def _part(self, piece: Piece, weight: Tensor, grad: Tensor, views: dict[str, Tensor]) -> Part:
        p, numel = self._params[piece.param], piece.stop - piece.start
        mine = {name: x[piece.at : piece.at + numel].view(weight.shape) for name, x in views.items()}
        if self._needs_master[piece.param]:
            if self._weights.is_changed(piece.param):
                settled_(mine[MASTER], weight.to(mine[MASTER].device))
            weight = mine[MASTER]
        mine.pop(MASTER, None)
        grad = grad.view(weight.shape)
        if not self._may_split and hasattr(p, "device_mesh"):
            weight, grad = (sharded_as(p, x) for x in (weight, grad))
        return Part(self._groups_of[piece.param], weight, grad, mine, self._numbers.get(piece))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those in the store."""
        super().zero_grad(set_to_none)
        self._gradients.drop()

    # ---------------------------------------------------------------- state

    @torch.no_grad()
    def begin_state(self) -> None:
        """Give parameters without state that of step 0, by a step with zero gradients, to read a checkpoint into."""
        for place, chunk in self._chunks():
            if any(piece not in self._numbers for piece in chunk.pieces):
                lease = _read(place, chunk)
                views = place.layout.views(lease.wait())
                views.pop(MASTER, None)
                lacking = [piece for piece in chunk.pieces if piece not in self._numbers]
                groups, shapes = self._groups_of, [local(p).shape for p in self._params]
                parts = {x: empty_part(groups[x.param], shapes[x.param], x, views) for x in lacking}
                self._inner.step(self.param_groups, list(parts.values()))
                self._numbers |= {piece: at_step_0(part.numbers or {}) for piece, part in parts.items()}
                place.store.write(lease)

    def forget_state(self, params: Iterable[Tensor]) -> None:
        """Leave these parameters without state, as before their first step. Masters stay."""
        forgotten = set(params)
        self._numbers = {x: own for x, own in self._numbers.items() if self._params[x.param] not in forgotten}

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round the masters into the parameters, after masters were written through `state`."""
        for p, entry in self.state.items():
            if MASTER in entry:
                p.copy_(cast(Tensor, entry[MASTER]))

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """The state of each parameter that was updated or has a master: views of the store, valid until `step`."""
        found: defaultdict[Tensor, State] = defaultdict(dict)
        for place in self._places:
            place.store.flush()
            shown = StateOfParams(self._params, place.layout, place.store, self._numbers, self._needs_master)
            found |= shown.entries(as_dtensors=not isinstance(self._inner.optimizer, Lamb))
        return found

    @state.setter
    def state(self, value: object) -> None:
        """Only for torch's constructor, which sets an empty state; afterwards it raises RuntimeError."""
        if self._places:
            raise RuntimeError("the state of an Offload is in its store; call load_state_dict with a complete one")

    @torch.no_grad()
    def load_state_dict(self, state_dict: State) -> None:
        """Load a state of this class, or of the plain optimizer that `make` makes. It is streamed into the store.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: It is of other groups, parameters or shapes. Nothing has changed then.
            RuntimeError: `close` has been called.
        """
        groups = cast(list[Group], state_dict["param_groups"])
        self._chunks()  # a closed one has none
        entries = load_entries(self._params, self.param_groups, self._fields, state_dict)
        for group, there in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in there.items() if key not in ("params", "param_names")})
        self._numbers.clear()
        for place in self._places:
            load_into(place.store, place.layout, entries, self._masters_of, self._numbers)
            place.store.flush()
        self._weights.end([])

    def _masters_of(self, param: int) -> State:
        """The master for a state without one: the parameter's values. Masters that round to these stay."""
        return {MASTER: self._weights.values(param)} if self._needs_master[param] else {}

    def add_param_group(self, param_group: Group) -> None:
        """Only for torch's constructor: afterwards the layout is fixed, and it raises RuntimeError."""
        if self._places:
            raise RuntimeError("Offload takes all parameters when it is made; make another one with more of them")
        super().add_param_group(param_group)

    def close(self, *, bring_back: bool = True) -> None:
        """Free memory and files. In mode "full" parameters come back to their device first, which must have room.

        Args:
            bring_back: False leaves the parameters of mode "full" without values: using them raises RuntimeError. True
                by default.
        """
        if self._places:
            if self._blocks is not None:
                self._blocks.close()
            self._weights.close(bring_back=bring_back)
            self._gradients.close()
            self._stores.close()
            self._places = []


def _read(place: Place, chunk: Chunk) -> Lease:
    return place.store.read(place.layout.extents(chunk))
