"""Parameters, floating-point operations and time of one forward pass, counted by torch.utils.flop_counter."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..config.sections import FlopsProfiler as Settings
from ..feature import Asked, Feature, Training

log = logging.getLogger(__name__)


class FlopsProfiler(Feature):
    """Counts on rank 0, in the first micro-batch after `profile_step` steps; every other pass is as without it.

    Args:
        settings: The block of the configuration.
    """

    blocks = ("flops_profiler",)
    example: ClassVar[Mapping[str, object]] = {"flops_profiler": {"enabled": True}}
    only_watches = True

    def __init__(self, settings: Settings):
        self._settings = settings

    @classmethod
    def of(cls, asked: Asked) -> FlopsProfiler | None:
        settings = asked.config.flops_profiler
        if settings.enabled and asked.config.pipeline.ranks > 1:
            if asked.rank == 0:
                log.warning("flops_profiler has no effect in a pipeline: no rank runs the whole forward pass")
            return None
        return cls(settings) if settings.enabled else None

    def inputs(self, engine: Training, inputs: Sequence[object], named: Mapping[str, object]) -> Mapping[str, object]:
        is_due = engine.global_steps == self._settings.profile_step and engine.micro_steps_of_step == 0
        if is_due and engine.grid.world.rank == 0:
            self._count_next_pass(engine.module)
        return named

    def _count_next_pass(self, module: nn.Module) -> None:
        """Count from here to the end of the module's next pass, and report it."""
        counter = FlopCounterMode(display=False)

        def end(module: nn.Module, inputs: object, output: object) -> None:
            hook.remove()
            counter.__exit__(None, None, None)
            seconds = _now() - began
            if output is not None:  # None: the pass has raised an error
                self._report(module, counter, seconds)

        hook = module.register_forward_hook(end, always_call=True)
        counter.__enter__()
        began = _now()

    def _report(self, module: nn.Module, counter: FlopCounterMode, seconds: float) -> None:
        text = report(module, counter, seconds, self._settings)
        if self._settings.output_file is None:
            log.info("%s", text)
            return
        path = Path(self._settings.output_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        except OSError as error:
            log.warning("%s cannot be written: %s\n%s", path, error.strerror, text)


def report(module: nn.Module, counter: FlopCounterMode, seconds: float, settings: Settings) -> str:
    """Describe a counted pass: totals, then modules by name if `detailed`, else the largest ones.

    Args:
        module: The model.
        counter: Has counted its forward pass.
        seconds: Duration of the pass.
        settings: Which modules to list.
    """
    flops, root = counter.get_total_flops(), type(module).__name__
    both = flops * (3 + settings.recompute_fwd_factor)  # a backward pass has two products for each of the forward pass
    lines = [
        f"flops profile of a forward pass, one micro-batch, rank 0, after step {settings.profile_step}:",
        f"parameters {sum(p.numel() for p in module.parameters()):,}",
        f"forward {flops:.4g} flops, {1e3 * seconds:.2f} ms, {flops / seconds:.4g} flops per second, counting included",
        f"forward and backward {both:.4g} flops, estimated",
    ]
    counts = counter.get_flop_counts()
    found = {
        name: sum(counts[f"{root}.{name}"].values()) for name, _ in module.named_modules() if f"{root}.{name}" in counts
    }
    deepest, most = settings.module_depth, max((name.count(".") for name in found), default=0) + 1
    depth = most if deepest < 0 else min(deepest, most)
    if settings.detailed:
        shown = [name for name in found if name.count(".") < depth]
    else:
        level = [name for name in found if name.count(".") == depth - 1]
        shown = sorted(level, key=lambda name: -found[name])[: settings.top_modules]
    for name in shown:
        numel = sum(p.numel() for p in module.get_submodule(name).parameters())
        share = 100 * found[name] / max(flops, 1)
        lines.append(f"  {name}: parameters {numel:,}, forward {found[name]:.4g} flops ({share:.1f} %)")
    return "\n".join(lines)


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
