"""Ranks with different numbers of batches: those that are through take part in the steps of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..usage.contract import Group
from .step_vote import Header, adopt_numbers


@dataclass
class Join:
    """Whether a loop over uneven batches is under way, and whether this rank is through with its own.

    shadow_steps: how many steps of other ranks this one has taken part in, so far.
    """

    is_on: bool = False
    is_finished: bool = False
    shadow_steps: int = 0

    @contextmanager
    def loop(self, shadow_step: Callable[[], object]) -> Iterator[None]:
        """Run the body; then `shadow_step`, a step without gradients, until `goes_on` has said that all are through."""
        self.is_on, self.is_finished = True, False
        try:
            yield
            self.is_finished = True
            while self.is_finished:
                shadow_step()
        finally:
            self.is_on = self.is_finished = False

    def goes_on(self, headers: Sequence[Header], groups: Sequence[Group]) -> bool:
        """Whether any rank has batches left, by the headers of all. A rank that has none takes over its options."""
        active = [header for header in headers if not header.is_finished]
        if not active:
            self.is_finished = False
        elif self.is_finished:
            self.shadow_steps += 1
            adopt_numbers(groups, active[0].numbers)
        return bool(active)
