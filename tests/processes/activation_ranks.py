"""What each rank of `test_activations.py` does: pipelines over Gloo, each against the same layers in one process.

Every rank builds all layers and runs the reference itself; of the pipeline it has its own stages. A result is a dict of
JSON values; gaps are the largest absolute differences, of gradients over the parameters of this rank's stages.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn import functional as F

from onebit.comm import Codec
from onebit.zero.pipeline.wire import WIRES, CompressedStage, quantised_boundary

WIDTH = 24
Loss = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """One tensor in, one out."""

    def __init__(self, place: int, last: bool):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Plain(Layer):
    """No squashing: what is infinite stays infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Several(Layer):
    """Three tensors between stages: two of floats, of different shapes, and one of integers."""

    def __init__(self, place: int, last: bool):
        super().__init__(place, last)
        self.last = last

    def forward(self, x: Tensor, y: Tensor | None = None, order: Tensor | None = None) -> object:
        if y is None or order is None:
            y, order = x[:, :5].sigmoid(), x.argsort(dim=1)
        x = torch.tanh(self.linear(x)) + y.mean(dim=1, keepdim=True)
        # No index: torch's stages first try their layers on tensors that hold anything at all.
        return x * (order % 5).to(x.dtype) if self.last else (x, y * x[:, :5], order)


LAYERS = {layer.__name__: layer for layer in (Layer, Plain, Several)}


@dataclass(frozen=True)
class Case:
    """A pipeline of `per_rank` stages on each rank, a step of `micro_batches` of `rows` each."""

    schedule: str
    per_rank: int = 1
    forward: str = "int8"
    backward: str = "int8"
    layer: str = "Layer"
    micro_batches: int = 4
    rows: int = 3
    dtype: str = "float32"
    input_scale: float = 1.0
    loss_scale: float = 1.0
    error_feedback: bool = False

    @property
    def is_v(self) -> bool:
        """A rank's two stages are neighbours at the turn of the V."""
        return self.schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")

    def stages_of(self, rank: int, world: int) -> list[int]:
        if self.is_v:
            return [rank, 2 * world - 1 - rank]
        return list(range(rank, world * self.per_rank, world))

    @property
    def codecs(self) -> dict[str, Codec | None]:
        return {"forward_codec": WIRES[self.forward], "backward_codec": WIRES[self.backward]}

    def layers(self, world: int) -> list[nn.Module]:
        torch.manual_seed(1)
        count = world * self.per_rank
        return [LAYERS[self.layer](k, k == count - 1).to(getattr(torch, self.dtype)) for k in range(count)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, self.rows * self.micro_batches, WIDTH, generator=generator)
        return (x * self.input_scale).to(getattr(torch, self.dtype)), y.to(getattr(torch, self.dtype))

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out.float(), y.float()) * self.loss_scale


class Watched(CompressedStage):
    """Looks at what it hands to the network."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)
        self.seen_bytes, self.seen_types = 0, set[str]()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._see(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._see(super().get_bwd_send_ops(bwd_chunk_id))

    def _see(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.seen_bytes += sum(op.tensor.nbytes for op in ops)
        self.seen_types |= {str(op.tensor.dtype) for op in ops}
        return ops


@dataclass
class Remembering:
    """A codec with error feedback: as much of it as a boundary needs."""

    codec: Codec
    error: Tensor | None = None

    @property
    def block(self) -> int:
        return self.codec.block

    def frame_bytes(self, n: int) -> int:
        return self.codec.frame_bytes(n)

    def encode(self, x: Tensor, error: None, frames: Tensor, counts: None) -> None:
        x += 0.0 if self.error is None else self.error
        self.codec.encode(x, None, frames, counts)
        self.error = x

    def decode(self, frames: Tensor, out: Tensor) -> None:
        self.codec.decode(frames, out)


Memory = dict[tuple[int, int], Remembering]  # by micro-batch and stage


def reference(
    case: Case, layers: list[nn.Module], world: int, x: Tensor, y: Tensor, memory: Memory
) -> tuple[list[Tensor], Tensor]:
    """Losses of the micro-batches, and outputs; gradients are left in the layers, as the schedules scale them."""
    rank_of = {stage: rank for rank in range(world) for stage in case.stages_of(rank, world)}
    losses, outputs = [], []
    batch = zip(x.chunk(case.micro_batches), y.chunk(case.micro_batches), strict=True)
    for micro_batch, (part, target) in enumerate(batch):
        values: object = part
        for k, layer in enumerate(layers):
            values = layer(*values) if isinstance(values, tuple) else layer(values)
            if k + 1 < len(layers) and rank_of[k] != rank_of[k + 1]:
                codecs = dict(case.codecs)
                if case.error_feedback:
                    codecs["backward_codec"] = memory.setdefault((micro_batch, k), Remembering(WIRES[case.backward]))
                values = sent(codecs, values)
        losses.append(case.loss(values, target))
        outputs.append(values.detach())
        if torch.is_grad_enabled():
            losses[-1].backward()
    for p in (p for layer in layers for p in layer.parameters() if p.grad is not None):
        p.grad.div_(case.micro_batches)
    return [loss.detach() for loss in losses], torch.cat(outputs)


def sent(codecs: dict[str, Codec | None], values: object) -> object:
    if isinstance(values, tuple):
        return tuple(sent(codecs, value) for value in values)
    return quantised_boundary(values, **codecs) if values.is_floating_point() else values


@dataclass
class Pipeline:
    """This rank's part: its stages, the schedule over them, and the parameters of each stage."""

    stages: list
    schedule: object

    def step(self, x: Tensor, y: Tensor, evaluate: bool = False) -> tuple[list[Tensor], Tensor | None]:
        is_first, is_last = (any(getattr(s, name) for s in self.stages) for name in ("is_first", "is_last"))
        losses: list[Tensor] = []
        call = self.schedule.eval if evaluate else self.schedule.step
        out = call(*([x] if is_first else []), target=y if is_last else None, losses=losses)
        return [loss.detach() for loss in losses], None if out is None else out.detach()

    def grads(self) -> dict[int, list[Tensor]]:
        return {s.stage_index: [p.grad for p in s.submod.parameters()] for s in self.stages}

    def zero_grad(self) -> None:
        for stage in self.stages:
            stage.submod.zero_grad()


def pipeline(case: Case, layers: list[nn.Module], rank: int, world: int, kind: type = Watched) -> Pipeline:
    is_ours = issubclass(kind, CompressedStage)
    options = case.codecs | {"error_feedback": case.error_feedback} if is_ours else {}
    stages = [
        kind(copy.deepcopy(layers[k]), k, len(layers), torch.device("cpu"), **options)
        for k in case.stages_of(rank, world)
    ]
    schedule = getattr(pipelining, case.schedule)
    one = issubclass(schedule, PipelineScheduleSingle)
    return Pipeline(stages, schedule(stages[0] if one else stages, case.micro_batches, loss_fn=case.loss))


def train(case: Case, rank: int, world: int) -> dict[str, object]:
    """Two steps, with an evaluation in between."""
    layers, memory = case.layers(world), Memory()
    here = pipeline(case, layers, rank, world)
    result: dict[str, object] = {"loss_gap": 0.0, "grad_gap": 0.0, "eval_gap": 0.0, "eval_bytes": 0}
    for step in range(2):
        x, y = case.batch(step)
        if step and case.error_feedback:
            here = resumed(here, pipeline(case, layers, rank, world))
        for each in (here, *layers):
            each.zero_grad()
        losses, _ = here.step(x, y)
        expected, _ = reference(case, layers, world, x, y, memory)
        if losses:
            result["loss_gap"] = max(result["loss_gap"], *(gap(a, b) for a, b in zip(losses, expected, strict=True)))
        for k, grads in here.grads().items():
            result["finite"] = all(bool(g.isfinite().all()) for g in grads)
            result["largest"] = max(float(g.abs().max()) for g in grads)
            for grad, p in zip(grads, layers[k].parameters(), strict=True):
                result["grad_gap"] = max(result["grad_gap"], gap(grad, p.grad))
        result["train_bytes"] = sum(s.sent_bytes for s in here.stages) - result["eval_bytes"]
        if step == 0 and not case.is_v:  # torch 2.13 cannot evaluate with these
            with torch.no_grad():
                _, outputs = reference(case, layers, world, x, y, memory)
            with torch.no_grad():
                _, out = here.step(x, y, evaluate=True)
            result["eval_gap"] = 0.0 if out is None else gap(out, outputs)
            result["eval_bytes"] = sum(s.sent_bytes for s in here.stages) - result["train_bytes"]
    assert all(s.sent_bytes == s.seen_bytes for s in here.stages)
    result["owed"] = sum(len(s.state_dict()["errors"]) for s in here.stages)
    result["types"] = sorted(set.union(*(s.seen_types for s in here.stages)))
    return result


def resumed(old: Pipeline, new: Pipeline) -> Pipeline:
    """The new stages, going on where the old ones end."""
    for before, after in zip(old.stages, new.stages, strict=True):
        after.load_state_dict(before.state_dict())
        after.sent_bytes, after.seen_bytes, after.seen_types = before.sent_bytes, before.seen_bytes, before.seen_types
    return new


def plain_twin(case: Case, rank: int, world: int) -> dict[str, object]:
    """The same with torch's own stage: are gradients and losses the same bits?"""
    layers = case.layers(world)
    (x, y), both = case.batch(0), []
    for kind in (CompressedStage, PipelineStage):
        here = pipeline(case, layers, rank, world, kind)
        losses, out = here.step(x, y)
        both.append((losses, [] if out is None else [out], *here.grads().values()))
    same = all(torch.equal(a, b) for p, q in zip(*both, strict=True) for a, b in zip(p, q, strict=True))
    return {"same": same, "compared": sum(len(part) for part in both[0])}


def gap(a: Tensor, b: Tensor) -> float:
    """inf where either is not finite: nan would hide in a maximum."""
    largest = float((a.double() - b.double()).abs().max())
    return largest if math.isfinite(largest) else math.inf


def run_cases(cases: list[tuple[str, dict]]) -> list[dict[str, object]]:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = [globals()[function](Case(**fields), rank, world) for function, fields in cases]
    dist.barrier()
    dist.destroy_process_group()
    return results
