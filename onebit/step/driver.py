"""The step machine: the state of a step, the events it allows next, and the steps of all buckets side by side.

`StepState` and `TRANSITIONS` define every course that a step can take, for replicated, sharded and local placements.
`Driver` takes the buckets through them, from the first Work to the last meeting.

A bucket's next phase is launched after phase 1 of the bucket that follows it; the remaining phases are completed in
rounds. So every rank launches the same sequence of operations, whether during backward or in step(), in a separate
channel. A phase that is due waits for the phase before it. A hook must not wait: a peer may send that phase only in
step(), and until then wait for this rank in a collective of the script. So hooks launch only what `catch_up` finds
ready, and step() waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Generic, TypeAlias

import torch

from .. import comm
from ..comm import Exchange, ExchangeTask, Transport, Work
from ..layout.buckets import B
from .bucket_step import Answer, Arrived, BucketStep, Decision, Meeting
from .stats import WaitClock

_PAUSE_S = 1e-4  # between two checks for data from other ranks

Meet: TypeAlias = Callable[[Sequence[B], Sequence[Meeting]], Sequence[Answer]]


class StepState(Enum):
    """The state of a step."""

    IDLE = "none has begun"
    BEGUN = "its kind and its options are settled, nothing has been sent"
    SENDING = "buckets leave, in backward or in step()"
    SUSPENDED = "all is sent, and travels while the next step computes"
    MET = "all has arrived, nothing has been written"


TRANSITIONS: Mapping[tuple[StepState, str], StepState] = {
    (StepState.IDLE, "begin"): StepState.BEGUN,
    (StepState.BEGUN, "launch"): StepState.SENDING,
    (StepState.SENDING, "launch"): StepState.SENDING,
    (StepState.SENDING, "suspend"): StepState.SUSPENDED,
    (StepState.SUSPENDED, "resume"): StepState.SENDING,
    (StepState.SUSPENDED, "skip"): StepState.IDLE,  # a member was lost: the others send it again
    (StepState.SENDING, "meet"): StepState.MET,
    (StepState.MET, "meet"): StepState.MET,  # in a further step(), after one that has raised
    (StepState.MET, "suspend"): StepState.SUSPENDED,  # the vote has raised: a state that is saved now still has it
    (StepState.MET, "resend"): StepState.BEGUN,  # on some rank a gradient has changed since it was sent
    (StepState.MET, "commit"): StepState.IDLE,
    (StepState.SENDING, "commit"): StepState.IDLE,  # the vote came first, and the exchange follows the decision
    (StepState.BEGUN, "skip"): StepState.IDLE,  # the vote came first, and nothing was sent
    (StepState.SENDING, "skip"): StepState.IDLE,
    (StepState.MET, "skip"): StepState.IDLE,
}


def moved(state: StepState, event: str) -> StepState:
    """The state that follows this one after the event. An event that is not in `TRANSITIONS` is an error of ours.

    Args:
        state: The state before the event.
        event: "begin", "launch" and so on, as in `TRANSITIONS`.
    """
    assert (state, event) in TRANSITIONS, f"a step cannot {event} when {state.value}"
    return TRANSITIONS[state, event]


class BucketTask(Generic[B]):
    """A bucket's step under way.

    Attributes:
        bucket: The bucket.
        meeting: The meeting that the step has reached; None if it has reached none, or has ended.
        exchange: Its Works up to the first meeting.
    """

    def __init__(self, bucket: B, step: BucketStep, waited: WaitClock):
        self.bucket = bucket
        self.meeting: Meeting | None = None
        self._step, self._waited = step, waited
        self.exchange = ExchangeTask(self._works(next(step, None)))

    def _works(self, yielded: Work | Meeting | None) -> Exchange:
        """The Works from this one on, up to the step's next meeting or its end."""
        while yielded is not None and not isinstance(yielded, Meeting):
            yield self._waited.timed(yielded)
            yielded = next(self._step, None)
        self.meeting = yielded

    def answer(self, answer: Answer) -> Exchange | None:
        """Send the step the answer to its meeting.

        Returns:
            The exchange up to its next meeting or its end; None if it got there without an exchange.
        """
        try:
            yielded = self._step.send(answer)
        except StopIteration:
            self.meeting = None
            return None
        if not isinstance(yielded, Meeting):
            return self._works(yielded)
        self.meeting = yielded
        return None

    def close(self) -> None:
        """End the step early. Nothing has been written."""
        self._step.close()


class Driver(Generic[B]):
    """Runs one step of all buckets, and knows its state. All ranks launch the same buckets in the same order.

    Args:
        transport: Moves the buckets, in a channel that the driver makes.
        phases: Phases of an exchange, see `Hierarchy.phases`. After a bucket's first phase follow the second phase of
            the bucket before it, the third of the one before that, and so on.
        waited: Counts the time that is spent waiting for buckets.
        on_comm_stream: On CUDA, whether buckets are launched on a separate stream. Default True. False for buckets that
            free gradients: the backward pass would reuse their memory at once.

    Attributes:
        state: The state of the step.
        channel: The driver's channel.
        tasks: The buckets that have begun their step, in order.
        due: The buckets whose next phases are the next operations to launch.
        is_broken: Whether an exception has ended a bucket's step before its meeting; `skip` mends it.
    """

    def __init__(self, transport: Transport, phases: int, waited: WaitClock, *, on_comm_stream: bool = True):
        self._phases, self._waited, self._has_stream = phases, waited, on_comm_stream
        self.state = StepState.IDLE
        self.channel = transport.new_channel()
        self.tasks: list[BucketTask[B]] = []
        self.due: deque[BucketTask[B]] = deque()
        self.is_broken = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._sending_from: torch.device | None = None

    @property
    def launched(self) -> int:
        """Number of buckets that the next step has sent; 0 while a step is suspended."""
        return 0 if self.state is StepState.SUSPENDED else len(self.tasks)

    def is_exchanging(self) -> bool:
        """Whether data of other ranks has yet to come. From any thread: it may be out of date at once."""
        return not all(task.exchange.is_ready() for task in tuple(self.tasks))

    def begin(self) -> None:
        """Begin a step, now that its kind and options are settled."""
        self.state = moved(self.state, "begin")

    def launch(self, bucket: B, step: BucketStep, *, is_alone: bool = False) -> None:
        """Begin the next bucket's step, up to its first Work; after that, earlier buckets' next phases are due.

        Waits for phases that were due before: hooks call `catch_up` first.

        Args:
            bucket: The next bucket, in order of index.
            step: Its step.
            is_alone: Whether to launch nothing else, and on the current stream, after everything computed so far:
                tensors that the step reads may be freed once this returns. Default False.
        """
        assert bucket.index == len(self.tasks)
        self.state = moved(self.state, "launch")
        self.settle()
        if is_alone:
            with self.channel(), self._advancing():
                self.tasks.append(BucketTask(bucket, step, self._waited))
            return
        with self._sending(bucket.device), self._advancing():
            self.tasks.append(BucketTask(bucket, step, self._waited))
            self.due.extend(reversed(self.tasks[-self._phases : -1]))
            self.catch_up()

    @contextmanager
    def sending(self, buckets: Sequence[B]) -> Iterator[None]:
        """In this block buckets are launched whose gradients are complete: the channel and the stream are entered once.

        Args:
            buckets: The buckets to be launched.
        """
        devices = {bucket.device for bucket in buckets}
        with self._sending(devices.pop()) if len(devices) == 1 else nullcontext():
            yield

    def catch_up(self, patience_s: float = 0.0) -> bool:
        """Launch the phases that are due, as far as the data that they wait for has arrived.

        Args:
            patience_s: Seconds to wait for such data. Default 0: do not wait.

        Returns:
            Whether everything due was launched.
        """
        deadline = time.monotonic() + patience_s if patience_s > 0 else 0.0
        while self.due:
            if self.due[0].exchange.is_ready():
                self._launch_due()
            elif patience_s == 0 or time.monotonic() > deadline:
                return False
            else:
                time.sleep(_PAUSE_S)
        return True

    def settle(self) -> None:
        """Launch everything that is due, waiting for the phases before."""
        while self.due:
            self._launch_due()

    def _launch_due(self) -> None:
        with self._advancing():
            task = self.due.popleft()
            with self._sending(task.bucket.device):
                task.exchange.advance()

    def suspend(self) -> None:
        """Suspend the step: every bucket was launched, and is exchanged while the next step computes."""
        self.state = moved(self.state, "suspend")

    def advance(self, indices: Iterable[int], *, is_awaited: bool = False) -> None:
        """Make the next phase of these buckets of the suspended step due, and launch it as `catch_up` does.

        Args:
            indices: Indices of the buckets.
            is_awaited: Whether to launch it in any case, so that computations from here on may read the frames that it
                has encoded. Default False.
        """
        tasks = [self.tasks[index] for index in indices]
        self.due.extend(tasks)
        self.catch_up()
        if is_awaited:
            self.settle()
            self._join_streams({task.bucket.device for task in tasks})

    def resume(self) -> None:
        """Continue a suspended step as if it had just been launched."""
        self.state = moved(self.state, "resume")

    def meet(self) -> Sequence[Arrived]:
        """Bring every launched bucket to its meeting, and return these meetings, in the order of the buckets."""
        self.wait()
        self.state = moved(self.state, "meet")
        meetings = [task.meeting for task in self.tasks]
        if not all(isinstance(each, Arrived) for each in meetings):
            raise RuntimeError(
                "step() was interrupted within an exchange, as by Ctrl+C, and cannot go on: one rank alone loads a "
                "state (optimizer.load_state_dict) or constructs a new optimizer; restart several from a checkpoint"
            )
        return meetings  # type: ignore[return-value]

    def finish(self, meet: Meet[B] | None = None) -> None:
        """Bring every launched bucket to its end.

        Args:
            meet: Gives the answers if buckets meet each other. Default None: none does.
        """
        try:
            self.wait()
            self._answer_meetings(self.tasks, meet)
        finally:
            self.skip()

    def wait(self) -> None:
        """Wait until the exchanges of all launched buckets are complete."""
        self.settle()
        devices = {task.bucket.device for task in self.tasks}
        with self._advancing(), ExitStack() as streams:
            for device in devices:
                streams.enter_context(self._sending(device))
            comm.wait_all([task.exchange for task in self.tasks])
        self._join_streams(devices)

    def _join_streams(self, devices: set[torch.device]) -> None:
        for device in devices & self._streams.keys():
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def commit(self, decision: Decision, meet: Meet[B] | None = None) -> None:
        """Let all buckets continue side by side, because the step is good.

        Args:
            decision: The decision of all ranks.
            meet: Gives the answers if buckets meet again. Default None: none does.
        """
        self.state = moved(self.state, "commit")
        tasks, self.tasks = self.tasks, []
        with self.channel():
            comm.interleave(works for task in tasks if (works := task.answer(decision)) is not None)
        self._answer_meetings(tasks, meet)

    @staticmethod
    def _answer_meetings(tasks: Sequence[BucketTask[B]], meet: Meet[B] | None) -> None:
        """Bring all buckets to their ends: each continues with its own answer."""
        while waiting := [(task, meeting) for task in tasks if (meeting := task.meeting) is not None]:
            assert meet is not None
            answers = meet([task.bucket for task, _ in waiting], [meeting for _, meeting in waiting])
            for (task, _), answer in zip(waiting, answers, strict=True):
                works = task.answer(answer)
                assert works is None, "after a second meeting nothing is exchanged by single buckets"

    def resend(self) -> None:
        """Forget the exchanges, because all buckets will be launched once more. Nothing was written."""
        self.state = moved(self.state, "resend")
        self._forget()

    def skip(self) -> None:
        """Forget the step and everything it has launched. Nothing was written."""
        if self.state is not StepState.IDLE:
            self.state = moved(self.state, "skip")
        self._forget()

    def _forget(self) -> None:
        for task in self.tasks:
            task.close()
        self.tasks = []
        self.due.clear()
        self.is_broken = False

    @contextmanager
    def _advancing(self) -> Iterator[None]:
        """In this block buckets' generators run. An exception ends them for good: Ctrl-C, or no memory."""
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    @contextmanager
    def _sending(self, device: torch.device) -> Iterator[None]:
        """Enter the channel and, on CUDA, a stream that begins after the work so far: backward does not wait for it."""
        if device == self._sending_from:
            yield
            return
        with self.channel(), self._stream(device):
            before, self._sending_from = self._sending_from, device
            try:
                yield
            finally:
                self._sending_from = before

    def _stream(self, device: torch.device) -> AbstractContextManager[object]:
        if device.type != "cuda" or not self._has_stream:
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)
