"""Parameters read from a store and written to it, a lease at a time. Reads ahead what followed the last time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .parameter import StoredParameter
from .store import Extent, Lease, Lender, rounded


@dataclass(eq=False)
class Stored:
    """A parameter whose values are in a store.

    Attributes:
        name: The parameter's first name in the model.
        param: The parameter.
        storage: Its storage on the device, which is emptied while the values are away.
        home: Its bytes in the store.
        users: How many uses need its values now.
        is_here: Whether the storage holds the values.
        version: The parameter's version counter when the values were brought.
        edition: How many steps have changed it.
        is_seen: Whether every write since then changes the version counter.
        was_written: Whether other code than the step has written it since the last step.
        is_empty: Whether it had no values (device "meta") when it moved to the store.
    """

    name: str
    param: StoredParameter
    storage: torch.UntypedStorage
    home: Extent
    users: int = 0
    is_here: bool = True
    version: int = 0
    edition: int = 0
    is_seen: bool = True
    was_written: bool = False
    is_empty: bool = False

    @property
    def nbytes(self) -> int:
        return self.param.numel() * self.param.element_size()

    @property
    def may_leave(self) -> bool:
        """Whether the storage may be emptied: not without bytes, nor if numpy holds the memory, unknown to torch."""
        return self.nbytes > 0 and self.storage.resizable()

    def bytes(self) -> Tensor:
        """The storage as uint8 [nbytes]. Writing to it does not change the parameter's version counter."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class _Slice(NamedTuple):
    """Bytes of a parameter that are read at once. `extent` is their place in the store, in whole pages."""

    stored: Stored
    start: int
    nbytes: int
    extent: Extent


@dataclass(frozen=True, eq=False)
class _Load:
    """The slices that one lease brings."""

    slices: tuple[_Slice, ...]


@dataclass
class _Order:
    """Which group followed the last two, to read ahead. Two are needed to tell forward from backward."""

    follows: dict[tuple[object, object], tuple[Stored, ...]] = field(default_factory=dict)
    last: tuple[object, object] = (None, None)

    def came(self, group: tuple[Stored, ...]) -> None:
        self.follows[self.last] = group
        self.last = self.last[1], group

    def next(self) -> Iterator[tuple[Stored, ...]]:
        """The groups that followed the last time, in order."""
        at = self.last
        while (group := self.follows.get(at)) is not None:
            yield group
            at = at[1], group


class Reader:
    """Reads and writes parameters in leases of at most `most` bytes, and reads `ahead` leases ahead.

    The lender must have two leases more than `ahead`.
    """

    def __init__(self, lender: Lender, most: int, ahead: int):
        self._lender, self._most, self._depth = lender, most, ahead
        self._order = _Order()
        self._ahead: dict[_Load, Lease] = {}
        self._loads: dict[tuple[Stored, ...], list[_Load]] = {}

    def read(self, missing: tuple[Stored, ...]) -> None:
        """Fill the storages of these parameters: all of them, or none if the store fails."""
        self._order.came(missing)
        loads = self._loads_of(missing)
        coming = [*loads]
        for group in self._order.next():
            if len(coming) >= len(loads) + self._depth:
                break
            coming += self._loads_of(group)
        try:
            for k, load in enumerate(loads):
                lease = self._ahead.pop(load, None) or self._begin(load)
                self._read_ahead(coming[k + 1 : k + 1 + self._depth])
                self._fill(load, lease)
        except BaseException:
            for s in missing:
                s.storage.resize_(0)  # all or nothing
            raise

    def read_again(self, s: Stored) -> None:
        """Read a parameter again, over what its storage holds."""
        self.forget()
        for load in self._loads_of((s,)):
            self._fill(load, self._begin(load))

    def write(self, s: Stored) -> None:
        """Write to the store what the parameter's storage holds."""
        self.forget()
        for load in self._loads_of((s,)):
            lease = self._lender.read([place.extent for place in load.slices], fresh=True)
            for part, place in zip(lease.wait(), load.slices, strict=True):
                part[: place.nbytes].copy_(s.bytes()[place.start : place.start + place.nbytes])
            self._lender.write(lease)

    def forget(self) -> None:
        """Drop what was read ahead, before the store's bytes change."""
        self._read_ahead([])

    def _fill(self, load: _Load, lease: Lease) -> None:
        try:
            for part, place in zip(lease.wait(), load.slices, strict=True):
                if place.stored.storage.nbytes() == 0:
                    place.stored.storage.resize_(place.stored.nbytes)
                place.stored.bytes()[place.start : place.start + place.nbytes].copy_(part[: place.nbytes])
        finally:
            self._lender.drop(lease)

    def _begin(self, load: _Load) -> Lease:
        return self._lender.read([place.extent for place in load.slices])

    def _read_ahead(self, loads: Sequence[_Load]) -> None:
        for load in [load for load in self._ahead if load not in loads]:
            self._lender.drop(self._ahead.pop(load))
        for load in loads:
            if load not in self._ahead and not any(place.stored.is_here for place in load.slices):
                self._ahead[load] = self._begin(load)

    def _loads_of(self, group: tuple[Stored, ...]) -> list[_Load]:
        if group not in self._loads:
            loads: list[list[_Slice]] = [[]]
            room = self._most
            for s in group:
                for start in range(0, s.nbytes, self._most):
                    nbytes = min(self._most, s.nbytes - start)
                    extent = Extent(s.home.offset + start, rounded(nbytes))
                    if extent.nbytes > room:
                        loads.append([])
                        room = self._most
                    loads[-1].append(_Slice(s, start, nbytes, extent))
                    room -= extent.nbytes
            self._loads[group] = [_Load(tuple(slices)) for slices in loads if slices]
        return self._loads[group]
