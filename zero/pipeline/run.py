"""Pipeline stages on torch.distributed.pipelining: which rank holds which, how a step runs, and tied parameters.

`stages_of` and `check` are pure; `Pipeline` runs a step's micro-batches through this rank's stages in the order of a
schedule, and `Ties` adds up the gradients of parameters that several stages hold. `layers.py` describes the model.
Called by all ranks of a pipeline, in the same order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from ...comm import Transport, Work, torch_versions
from ...comm.messages import gather_bytes, gather_texts, raise_on_all_ranks
from ...model_parallel import local
from ..checkpoint.materialize import to_device
from ..config.schema import changed
from ..config.sections import Pipelining
from ..config.whole import Config
from ..grid import Grid
from ..parallel.sharding import Sharding
from .layers import Loss, PipelineModule, Stage, TiedLayerSpec, balance, unmarked
from .wire import WIRES, CompressedStage

log = logging.getLogger(__name__)


class Schedule(Protocol):
    """One of torch's schedules: an order of micro-batches, with the stages that it drives."""

    def step(self, *inputs: Tensor, target: Tensor | None = None, losses: list[Tensor] | None = None) -> object: ...
    def eval(self, *inputs: Tensor, target: Tensor | None = None, losses: list[Tensor] | None = None) -> object: ...


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
# Stages per rank, if the configuration does not set them and the schedule needs more than one.
_CHUNKS = {"interleaved": 2, "zbv": 2}
# Schedules that run several stages of a rank; the others run one.
_MULTI = ("interleaved", "zero-bubble", "zbv")
# Schedules with a backward pass in two parts, which does not run the hooks in which FSDP2 reduces gradients.
SPLIT_BACKWARD = ("zero-bubble", "zbv")

Batch = tuple[object, object]
R = TypeVar("R")


def chunks_of(settings: Pipelining) -> int:
    """Stages per rank; one if a single rank holds the whole model, whatever the schedule."""
    if settings.ranks == 1:
        return 1
    return settings.chunks or _CHUNKS.get(settings.schedule, 1)


def stages_of(settings: Pipelining, place: int) -> list[int]:
    """The stages of the rank at this place in the pipeline: in a loop or, for zbv, down and up again."""
    ranks, chunks = settings.ranks, chunks_of(settings)
    if settings.schedule == "zbv" and ranks > 1:
        return [place, 2 * ranks - 1 - place]
    return [place + k * ranks for k in range(chunks)]


def check(config: Config, model: object) -> None:
    """Raise ValueError, TypeError or ImportError if this model cannot run in these stages. Sends nothing."""
    torch_versions.require_pipelines()
    settings, micro_batches = config.pipeline, config.gradient_accumulation_steps
    ranks, chunks, schedule = settings.ranks, chunks_of(settings), settings.schedule
    if not isinstance(model, PipelineModule):
        raise TypeError(
            f"{ranks} pipeline stages, but the model is a {type(model).__name__}: a pipeline needs an "
            "onebit.zero.PipelineModule, a list of layers, which onebit.zero.split can make from a module, or a causal "
            "language model of transformers' of a type in onebit.zero.pipeline.huggingface.FAMILIES"
        )
    if (schedule not in _MULTI and chunks != 1) or (schedule == "zbv" and chunks != 2):
        fits = "has two stages on each rank" if schedule == "zbv" else "has one stage on each rank"
        raise ValueError(f"pipeline.chunks is {chunks}, but the schedule {schedule!r} {fits}")
    model.check_cut(ranks * chunks, settings.partition)
    rounds = max(1, micro_batches // ranks)
    if schedule in ("interleaved", "zero-bubble") and micro_batches % rounds:
        raise ValueError(
            f"gradient_accumulation_steps is {micro_batches}, the micro-batches of a step; the schedule {schedule!r} "
            f"needs a multiple of {rounds} for {ranks} ranks; a multiple of {ranks} always fits"
        )
    if schedule in SPLIT_BACKWARD and config.zero_optimization.stage == 3:
        raise ValueError(
            f"the schedule {schedule!r} needs a layer's weights again after its backward pass, when stage 3 has freed "
            "them; use stage 2, or another schedule"
        )
    has_ties = any(isinstance(layer, TiedLayerSpec) for layer in model.layers)
    if schedule == "zbv" and config.zero_optimization.stage > 0 and has_ties:
        raise ValueError(
            "the first and the last stage are tied, and the schedule 'zbv' puts them on one rank, where FSDP2 cannot "
            "shard what both hold; use another schedule, or stage 0"
        )


def without_effect(settings: Pipelining, model: object) -> list[str]:
    """The keys of the block "pipeline" that have no effect if there is one stage, one line each."""
    used = {"stages", "activation_checkpoint_interval"} if isinstance(model, PipelineModule) else {"stages"}
    names = [name for name in changed(settings) if name not in used]
    return [f"pipeline.{name} has no effect: there is one stage, and the model is not cut" for name in names]


def build_stages(model: PipelineModule, settings: Pipelining, grid: Grid) -> dict[int, Stage]:
    """Build this rank's stages, by number, on its device. All ranks call it.

    Raises:
        ValueError: On all ranks, if a stage would have nothing to train.
    """
    if settings.activation_checkpoint_interval is not None:
        model.activation_checkpoint_interval = settings.activation_checkpoint_interval
    method, count = settings.partition or model.partition_method, settings.ranks * chunks_of(settings)
    if count == 1:
        parts = [range(len(model))]
    else:
        parts = balance(_seconds(model, grid.world), count) if method == "time" else model.cut(count, method)
    if grid.world.rank == 0 and count > 1:
        log.info("layers of the stages: %s", ", ".join(f"{part.start} to {part.stop - 1}" for part in parts))
    numbers = stages_of(settings, grid.coordinates["pipe"])
    stages = dict(zip(numbers, model.stages([parts[number] for number in numbers]), strict=True))
    idle = [number for number, stage in stages.items() if not any(p.requires_grad for p in stage.parameters())]
    problem = f"pipeline stage {idle[0]} has nothing to train; use fewer stages or another partition" if idle else None
    raise_on_all_ranks(grid.world, problem, ValueError)
    return {number: to_device(stage, grid.device) for number, stage in stages.items()}


def _seconds(model: PipelineModule, world: Transport) -> list[float]:
    """Each layer's seconds, measured on rank 0, for all ranks. All raise RuntimeError if a layer fails there."""
    seconds, problem = [], None
    if world.rank == 0:
        try:
            seconds = model.seconds()
        except Exception as error:
            log.exception("rank 0: a layer fails with the example")
            problem = f"rank 0 cannot time the layers with the example of the PipelineModule: {error!r}"
    raise_on_all_ranks(world, problem, RuntimeError)
    first: list[float] = json.loads(gather_texts(world, json.dumps(seconds))[0])
    return first


# -------------------------------------------------------------------------------- a step


class _Judged(TypedDict, total=False):
    """What the last stage gets besides its inputs: the numbers of the micro-batches, and a list for their losses."""

    target: Tensor
    losses: list[Tensor]


class Pipeline:
    """This rank's stages, by number, and how a step's micro-batches run through them.

    `sharding` is that of the stages together. At stage 3 gradients are reduced with every micro-batch, so that whole
    ones take no memory. At the others, and if the schedule's backward pass has two parts, they add up unsharded and are
    reduced once.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        config: Config,
        grid: Grid,
        loss_fn: Loss,
        sharding: Sharding,
    ):
        self.stages, self.settings = stages, config.pipeline
        self.micro_batches = config.gradient_accumulation_steps
        self._sharding = sharding
        self._transport = grid.transports["pipe"]
        self._loss_fn = self._judge = loss_fn
        self._device = grid.device
        self._scale = 1.0
        self._targets: list[object] = []  # of the step's micro-batches
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._driven: list[CompressedStage] = []

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent to other stages: activations and their gradients."""
        return sum(stage.sent_bytes for stage in self._driven)

    @property
    def is_first(self) -> bool:
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        return self._count - 1 in self.stages

    @property
    def _count(self) -> int:
        return self.settings.ranks * chunks_of(self.settings)

    def run(self, batches: Sequence[Batch], scale: float = 1.0) -> Tensor | None:
        """Run forward and backward of all micro-batches. The gradients of the mean loss times `scale` add up.

        All ranks of the pipeline call it with the same batches.

        Returns:
            The micro-batches' mean loss on the ranks with the last stage, None on others.

        Raises:
            ValueError: Micro-batches differ in shape; on all ranks.
            PeerError: A peer is lost.
        """
        self._scale = scale / self.micro_batches
        losses = self._drive(batches, trains=True)
        return torch.stack([loss.float() for loss in losses]).sum() / (self._scale * len(losses)) if losses else None

    def evaluate(self, batches: Sequence[Batch], judge: Callable[[object, object], R]) -> list[R] | None:
        """What `judge` returns for each micro-batch, forward only; any number of them. Otherwise as `run`.

        Args:
            batches: The micro-batches.
            judge: Called with an output and a target, on the ranks with the last stage.

        Returns:
            A list on the ranks with the last stage, None on others.

        Raises:
            RuntimeError: The schedule is "zbv", which has no such form.
            ValueError: The schedule does not take this number of micro-batches.
        """
        if self.settings.schedule == "zbv":
            raise RuntimeError(
                "torch.distributed.pipelining has no forward-only form of the schedule 'zbv' (torch 2.13); evaluate in "
                "a run with another schedule, from a checkpoint of this one"
            )
        found: list[R] = []

        def note(output: object, target: object) -> Tensor:
            found.append(judge(output, target))
            return torch.zeros((), dtype=torch.float32, device=self._device)

        self._judge = note
        try:
            with torch.no_grad():
                self._drive(batches, trains=False)
        finally:
            self._judge = self._loss_fn
        return found if self.is_last else None

    def _drive(self, batches: Sequence[Batch], *, trains: bool) -> list[Tensor]:
        """Run the micro-batches. The scaled loss of each, on the ranks with the last stage; empty on others."""
        inputs = _columns(batches)
        self._targets = [target for _, target in batches]
        key = (trains, len(batches), *map(_shape, inputs))
        if key not in self._schedules:
            self._schedules[key] = self._schedule(trains, len(batches))
        losses: list[Tensor] = []
        schedule = self._schedules[key]
        # torch divides a target by rows; the numbers of the micro-batches leave targets of any kind as they are.
        numbers = torch.arange(len(batches), device="cpu")
        given = _Judged(target=numbers, losses=losses) if self.is_last else _Judged()
        drive = schedule.step if trains else schedule.eval
        with self._naming_peers():
            drive(*(inputs if self.is_first else ()), **given)
        self._sharding.release()
        return [loss.detach() for loss in losses]

    def _schedule(self, trains: bool, micro_batches: int) -> Schedule:
        """A schedule for micro-batches of one shape, because torch's stages keep the buffers of the first shape."""
        settings, group = self.settings, self._transport.group  # type: ignore[attr-defined]
        reduces_each = self._sharding.reduces_in_pipeline and settings.schedule not in SPLIT_BACKWARD
        self._sharding.begin_pipeline(reduces_each=reduces_each)
        stages = [
            CompressedStage(
                _Reducing(module) if reduces_each else module,
                number,
                self._count,
                self._device,
                group=group,
                forward_codec=WIRES[settings.activations or "fp32"],
                backward_codec=WIRES[settings.activation_gradients or "fp32"],
            )
            for number, module in sorted(self.stages.items())
        ]
        self._driven += stages
        # Without backward passes, or with fewer micro-batches than stages (which torch's 1F1B refuses), it is GPipe.
        is_gpipe = settings.schedule == "1f1b" and (not trains or micro_batches < self._count)
        kind = SCHEDULES["gpipe" if is_gpipe else settings.schedule]
        given = stages if settings.schedule in _MULTI else stages[0]
        return kind(given, micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: object, number: Tensor) -> Tensor:
        return self._judge(unmarked(output), self._targets[int(number)]).float() * self._scale

    @contextmanager
    def _naming_peers(self) -> Iterator[None]:
        with self._transport.naming_peers("a pipeline step"):
            yield


class _Reducing(nn.Module):
    """Hides FSDP2 from torch's pipelining, which would otherwise delay reducing gradients to the end of a step."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: object) -> object:
        return self.stage(*inputs)


def _columns(batches: Sequence[Batch]) -> tuple[Tensor, ...]:
    """The inputs of all micro-batches, concatenated.

    Raises:
        ValueError: They differ in shape.
        TypeError: An input is no tensor with a batch dimension.
    """
    rows = [_tensors(inputs) for inputs, _ in batches]
    shapes = {tuple(map(_shape, inputs)) for inputs in rows}
    if len(shapes) > 1:
        found = ", ".join(map(str, sorted(shapes)))
        raise ValueError(
            f"the micro-batches of a step must have one shape in a pipeline, got {found}; "
            "drop the last, incomplete batch (dataloader_drop_last), or pad it"
        )
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


def _tensors(inputs: object) -> tuple[Tensor, ...]:
    several = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if not all(isinstance(x, Tensor) and x.dim() > 0 for x in several):
        found = ", ".join(type(x).__name__ for x in several)
        raise TypeError(f"a pipeline takes tensors with a batch dimension as inputs, got {found}")
    return tuple(several)


def _shape(x: object) -> tuple[int | str, ...]:
    return (*x.shape, str(x.dtype)) if isinstance(x, Tensor) else (type(x).__name__,)


# -------------------------------------------------------------------------------- what several stages hold


@dataclass(frozen=True)
class Tie:
    """The names of parameters that all stages of this transport's ranks hold."""

    transport: Transport
    names: tuple[str, ...]


class Ties:
    """The parameters that this rank's stages share with other ranks', found by name."""

    def __init__(self, module: nn.Module, grid: Grid):
        self._module = module
        self.ties = [Tie(transport, names) for transport, names in _find(module, grid)]

    def holders(self) -> dict[Tensor, int]:
        """How many stages hold each tied parameter; see `ModelParallelGroup.tied`."""
        return {p: tie.transport.world_size for tie, p in self._pairs()}

    @torch.no_grad()
    def equalise(self) -> None:
        """Give all holders of a parameter the first holder's values. All ranks, before or after sharding."""
        sent = []
        for tie, p in self._pairs():
            held = local(p).detach()
            whole = held.contiguous()
            if whole.numel() > 0:
                sent.append((tie.transport.broadcast(whole, 0), held, whole))
        _wait_all(sent)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Replace each tied gradient by the sum over its holders, the same bits on all. After the last backward pass.

        All ranks call it. A parameter without a gradient on any rank stays without one.
        """
        named = dict(self._module.named_parameters())
        for tie in self.ties:
            params = [named[name] for name in tie.names]
            rows = gather_bytes(tie.transport, bytes(p.grad is not None for p in params))
            waiting = []
            for k, p in enumerate(params):
                if not any(row[k] for row in rows):
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p, dtype=torch_versions.grad_dtype(p))
                held = local(p.grad)
                whole = held.contiguous()
                if whole.numel() > 0:
                    waiting.append((tie.transport.all_reduce(whole), held, whole))
            _wait_all(waiting)

    def _pairs(self) -> Iterator[tuple[Tie, Tensor]]:
        named = dict(self._module.named_parameters())
        return ((tie, named[name]) for tie in self.ties for name in tie.names)


def _wait_all(sent: Sequence[tuple[Work, Tensor, Tensor]]) -> None:
    """Wait for each operation, and copy its result back if it used a contiguous copy."""
    for work, held, whole in sent:
        work.wait()
        if whole.data_ptr() != held.data_ptr():
            held.copy_(whole)


def _find(module: nn.Module, grid: Grid) -> Iterator[tuple[Transport, tuple[str, ...]]]:
    """A transport for each set of stages that share parameters, with the names, in the same order on all ranks."""
    pipe, here = grid.transports["pipe"], grid.coordinates
    texts = gather_texts(pipe, "\n".join(name for name, _ in module.named_parameters()))
    held = [dict.fromkeys(text.split("\n")) for text in texts]
    shared: dict[tuple[int, ...], list[str]] = {}
    for name in sorted({name for names in held for name in names if name}):
        holders = tuple(place for place, names in enumerate(held) if name in names)
        if len(holders) > 1:
            shared.setdefault(holders, []).append(name)
    for holders, names in sorted(shared.items()):
        if here["pipe"] in holders:
            ranks = [grid.shape.rank(here | {"pipe": place}) for place in holders]
            yield (pipe if len(holders) == pipe.world_size else grid.world.split(ranks)), tuple(names)
