"""A communication hook for models that must stay in DistributedDataParallel: gradients in one bit, any optimizer.

    model = DistributedDataParallel(model)
    state = onebit.DDPHookState(model)
    model.register_comm_hook(state, onebit.ddp_hook)

Each bucket's gradient goes through the compressed all-reduce (`comm/allreduce.py`) with error feedback on both phases,
after a warm-up with full means as in DDP. DDP decides everything else: when buckets are sent, `no_sync`, unused
parameters.

It converges worse than the optimizers: signs of a gradient carry far more noise than signs of the momentum that
`OnebitAdam` sends, and an Adam after the hook computes its variance from decoded gradients. See `docs/frameworks.md`
for losses beside PowerSGD's hook. If the model can be unwrapped, unwrap it.
"""

# Without postponed annotations: DDP reads those of the hook, and expects types.

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket

from ..comm import Codec, SignCodec, Transport, check_transport, init
from ..comm.allreduce import WINDOW, ErrorFeedback, Exchange, ExchangeTask, Wire, compressed_allreduce, wait_all
from ..comm.hierarchy import Hierarchy
from ..layout.flat import Layout, lay_out
from ..rule import check_codec
from ..step.stats import Traffic
from ..usage.contract import State

log = logging.getLogger(__name__)

Errors = tuple[Tensor, Tensor]
"""The residuals of a parameter: worker error and server error, the latter with zeros where another rank owns it."""


@dataclass
class _Bucket:
    """One of DDP's buckets. Each parameter starts a new block, so that blocks survive when DDP rebuilds its buckets."""

    names: list[str]
    params: list[Tensor]
    layout: Layout
    counts: Tensor
    x: Tensor
    ef: ErrorFeedback
    wire: Wire

    def errors(self, rank: int) -> Iterator[tuple[str, Errors]]:
        """Residuals of this rank, by parameter."""
        return by_parameter(self.names, self.layout, self.ef.worker, self.ef.server, rank)


def by_parameter(
    names: Sequence[str], layout: Layout, worker: Tensor, server: Tensor, rank: int
) -> Iterator[tuple[str, Errors]]:
    """The residuals of a bucket of this layout, by parameter, on this rank."""
    whole = torch.zeros_like(worker)
    whole.view(layout.world_size, -1)[rank] = server
    return zip(names, zip(layout.views(worker), layout.views(whole), strict=True), strict=True)


@dataclass
class _UnderWay:
    """A bucket between its hook and the end of the backward pass."""

    task: ExchangeTask
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    gradients: list[Tensor]
    bucket: _Bucket | None  # None: in warm-up


class DDPHookState:
    """State of `ddp_hook` on this rank: residuals and buffers. All ranks construct it with the same arguments.

    A step, along DDP's buckets: each bucket starts its exchange when it is full, and advances while later ones fill.
    After the last one, all are completed. If a gradient is not finite on any rank, its bucket is averaged in full, as
    DDP would, and no residual changes: a GradScaler skips such a step. Residuals are in units of the gradient, with the
    loss scale of their step.

    State: 4·(1 + 1/W) bytes per parameter, the same again for the step under way, which may still be abandoned, and the
    bucket in float32. Sends 2·(W-1)/W·(1 + 16/block) bits per parameter and step.

    Args:
        model: The model that DDP wraps, or the wrapper.
        start_step: Steps at the beginning in which gradients are averaged in full, as DDP does, while the optimizer's
            moments form. Default 100.
        transport: Connection between the ranks of DDP's process group, flat. Default `onebit.comm.init(levels=1)`.
        codec: Format of gradients. Default `SignCodec()`.

    Attributes:
        step: Steps so far.
        sent_bytes: Bytes that the last step sent.
        bits_per_parameter: Bits per parameter of the last step.

    Raises:
        ValueError: start_step is negative, or the transport has two levels.
        TypeError: transport is not a transport, or codec not a codec.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start_step: int = 100,
        transport: Transport | None = None,
        codec: Codec | None = None,
    ):
        if start_step < 0:
            raise ValueError(f"start_step must be at least 0, got {start_step}")
        self.transport = init(levels=1) if transport is None else transport
        check_transport(self.transport)
        self.rank = self.transport.rank
        if Hierarchy.of(self.transport).local_size > 1:
            raise ValueError(
                "the hook takes a transport of one level, as DDP's process group is; leave transport= out, or give "
                "onebit.comm.init(levels=1)"
            )
        self.codec: Codec = SignCodec() if codec is None else check_codec("gradients", codec)
        self.start_step, self.step = start_step, 0
        self.sent_bytes, self.bits_per_parameter = 0, 0.0
        plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._names = {p: name for name, p in plain.named_parameters()}
        self._traffic = Traffic(self.transport)
        self._buckets: dict[int, _Bucket] = {}
        self._owed: dict[str, Errors] = {}  # residuals of a layout that DDP has replaced, or of a loaded state
        self._loaded: list[State] = []  # the latter's buckets, for a save before the next step
        self._under_way: list[_UnderWay] = []

    # ---------------------------------------------------------------- a step

    @torch.no_grad()
    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin a bucket's exchange; at the last bucket, complete all. DDP calls hooks in the same order on all ranks.

        Args:
            bucket: The bucket, from DDP.

        Returns:
            A future of the bucket's averaged gradients.
        """
        if bucket.index() == 0:
            self._give_up()
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        ours = self._bucket_of(bucket) if self.step >= self.start_step else None
        gradients = bucket.gradients()
        task = ExchangeTask(self._dense(buffer) if ours is None else self._compressed(ours, gradients))
        self._under_way.append(_UnderWay(task, buffer, future, gradients, ours))
        for earlier in self._under_way[-1 - WINDOW :: -WINDOW]:
            earlier.task.advance()
        if bucket.is_last():
            self._end_step()
        return future

    def _dense(self, buffer: Tensor) -> Exchange:
        buffer.div_(self.transport.world_size)
        yield self.transport.all_reduce(buffer)

    def _compressed(self, bucket: _Bucket, gradients: Sequence[Tensor]) -> Exchange:
        bucket.x.zero_()
        for view, gradient in zip(bucket.layout.views(bucket.x), gradients, strict=True):
            view.copy_(gradient.view_as(view))
        yield from compressed_allreduce(bucket.x, bucket.ef, self.codec, self.transport, bucket.wire, bucket.counts)

    def _end_step(self) -> None:
        wait_all([each.task for each in self._under_way])
        bad = [each for each in self._under_way if each.bucket is not None and not self._is_finite(each.bucket)]
        wait_all([ExchangeTask(self._dense(each.buffer)) for each in bad])
        for each in self._under_way:
            if each.bucket is not None and each not in bad:
                self._take_mean(each.bucket, each.gradients)
            if each.bucket is not None and not bad:
                each.bucket.ef.commit()
            each.future.set_result(each.buffer)
        elements = sum(gradient.numel() for each in self._under_way for gradient in each.gradients)
        self._under_way = []
        self.step += 1
        self.sent_bytes, _ = self._traffic.take()
        self.bits_per_parameter = 8.0 * self.sent_bytes / max(elements, 1)

    def _is_finite(self, bucket: _Bucket) -> bool:
        return bool(self.codec.is_finite(bucket.wire.frames_WB, bucket.layout.chunk))

    def _take_mean(self, bucket: _Bucket, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients by the decoded mean."""
        self.codec.decode(bucket.wire.frames_WB, bucket.x.view(self.transport.world_size, -1))
        for view, gradient in zip(bucket.layout.views(bucket.x), gradients, strict=True):
            gradient.copy_(view.view_as(gradient))

    def _give_up(self) -> None:
        """Complete and drop the exchanges of a backward pass that was not finished, on all ranks."""
        wait_all([each.task for each in self._under_way])
        self._under_way = []

    # ---------------------------------------------------------------- buckets, which DDP rebuilds after its first step

    def _bucket_of(self, bucket: GradBucket) -> _Bucket:
        params, known = bucket.parameters(), self._buckets.get(bucket.index())
        if known is not None and [*map(id, known.params)] == [*map(id, params)]:
            return known
        if known is not None:  # those before it are under way in this step, and stay
            for index in [index for index in self._buckets if index >= bucket.index()]:
                self._owed.update(self._buckets.pop(index).errors(self.rank))
        made = self._buckets[bucket.index()] = self._new_bucket(params)
        self._loaded = []
        return made

    def _new_bucket(self, params: list[Tensor]) -> _Bucket:
        if unknown := [tuple(p.shape) for p in params if p not in self._names]:
            raise ValueError(
                f"rank {self.rank}: DDP exchanges a parameter of shape {unknown[0]} that the state's model "
                "does not have; construct DDPHookState with the model that is wrapped, after it has all parameters"
            )
        names, W, device = [self._names[p] for p in params], self.transport.world_size, params[0].device
        layout = lay_out([p.shape for p in params], self.codec.block, W)
        ef = ErrorFeedback.zeros(layout.numel, W, device=device)
        if self._owed:
            worker, server = (torch.zeros(layout.numel, device=device, dtype=torch.float32) for _ in range(2))
            views = zip(names, layout.views(worker), layout.views(server), strict=True)
            for name, worker_view, server_view in views:
                if name in self._owed:  # else it was frozen until now
                    worker_view.copy_(self._owed[name][0])
                    server_view.copy_(self._owed[name][1])
            self.transport.all_reduce(server).wait()  # each rank has the part that it owned, zeros elsewhere
            ef.worker.copy_(worker)
            ef.server.copy_(server.view(W, -1)[self.rank])
        wire = Wire.empty(self.codec, layout.numel, W, device=device)
        x = torch.empty(layout.numel, device=device, dtype=torch.float32)
        return _Bucket(names, params, layout, layout.counts(device), x, ef, wire)

    # ---------------------------------------------------------------- saving

    def state_dict(self) -> State:
        """This rank's state. Each rank saves and loads its own, between two steps."""
        buckets = [
            {"names": b.names, "worker_error": b.ef.worker.clone(), "server_error": b.ef.server.clone()}
            for b in self._buckets.values()
        ]
        return {**self._identity(), "step": self.step, "buckets": buckets or self._loaded}

    def load_state_dict(self, state: State) -> None:
        """Continue where `state` was taken. All ranks, before a step.

        From another rank's state, in a world of any size, only the step is taken; residuals begin at zero, with a
        warning.

        Args:
            state: From `state_dict()`.

        Raises:
            ValueError: It does not fit the model or the codec. Nothing has changed.
        """
        place = ("rank", "world_size")
        is_own = all(state.get(key) == getattr(self.transport, key) for key in place)
        for key, here in self._identity().items():
            if key not in place and state.get(key) != here:
                raise ValueError(
                    f"rank {self.rank}: this state of the hook has {key}={state.get(key)}, here it is {here}; "
                    "construct it as it was, or load no state, which drops the residuals"
                )
        shapes = {name: p.shape for p, name in self._names.items()}
        owed: dict[str, Errors] = {}
        for saved in state["buckets"]:
            if unknown := [name for name in saved["names"] if name not in shapes]:
                raise ValueError(
                    f"rank {self.rank}: this state of the hook has {unknown[0]}, which the model does not; load the "
                    "state of this model"
                )
            layout = lay_out([shapes[name] for name in saved["names"]], self.codec.block, self.transport.world_size)
            if not is_own:
                nothing = torch.zeros(layout.numel, dtype=torch.float32, device="cpu")
                owed.update(by_parameter(saved["names"], layout, nothing, nothing[: layout.chunk], self.rank))
                continue
            if layout.numel != saved["worker_error"].numel():
                raise ValueError(
                    f"rank {self.rank}: this state of the hook has other shapes than the model in the bucket "
                    f"of {saved['names'][0]}"
                )
            owed.update(by_parameter(saved["names"], layout, saved["worker_error"], saved["server_error"], self.rank))
        if not is_own:
            log.warning(
                "rank %d: this state of the hook is that of rank %s of %s: this rank's residuals begin at zero; save "
                "on every rank to keep them",
                self.rank,
                state.get("rank"),
                state.get("world_size"),
            )
        self._give_up()
        self.step, self._owed, self._loaded = state["step"], owed, state["buckets"] if is_own else []
        self._buckets.clear()

    def _identity(self) -> State:
        """The fields that a state must have to be this rank's."""
        return {
            "kind": "onebit.ddp_hook",
            "rank": self.rank,
            "world_size": self.transport.world_size,
            "codec": self.codec.name,
            "block": self.codec.block,
        }


def ddp_hook(state: DDPHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients in one bit: `model.register_comm_hook(state, onebit.ddp_hook)`.

    Sends 2·(W-1)/W·(1 + 16/block) bits per parameter after the warm-up.

    Args:
        state: This rank's `DDPHookState`.
        bucket: The bucket, from DDP.

    Returns:
        A future of the averaged gradients, complete after the last bucket of the backward pass.

    Raises:
        TypeError: state is not a `DDPHookState`.
    """
    if not isinstance(state, DDPHookState):
        raise TypeError(
            f"onebit.ddp_hook needs a state that keeps residuals, got {type(state).__name__}; register it as "
            "model.register_comm_hook(onebit.DDPHookState(model), onebit.ddp_hook)"
        )
    return state.exchange(bucket)
