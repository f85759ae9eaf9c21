"""Sending during the backward pass: when a bucket's gradients are complete, and whether they stayed as they were sent.

A parameter's gradient is complete when as many backward passes are in it as were in the step before. Where gradients
change after they were sent, the step sends all buckets once more; where that happens in every step, nothing is sent
during backward any more.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..layout.buckets import AnyBucket
from ..usage.marks import GradientMark, changed_since, gradient_bits, marks_of

log = logging.getLogger(__name__)

RESENT_STEPS = 3  # after so many steps in a row that had to be sent twice nothing is sent during backward any more


@dataclass
class Passes:
    """How many backward passes since the last step are in a parameter's gradient."""

    count: int = 0
    is_complete: bool = False
    _grad: weakref.ref[Tensor] | None = field(default=None, repr=False)

    def add(self, grad: Tensor) -> None:
        """A backward pass has added to this gradient. A new one drops what earlier passes had added to another."""
        if self._grad is None or self._grad() is not grad:
            self._grad, self.count = weakref.ref(grad), 0
        self.count += 1


@dataclass
class Sent:
    """A bucket's gradients as they were when they were sent. bits: a hash of each, in the steps that look for edits."""

    bucket: AnyBucket
    marks: Sequence[GradientMark]
    bits: Tensor | None

    def changed(self) -> list[str]:
        """The parameters whose gradients are no longer those that were sent."""
        return [self.bucket.names[k] for k in changed_since(self.bucket.params, self.marks)]

    def is_edited_unseen(self) -> bool:
        """Whether gradients that have not changed as far as torch can tell have other bits. False if not marked."""
        return self.bits is not None and not torch.equal(self.bits, gradient_bits(self.bucket.gradients()))


class Overlap:
    """Counts passes, and remembers what was sent early.

    is_on: what the user asked for. is_possible: whether buckets may leave during backward at all.
    """

    def __init__(self, rank: int, is_on: bool):
        self.is_on = self.is_possible = is_on
        self.resent_steps = 0
        self._has_warned = False
        self._rank = rank
        self._passes: dict[Tensor, Passes] = {}
        self._complete: dict[int, int] = {}  # bucket -> how many of its gradients are
        self._sent: dict[int, Sent] = {}  # bucket -> what it sent last
        self._passes_per_step = 0  # the first step learns how many there are
        self._resent_in_a_row = 0

    def count_pass(self, p: Tensor, bucket: AnyBucket) -> bool:
        """A backward pass has added to p's gradient. Whether all of its bucket's are complete now."""
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
        """Whether all gradients of the bucket are."""
        return self._complete.get(bucket.index, 0) == len(bucket.params)

    def mark_sent(self, bucket: AnyBucket, *, with_bits: bool) -> None:
        """The bucket's gradients are being sent as they are now. with_bits: note their bits, to find unseen edits."""
        bits = gradient_bits(bucket.gradients()) if with_bits else None
        self._sent[bucket.index] = Sent(bucket, marks_of(bucket.params), bits)

    def has_changed(self, scale: float) -> bool:
        """Whether a gradient that has been sent is no longer what was sent; a warning says so, once.

        scale: what gradients are to be multiplied by.
        """
        changed = [name for sent in self._sent.values() for name in sent.changed()]
        is_edited_unseen = not changed and any(sent.is_edited_unseen() for sent in self._sent.values())
        if changed and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank %d: the gradient of %s changed after backward had sent it, by clipping, by a backward pass more "
                "than in the step before, or because a backward pass was given up: all buckets are sent once more. For "
                "clipping use max_grad_norm=..., for passes that are not the last of their step optimizer.no_sync(), "
                "for GradScaler and anything else that edits gradients overlap=False",
                self._rank,
                changed[0],
            )
        if is_edited_unseen:
            self.is_possible = False
            log.warning(
                "rank %d: gradients were edited after backward had sent them, in a way that torch does not count and "
                "only some steps look for (through .data; or sharded ones by clip_grad_norm_): all buckets are sent "
                "once more, and from here on in step(), as with overlap=False. Edit the gradients themselves "
                "(p.grad.clamp_()), clip by max_grad_norm=, or construct with overlap=False",
                self._rank,
            )
        is_scaled = bool(self._sent) and scale != 1.0  # the scale is known too late
        return bool(changed) or is_edited_unseen or is_scaled

    def count_resent(self, ranks: Sequence[int]) -> None:
        """The step has been sent twice for these ranks' gradients, on all ranks; for none: once."""
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
        """Forget this step's passes and what it has sent."""
        # 0 where every pass was paused, or there was none.
        counts = [passes.count for passes in self._passes.values()]
        self._passes_per_step = max(counts, default=0) or self._passes_per_step
        self._sent.clear()
        self._complete.clear()
        for passes in self._passes.values():
            passes.count, passes.is_complete = 0, False
