"""Ranks with different numbers of batches: a rank that has finished takes part in the steps of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..usage.contract import Group
from .step_vote import Header, adopt_numbers

_is_joining: ContextVar[bool] = ContextVar("whether this thread is in a loop of `join`", default=False)


@contextmanager
def alone_in_join(rank: int) -> Iterator[None]:
    """Every loop of `join` is in such a block.

    Args:
        rank: This rank, for the message.

    Raises:
        RuntimeError: It is inside another optimizer's. A rank that has finished would take part in the inner loop's
            steps first, and the others would wait for it in the outer one's.
    """
    if _is_joining.get():
        raise RuntimeError(
            f"rank {rank}: join() inside the join() of another optimizer: a rank that has no batches left can follow "
            "one alone. Train the models with one optimizer, a group each, or give all ranks as many batches"
        )
    token = _is_joining.set(True)
    try:
        yield
    finally:
        _is_joining.reset(token)


@dataclass
class Join:
    """Knows whether a loop over uneven batches is under way, and whether this rank has finished its own.

    Attributes:
        is_on: Whether such a loop is under way. Default False.
        is_finished: Whether this rank has no batches left. Default False.
        shadow_steps: Number of steps of other ranks in which this one has taken part without batches. Default 0.
    """

    is_on: bool = False
    is_finished: bool = False
    shadow_steps: int = 0

    @contextmanager
    def loop(self, shadow_step: Callable[[], object]) -> Iterator[None]:
        """Run the body, then shadow steps until `goes_on` finds that all ranks have finished. All ranks.

        Args:
            shadow_step: Takes a step without gradients.
        """
        self.is_on, self.is_finished = True, False
        try:
            yield
            self.is_finished = True
            while self.is_finished:
                shadow_step()
        finally:
            self.is_on = self.is_finished = False

    def goes_on(self, headers: Sequence[Header], groups: Sequence[Group]) -> bool:
        """Whether any rank has batches left. A rank that has none takes over the options of one that has.

        Args:
            headers: The headers of all ranks.
            groups: This rank's param groups; modified if it has no batches.
        """
        active = [header for header in headers if not header.is_finished]
        if not active:
            self.is_finished = False
        elif self.is_finished:
            self.shadow_steps += 1
            adopt_numbers(groups, active[0].numbers)
        return bool(active)
