"""The vote on a step: one small message per rank, which all ranks need before they decide anything.

A vote begins with the summary of a header: which step the rank is taking, and with which options. If ranks are in
different steps, or use different options, they raise a `DesyncError` that names them, before anything is written.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.messages import BytesUnderWay, bytes_on, raise_on_all_ranks
from ..usage.contract import Group
from ..version import VERSION
from .wrappers import NOT_COMPARED

NUMBERS_OF_A_GROUP = ("lr", "betas[0]", "betas[1]", "eps", "weight_decay")

_KIND_BYTES = 32
_HEADER = struct.Struct(f"<q{_KIND_BYTES}sB")
_SUMMARY = struct.Struct("<q8s?B8s")
_SAME_BYTES = 16  # step and digest, with which a vote begins
_SUMS = struct.Struct("<2d")

_REMEDIES = {
    "step": "every rank must call step() equally often; where ranks have different numbers of batches, put the loop "
    "into `with optimizer.join():`",
    "kind": "every rank must call the same methods of the same optimizer in the same order",
    "number": "a schedule must give the same on all ranks: give ReduceLROnPlateau and the like the mean over ranks",
}


class DesyncError(RuntimeError):
    """The ranks are in different steps, or take a step with different options. Nothing of the step was written."""


@dataclass(frozen=True)
class Summary:
    """A header in the short form that is sent with a vote.

    Attributes:
        step: Number of the step.
        resends: Whether a gradient of this rank has changed since it was sent.
        repeats: Whether this rank's gradients are those of the last step.
        changes: Whether a newcomer waits to be let in before the next step.
        gradients: Digest of the gradients, see `wrappers.gradient_digest`.
        digest: Digest of the header, 8 bytes.
    """

    step: int
    resends: bool
    repeats: bool
    changes: bool
    gradients: bytes
    digest: bytes

    def to_bytes(self) -> bytes:
        """The summary as it is sent."""
        return _SUMMARY.pack(self.step, self.digest, self.resends, self.repeats | self.changes << 1, self.gradients)

    @classmethod
    def from_bytes(cls, data: bytes) -> Summary:
        """The summary in these bytes."""
        step, digest, resends, flags, gradients = _SUMMARY.unpack(data)
        return cls(step, resends, bool(flags & 1), bool(flags & 2), gradients, digest)


@dataclass(frozen=True)
class Header:
    """Which step a rank is taking, and with which options.

    Attributes:
        step: Number of the step.
        kind: The optimizer and the kind of step.
        numbers: `NUMBERS_OF_A_GROUP` of each group.
        is_finished: Whether this rank has no batches left, and only takes part in the others' steps. Default False.
        edit: Message about objects that this rank has found replaced in its groups or state; "" (default) if there are
            none. In a received header it is "something".
    """

    step: int
    kind: str
    numbers: tuple[float, ...]
    is_finished: bool = False
    edit: str = ""

    @classmethod
    def of(
        cls,
        groups: Sequence[Mapping[str, Any]],
        step: int,
        kind: str,
        *,
        is_finished: bool = False,
        edit: str = "",
    ) -> Header:
        """The header of a step over these parameter groups.

        Args:
            groups: The param groups.
            step: Number of the step.
            kind: The optimizer and the kind of step.
            is_finished: Whether this rank has no batches left. Default False.
            edit: As the attribute. Default "".
        """
        return cls(step, kind, tuple(x for group in groups for x in numbers_of(group)), is_finished, edit)

    def summary(
        self, *, resends: bool = False, repeats: bool = False, changes: bool = False, gradients: bytes = NOT_COMPARED
    ) -> Summary:
        """The summary, which is all that is sent as long as ranks agree. Arguments as the attributes of `Summary`."""
        digest = hashlib.blake2b(self.to_bytes(), digest_size=8).digest()
        return Summary(self.step, resends, repeats, changes, gradients, digest)

    def to_bytes(self) -> bytes:
        """The header as it is sent. The kind is cut to 32 bytes, and of the edit only a flag is sent."""
        numbers = struct.pack(f"<{len(self.numbers)}d", *self.numbers)
        flags = self.is_finished | bool(self.edit) << 1
        return _HEADER.pack(self.step, self.kind.encode()[:_KIND_BYTES], flags) + numbers

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """The header in these bytes."""
        step, kind, flags = _HEADER.unpack_from(data)
        numbers = struct.unpack(f"<{(len(data) - _HEADER.size) // 8}d", data[_HEADER.size :])
        edit = "something" if flags & 2 else ""
        return cls(step, kind.rstrip(b"\0").decode(errors="replace"), numbers, bool(flags & 1), edit)


def numbers_of(group: Mapping[str, Any]) -> tuple[float, ...]:
    """`NUMBERS_OF_A_GROUP` of a group; 0 for an option that it does not have, the sum of several eps (Adafactor)."""
    betas, eps = group.get("betas", (0.0, 0.0)), group.get("eps", 0.0)
    if isinstance(eps, tuple):
        eps = sum(each for each in eps if each is not None)
    return float(group["lr"]), *map(float, betas), float(eps), float(group.get("weight_decay", 0.0))


def options_of(numbers: Sequence[float]) -> list[Group]:
    """The inverse of `numbers_of`: for each group, the options that these numbers stand for."""
    width, groups = len(NUMBERS_OF_A_GROUP), []
    for first in range(0, len(numbers), width):
        lr, beta1, beta2, eps, decay = numbers[first : first + width]
        groups.append({"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay})
    return groups


def option_lines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The version of this package and the numbers of these groups, as lines that ranks compare at construction."""
    pairs = [zip(NUMBERS_OF_A_GROUP, numbers_of(group), strict=True) for group in groups]
    options = [", ".join(f"{name} = {number}" for name, number in each) for each in pairs]
    return [f"version of onebit = {VERSION}", *(f"options of a group: {line}" for line in options)]


def adopt_numbers(groups: Sequence[Group], numbers: Sequence[float]) -> None:
    """Give the groups another rank's numbers. A learning rate that is a tensor stays one.

    Args:
        groups: The param groups, modified in place.
        numbers: The other rank's, from its header.
    """
    for group, theirs in zip(groups, options_of(numbers), strict=True):
        lr = theirs.pop("lr")
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        group.update({name: value for name, value in theirs.items() if name in group})


@dataclass
class HeadersUnderWay:
    """The headers of all ranks while they are being sent. Sends 41 bytes and 40 for each group to each peer.

    Attributes:
        mine: This rank's header.
        messages: The messages under way.
    """

    mine: Header
    messages: BytesUnderWay

    @classmethod
    def launch(cls, transport: Transport, mine: Header, device: torch.device | str) -> HeadersUnderWay:
        """Send this rank's header to all. All ranks."""
        return cls(mine, BytesUnderWay.launch(transport, bytes_on(device, mine.to_bytes())))

    def is_ready(self) -> bool:
        """Whether `read` would return without waiting for another rank."""
        return self.messages.work.is_ready()

    def read(self) -> list[Header]:
        """The headers in rank order. Waits for all ranks."""
        return [Header.from_bytes(data) for data in self.messages.read()[0]]


def gather_headers(transport: Transport, mine: Header, device: torch.device | str | None = None) -> list[Header]:
    """Every rank's header, in rank order. All ranks. Sends as `HeadersUnderWay` does, and waits.

    Args:
        transport: Between the replicas.
        mine: This rank's header.
        device: Device of the messages. Default None: the transport's.
    """
    return HeadersUnderWay.launch(transport, mine, transport.device if device is None else device).read()


def check_summaries(
    transport: Transport, mine: Header, every: Sequence[Summary], device: torch.device | str | None = None
) -> None:
    """Raise as `check_headers` does, unless all summaries are the same. All ranks, with the same summaries.

    Sends the headers only if they differ, or if a rank would raise an error for its own.

    Args:
        transport: Between the replicas.
        mine: This rank's header.
        every: The summaries of all ranks.
        device: Device of the messages. Default None: the transport's.
    """
    are_alike = len({(one.step, one.digest) for one in every}) == 1
    if not are_alike or mine.edit or not all(map(math.isfinite, mine.numbers)):
        check_headers(transport, mine, gather_headers(transport, mine, device), device)


def check_headers(
    transport: Transport, mine: Header, headers: Sequence[Header], device: torch.device | str | None = None
) -> None:
    """Raise an error on all ranks unless all are in the same step, of the same kind, with the same numbers.

    Args:
        transport: Between the replicas.
        mine: This rank's header.
        headers: The headers of all ranks. One that has finished need not have the same numbers.
        device: Device of the messages. Default None: the transport's.

    Raises:
        DesyncError: They differ in step, kind or numbers.
        ValueError: A number is not finite.
        RuntimeError: A rank's groups or state were edited; that rank sends its message to all.
    """
    if any(header.edit for header in headers):
        raise_on_all_ranks(transport, mine.edit, RuntimeError, device)
    rank = transport.rank
    first = headers[0]
    bad = [index for index, number in enumerate(first.numbers) if not math.isfinite(number)]
    if bad:
        group, number = divmod(bad[0], len(NUMBERS_OF_A_GROUP))
        raise ValueError(
            f"rank {rank}: {NUMBERS_OF_A_GROUP[number]} of parameter group {group} is {first.numbers[bad[0]]} on rank "
            "0, a finite number is expected; look at the schedule that sets it"
        )
    if all((other.step, other.kind, other.numbers) == (first.step, first.kind, first.numbers) for other in headers):
        return
    _check_same(rank, "are not in the same step", {k: header.step for k, header in enumerate(headers)}, "step")
    _check_same(rank, "do different things", {k: header.kind for k, header in enumerate(headers)}, "kind")
    active = {k: header.numbers for k, header in enumerate(headers) if not header.is_finished}
    for index in range(len(first.numbers)):
        group, number = divmod(index, len(NUMBERS_OF_A_GROUP))
        what = f"have different values of {NUMBERS_OF_A_GROUP[number]} in parameter group {group}"
        _check_same(rank, what, {k: numbers[index] for k, numbers in active.items()}, "number")


def _check_same(rank: int, what: str, values: Mapping[int, object], remedy: str) -> None:
    ranks_of: dict[object, list[int]] = {}
    for k, value in values.items():
        ranks_of.setdefault(value, []).append(k)
    if len(ranks_of) > 1:
        found = "; ".join(f"{value} on rank {_listed(ranks)}" for value, ranks in ranks_of.items())
        raise DesyncError(f"rank {rank}: the ranks {what}: {found}; {_REMEDIES[remedy]}")


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


@dataclass(frozen=True)
class StepVote:
    """One rank's vote on a step.

    Attributes:
        summary: Summary of its header.
        present: For each parameter, whether it has a gradient here.
        norm_squared: ‖g_i‖² over all shards of the replica. Default 0.
        product: <g_i, m̂> over all shards of the replica. Default 0.
        note: Further bytes that a family of optimizers adds, the same number on every rank. Default b"".
    """

    summary: Summary
    present: Sequence[bool]
    norm_squared: float = 0.0
    product: float = 0.0
    note: bytes = b""

    def to_bytes(self) -> bytes:
        """The vote as it is sent."""
        bits = sum(1 << k for k, is_present in enumerate(self.present) if is_present)
        presence = bits.to_bytes(-(-len(self.present) // 8), "little")
        return self.summary.to_bytes() + _SUMS.pack(self.norm_squared, self.product) + presence + self.note

    def with_sums(self, sums: Tensor) -> StepVote:
        """A copy with norm_squared, and product if there is a second sum. Waits for their device."""
        return replace(self, **dict(zip(("norm_squared", "product"), sums.tolist(), strict=False)))

    @classmethod
    def from_bytes(cls, data: bytes, parameters: int) -> StepVote:
        """The vote in these bytes.

        Args:
            data: From `to_bytes`.
            parameters: Number of parameters in `present`.
        """
        start, end = _SUMMARY.size + _SUMS.size, _SUMMARY.size + _SUMS.size + -(-parameters // 8)
        bits = int.from_bytes(data[start:end], "little")
        present = [bool(bits >> k & 1) for k in range(parameters)]
        norm_squared, product = _SUMS.unpack_from(data, _SUMMARY.size)
        return cls(Summary.from_bytes(data[: _SUMMARY.size]), present, norm_squared, product, data[end:])


@dataclass
class Ballot:
    """A vote under way.

    Attributes:
        transport: Between the replicas.
        header: This rank's header.
        mine: This rank's vote.
        device: Device of the messages.
        messages: The messages under way.
        votes: Every rank's vote, in rank order; empty until they have been read.
    """

    transport: Transport
    header: Header
    mine: StepVote
    device: torch.device
    messages: BytesUnderWay
    votes: Sequence[StepVote] = ()

    @classmethod
    def cast(
        cls,
        transport: Transport,
        header: Header,
        mine: StepVote,
        device: torch.device,
        sums: Tensor | None = None,
    ) -> Ballot:
        """Send this rank's vote. All ranks. Sends 42 bytes, a bit per parameter and the note to each peer.

        Args:
            transport: Between the replicas.
            header: The header that the vote sums up.
            mine: The vote.
            device: Device of the messages.
            sums: norm_squared, and product if it is not 0, float64 [1 or 2], if the host has not waited for them; mine
                then has zeros there. Default None.
        """
        mine_B = bytes_on(device, mine.to_bytes())
        if sums is not None:
            mine_B[_SUMMARY.size :][: sums.nbytes].copy_(sums.to(device).view(torch.uint8))
        messages = BytesUnderWay.launch(transport, mine_B)
        return cls(transport, header, mine, device, messages)

    def read(self, flags: Mapping[torch.device, Tensor] | None = None) -> bool:
        """Read the votes, and return whether all flags are true. Waits once for the device of the votes.

        Args:
            flags: For each device, a bool of no dimensions. Default None: none.

        Raises:
            DesyncError: At the first call; see `check_headers` and `check_votes`.
        """
        rest, are_true = dict(flags or {}), True
        if not self.votes:
            here = [rest.pop(self.device)] if self.device in rest else []
            messages, are_true = self.messages.read(*here)
            votes = self._parsed(messages)
            check_votes(self.transport, self.header, votes, self.device)
            self.votes = votes
        return are_true and all(bool(flag) for flag in rest.values())

    def take(self, messages: Sequence[bytes]) -> None:
        """Take the votes from these messages, unchecked."""
        self.votes = self._parsed(messages)

    def _parsed(self, messages: Sequence[bytes]) -> list[StepVote]:
        return [StepVote.from_bytes(data, len(self.mine.present)) for data in messages]

    def check(self) -> None:
        """Raise DesyncError as `check_headers` and `check_votes` do. All ranks, after the votes were taken."""
        check_votes(self.transport, self.header, self.votes, self.device)

    def sums(self) -> Tensor:
        """norm_squared and product of each rank, float64 [W, 2], on the device. The vote must have arrived."""
        rows = self.messages.rows[:, _SUMMARY.size : _SUMMARY.size + _SUMS.size]
        return rows.clone(memory_format=torch.contiguous_format).view(torch.float64)

    def gate(self) -> Tensor:
        """Whether all ranks are in the same step, and all their sums are finite: bool, of no dimensions, on the device.

        The vote must have arrived. Does not wait for the device.
        """
        same = self.messages.rows[:, :_SAME_BYTES]
        return self.sums().isfinite().all().logical_and_((same == same[0]).all())


def cast_votes(transport: Transport, header: Header, mine: StepVote, device: torch.device) -> Sequence[StepVote]:
    """Every rank's vote, in rank order. All ranks. Sends as `Ballot.cast` does, and waits."""
    ballot = Ballot.cast(transport, header, mine, device)
    ballot.read()
    return ballot.votes


def check_votes(
    transport: Transport, header: Header, votes: Sequence[StepVote], device: torch.device | str | None = None
) -> None:
    """Raise as `check_summaries` does, and DesyncError if only some ranks use the gradients of their last step again.

    Args:
        transport: Between the replicas.
        header: This rank's header.
        votes: The votes of all ranks.
        device: Device of the messages. Default None: the transport's.
    """
    check_summaries(transport, header, [vote.summary for vote in votes], device)
    again = [rank for rank, vote in enumerate(votes) if vote.summary.repeats]
    anew = [rank for rank, vote in enumerate(votes) if not vote.summary.repeats and any(vote.present)]
    if again and anew:
        raise DesyncError(
            f"rank {transport.rank}: rank {_listed(again)} calls step() with the gradients of its last step, rank "
            f"{_listed(anew)} with new ones; every rank must call backward() and step() equally often, and zero_grad() "
            "where it has no batch"
        )


def are_finite(votes: Sequence[StepVote]) -> bool:
    """Whether the sums of all these votes are finite."""
    return all(math.isfinite(vote.norm_squared) and math.isfinite(vote.product) for vote in votes)


def are_beyond_range(votes: Sequence[StepVote]) -> bool:
    """Whether sums are not finite that may be finite in float64: no square is a NaN, as if a gradient contained one."""
    return not are_finite(votes) and not any(math.isnan(vote.norm_squared) for vote in votes)


def present_anywhere(votes: Sequence[StepVote]) -> list[bool]:
    """For each parameter, whether any rank has a gradient."""
    return [any(column) for column in zip(*(vote.present for vote in votes), strict=True)]
