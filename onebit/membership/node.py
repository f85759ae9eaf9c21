"""A member of several ranks: those of a node leave an epoch together, and enter the next together.

The first rank of the node speaks for all at the rendezvous, where a member is the node. In an epoch each rank is
connected to those at its place in the other nodes: the optimizer's transport is of one rank of each node. Within the
node a step is a meeting: every rank of it calls the same operations of `InNode`, and each of these first tells the
others whether this rank still has the epoch. If another node is lost, some ranks notice it in their exchange, and the
rest in the next of these operations, before any of them has written a thing.

A rank of the node itself is never replaced: if one ends, all end, and the node starts again as a newcomer.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm import PeerError, Transport
from ..comm.messages import gather_bytes, gather_texts
from ..comm.transports.base import Work
from ..comm.transports.notes import outside_calls
from .published import Watched
from .rendezvous import Gives, MembershipError, Patience, Rendezvous, Roster

_LOST, _HERE, _DUE, _ASKED, _WAITS = 0, 1, 2, 4, 8  # the middle three may be one word

Found = TypeVar("Found")

TELL_S = 1.0
"""While the first rank waits at the rendezvous, it tells the others so at this interval."""


class Node:
    """What the ranks of a node agree on. All of them call everything, in the same order.

    Args:
        transport: Between the ranks of the node, for nothing else.

    Attributes:
        is_in_run: Whether the node has entered an epoch, so that a rank of it may lose one.
    """

    def __init__(self, transport: Transport):
        self.transport, self.is_in_run = transport, False

    def check(self, *, is_due: bool = False, is_asked: bool = False) -> tuple[bool, bool]:
        """Whether each of these is so on any rank of the node. Sends one byte to each.

        Args:
            is_due: Whether newcomers are to be let in before the next step, as far as this rank knows. Default False.
            is_asked: Whether a newcomer has asked this rank for a copy of the state. Default False.

        Raises:
            PeerError: Another rank has lost the epoch: it has called `leave`.
            MembershipError: A rank of the node is lost.
        """
        words = self._tell(_HERE | _DUE * is_due | _ASKED * is_asked)
        if _LOST in words:
            raise PeerError(f"rank {words.index(_LOST)} of this node has lost the epoch")
        return any(word & _DUE for word in words), any(word & _ASKED for word in words)

    def share(self, value: Any) -> list[Any]:
        """What each rank of the node gives, in rank order.

        Args:
            value: This rank's, a value of JSON.

        Raises:
            MembershipError: A rank of the node is lost.
        """
        with self._as_a_whole():
            return [json.loads(text) for text in gather_texts(self.transport, json.dumps(value))]

    def leave(self, missed: Collection[str] = ()) -> list[str]:
        """Leave the epoch with all ranks of the node: those that do not know yet learn it in their next operation.

        Args:
            missed: Names of the members that this rank misses. Default ().

        Returns:
            Those that any rank misses.
        """
        while any(word != _LOST for word in self._tell(_LOST)):
            pass
        return sorted({name for names in self.share(list(missed)) for name in names})

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer of the first rank, a value of JSON; the others wait for it, as long as it takes.

        Args:
            question: Asked on the first rank alone.

        Raises:
            PeerError: As the question does, on all ranks.
            MembershipError: Likewise, or a rank of the node is lost.
        """
        answer = ""
        if self.transport.rank > 0:
            while self._tell(_WAITS)[0] == _WAITS:
                pass
        else:
            answers = SimpleQueue[str]()
            threading.Thread(target=lambda: answers.put(_answer(question)), daemon=True).start()
            while not answer:
                try:
                    answer = answers.get(timeout=TELL_S)
                except Empty:
                    self._tell(_WAITS)
            self._tell(_HERE)
        found = json.loads(gather_texts(self.transport, answer)[0])
        if "lost" in found:
            raise PeerError(found["why"], found["lost"])
        if "why" in found:
            raise MembershipError(found["why"])
        return found["is"]

    def together(self, work: Callable[[], Found]) -> Found:
        """Do this on all ranks of the node, however much longer it takes on some.

        Args:
            work: Called in another thread, without gradients. It exchanges nothing within the node.

        Raises:
            PeerError: Another rank has lost the epoch; or as the work.
            MembershipError: A rank of the node is lost.
        """
        with ThreadPoolExecutor(1, "onebit-node") as threads:
            done = threads.submit(torch.no_grad()(outside_calls()(work)))
            is_over = False
            while not is_over:
                wait([done], TELL_S)
                words = self._tell(_HERE if done.done() else _WAITS)
                is_over = _WAITS not in words
        found = done.result()
        if _LOST in words:
            raise PeerError(f"rank {words.index(_LOST)} of this node has lost the epoch")
        return found

    def _tell(self, word: int) -> list[int]:
        with self._as_a_whole():
            return [row[0] for row in gather_bytes(self.transport, bytes([word]))]

    @contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            raise MembershipError(
                f"rank {self.transport.rank} of the node: another rank of it is lost, and a node comes and goes as a "
                f"whole: end all its ranks, and start it again ({error})"
            ) from error


def _answer(question: Callable[[], Any]) -> str:
    try:
        return json.dumps({"is": question()})
    except PeerError as error:
        return json.dumps({"why": str(error), "lost": error.ranks})
    except Exception as error:
        return json.dumps({"why": str(error)})


class InNode(Transport):
    """A transport between ranks of a node, whose operations begin with `Node.check` once the node is in a run.

    So all ranks of the node call as many of them, in the same order, even if this transport connects those of one stage
    of a pipeline alone.

    Args:
        node: The node.
        inner: Between these ranks.
    """

    def __init__(self, node: Node, inner: Transport):
        self.node, self._inner = node, inner
        self.rank, self.world_size, self.timeout_s = inner.rank, inner.world_size, inner.timeout_s

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    def _check(self) -> None:
        if self.node.is_in_run:  # before, ranks of one stage may have more to tell each other: how options differ
            self.node.check()

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        self._check()
        return self._inner.all_to_all(out_WB, in_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        self._check()
        return self._inner.all_gather(out_WB, in_B)

    def all_reduce(self, x: Tensor) -> Work:
        self._check()
        return self._inner.all_reduce(x)

    def broadcast(self, x: Tensor, src: int) -> Work:
        self._check()
        return self._inner.broadcast(x, src)

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        self._check()
        return self._inner.shift(out_B, in_B, by)

    def split(self, ranks: Sequence[int]) -> Transport:
        return self._inner.split(ranks)

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def reaches(self, device: torch.device) -> bool:
        return self._inner.reaches(device)

    def close(self) -> None:
        self._inner.close()


class NodeRendezvous:
    """The rendezvous for all ranks of a node: the first rank's, whose answers the others get.

    Methods and errors are those of `Rendezvous`. All ranks of the node call `meet`, `ask`, `has_begun` and `confirm`
    together.

    Args:
        node: The node.
        first: The rendezvous in which the node is a member. None on the other ranks.
        name: The node's name there.
        min_members: As there.
        patience: As there.
    """

    def __init__(self, node: Node, first: Rendezvous | None, name: str, min_members: int, patience: Patience):
        self._node, self._first = node, first
        self.name, self.min_members, self.patience = name, min_members, patience
        self.is_awaited = threading.Event() if first is None else first.is_awaited
        self.is_over = threading.Event() if first is None else first.is_over

    def meet(
        self,
        last: Roster | None,
        missed: Collection[str] = (),
        *,
        lets_in: bool = True,
        when_left: Callable[[], None] = lambda: None,  # not called: the other ranks wait for the answer meanwhile
    ) -> Roster:
        all_missed = self._node.leave(missed)

        def met(first: Rendezvous) -> list[Any]:
            roster = first.meet(last, all_missed, lets_in=lets_in)
            return [roster.epoch, roster.names]

        epoch, names = self._ask(met)
        return Roster(epoch, tuple(names))

    def gives(self, giver: Gives) -> None:
        if self._first is not None:
            self._first.gives(giver)

    def ask(self) -> Roster | None:
        def asked(first: Rendezvous) -> list[Any] | None:
            pair = first.ask()
            return None if pair is None else [pair.epoch, pair.names]

        found = self._ask(asked)
        return None if found is None else Roster(found[0], tuple(found[1]))

    @property
    def copied(self) -> float | None:
        return None if self._first is None else self._first.copied

    @copied.setter
    def copied(self, share: float) -> None:
        if self._first is not None:
            self._first.copied = share

    def has_begun(self, roster: Roster) -> bool:
        self._node.check()
        return bool(self._ask(lambda first: first.has_begun(roster)))

    def confirm(self, roster: Roster, what: str, within_s: float = math.inf) -> None:
        self._node.check()
        self._ask(lambda first: first.confirm(roster, what, within_s))

    def begin(self) -> None:
        if self._first is not None:
            self._first.begin()

    def note_change(self, optimizer: Watched, seconds: float, why: str) -> None:
        if self._first is not None:
            self._first.note_change(optimizer, seconds, why)

    def end(self, why: str) -> None:
        if self._first is not None:
            self._first.end(why)

    def leave(self) -> None:
        if self._first is not None:
            self._first.leave()

    def _ask(self, question: Callable[[Rendezvous], Any]) -> Any:
        def asked() -> Any:
            assert self._first is not None
            return question(self._first)

        return self._node.ask(asked)
