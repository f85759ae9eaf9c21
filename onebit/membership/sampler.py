"""The order of the data in a run whose members come and go: each sample once per epoch of data.

    sampler = MemberSampler(members, len(dataset), batch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
    begin(optimizer, sampler=sampler)
    batches = sampler.batches(loader)

The order is one endless sequence of positions, the epochs of data one after another, the same on all members. Each step
is a round: a window of positions, in which each member has a share by its rank. A round begins where the last one ends,
and the sizes of the shares change at steps that all members know (`shares.py`). At a change (`change.py`) members tell
each other their rounds:

    1. The newest round counts. A member that has taken over the step before it enters it with its old rank.
    2. Remaining members keep their shares: their gradients are there. Newcomers get shares after the window's end.
    3. Positions of the window that no present member has were in flight on a lost one. They are named in the log, and
       the mean of the gradients is that over the others (`factor`).

A DataLoader draws ahead. Each batch is known by its first position, and a batch with another one than the loop needs
next was drawn for other members: it is dropped, and its samples are drawn again by the members that now have them.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .members import Members, Standing
from .shares import Shares

log = logging.getLogger(__name__)

T = TypeVar("T")

_MEDIAN_OF = 5  # steps: the first may compile, and an evaluation on one member within one of them does not count


@dataclass(frozen=True)
class Round:
    """The positions of a step, and this member's share of them.

    Attributes:
        first: First position of the window.
        end: The position after the window.
        start: First position of this member's share. None: it has none.
        count: Samples of the share.
        given: Samples of the share that the loop has received.
        factor: See `MemberSampler.factor`.
    """

    first: int
    end: int
    start: int | None = None
    count: int = 0
    given: int = 0
    factor: float = 1.0

    @property
    def is_complete(self) -> bool:
        """Whether this member has nothing more to draw from it."""
        return self.start is None or self.given == self.count


@dataclass(frozen=True)
class Place:
    """A member's place among the others, and the samples that each of them takes.

    Attributes:
        rank: Its rank.
        batch_size: Samples of a micro-batch.
        shares: Micro-batches of each member in a step, by rank.
    """

    rank: int
    batch_size: int
    shares: Sequence[int]

    def after(self, end: int) -> Round:
        """The round that begins at this position."""
        before, own = sum(self.shares[: self.rank]), self.shares[self.rank]
        size = self.batch_size
        return Round(end, end + size * sum(self.shares), end + size * before, size * own)

    def draw(self, now: Round) -> tuple[Round, int]:
        """The round after this member's next micro-batch, and the micro-batch's first position.

        Args:
            now: The round before it.
        """
        if now.is_complete:
            now = self.after(now.end)
        assert now.start is not None
        return replace(now, given=now.given + self.batch_size), now.start + now.given

    def starts(self, now: Round) -> Iterator[int]:
        """The first positions of this member's micro-batches, as long as its place is this one.

        Args:
            now: The round before the first of them.
        """
        while True:
            now, start = self.draw(now)
            yield start


class MemberSampler:
    """Draws the batches of a member such that all members together see each sample once per epoch of data.

    Pass it to a DataLoader as `batch_sampler`, and to `begin(optimizer, sampler=sampler)`, and take the batches from
    `batches(loader)`. Every step takes `micro_batches` of them on each member; divide the loss by that number. The
    sequence is endless: a batch may have the last samples of one epoch of data and the first of the next, and nothing
    is dropped or padded.

    If balanced, each member takes as many micro-batches as its speed allows, `micro_batches` on average: take those of
    a step from `step_batches`. The sum of a step stays the same, so gradients of losses that are divided by
    `micro_batches`, averaged over members, are the mean over the samples of the step.

    Args:
        members: The transport of the run.
        samples: Number of samples in an epoch of data, `len(dataset)`. None: a stream that never ends.
        batch_size: Samples of a micro-batch, the same on all members, like the following.
        micro_batches: Micro-batches of a member in a step; if balanced, of the mean member. Default 1.
        balanced: Whether members take as many micro-batches as their speed allows. Default False.
        shuffle: Whether each epoch of data has a random order. Default True; a stream keeps the order of its source.
        seed: Seed of these orders. Default 0.
        part: (this rank's share of its member's data, number of shares), if a member has several ranks: `grid.data` of
            its node. Each share has `batch_size` samples of a micro-batch. Default None: a member is one rank.

    Raises:
        TypeError: `members` is not a `Members`.
        ValueError: A number is not an integer in its range; or members of several ranks are to be balanced, or have no
            `part`.
    """

    def __init__(
        self,
        members: Members,
        samples: int | None,
        batch_size: int,
        *,
        micro_batches: int = 1,
        balanced: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        part: tuple[int, int] | None = None,
    ):
        if not isinstance(members, Members):
            raise TypeError(f"expected the Members of onebit.membership.connect(), got {type(members).__name__}")
        numbers = {"batch_size": batch_size, "micro_batches": micro_batches, "seed": seed}
        for name, number in numbers.items() if samples is None else [("samples", samples), *numbers.items()]:
            least = 0 if name == "seed" else 1
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}, got {number!r}"
                    + ("; give len(dataset), or None for a stream that never ends" if name == "samples" else "")
                )
        if balanced and members.node is not None:
            raise ValueError("the ranks of a member take the same number of micro-batches: use balanced=False")
        if part is None and members.node is not None:
            raise ValueError("the ranks of a member may read the same samples, or each its own: give part=grid.data")
        share, count = (0, 1) if part is None else part
        if not 0 <= share < count:
            raise ValueError(f"part must be (share, number of shares), such as grid.data, got {part}")
        self.samples, self.batch_size, self.micro_batches = samples, batch_size, micro_batches
        self.offset, self._of_member = share * batch_size, count * batch_size  # samples of a micro-batch
        self.balanced = balanced
        self._members, self._shuffle, self._seed = members, shuffle, seed
        self._shares = Shares(micro_batches, balanced, members.world_size)
        self._seconds = deque[float](maxlen=_MEDIAN_OF)  # of this member's micro-batches
        self._round, self._changes = Round(0, 0), 0  # changes: of what a DataLoader draws ahead from
        self._heard = -1  # first position of the last round whose votes were heard
        self._in_flight = set[int]()  # positions of this round that were named as lost
        self._drawn: deque[int] | None = None  # the first positions of batches that a DataLoader has drawn
        self._order: tuple[int, NDArray[np.int64]] | None = None  # of the epoch of data that was drawn from last

    @property
    def position(self) -> int:
        """Number of samples of all members before the step that comes next, the same on all of them."""
        its = self._round
        return its.end if its.is_complete else its.first

    @property
    def data_epoch(self) -> int:
        """The epoch of data in which the next step begins, from 0, the same on all members."""
        return 0 if self.samples is None else self.position // self.samples

    @property
    def factor(self) -> float:
        """Factor of the gradients in this step, the same on all members, so that they average to the mean over samples.

        1, except in a step that lost members leave without their part, as the others take it again.
        """
        return self._round.factor

    def step_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """This member's micro-batches of the step that comes next. Their time is its speed, if members are balanced.

        Args:
            batches: From `batches`.
        """
        began, count = time.monotonic(), 0
        while not count or not self._round.is_complete:
            yield next(batches)
            count += 1
        if self.balanced and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._seconds.append((time.monotonic() - began) / count)

    def batches(self, loader: DataLoader[T]) -> Generator[Any, None, None]:
        """This member's batches, without end. Take each where it is trained on: what is taken counts as seen.

        Args:
            loader: A DataLoader with this `batch_sampler`, or over a `MemberStream`. torchdata's StatefulDataLoader is
                one.

        Raises:
            ValueError: The loader has another batch sampler, batch size or dataset, or cannot follow changes.
        """
        stream = loader.dataset if isinstance(loader.dataset, MemberStream) else None
        self._check(loader, stream)
        return self._batches(loader, stream)

    def _batches(self, loader: DataLoader[T], stream: MemberStream[T] | None) -> Generator[Any, None, None]:
        while True:
            if self._members.roster is None or all(its is not self for its in self._members.travels.values()):
                raise RuntimeError("this sampler is in no run yet: call begin(optimizer, sampler=sampler) first")
            changes, drawn = self._changes, deque[int]()
            planned = self._place().starts(self._round)
            if stream is not None:
                stream.starts_at = self._place(), self._round
            self._drawn = drawn
            iterator = iter(loader)
            self._drawn = None
            for batch in iterator:
                if stream is not None and changes != self._changes:
                    break  # its workers cannot be told of the change: begin anew
                following, start = self._place().draw(self._round)
                if start == (drawn.popleft() if stream is None else next(planned)):
                    self._round = following
                    yield batch
            del iterator  # its workers end before others begin

    def _check(self, loader: DataLoader[T], stream: MemberStream[T] | None) -> None:
        if stream is None:
            if loader.batch_sampler is not self:
                raise ValueError(
                    "expected DataLoader(dataset, batch_sampler=sampler), or a DataLoader over MemberStream(source, "
                    f"sampler); got batch_sampler={loader.batch_sampler!r}"
                )
            length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else self.samples
            if length is None or length != self.samples:
                raise ValueError(f"the dataset has {length} samples, the sampler {self.samples}; give len(dataset)")
        else:
            if (stream.samples, stream.batch_size, loader.batch_size) != (self.samples, *[self.batch_size] * 2):
                raise ValueError(
                    f"the sampler has samples={self.samples}, batch_size={self.batch_size}, its MemberStream "
                    f"samples={stream.samples}, batch_size={stream.batch_size}, the loader "
                    f"batch_size={loader.batch_size}; make both with this sampler"
                )
            if loader.persistent_workers:
                raise ValueError(
                    "persistent workers would read on as before a change of members; use persistent_workers=False"
                )
        if not getattr(loader, "in_order", True):
            raise ValueError("expected batches in the order in which they were drawn; use in_order=True")
        if getattr(loader, "next_iter_state", None) is not None:
            raise ValueError(
                "a state was loaded into the StatefulDataLoader, which fits one number of members; load the sampler's "
                "state alone: it is the whole position in the data"
            )

    def __iter__(self) -> Iterator[list[int]]:
        if self._drawn is None:
            raise RuntimeError(
                "a DataLoader draws ahead of changes of members: iterate over sampler.batches(loader), not over it"
            )
        return self._draw(self._drawn)

    def _draw(self, drawn: deque[int]) -> Iterator[list[int]]:
        while True:
            changes = self._changes
            for start in self._place().starts(self._round):
                if changes != self._changes:
                    break
                drawn.append(start)
                yield self._indices(start + self.offset, self.batch_size)

    def _place(self) -> Place:
        return Place(self._members.rank, self._of_member, self._shares.now)

    def _indices(self, start: int, count: int) -> list[int]:
        """The dataset's indices at these positions."""
        assert self.samples is not None
        found: list[int] = []
        while len(found) < count:
            epoch, first = divmod(start + len(found), self.samples)
            if self._order is None or self._order[0] != epoch:
                order = _shuffled(self.samples, self._seed, epoch) if self._shuffle else np.arange(self.samples)
                self._order = epoch, order
            found += self._order[1][first : first + count - len(found)].tolist()
        return found

    # ---------------------------------------------------------------- votes

    def tell(self) -> float:
        """Seconds of a micro-batch here, for the others; 0: not known yet. Called before each vote.

        Raises:
            ValueError: A step was taken before its last micro-batch.
        """
        self._check_complete()
        return median(self._seconds) if self._seconds else 0.0

    def hear(self, seconds: Sequence[float]) -> None:
        """Follow a vote.

        Args:
            seconds: What each member has told, by rank.
        """
        if self._heard != self._round.first:  # a step that is taken again has a second vote
            self._heard = self._round.first
            self._changes += self._shares.hear(seconds)

    def _check_complete(self) -> None:
        its = self._round
        if its.given and not its.is_complete:
            raise ValueError(
                f"step() came after {its.given // self._of_member} of {its.count // self._of_member} micro-batches; "
                f"take all from sampler.step_batches(batches), or construct the sampler with the micro_batches= that "
                f"every step takes, got {self.micro_batches}"
            )

    # ---------------------------------------------------------------- changes of members

    def option_lines(self) -> list[str]:
        """The options that must be the same on all members, as text; also a sign of how this NumPy shuffles."""
        sign = zlib.crc32(_shuffled(1000, self._seed, 0).astype("<i8").tobytes())
        return [
            f"sampler: samples={self.samples}, batch_size={self._of_member}, micro_batches={self.micro_batches}, "
            f"balanced={self.balanced}, shuffle={self._shuffle}, seed={self._seed}, a shuffle's CRC {sign:08x}"
        ]

    def leave_world(self) -> list[int]:
        """This member's round for the others: window, share or -1, its samples; and those of its share in the next.

        Local. The next round is that after this step, if this member takes it over from the others.

        Raises:
            ValueError: A step was taken before its last micro-batch.
        """
        self._check_complete()
        its, shares = self._round, self._shares
        following = replace(self._place(), shares=shares.now if self._heard == its.first else shares.coming)
        then = following.after(its.end)
        assert then.start is not None
        return [its.first, its.end, -1 if its.start is None else its.start, its.count, then.start, then.count]

    def enter_world(self, standing: Sequence[Standing]) -> None:
        """Take this member's share of the newest round, and name those in flight on lost members. Local.

        Args:
            standing: What each member of the new epoch has told, by rank.
        """
        known = [(its.steps, *its.round[:2]) for its in standing if its.has_state] or [
            (0, self._round.first, self._round.end)  # founders: all have loaded the same
        ]
        steps, first, end = map(max, zip(*known, strict=True))
        shares: list[range | None] = []
        skipped = set[int]()
        taken = 0  # samples in the gradients of this step
        for its in standing:
            its_first, its_end, start, count, then, then_count = its.round
            share = None
            if its.has_state and its_first == first and start >= 0:
                share = range(start, start + count)
            elif its.has_state and its_first < first and its.steps < steps:
                share = range(then, then + then_count)  # it has taken over the step before
                for k in range(then + its_end - its_first, then + first - its_end, its_end - its_first):
                    skipped.update(range(k, k + then_count))
            elif its.has_state:
                taken += count  # of a step that others have skipped
            elif its.is_new:
                share = range(end, end := end + self.micro_batches * self._of_member)
            shares.append(share)  # None: it is back, and its gradients are gone
            taken += 0 if share is None else len(share)
        in_flight = set(range(first, end)).difference(*(share for share in shares if share is not None))
        self._name_lost(in_flight - self._in_flight, "were in flight on lost members")
        self._name_lost(skipped, "are of steps that members took over")
        self._in_flight = in_flight
        rank = self._members.rank
        mine, own = standing[rank], shares[rank]
        given = self._round.given if mine.has_state and mine.round[0] == first else 0
        factor = len(standing) * self.micro_batches * self._of_member / taken if taken else 1.0
        self._round = Round(first, end, given=given, factor=factor)
        if own is not None:
            self._round = replace(self._round, start=own.start, count=len(own))
        self._changes += 1
        self._shares.begin([its.seconds for its in standing])
        self._heard = -1

    def _name_lost(self, positions: set[int], why: str) -> None:
        if not positions or not self._members.speaks or self._members.roster is None:
            return
        found = sorted(positions)
        runs = [[k for _, k in run] for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
        indices = [] if self.samples is None else [k for run in runs for k in self._indices(run[0], len(run))]
        log.warning(
            "epoch %d: samples %s and are not seen: positions %s%s",
            self._members.roster.epoch,
            why,
            ", ".join(f"{run[0]} to {run[-1]}" for run in runs),
            f"; indices {indices}" if indices else "",
        )

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for checkpoints and newcomers: plain numbers, the same on all members."""
        return {"position": self.position, "samples": self.samples, "shuffle": self._shuffle, "seed": self._seed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position, with any number of members and any batch size.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It is of another order: `samples`, `shuffle` or `seed` differ. Nothing has changed.
        """
        mine = self.state_dict()
        for name in ("samples", "shuffle", "seed"):
            if state_dict.get(name) != mine[name]:
                raise ValueError(
                    f"the position is of an order with {name}={state_dict.get(name)}, and this sampler has "
                    f"{name}={mine[name]}; construct it with the same dataset and options"
                )
        self._round = Round(state_dict["position"], state_dict["position"])
        self._changes += 1


class MemberStream(IterableDataset[T]):
    """The share of a member of a stream without indices: it reads all samples, and drops those of other members.

    Pass it to a DataLoader with the sampler's `batch_size`, and take the batches from `sampler.batches(loader)`. Each
    worker reads the whole source, from the beginning after each change: a `skip(n)` of the source that returns what
    follows its first n samples spares that. `set_epoch(n)` of the source is called before epoch n of the data.

    Args:
        source: An iterable that begins anew each time, with the same samples in the same order in each process: it
            must not divide them among ranks or workers by itself.
        sampler: The sampler.

    Raises:
        TypeError: The source is an iterator, which cannot begin anew.
    """

    def __init__(self, source: Iterable[T], sampler: MemberSampler):
        if isinstance(source, Iterator):
            raise TypeError(
                f"expected a source that can be read again from its beginning, got {type(source).__name__}; wrap what "
                "makes it in a class with __iter__"
            )
        self.samples, self.batch_size, self._source = sampler.samples, sampler.batch_size, source
        self._offset = sampler.offset
        self.starts_at: tuple[Place, Round] | None = None  # set by the sampler; workers get a copy

    def __iter__(self) -> Iterator[T]:
        if self.starts_at is None:
            raise RuntimeError("iterate over sampler.batches(loader), not over the loader of a MemberStream")
        place, now = self.starts_at
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        starts = islice(place.starts(now), worker, None, workers)  # a DataLoader takes batches from workers in turn
        start = position = next(starts) + self._offset
        samples = self._read_from(start)
        while True:
            yield from islice(samples, start - position, start - position + self.batch_size)
            position, start = start + self.batch_size, next(starts) + self._offset

    def _read_from(self, position: int) -> Iterator[T]:
        epoch, first = (0, position) if self.samples is None else divmod(position, self.samples)
        while True:
            source: Any = self._source
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            can_skip = first > 0 and hasattr(source, "skip")
            count = first
            rest = islice(source.skip(first) if can_skip else source, 0 if can_skip else first, None)
            for sample in rest if self.samples is None else islice(rest, self.samples - first):
                yield sample
                count += 1
            if self.samples is None or count < self.samples:
                raise ValueError(
                    f"the stream ended after {count} samples, expected {self.samples or 'no end'}; construct "
                    "MemberSampler with samples= the number of samples in one pass"
                )
            epoch, first = epoch + 1, 0


def _shuffled(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(samples)
