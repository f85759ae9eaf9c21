"""What an engine does for data efficiency in a step: sequence lengths, dropped tokens, and learning rates.

`configured.py` makes the parts; the engine calls these methods, each of which does nothing if its part is off.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from ...comm.messages import gather_bytes
from ..grid import Grid
from .pacing import Custom, Pacing
from .sequence import length_of, truncate
from .token_dropping import TokenDropping

T = TypeVar("T")
SEQLEN = "curriculum_seqlen"
"""The argument in which DeepSpeed passes a model the number of tokens to use of a sequence."""


def names_in(forward: Callable[..., object]) -> set[object]:
    """What a forward pass may find in named arguments: its parameters, and the keys that it looks up in its **named."""
    forward = inspect.unwrap(forward)
    parameters = inspect.signature(forward).parameters
    takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    code = getattr(forward, "__code__", None)
    return {*parameters, *(code.co_consts if code and takes_more else ())}


@dataclass
class Efficiency:
    """The parts of data efficiency that are on in an engine.

    Attributes:
        dropping: The layers that drop tokens, or None.
        lengths: The sequence lengths of the older curriculum ("curriculum_learning"), or None.
        layers: How many layers the model has, if tokens are dropped; otherwise 1.
        counts_tokens: Whether learning rates depend on consumed tokens.
        layer_tokens: Tokens times layers that all ranks have consumed, if `counts_tokens`.
    """

    dropping: TokenDropping | None = None
    lengths: Pacing | None = None
    layers: int = 1
    counts_tokens: bool = False
    layer_tokens: int = 0
    _mine: int = 0
    _rates: list[float | Tensor] | None = None
    _takes_length: dict[type[nn.Module], bool] = field(default_factory=dict)

    # ---------------------------------------------------------------- a micro-batch

    def seqlen(self, step: int) -> int | None:
        """The sequence length of a step, counted from 0; None for whole sequences."""
        return None if self.lengths is None else self.lengths(step + 1)

    def prepare(
        self, module: nn.Module, step: int, inputs: tuple[object, ...], named: Mapping[str, object], rank: int
    ) -> Mapping[str, object]:
        """The keyword arguments for a forward call in training.

        Raises:
            ValueError: The sequences are longer than the curriculum allows.
        """
        length, came = self.seqlen(step), None
        if length is not None or self.counts_tokens:
            came = length_of((inputs, dict(named)))
        if length is not None and self._takes(module):
            named = {**named, SEQLEN: length}
            came = None if came is None else min(came, length)
        elif length is not None and came is not None and came > length:
            raise ValueError(
                f"rank {rank}: step {step + 1} of the curriculum expects sequences of {length} tokens, and the model "
                f"was given {came}; truncate them: onebit.zero.data_efficiency.truncate(batch, "
                f"engine.curriculum_seqlen()), pass initialize(training_data=...), which truncates its batches, or "
                f"give forward an argument {SEQLEN}="
            )
        self._count(came, (inputs, dict(named)))
        return named

    def prepare_batches(self, batches: list[T], step: int, *, is_counted: bool) -> list[T]:
        """The micro-batches of a whole step, truncated. is_counted: count their tokens here, not in later calls."""
        length = self.seqlen(step)
        if length is not None:
            batches = [truncate(batch, length) for batch in batches]
        for batch in batches if is_counted else ():
            self._count(length_of(batch), batch)
        return batches

    def _count(self, length: int | None, batch: object) -> None:
        if not self.counts_tokens:
            return
        if length is None:
            raise ValueError(
                "learning rates depend on consumed tokens, but the model's inputs have no tensor [batch, sequence, "
                "...]; pass the tokens as one"
            )
        each = length * self.layers if self.dropping is None else self.dropping.layer_tokens(length, self.layers)
        self._mine += _rows(batch) * each

    def _takes(self, module: nn.Module) -> bool:
        kind = type(module)
        if kind not in self._takes_length:
            self._takes_length[kind] = SEQLEN in names_in(module.forward)
        return self._takes_length[kind]

    # ---------------------------------------------------------------- a step

    def begin_rates(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Scale all learning rates for this step. Must precede the sending of any gradient."""
        self.end_rates(optimizer)  # of a step that was given up
        if scale == 1.0:
            return
        self._rates = [_copied(group["lr"]) for group in optimizer.param_groups]
        _set_rates(optimizer, [lr * scale for lr in self._rates])

    def end_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the rates, so that the schedule continues from its own."""
        if self._rates is not None:
            _set_rates(optimizer, self._rates)
            self._rates = None

    def consumed(self, grid: Grid) -> int:
        """Tokens times layers of the step, over all ranks that read different data. All ranks call it."""
        rows = gather_bytes(grid.world, struct.pack("<q", self._mine))
        # Ranks that read the same data report the same tokens.
        alike = grid.world.world_size // grid.data[1]
        self._mine = 0
        tokens = sum(int.from_bytes(row, "little") for row in rows) // alike
        self.layer_tokens += tokens
        return tokens

    def go_to(self, step: int) -> None:
        """Make `step`, counted from 0, the next one: after each step, and after loading a checkpoint."""
        self._mine = 0
        if self.dropping is not None:
            self.dropping.advance(step)

    def set_custom(self, functions: object, metrics: Sequence[Pacing]) -> None:
        """Set the functions of "custom" schedules: a mapping by metric, or one function for all.

        Raises:
            ValueError: No schedule is "custom", or none of a given name.
        """
        custom = [pacing for pacing in [self.lengths, *metrics] if isinstance(pacing, Custom)]
        given = functions if isinstance(functions, Mapping) else dict.fromkeys((p.name for p in custom), functions)
        names = {pacing.name for pacing in custom}
        if not names or not set(given) <= names:
            raise ValueError(
                f'no schedule of the configuration is "custom" under the name {next(iter(given), None)!r}; '
                f"there are: {', '.join(sorted(names)) or 'none'}"
            )
        for pacing in custom:
            pacing.function = cast("Pacing | None", given.get(pacing.name, pacing.function))


def _rows(batch: object) -> int:
    if isinstance(batch, Tensor):
        return batch.shape[0]
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next(_rows(value) for value in inside if length_of(value) is not None)


def _copied(lr: float | Tensor) -> float | Tensor:
    return lr.clone() if isinstance(lr, Tensor) else lr


def _set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float | Tensor]) -> None:
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
