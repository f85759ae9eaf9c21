"""A newcomer copies the run's state while the others train, so that the change in which it comes in is short.

    1. It asks the first member through the store (`Rendezvous.ask`). The two connect to each other, and compare models
       and options.
    2. The first member sends one bucket after the other, each as it is at that moment. From then on it also sends what
       every step does to that bucket: the frames that the step applies, and their factors.
    3. The newcomer applies them to its copy. Once it has everything, it comes to the rendezvous.
    4. At the change it tells the digests of the tensors in its copy. The member that sends the state leaves those out.

So does a member that was away, once it finds that the others have gone on without it. In members of several ranks each
gives to the one at its place, and all begin in the same step.

The other members take no part before 3, and nothing that they do depends on the copy. What differs at the change is
sent then, whatever the reason, so the copy decides how long a change takes, and not what a newcomer gets.

The first member holds a copy of one bucket, and frames that are not sent yet, at most as many bytes as the parameters
have, or as two steps. It sends in the pauses of the steps' own exchanges. If steps make frames faster than that, it
gives the copy up.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..checkpoint.archive import read_archive
from ..comm import PeerError, Transport
from ..comm.messages import gather_bytes, gather_texts
from ..layout.buckets import AnyBucket
from ..usage.contract import State
from .rendezvous import LEAVE_S, MembershipError, Roster

if TYPE_CHECKING:
    from ..step.replicated import Journal
    from .members import Members
    from .node import Node

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
"""Of a copy. A step's exchange waits for one piece at most: 21 ms of a link at 100 Mbit/s."""

LEAST_LOG_BYTES = 4 << 20
"""Frames that may wait in a small model."""

LEAST_BYTES = 256
"""Of a tensor that has a digest."""

TRIES = 3
"""How often each bucket is sent at most, on average: steps that exchange gradients make a copy worthless."""

TICK_S, PAUSE_S, MOST_PAUSE_S = 1.0, 0.001, 1.0

_HELD = "onebit.held"
_LEFT = "the member that gave it has left the run"


@runtime_checkable
class Repeatable(Protocol):
    """An optimizer whose steps can be repeated from the frames that they apply. Buckets go by their index."""

    @property
    def buckets(self) -> Sequence[AnyBucket]:
        """Its buckets."""

    def why_not_repeated(self) -> str:
        """Why its steps cannot be repeated now; "" if they can."""

    def keep_journal(self, journal: Journal | None) -> None:
        """Tell this journal of what steps do to the state from now on. None: none does."""

    def common(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """Of a bucket, the large state that all members have, first what follows the parameters; not copied.

        And the frames of the last step, if they are a part of it.
        """

    def repeat(self, index: int, tensors: Sequence[Tensor], step: State) -> None:
        """Do to copies of these tensors what a step has done to the bucket. From any thread.

        Args:
            index: The bucket's.
            tensors: On the host, modified.
            step: From the journal: its `how`, and "frames", uint8 [W, B], on the host.
        """

    def is_exchanging(self) -> bool:
        """Whether data of a step is on its way. May be called from any thread."""


# ---------------------------------------------------------------- a state as a message


def send_state(
    part: Transport, state: object, piece_bytes: int, before_piece: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Send a state to the other ranks, which call `receive_state`.

    Args:
        part: Between the ranks.
        state: Tensors, lists, dicts and plain values.
        piece_bytes: It is sent in pieces of this size, each within the transport's timeout.
        before_piece: Called before each, with its bytes. Default: nothing is.
    """
    file = io.BytesIO()
    torch.save(state, file)
    data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(part.device)
    part.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=part.device), part.rank).wait()
    for piece in data.split(piece_bytes):
        before_piece(len(piece))
        part.broadcast(piece, part.rank).wait()


def receive_state(part: Transport, source: int, piece_bytes: int) -> State:
    """A state from another rank's `send_state`, on the host.

    Args:
        part: Between the ranks.
        source: The rank that sends it.
        piece_bytes: As there.

    Raises:
        MembershipError: It contains a class that torch does not load.
        PeerError: A rank is lost.
    """
    length = torch.zeros(1, dtype=torch.int64, device=part.device)
    part.broadcast(length, source).wait()
    data = torch.empty(int(length), dtype=torch.uint8, device=part.device)
    for piece in data.split(piece_bytes):
        part.broadcast(piece, source).wait()
    try:
        state: State = read_archive(io.BytesIO(data.cpu().numpy().tobytes()))
    except Exception as error:  # whatever a class that torch does not load unpickles to
        raise MembershipError(
            "the state of a member cannot be read here: what `begin` is given must have a state_dict of tensors, "
            f"numbers, strings, lists and dicts ({str(error).splitlines()[0]})"
        ) from error
    return state


def difference(name: str, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """What a newcomer is told whose lines differ from the run's."""
    pairs = enumerate(zip_longest(mine, theirs, fillvalue="nothing"))
    k, (here, there) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
    return (
        f"{name} has another model or other options than the run: entry {k} is {here} here, {there} there; build the "
        "same model and the same optimizer"
    )


# ---------------------------------------------------------------- tensors that need not be sent


def digests_of(tensors: Sequence[Tensor]) -> list[str]:
    """A SHA-256 of the dtype, the shape and the bits of each tensor."""
    with ThreadPoolExecutor(2) as threads:  # hashing does not hold Python's lock
        return list(threads.map(_digest, tensors))


def _digest(tensor: Tensor) -> str:
    host = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{host.dtype} {tuple(host.shape)}".encode())
    found.update(host.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digested(state: object) -> dict[int, str]:
    """The digests of the tensors in a state, by their id; small ones have none."""
    tensors = [tensor for tensor in _tensors(state) if tensor.nbytes >= LEAST_BYTES]
    return dict(zip(map(id, tensors), digests_of(tensors), strict=True))


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)


def bytes_of(state: object) -> int:
    """Bytes of the tensors in a state."""
    return sum(tensor.nbytes for tensor in _tensors(state))


def without(state: Any, digests: Mapping[int, str], held: Collection[str]) -> Any:
    """A state in which tensors with a digest among those held are replaced by their digest.

    Args:
        state: Tensors, lists, tuples, dicts and plain values.
        digests: From `digested`, of the same state.
        held: The digests.
    """
    if isinstance(state, Tensor):
        digest = digests.get(id(state), "")
        return {_HELD: digest} if digest in held else state
    if isinstance(state, dict):
        return {key: without(value, digests, held) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(without(value, digests, held) for value in state)
    return state


def filled(state: Any, held: Mapping[str, Tensor]) -> Any:
    """The inverse of `without`.

    Args:
        state: From it.
        held: The tensors, by digest.
    """
    if isinstance(state, dict):
        if state.keys() == {_HELD}:
            return held[state[_HELD]]
        return {key: filled(value, held) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(filled(value, held) for value in state)
    return state


# ---------------------------------------------------------------- the member that gives


class Giver:
    """Gives newcomers a copy of this member's state, and is the journal of the steps since then.

    `Rendezvous` asks it in the first member. The next newcomer is sent a bucket once the one before it has all.

    Args:
        optimizer: The optimizer.
        members: Its transport.
        lines: What must be the same in a newcomer, as text.
    """

    def __init__(self, optimizer: Repeatable, members: Members, lines: Callable[[], list[str]]):
        self._optimizer, self._members, self._lines = optimizer, members, lines
        self._givings: list[_Giving] = []
        self._has_left = False
        self._lock = threading.Lock()  # of these, of the optimizer's journal, and of the following
        self._asked: Roster | None = None  # for all ranks of this member; then the answers
        self._answers: dict[Roster, str | None] = {}

    def answer(self, pair: Roster) -> str | None:
        """Begin a copy in another thread, unless there is a reason against it. From any thread.

        Args:
            pair: This member and the newcomer.

        Returns:
            "" if it has begun; why there will be none; None: ask again later, another newcomer gets one, or the other
            ranks of this member have yet to begin.
        """
        if self._members.node is not None:
            with self._lock:
                if (answer := self._answers.pop(pair, None)) is None and self._asked is None:
                    self._asked = pair
                return answer
        why = self._why_not()
        return self._begin(pair) if why == "" else why

    @property
    def is_asked(self) -> bool:
        """Whether all ranks of this member are to call `begin_together`."""
        return self._asked is not None

    def begin_together(self, node: Node) -> None:
        """Begin a copy for which the first rank was asked, on all ranks of this member or on none. All of them.

        Args:
            node: Those ranks.
        """
        epoch, names = node.share(None if self._asked is None else [self._asked.epoch, self._asked.names])[0]
        pair, every = Roster(epoch, tuple(names)), node.share(self._why_not())
        if all(why == "" for why in every):
            every = node.share(self._begin(pair))
        with self._lock:
            if self._asked is not None:
                self._answers[pair] = None if None in every else next(filter(None, every), "")
                self._asked = None

    def _why_not(self) -> str | None:
        if not all(giving.is_ready for giving in self._living()):
            return None
        return self._optimizer.why_not_repeated()

    def _begin(self, pair: Roster) -> str:
        giving = _Giving(self._optimizer, self._members, pair, self._lines())
        with self._lock:
            if self._has_left:
                return _LEFT
            self._givings.append(giving)
            self._optimizer.keep_journal(self)
            giving.thread.start()
        return ""

    def enter(self, roster: Roster) -> None:
        """End the copy to a newcomer that is in the next epoch: it gets what is left of the frames."""
        for giving in self._living():
            if giving.newcomer in roster.names:
                giving.end()

    def forget(self) -> None:
        """This member has taken over another's state: what it has given is worth nothing."""
        for bucket in self._optimizer.buckets:
            self.spoil(bucket.index)

    def stop(self) -> None:
        """This member leaves the run."""
        with self._lock:
            self._has_left = True
        for giving in self._living():
            giving.end(_LEFT)
            giving.thread.join(LEAVE_S)

    def _living(self) -> list[_Giving]:
        with self._lock:
            self._givings = [giving for giving in self._givings if not giving.is_over]
            if not self._givings:
                self._optimizer.keep_journal(None)
            return self._givings

    # ---------------------------------------------------------------- the journal, called in each step

    @contextmanager
    def applying(self, index: int, frames_WB: Tensor, how: State) -> Iterator[None]:
        """In this block frames are applied to the state. See `Journal`."""
        with ExitStack() as copies:
            for giving in self._living():
                copies.enter_context(giving.changed)  # no bucket is copied meanwhile
                giving.note(index, frames_WB, how)
            yield

    def spoil(self, index: int) -> None:
        """A bucket has changed in another way: copies of it are worth nothing, and are sent again."""
        for giving in self._living():
            giving.spoil(index)


class _Giving:
    """A copy for one newcomer.

    Attributes:
        newcomer: Its name.
        changed: Held while parameters change, or a bucket is copied.
        is_ready: Whether it has been sent everything.
        is_over: Whether it gets no more.
        thread: Sends it. The caller starts it.
    """

    def __init__(self, optimizer: Repeatable, members: Members, pair: Roster, lines: Sequence[str]):
        self.newcomer = pair.names[1]
        self._optimizer, self._members, self._pair, self._lines = optimizer, members, pair, lines
        self.changed = threading.Condition()
        self._log, self._log_bytes = list[State](), 0  # steps; their bytes, with those that are being sent
        self._given, self._count = set[int](), 0  # buckets; how many were sent
        self._frames: dict[int, Tensor] = {}  # the last ones of each bucket
        self._since_pause, self._last_bytes = 0, math.inf  # of steps in the last message, if it had no bucket
        self.is_ready = self.is_over = self._ended = False
        self._why = ""
        self._most_bytes = max(sum(4 * bucket.layout.parameter_numel for bucket in optimizer.buckets), LEAST_LOG_BYTES)
        self.thread = threading.Thread(target=self._run, name="onebit-copy", daemon=True)

    def end(self, why: str = "") -> None:
        """Send what is left, and end. why: the copy is given up."""
        with self.changed:
            self._end(why)

    def _end(self, why: str) -> None:
        self._ended, self._why = True, self._why or why
        self.changed.notify_all()

    def note(self, index: int, frames_WB: Tensor, how: State) -> None:
        """Note frames that are about to be applied to a bucket. The caller holds `changed`."""
        if index not in self._given or self._ended:
            return
        numbers = {name: x.to("cpu", copy=True) if isinstance(x, Tensor) else x for name, x in how.items()}
        step: State = {"bucket": index, "frames": None, **numbers}
        last = self._frames.get(index)
        if last is None or not torch.equal(last, frames_WB.cpu()):  # with a delay, frames are applied more than once
            self._frames[index] = step["frames"] = frames_WB.to("cpu", copy=True)
            self._log_bytes += frames_WB.nbytes
        self._log.append(step)
        rounds = 2 * sum(frames.nbytes for frames in self._frames.values())  # each comes in one burst
        if self._log_bytes > max(self._most_bytes, rounds):
            self._give_up(f"steps make frames faster than they can be sent, and {self._log_bytes >> 20} MiB wait")
        self.changed.notify_all()

    def spoil(self, index: int) -> None:
        """Copy this bucket again."""
        with self.changed:
            if index in self._given:
                self._given.remove(index)
                self._log_bytes -= _bytes_of(step for step in self._log if step["bucket"] == index)
                self._log = [step for step in self._log if step["bucket"] != index]
                self.changed.notify_all()

    def _give_up(self, why: str) -> None:
        self._log.clear()
        self._given.clear()
        self._end(why)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        link: Transport | None = None
        try:
            link = self._members.connect_pair(self._pair)
            if len(set(gather_texts(link, "\n".join(self._lines)))) == 1:
                self._send_all(link)
        except Exception as error:  # a newcomer that is lost must not end a member
            self._why = self._why or str(error)
        finally:
            self.is_over = True
            if link is not None:
                link.abandon()
        if self._why:
            name = self._members.rendezvous.name
            log.info("%s: the copy for %s was given up: %s", name, self.newcomer, self._why)

    def _send_all(self, link: Transport) -> None:
        is_end = False
        while not is_end:
            message = self._next()
            send_state(link, message, PIECE_BYTES, self._pause)
            with self.changed:
                self._log_bytes -= _bytes_of(message["steps"])
                self.is_ready |= message["is_ready"]
            is_end = message["is_end"]
        gather_bytes(link, b"\0")  # it has everything

    def _next(self) -> State:
        """The next message: the steps so far, then a bucket if one is missing."""
        buckets = self._optimizer.buckets
        with self.changed:
            missing = [bucket for bucket in buckets if bucket.index not in self._given]
            if self.is_ready and not (self._log or missing or self._ended):
                self.changed.wait(TICK_S)
            if missing and self._count >= TRIES * len(buckets) and not self._ended:
                self._give_up("steps that exchange gradients come too often")
            steps, self._log = self._log, []
            of_two_steps = 2 * sum(frames.nbytes for frames in self._frames.values())
            is_little = self._log_bytes <= max(of_two_steps, PIECE_BYTES)
            # If steps make frames about as fast as they are sent, no less will be left later.
            is_no_less = self._log_bytes >= 0.75 * self._last_bytes
            self._last_bytes = math.inf if missing else self._log_bytes
            message: State = {
                "steps": steps,
                "bucket": self._copied(missing[0].index) if missing and not self._ended else None,
                "is_ready": not missing and (is_little or is_no_less),
                "is_end": self._ended,
                "why": self._why,
            }
            return message

    def _copied(self, index: int) -> State:
        self._given.add(index)
        self._count += 1
        tensors, last = self._optimizer.common(index)
        frames = None if last is None else last.to("cpu", copy=True)
        self._frames.pop(index, None)
        if frames is not None:
            self._frames[index] = frames
        return {
            "index": index,
            "tensors": [x.detach().to("cpu", copy=True) for x in tensors],
            "frames": frames,
            "share": len(self._given) / len(self._optimizer.buckets),
        }

    def _pause(self, nbytes: int) -> None:
        """Before as many bytes: leave the network to a step's own exchange."""
        self._since_pause += nbytes
        if self._since_pause < PIECE_BYTES:
            return
        self._since_pause, deadline = 0, time.monotonic() + MOST_PAUSE_S
        while not self._ended and self._optimizer.is_exchanging() and time.monotonic() < deadline:
            time.sleep(PAUSE_S)


def _bytes_of(steps: Iterable[State]) -> int:
    return sum(step["frames"].nbytes for step in steps if step["frames"] is not None)


# ---------------------------------------------------------------- the newcomer


class Copy:
    """A newcomer's copy of the run's state, on the host, which a thread keeps up with the run.

    Args:
        optimizer: The newcomer's, not yet in the run.
        members: Its transport.
        pair: The member that gives, and this one.
        lines: As in `Giver`.

    Attributes:
        is_ready: Set once it has everything, or will get no more.
    """

    def __init__(self, optimizer: Repeatable, members: Members, pair: Roster, lines: Sequence[str]):
        self._optimizer, self._members, self._rendezvous = optimizer, members, members.rendezvous
        self._pair, self._lines = pair, lines
        self._buckets: dict[int, State] = {}
        self._is_stopped = False
        self.is_ready = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="onebit-copy", daemon=True)
        self._thread.start()

    @property
    def refusal(self) -> str:
        """Why this newcomer does not fit the run; "" if it does."""
        return str(self.error) if isinstance(self.error, ValueError) else ""

    def held(self, within_s: float) -> dict[str, Tensor]:
        """The tensors of the copy by digest, once the other member has sent all; none if that takes too long."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            return {}
        tensors: list[Tensor] = []
        for index, its in self._buckets.items():
            tensors += [*its["tensors"], *([] if its["frames"] is None else [its["frames"]])]
            params = self._optimizer.buckets[index].params
            tensors += [x.to(p.dtype) for x, p in zip(its["tensors"], params, strict=False) if x.dtype != p.dtype]
        return dict(zip(digests_of(tensors), tensors, strict=True))

    def stop(self) -> None:
        """This process leaves the run."""
        self._is_stopped = True
        self._thread.join(LEAVE_S)

    def _run(self) -> None:
        link: Transport | None = None
        try:
            link = self._members.connect_pair(self._pair)
            theirs, mine = (text.split("\n") for text in gather_texts(link, "\n".join(self._lines)))
            if theirs != mine:
                raise ValueError(difference(self._rendezvous.name, mine, theirs))
            while not self._is_stopped and self._take(receive_state(link, 0, PIECE_BYTES)):
                pass
            if not self._is_stopped:
                gather_bytes(link, b"\0")
        except Exception as error:
            self.error = error
        finally:
            if link is not None:
                link.abandon()
            if self.error is not None and not self.refusal:
                log.info(
                    "%s: the copy from %s was given up: %s", self._rendezvous.name, self._pair.names[0], self.error
                )
            self.is_ready.set()

    def _take(self, message: State) -> bool:
        """Take a message in. Returns whether others follow."""
        for step in message["steps"]:
            its = self._buckets[step["bucket"]]
            if step["frames"] is not None:
                its["frames"] = step["frames"]
            self._optimizer.repeat(its["index"], its["tensors"], {**step, "frames": its["frames"]})
        if (its := message["bucket"]) is not None:
            self._buckets[its["index"]] = its
            self._rendezvous.copied = its["share"]
        if message["why"]:
            self.error = PeerError(message["why"])
        if message["is_ready"]:
            self.is_ready.set()
        return not message["is_end"]


def copy_state(optimizer: Repeatable, members: Members, lines: Sequence[str]) -> Copy | None:
    """As a newcomer, copy the run's state while the others train, as far as it goes. None: nothing was copied.

    All ranks of the newcomer, if it has several.

    Args:
        optimizer: The newcomer's, not yet in the run.
        members: Its transport.
        lines: As in `Giver`.

    Raises:
        ValueError: This newcomer has another model or other options than the run.
    """
    copy = None
    for _ in range(TRIES):
        if (pair := members.rendezvous.ask()) is None:
            break
        copy = Copy(optimizer, members, pair, lines)
        try:
            while not all(members.told(copy.is_ready.wait(TICK_S))):
                pass
            if refusal := next(filter(None, members.told(copy.refusal)), ""):
                raise ValueError(refusal)
            if not all(members.told(copy.error is not None)):
                break
        except BaseException:
            copy.stop()
            raise
    return copy
