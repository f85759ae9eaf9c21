"""ZeRO stages 1 and 2: parameters stay whole on every rank; gradients and optimizer state are divided.

    sharding = Partitioned(model, grid, stage=2, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(sharding.held.parameters(), fused=True)
    sharding.keep(optimizer)
    with sharding.backward(is_last=True):
        loss_of(model, batch).backward()
    sharding.reduce(is_last=True)
    optimizer.step()
    sharding.gather()

The model is an ordinary module between and during steps: any method of it may be called, its weights may be read,
averaged, penalised or shared with another engine, and ranks may use different parts of it. What each of S ranks holds
of P parameters, in elements, and what it sends and receives of them in a step of k micro-batches:

    stage  parameters  gradients  optimizer state  gathered     reduced
    1      P           P          1/S              once         once, with the last micro-batch
    2      P           1/S        1/S              once         k times

1. The optimizer steps on a shard of each parameter: the rows that FSDP2 would give this rank. If the parameter has the
   shard's dtype and device, the shard is a view of it; else (bf16, fp16, state in host memory) a float32 master.
2. Gradients leave during backward, in buckets in one order, each row to its owner, which adds them in rank order. Two
   buckets are under way at a time. At stage 2 a gradient is freed as soon as it has left. `reduce` sends what changed
   since, or has not left, because this rank had no backward pass.
3. After the optimizer's step `gather` gives every rank the new rows of all others.

Rests on `onebit/dense.py`, which sends buckets during backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ...comm import Transport, Work, torch_versions
from ...dense import Bucket, DenseAverager, in_buckets, real
from ...model_parallel import like, local
from ...usage.gradients import check_place, gradient_of
from ...usage.marks import marks_of
from ..grid import Grid
from .sharding import Sharding, ZeroGrad
from .tensor import place_gradients

_BY_ROWS: Placement = Shard(0)
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
_IN_FLIGHT = 2


class Partitioned(Sharding):
    """Divides gradients and optimizer state over the grid's shard axis. All ranks call everything, in the same order.

    Args:
        model: The model, the same on all ranks of the axis. Its parameters are cast to dtype, in place.
        grid: The grid of ranks.
        stage: The ZeRO stage, 1 or 2.
        dtype: The dtype to compute in, torch.bfloat16 or torch.float16, if masters are to be float32. Default None:
            parameters keep their dtypes.
        on_host: Share of the elements, 0 to 1, with shards in host memory. Default 0.
        pin_memory: Whether that memory is page-locked if there is CUDA. Default True.
        bucket_cap_mb: Largest bucket, in MiB. Default None: 25.
        params: The parameters whose gradients and state are divided. Default None: all of the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        stage: int,
        *,
        dtype: torch.dtype | None = None,
        on_host: float = 0.0,
        pin_memory: bool = True,
        bucket_cap_mb: float | None = None,
        params: Collection[Tensor] | None = None,
    ):
        super().__init__(model)
        self._transport: Transport = grid.transports["shard"]
        self._stage, self._bucket_cap_mb = stage, bucket_cap_mb
        those = [p for p in model.parameters() if params is None or p in params]
        those = [p for p in those if p.is_floating_point() or p.is_complex()]
        away = set(_last(those, on_host))
        self._shards: dict[Tensor, nn.Parameter] = {}
        for p in those:
            moves = p in away and local(p).device.type != "cpu"
            self._shards[p] = _shard(p, grid, dtype, pin_memory=pin_memory if moves else None)
        if stage == 1 and any(p.dtype != shard.dtype for p, shard in self._shards.items()):
            self._stage = 1 if torch_versions.has_grad_dtype() else 2  # adding up in bfloat16 would lose precision
        self.held = _twin(model, self._shards, {})
        self._scatter: _Scatter | None = None
        self._gathered: list[list[Tensor]] = []  # parameters by the bucket in which their new rows travel

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        trained = {x for group in optimizer.param_groups for x in group["params"]}
        self._shards = {p: shard for p, shard in self._shards.items() if shard in trained}
        self.held = _twin(self.model, self._shards, {})
        self._gathered = in_buckets(list(self._shards), self._bucket_cap_mb, lambda p: (p.device, p.dtype))
        self._scatter = _Scatter(self._shards, self._stage, self._transport, self._bucket_cap_mb)
        self.model.zero_grad = ZeroGrad(self)  # type: ignore[method-assign]

    @property
    def scalars(self) -> dict[str, Tensor]:
        """The 0-dim parameters with shards, by all their names; their shards have one row."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: p for name, p in named if p in self._shards and p.dim() == 0}

    # ---------------------------------------------------------------- gradients

    def begin_forward(self, *, is_last: bool) -> None:
        if not is_last and self._stage == 1:
            self._add_up_in_float32()

    def begin_pipeline(self, *, reduces_each: bool) -> None:
        self._add_up_in_float32()

    def _add_up_in_float32(self) -> None:
        """Make gradients of several micro-batches add up in the shards' dtype."""
        for p, shard in self._shards.items():
            if p.grad is None and p.requires_grad and p.dtype != shard.dtype:
                torch_versions.require("adding up gradients of bfloat16 parameters in float32", at_least=(2, 10))
                p.grad_dtype = shard.dtype

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        assert self._scatter is not None, "call keep() before the first backward pass"
        if not is_last and self._stage == 1:
            yield
            return
        with self._scatter.sending():
            yield

    def reduce(self, *, is_last: bool) -> float:
        assert self._scatter is not None, "call keep() before the first step"
        if not is_last and self._stage == 1:
            return 0.0
        self.adopt()
        for p, shard in self._shards.items():
            shard.requires_grad_(p.requires_grad)
        return self._scatter.finish()

    def drop_gradients(self) -> None:
        for p in self._shards:
            p.grad = None
        if self._scatter is not None:
            self._scatter.discard()

    # ---------------------------------------------------------------- values

    @torch.no_grad()
    def adopt(self) -> None:
        for p, shard in self._shards.items():
            mine, rows = local(shard), self._own_rows(p)
            if mine.numel() == 0 or mine.data_ptr() == rows.data_ptr():
                continue
            if mine.dtype == rows.dtype and mine.device == rows.device:
                # A script has given the parameter other memory (p.data = average): the shard follows.
                shard._local_tensor = rows  # type: ignore[attr-defined]
                continue
            # Any write into a rounded parameter shows as a difference from the master, also one through .data.
            rows = rows.to(mine.device)
            mine.copy_(torch.where(rows == mine.to(rows.dtype), mine, rows.to(mine.dtype)))

    def _own_rows(self, p: Tensor) -> Tensor:
        return _rows(local(p).detach(), self._transport.world_size, self._transport.rank)

    @torch.no_grad()
    def gather(self) -> None:
        ranks, waiting = self._transport.world_size, []
        for bucket in self._gathered:
            waiting.append((bucket, *self._launch_gather(bucket)))
            if len(waiting) > _IN_FLIGHT:
                _take(*waiting.pop(0), ranks)
        for each in waiting:
            _take(*each, ranks)

    def _launch_gather(self, params: Sequence[Tensor]) -> tuple[Tensor, Work]:
        """Send this rank's rows of a bucket's parameters to all ranks. Returns the rows of all, and the work."""
        ranks, first = self._transport.world_size, local(params[0])
        widths = [_width(local(p), ranks) for p in params]
        flat_N = torch.empty(sum(widths), dtype=real_dtype(first.dtype), device=first.device)
        pairs = []
        for p, piece in zip(params, flat_N.split(widths), strict=True):
            mine = _flat(local(self._shards[p]).detach())
            pairs.append((piece[: mine.numel()], mine))
        _copy_all(pairs)
        out_SN = torch.empty(ranks, flat_N.numel(), dtype=flat_N.dtype, device=flat_N.device)
        return out_SN, self._transport.all_gather(out_SN.view(torch.uint8), flat_N.view(torch.uint8))

    def shard_of(self, p: Tensor) -> Tensor:
        return self._shards.get(p, p)

    def trained(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        held: dict[Tensor, Tensor] = {shard: p for p, shard in self._shards.items()}
        return [held.get(x, x) for x in super().trained(optimizer)]


# -------------------------------------------------------------------------------- gradients to their owners


class _Scatter(DenseAverager):
    """Sends gradients to their owners as `DenseAverager` averages them, but during backward only within `sending`."""

    def __init__(self, shards: Mapping[Tensor, nn.Parameter], stage: int, transport: Transport, cap_mb: float | None):
        self._shards, self._stage = shards, stage
        super().__init__(shards, transport, cap_mb)
        self._is_paused = True

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send the buckets whose gradients a backward pass in this block completes."""
        self._is_paused = False
        try:
            yield
            self._launch_rest()  # another rank may wait for these before its backward pass goes on
        finally:
            self._is_paused = True

    def _make_buckets(self, params: Sequence[Tensor], bucket_cap_mb: float | None) -> Sequence[Bucket]:
        groups = in_buckets(params, bucket_cap_mb, lambda p: (p.device, real_dtype(self._shards[p].dtype)))
        ranks = self._transport.world_size
        return [_Rows(group, [self._shards[p] for p in group], self._stage, ranks) for group in groups]

    def _launch_complete(self) -> None:
        super()._launch_complete()
        self._land()

    @torch.no_grad()
    def finish(self) -> float:
        waited_ms = super().finish()
        for bucket in self._rows:
            # A bucket that has joined in this step knows of none.
            for shard, is_absent in zip(bucket.shards, bucket.absent, strict=False):
                if is_absent:
                    shard.grad = None
        return waited_ms

    @property
    def _rows(self) -> list[_Rows]:
        return [bucket for bucket in self._buckets if isinstance(bucket, _Rows)]

    @torch.no_grad()
    def _launch_rest(self) -> None:
        for bucket in self._buckets[self._launched :]:
            bucket.launch(self._transport, self._channel)
            self._launched += 1
            self._land()

    def _land(self) -> None:
        """Wait for the oldest buckets, so that few are under way: each has the memory of its gradients twice."""
        for bucket in self._buckets[: max(0, self._launched - _IN_FLIGHT)]:
            bucket.finish(self._transport.world_size)

    def discard(self) -> None:
        """Drop what was sent since the last step. All ranks at stage 2; at stage 1 it may be one."""
        for bucket in self._rows:
            bucket.discard()


class _Rows(Bucket):
    """A bucket of parameters whose gradients travel to the owners of their rows. `finish` gives them to the shards.

    At stage 2 a gradient is dropped when it has been copied out; what arrives is added to the shards' gradients.

    Attributes:
        shards: The shards of its parameters.
    """

    def __init__(self, params: list[Tensor], shards: list[nn.Parameter], stage: int, ranks: int):
        super().__init__(params, _NOTHING, ())
        self.shards, self._adds = shards, stage == 2
        self._had = [False] * len(params)  # a gradient in this step
        self._widths = [_width(local(p), ranks) for p in params]
        self._shapes = [local(p).shape for p in params]
        self._devices = [p.device for p in params]
        self._in_SN = self._out_SN = _NOTHING
        self._is_dropped = False

    def _fill(self, transport: Transport) -> None:
        ranks = transport.world_size
        dtype, device = real_dtype(self.shards[0].dtype), local(self.params[0]).device
        self._in_SN = torch.empty(ranks, sum(self._widths), dtype=dtype, device=device)
        pairs = []
        for k, (p, columns_SW) in enumerate(zip(self.params, self._in_SN.split(self._widths, dim=1), strict=True)):
            check_place(transport.rank, p, "a parameter", self._shapes[k], self._devices[k])
            grad = gradient_of(p)
            if grad is None:
                columns_SW.zero_()
                continue
            self._had[k] = True
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"rank {transport.rank}: a parameter of shape {tuple(p.shape)} has a {grad.layout} gradient; "
                    "sharding needs dense ones (nn.Embedding(..., sparse=False))"
                )
            for rank in range(ranks):
                rows = _flat(_rows(local(grad).detach(), ranks, rank))
                pairs.append((columns_SW[rank, : rows.numel()], rows))
        _copy_all(pairs)

    def present(self) -> list[bool]:
        return [had or is_there for had, is_there in zip(self._had, super().present(), strict=True)]

    def _send(self, transport: Transport) -> Work:
        self._out_SN = torch.empty_like(self._in_SN)
        return transport.all_to_all(self._out_SN.view(torch.uint8), self._in_SN.view(torch.uint8))

    def launch(self, *args: Any, **named: Any) -> None:
        super().launch(*args, **named)
        if self._adds:
            for p in self.params:
                p.grad = None
            self.sent, self.sent_bits = marks_of(self.params), None

    def progress(self, world_size: int) -> None:
        if self.work is not None and self.work.is_ready():
            self.finish(world_size)

    def recall(self, world_size: int) -> float:
        if self._adds:  # what is sent again is what came since
            return self.finish(world_size)
        return 0.0 if self.work is None else super().recall(world_size)

    def finish(self, world_size: int) -> float:
        if self.work is None:
            return 0.0
        waited_ms = super().recall(world_size)
        mean_N = self._out_SN[0]
        for row_N in self._out_SN[1:]:
            mean_N += row_N
        mean_N /= world_size
        pairs = []
        for p, shard, piece in zip(self.params, self.shards, mean_N.split(self._widths), strict=True):
            mine = local(shard)
            if self._is_dropped or not p.requires_grad:
                continue
            piece = piece[: _flat(mine.detach()).numel()]
            if shard.grad is not None and self._adds:
                _flat(local(shard.grad)).add_(piece.to(mine.device))
                continue
            made = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
            pairs.append((_flat(made), piece))
            shard.grad = like(shard, made)
        _copy_all(pairs)
        self._in_SN = self._out_SN = _NOTHING
        self.work, self.complete, self._is_dropped = None, 0, False
        return waited_ms

    def discard(self) -> None:
        """Drop what is under way, if it would be added, and the shards' gradients."""
        self._is_dropped, self.complete = self._adds and self.work is not None, 0
        self._had = [False] * len(self.params)
        for shard in self.shards:
            shard.grad = None


# -------------------------------------------------------------------------------- shards


def _shard(p: Tensor, grid: Grid, dtype: torch.dtype | None, *, pin_memory: bool | None) -> nn.Parameter:
    """Return this rank's rows of a parameter, and cast the parameter.

    Args:
        p: The parameter; one that the tensor axis divides is a DTensor.
        grid: The grid.
        dtype: The dtype to compute in. None: p's.
        pin_memory: Whether the rows are pinned in host memory. None: they are where p is.
    """
    ranks, held = grid.shape.size("shard"), local(p).detach()
    wanted = torch.float32 if dtype is not None and p.is_floating_point() else p.dtype
    # Scalars stay in float32: they are computed with in the other operand's dtype.
    computed = dtype if dtype is not None and p.is_floating_point() and p.dim() > 0 else wanted
    if isinstance(p, DTensor) and computed != p.dtype:
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().to(computed), requires_grad=p.requires_grad))
        p._backward_hooks = None  # they went with the former values
        place_gradients(p)
    elif computed != p.dtype:
        p.data = p.data.to(computed)  # safe: no optimizer holds it yet
    rows = _rows(held, ranks, grid.coordinates["shard"])
    if local(p).dtype == wanted and pin_memory is None:
        rows = _rows(local(p).detach(), ranks, grid.coordinates["shard"])
    elif pin_memory is not None:
        rows = torch.empty(
            rows.shape, dtype=wanted, device="cpu", pin_memory=pin_memory and torch.cuda.is_available()
        ).copy_(rows)
    else:
        rows = rows.to(wanted, copy=True)
    mesh, placements, shape = grid.mesh["shard"], [_BY_ROWS], p.shape or torch.Size([1])
    if isinstance(p, DTensor) and p.device_mesh.size() > 1:
        mesh, (cut,) = grid.mesh["shard", "tensor"], p.placements
        # If both axes cut rows, a rank's rows are a part of its tensor rank's; torch notes how often those were cut.
        by_rows = cut.is_shard(0)
        placements = [_StridedShard(0, split_factor=p.device_mesh.size()) if by_rows else _BY_ROWS, cut]
    made = DTensor.from_local(
        rows,
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, dtype=wanted, device="meta").stride(),
    )
    return nn.Parameter(made, requires_grad=p.requires_grad)


def _twin(module: nn.Module, shards: Mapping[Tensor, nn.Parameter], made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module of the same class with the same attributes, and these in the place of its parameters.

    Optimizers find roles and names in it, checkpoints the shards. It shares buffers, hooks and extra state with the
    module.
    """
    if module not in made:
        made[module] = twin = object.__new__(type(module))
        vars(twin).update(vars(module))
        parameters = {name: None if p is None else shards.get(p, p) for name, p in module._parameters.items()}
        modules = {
            name: None if child is None else _twin(child, shards, made) for name, child in module._modules.items()
        }
        extra = {"get_extra_state": module.get_extra_state, "set_extra_state": module.set_extra_state}
        vars(twin).update(extra, _parameters=parameters, _modules=modules)
    return made[module]


def _last(params: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return the last parameters that have this share of the elements, at least."""
    found, room = [], share * sum(p.numel() for p in params)
    for p in reversed(params):
        if room <= 0:
            break
        found.append(p)
        room -= p.numel()
    return found


# -------------------------------------------------------------------------------- rows


def _rows(x: Tensor, ranks: int, rank: int) -> Tensor:
    """A rank's rows, as `torch.chunk` divides them; none if there are too few. A 0-dim tensor has one."""
    x = x.unsqueeze(0) if x.dim() == 0 else x
    each = -(-x.shape[0] // ranks)
    return x[min(rank * each, x.shape[0]) : min((rank + 1) * each, x.shape[0])]


def _width(x: Tensor, ranks: int) -> int:
    """Real elements of the largest rank's rows."""
    return _flat(_rows(x.detach(), ranks, 0)).numel()


def _flat(x: Tensor) -> Tensor:
    """The real elements in order: a view if x is contiguous."""
    return real(x).reshape(-1)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's real elements."""
    return dtype.to_real() if dtype.is_complex else dtype


def _take(params: Sequence[Tensor], out_SN: Tensor, work: Work, ranks: int) -> None:
    """Wait for the rows of all ranks, and copy them into the parameters."""
    work.wait()
    widths = [_width(local(p), ranks) for p in params]
    pairs = []
    for p, columns_SW in zip(params, out_SN.split(widths, dim=1), strict=True):
        for rank, row_W in enumerate(columns_SW):
            rows = _rows(local(p).detach(), ranks, rank)
            values = row_W[: _flat(rows).numel()]
            values = torch.view_as_complex(values.view(-1, 2)) if rows.is_complex() else values
            pairs.append((rows, values.view(rows.shape)))
    _copy_all(pairs)


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, in one call."""
    if pairs:
        to, of = zip(*pairs, strict=True)
        torch._foreach_copy_(to, of)
