"""Messages of one step in every `steps_per_print`, with their bytes and milliseconds, as torch.profiler sees them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ..config.sections import CommsLogger as Settings
from ..feature import Asked, Feature, T, Training

log = logging.getLogger(__name__)

_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")
_BYTES = {
    "bool": 1, "signed char": 1, "unsigned char": 1, "c10::BFloat16": 2, "c10::Half": 2, "short int": 2,
    "float": 4, "int": 4, "double": 8, "long int": 8, "c10::complex<float>": 8,
}  # fmt: skip
"""Bytes per element, by the names that torch.profiler gives to dtypes."""


class Message(NamedTuple):
    """An operation as this rank saw it, from its launch to its end. name: torch's, without the backend."""

    name: str
    nbytes: int
    milliseconds: float


class CommsLogger(Feature):
    """Profiles on rank 0 the step before each of the engine's lines in the log; other steps are as without it.

    Args:
        settings: The block of the configuration.
        every: Number of steps between two profiled ones. None: none is profiled.
    """

    blocks = ("comms_logger",)
    example: ClassVar[Mapping[str, object]] = {"comms_logger": {"enabled": True}}
    only_watches = True

    def __init__(self, settings: Settings, every: int | None):
        self._settings, self._every = settings, every
        self._running: profile | None = None

    @classmethod
    def of(cls, asked: Asked) -> CommsLogger | None:
        settings, every = asked.config.comms_logger, asked.config.steps_per_print
        if settings.enabled and every is None and asked.rank == 0:
            log.warning("comms_logger has no effect: it logs every steps_per_print steps, which is null")
        return cls(settings, every) if settings.enabled else None

    def batches(self, engine: Training, batches: list[T]) -> list[T]:
        self._begin_if_due(engine)
        return batches

    def inputs(self, engine: Training, inputs: Sequence[object], named: Mapping[str, object]) -> Mapping[str, object]:
        self._begin_if_due(engine)
        return named

    def after_step(self, engine: Training) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.__exit__(None, None, None)
            log.info("%s", report(messages_of(running), engine.global_steps, each=self._settings.verbose))

    def _begin_if_due(self, engine: Training) -> None:
        """Profile from the step's first forward pass to its end, unless the program itself is profiling.

        Not from the end of the step before: an evaluation between them may be long, and all of it would be kept.
        """
        is_busy = self._running is not None or torch.autograd._profiler_enabled()
        if is_busy or self._every is None or engine.grid.world.rank != 0:
            return
        if (engine.global_steps + 1) % self._every == 0:
            self._running = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._running.__enter__()


def messages_of(profiled: profile) -> list[Message]:
    """The messages of a profile, in the order of their launches.

    Args:
        profiled: Has ended, with record_shapes.
    """
    result = profiled.profiler.kineto_results if profiled.profiler is not None else None
    found = [event for event in ([] if result is None else result.events()) if event.name().startswith(_BACKENDS)]
    return [
        Message(event.name().partition(":")[2], _nbytes(event.shapes(), event.dtypes()), event.duration_ns() / 1e6)
        for event in sorted(found, key=lambda event: event.start_ns())
    ]


def report(messages: Sequence[Message], step: int, *, each: bool = False) -> str:
    """Describe a step's messages: their sums by name and size, the most bytes first, or each of them.

    Args:
        messages: The messages.
        step: Number of the step.
        each: Whether to list every message in order. Default False.
    """
    lines = [f"{len(messages)} messages in step {step}, rank 0; milliseconds from launch to end, which overlap:"]
    lines += [f"  {m.name}: {m.nbytes:,} bytes, {m.milliseconds:.2f} ms" for m in messages] if each else sums(messages)
    return "\n".join(lines)


def sums(messages: Iterable[Message]) -> list[str]:
    """One line for each name and size of messages, the most bytes first."""
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for name, nbytes, milliseconds in messages:
        times[name, nbytes].append(milliseconds)
    lines = []
    for (name, nbytes), its in sorted(times.items(), key=lambda item: -item[0][1] * len(item[1])):
        total, mean = len(its) * nbytes, sum(its) / len(its)
        lines.append(f"  {name}: {len(its)} of {nbytes:,} bytes, {total:,} in all, {mean:.2f} ms in the mean")
    return lines


def _nbytes(shapes: list[list[int]], dtypes: list[str]) -> int:
    return sum(torch.Size(shape).numel() * _BYTES.get(dtype, 0) for shape, dtype in zip(shapes, dtypes, strict=True))
