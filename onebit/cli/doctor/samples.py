"""Times contenders' steps on the network at hand, on a few matrices, and extrapolates to a model of any size.

Every method takes its steps on two samples, a small and a larger one: as large as a step of about a second allows, and
never larger than the requested model. All ranks meet before each step; the slowest rank's time counts.
"""

from __future__ import annotations

import gc
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...comm import Transport
from ...comm.messages import gather_bytes
from .contenders import FIRST, WARMUP_STEPS, Contender, EmulatedModel, Method
from .prediction import Line, Prediction, StepCost, predict, shapes_of

Shapes = Sequence[tuple[int, int]]
WARMUP = ", warm-up"
REPEATS = 5
STEP_S = 0.7  # aim for the traffic of a sample's step
SMALL, LARGE = 1 << 20, 3 << 22
"""Elements of the samples if the network is fast enough."""


@dataclass(frozen=True)
class Timed:
    """Seconds of a step, each of its slowest rank. seconds: whole step; backward_s: forward and backward; update_s:
    step() without waiting."""

    seconds: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class Sample:
    """Median steps of a method with this many elements. buckets: number of buckets of its traffic."""

    elements: int
    buckets: int
    step: Timed


def numels_of(shapes: Shapes) -> list[int]:
    return [rows * columns for rows, columns in shapes]


def cut(shapes: Shapes, elements: float) -> Shapes:
    """The first matrices that together have at least this many elements, or all of them; at least one."""
    taken, total = 0, 0
    while taken < len(shapes) and total < elements:
        total += shapes[taken][0] * shapes[taken][1]
        taken += 1
    return shapes[:taken]


def sample_shapes(shapes: Shapes, method: Method, world_size: int, bytes_per_s: float) -> list[Shapes]:
    """Two samples of a model for a method, the smaller first; one if the model is small.

    bytes_per_s: bandwidth of a rank in each direction.
    """
    each = 2 * (world_size - 1) / world_size * method.sent_bytes / bytes_per_s
    most = max(SMALL, min(LARGE, STEP_S / each))
    found = [cut(shapes, most / 4), cut(shapes, most)]
    return found if len(found[0]) < len(found[1]) else found[:1]


def measure(
    method: Method, shapes: Shapes, transport: Transport, *, compute_s: float = 0.0, repeats: int = REPEATS
) -> dict[str, Timed]:
    """Median steps of a model of these shapes, by row: the method's name, and the name with WARMUP. All ranks."""
    model = EmulatedModel(shapes, transport, compute_s)
    contender = method.make(model, transport)
    rows: dict[str, Timed] = {}

    def median(steps: int) -> Timed:
        every = _slowest(transport, [_one_step(contender, transport) for _ in range(steps)])
        return Timed(*(statistics.median(column) for column in zip(*every, strict=True)))

    if method.has_warmup:
        median(FIRST)
        rows[method.name + WARMUP] = median(WARMUP_STEPS - FIRST)
    median(method.steps_before)
    rows[method.name] = median(repeats)
    gc.collect()
    gather_bytes(transport, b"done", transport.device)
    return rows


def _one_step(contender: Contender, transport: Transport) -> tuple[float, float, float]:
    """This rank's seconds of the whole step, of backward, and of step() without waiting."""
    gather_bytes(transport, b"ready", transport.device)
    began = time.perf_counter()
    contender.backward()
    _synchronise(transport.device)
    backward_s = time.perf_counter() - began
    waited_s = contender.update()
    _synchronise(transport.device)
    seconds = time.perf_counter() - began
    contender.optimizer.zero_grad()
    return seconds, backward_s, max(0.0, seconds - backward_s - waited_s)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(transport: Transport, timed: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """For each step, the largest of each number over all ranks."""
    packed = struct.pack(f"<{3 * len(timed)}d", *(x for step in timed for x in step))
    every = [struct.unpack(f"<{3 * len(timed)}d", row) for row in gather_bytes(transport, packed, transport.device)]
    largest = [max(column) for column in zip(*every, strict=True)]
    return [(largest[k], largest[k + 1], largest[k + 2]) for k in range(0, len(largest), 3)]


def take_samples(
    methods: Sequence[Method],
    shapes: Shapes,
    transport: Transport,
    bytes_per_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, list[Sample]]:
    """Samples of a model of these shapes, by row of the table. All ranks."""
    rows: dict[str, list[Sample]] = {}
    for method in methods:
        for part in sample_shapes(shapes, method, transport.world_size, bytes_per_s):
            numels = numels_of(part)
            say(f"{method.name}: a step of {sum(numels) / 1e6:.1f} M elements")
            buckets = len(method.schedule.buckets(numels))
            for name, step in measure(method, part, transport).items():
                rows.setdefault(name, []).append(Sample(sum(numels), buckets, step))
    return rows


def cost_of(method: Method, samples: Sequence[Sample]) -> StepCost:
    """Fit the parts of a step to the samples of a row."""
    exchange = [(one.elements, one.step.seconds - one.step.update_s) for one in samples]
    update = [(one.elements, one.step.update_s) for one in samples]
    # If all traffic of our optimizer is in one bucket, backward launches it and waits for nothing.
    alone = [(one.elements, one.step.backward_s) for one in samples if one.buckets == 1]
    launching = Line.through(alone) if alone and method.schedule.hides and not method.is_dense else Line(0.0, 0.0)
    return StepCost(Line.through(exchange), launching, Line.through(update))


def predictions(
    methods: Sequence[Method], samples: Mapping[str, Sequence[Sample]], shapes: Shapes, compute_s: float
) -> dict[str, Prediction]:
    """Seconds of a step of a model of these shapes, by row of the table."""
    numels, found = numels_of(shapes), {}
    for method in methods:
        schedules = {method.name: method.schedule, method.name + WARMUP: method.warmup_schedule or method.schedule}
        for name, schedule in schedules.items():
            if name in samples:
                found[name] = predict(cost_of(method, samples[name]), schedule, numels, compute_s)
    return found


def model_shapes(params: float) -> Shapes:
    """Matrices of a transformer with about this many parameters."""
    return shapes_of(params)
