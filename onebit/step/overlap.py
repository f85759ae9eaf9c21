"""Sending during backward: when a bucket's gradients are complete, and whether they changed after they were sent.

A parameter's gradient is complete when as many backward passes have added to it as in the step before. If gradients
change after they were sent, the step sends all buckets once more; after `RESENT_STEPS` such steps in a row, buckets are
sent in step() only.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..layout.buckets import AnyBucket
from ..usage.marks import GradientMark, changed_since, gradient_bits, is_inspected, marks_of

log = logging.getLogger(__name__)

RESENT_STEPS = 3  # after this number of steps in a row that were sent twice, buckets are sent in step() only


@dataclass
class Passes:
    """Counts the backward passes since the last step that have added to a parameter's gradient.

    Attributes:
        count: Number of passes.
        is_complete: Whether the gradient is complete.
    """

    count: int = 0
    is_complete: bool = False
    _grad: weakref.ref[Tensor] | None = field(default=None, repr=False)

    def add(self, grad: Tensor) -> None:
        """Count a backward pass that has added to this gradient; counting begins anew if it is another tensor."""
        if self._grad is None or self._grad() is not grad:
            self._grad, self.count = weakref.ref(grad), 0
        self.count += 1


@dataclass
class Sent:
    """A bucket's gradients as they were when they were sent.

    Attributes:
        bucket: The bucket.
        marks: A mark of each gradient, by which torch shows changes.
        bits: A hash of each gradient, if unseen edits are looked for; else None.
    """

    bucket: AnyBucket
    marks: Sequence[GradientMark]
    bits: Tensor | None

    def changed(self) -> list[str]:
        """The names of the parameters with gradients that have changed since they were sent."""
        return [self.bucket.names[k] for k in changed_since(self.bucket.params, self.marks)]

    def is_edited_unseen(self) -> bool:
        """Whether gradients differ in bits from those that were sent. False if their bits were not noted.

        Asked if torch shows no change.
        """
        return self.bits is not None and not torch.equal(self.bits, gradient_bits(self.bucket.gradients()))


class Overlap:
    """Counts backward passes, and remembers the gradients that were sent during backward.

    Args:
        rank: This rank, for messages.
        is_on: Whether the user wants buckets to be sent during backward.

    Attributes:
        is_on: The same.
        is_possible: Whether buckets may be sent during backward; turned off if gradients keep changing afterwards.
        resent_steps: Number of steps that were sent twice.
    """

    def __init__(self, rank: int, is_on: bool):
        self.is_on = self.is_possible = is_on
        self.resent_steps = 0
        self._has_warned = False
        self._rank = rank
        self._passes: dict[Tensor, Passes] = {}
        self._complete: dict[int, int] = {}  # bucket -> number of its complete gradients
        self._sent: dict[int, Sent] = {}  # bucket -> the gradients that it sent last
        self._early = Counter[int]()  # bucket -> how often it has left during backward
        self._passes_per_step = 0  # unknown until the first step has counted them
        self._resent_in_a_row = 0

    def count_pass(self, p: Tensor, bucket: AnyBucket) -> bool:
        """Count a backward pass that has added to p's gradient.

        Args:
            p: The parameter.
            bucket: Its bucket.

        Returns:
            Whether all gradients of the bucket have just become complete.
        """
        if p.grad is None:
            return False
        passes = self._passes.setdefault(p, Passes())
        passes.add(p.grad)
        was_complete = passes.is_complete
        passes.is_complete = 0 < self._passes_per_step == passes.count
        count = self._complete.get(bucket.index, 0) + passes.is_complete - was_complete
        self._complete[bucket.index] = count
        return passes.is_complete and count == len(bucket.params)

    def is_complete(self, bucket: AnyBucket) -> bool:
        """Whether all gradients of the bucket are complete."""
        return self._complete.get(bucket.index, 0) == len(bucket.params)

    def mark_sent(self, bucket: AnyBucket, *, in_backward: bool) -> None:
        """Note the bucket's gradients as they are now, because they are being sent.

        Args:
            bucket: The bucket.
            in_backward: Whether the backward pass is still running. Then bits are noted at times, too, to find edits
                that torch does not show.
        """
        bits = None
        if in_backward:
            bits = gradient_bits(bucket.gradients()) if is_inspected(self._early[bucket.index]) else None
            self._early[bucket.index] += 1
        self._sent[bucket.index] = Sent(bucket, marks_of(bucket.params), bits)

    def has_changed(self, scale: float) -> bool:
        """Whether a gradient differs from the one that was sent. Warns once of changes that torch shows.

        Args:
            scale: Factor by which gradients are to be multiplied. Other than 1, everything that was sent counts as
                changed.
        """
        changed = [name for sent in self._sent.values() for name in sent.changed()]
        is_edited_unseen = not changed and any(sent.is_edited_unseen() for sent in self._sent.values())
        if changed and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank %d: the gradient of %s changed after backward had sent it, by clipping, by freezing, by a "
                "backward pass more than in the step before, or because one was given up: all buckets are sent once "
                "more. For clipping use max_grad_norm=..., for passes that are not the last of their step "
                "optimizer.no_sync(), for GradScaler and anything else that edits gradients overlap=False",
                self._rank,
                changed[0],
            )
        if is_edited_unseen:
            self.is_possible = False
            log.warning(
                "rank %d: gradients were edited after backward had sent them, in a way that torch does not count "
                "(.data, or clip_grad_norm_() on sharded ones) and only some steps look for: all buckets are sent "
                "once more, and from here on in step(), as with overlap=False. Edit the gradients themselves "
                "(p.grad.clamp_()), clip by max_grad_norm=, or construct with overlap=False",
                self._rank,
            )
        is_scaled = bool(self._sent) and scale != 1.0  # the scale is known too late
        return bool(changed) or is_edited_unseen or is_scaled

    def warn_of_options(self, names: Sequence[str]) -> None:
        """Warn, once, that an option of these names changed after backward had sent buckets by its old value."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank %d: %s of a group changed between backward, which had sent buckets by the old value, and step(): "
                "all buckets are sent once more. Set options before the backward pass, or construct with overlap=False",
                self._rank,
                " or ".join(names),
            )

    def count_resent(self, ranks: Sequence[int]) -> None:
        """Count a step that was sent twice. All ranks, with the same list.

        Args:
            ranks: Ranks whose gradients had changed; empty if the step was sent once.
        """
        if ranks:
            self.resent_steps += 1
            self._resent_in_a_row += 1
            if self._resent_in_a_row == RESENT_STEPS and self._rank == 0 and self.is_possible:
                log.warning(
                    "gradients of rank %s changed after backward had sent them in %d steps in a row: from here on they "
                    "are sent in step(), as with overlap=False",
                    list(ranks),
                    RESENT_STEPS,
                )
            self.is_possible &= self._resent_in_a_row < RESENT_STEPS
        else:
            self._resent_in_a_row = 0

    def end_step(self) -> None:
        """Forget this step's passes and the gradients that it has sent."""
        # 0 if every pass was paused, or if there was none: then the count of the step before stays.
        counts = [passes.count for passes in self._passes.values()]
        self._passes_per_step = max(counts, default=0) or self._passes_per_step
        self._sent.clear()
        self._complete.clear()
        for passes in self._passes.values():
            passes.count, passes.is_complete = 0, False
