"""The step machine: where a step is, what may happen next, and the steps of all buckets side by side.

`StepState` and `TRANSITIONS` are all that can become of a step, of replicated, sharded and local placements. `Driver`
takes the buckets through them, from the first Work to the last meeting.

A bucket's next phase is launched after phase 1 of the bucket that follows it; what is left is brought home in rounds.
So every rank launches the same sequence of operations, whether during backward or in step(), in a channel apart from
all others. What is due waits for the phase before it. A hook does not: a peer may send that only in step(), and wait
for this rank in between, in a collective of the script's own. So hooks go on as far as `catch_up`, and step() waits.
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

_PAUSE_S = 1e-4  # between two looks at what has come

Meet: TypeAlias = Callable[[Sequence[B], Sequence[Meeting]], Sequence[Answer]]


class StepState(Enum):
    """Where a step is."""

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
    """The state that follows."""
    assert (state, event) in TRANSITIONS, f"a step cannot {event} when {state.value}"
    return TRANSITIONS[state, event]


class BucketTask(Generic[B]):
    """A bucket's step under way. meeting: the one that it has come to; None: it is through."""

    def __init__(self, bucket: B, step: BucketStep):
        self.bucket = bucket
        self.meeting: Meeting | None = None
        self._step = step
        self.exchange = ExchangeTask(self._works(next(step, None)))

    def _works(self, yielded: Work | Meeting | None) -> Exchange:
        """From what the step has yielded, the Works up to its next meeting, or to its end."""
        while yielded is not None and not isinstance(yielded, Meeting):
            yield yielded
            yielded = next(self._step, None)
        self.meeting = yielded

    def answer(self, answer: Answer) -> Exchange | None:
        """Tell it what was decided at its meeting. What it exchanges then; None: it has gone on without any exchange.

        That is to its next meeting, or to its end.
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
        """Give the step up. Nothing has been written."""
        self._step.close()


class Driver(Generic[B]):
    """Runs one step of all buckets, and knows its state.

    tasks: of the buckets that have begun their step. due: those whose next phases are the next operations. phases: of
    an exchange, see `Hierarchy.phases`; each begins with the first of the bucket that comes as many buckets later.
    on_comm_stream: on CUDA buckets are launched on a stream apart, unless they free gradients, whose memory the
    backward pass would take for its own at once.
    """

    def __init__(self, transport: Transport, phases: int, *, on_comm_stream: bool = True):
        self._phases, self._has_stream = phases, on_comm_stream
        self.state = StepState.IDLE
        self.channel = transport.new_channel()
        self.tasks: list[BucketTask[B]] = []
        self.due: deque[BucketTask[B]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._sending_from: torch.device | None = None

    @property
    def launched(self) -> int:
        """How many buckets the next step has sent; of one that is suspended, none."""
        return 0 if self.state is StepState.SUSPENDED else len(self.tasks)

    def begin(self) -> None:
        """A step begins: its kind and options are settled."""
        self.state = moved(self.state, "begin")

    def launch(self, bucket: B, step: BucketStep, *, is_alone: bool = False) -> None:
        """Begin the next bucket's step, up to its first Work; then earlier buckets' next phases are due.

        Waits for what was due before: hooks ask `catch_up` first. is_alone: nothing is due, and it comes after what was
        computed so far: what it reads may go once this returns.
        """
        assert bucket.index == len(self.tasks)
        self.state = moved(self.state, "launch")
        self.settle()
        if is_alone:
            with self.channel():
                self.tasks.append(BucketTask(bucket, step))
            return
        with self._sending(bucket.device):
            self.tasks.append(BucketTask(bucket, step))
            self.due.extend(reversed(self.tasks[-self._phases : -1]))
            self.catch_up()

    @contextmanager
    def sending(self, buckets: Sequence[B]) -> Iterator[None]:
        """These are launched in here, of which all gradients are there: the channel and the stream are entered once."""
        devices = {bucket.device for bucket in buckets}
        with self._sending(devices.pop()) if len(devices) == 1 else nullcontext():
            yield

    def catch_up(self, patience_s: float = 0.0) -> bool:
        """Launch what is due, as far as other ranks have sent what that waits for, or do in time. Whether it is all."""
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
        """Launch what is due, and wait for what that waits for."""
        while self.due:
            self._launch_due()

    def _launch_due(self) -> None:
        task = self.due.popleft()
        with self._sending(task.bucket.device):
            task.exchange.advance()

    def suspend(self) -> None:
        """All has been launched; it travels on while the next step computes."""
        self.state = moved(self.state, "suspend")

    def advance(self, indices: Iterable[int], *, is_awaited: bool = False) -> None:
        """The next phase of these buckets of the step that is suspended is due, and launched as by `catch_up`.

        is_awaited: it is launched, and what is computed from here on may read what it has encoded.
        """
        tasks = [self.tasks[index] for index in indices]
        self.due.extend(tasks)
        self.catch_up()
        if is_awaited:
            self.settle()
            self._join_streams({task.bucket.device for task in tasks})

    def resume(self) -> None:
        """The step that was suspended goes on as if it had just been launched."""
        self.state = moved(self.state, "resume")

    def meet(self) -> Sequence[Arrived]:
        """Bring every bucket that has been launched to its meeting; these."""
        self._wait()
        self.state = moved(self.state, "meet")
        meetings = [task.meeting for task in self.tasks]
        assert all(isinstance(each, Arrived) for each in meetings)
        return meetings  # type: ignore[return-value]

    def finish(self, meet: Meet[B] | None = None) -> None:
        """Bring every bucket that has been launched to its end. If some meet the others, `meet` has the answers."""
        try:
            self._wait()
            self._answer_meetings(self.tasks, meet)
        finally:
            self.skip()

    def _wait(self) -> None:
        self.settle()
        devices = {task.bucket.device for task in self.tasks}
        with ExitStack() as streams:
            for device in devices:
                streams.enter_context(self._sending(device))
            comm.wait_all([task.exchange for task in self.tasks])
        self._join_streams(devices)

    def _join_streams(self, devices: set[torch.device]) -> None:
        for device in devices & self._streams.keys():
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def commit(self, decision: Decision, meet: Meet[B] | None = None) -> None:
        """The step is good: all buckets go on, side by side. If some meet again, `meet` has the answers."""
        self.state = moved(self.state, "commit")
        tasks, self.tasks = self.tasks, []
        with self.channel():
            comm.interleave(works for task in tasks if (works := task.answer(decision)) is not None)
        self._answer_meetings(tasks, meet)

    @staticmethod
    def _answer_meetings(tasks: Sequence[BucketTask[B]], meet: Meet[B] | None) -> None:
        """To the end of all: each goes on with its own answer."""
        while waiting := [(task, meeting) for task in tasks if (meeting := task.meeting) is not None]:
            assert meet is not None
            answers = meet([task.bucket for task, _ in waiting], [meeting for _, meeting in waiting])
            for (task, _), answer in zip(waiting, answers, strict=True):
                works = task.answer(answer)
                assert works is None, "behind a second meeting nothing is exchanged by single buckets"

    def resend(self) -> None:
        """All buckets are to be launched once more: forget what has come to its meeting. Nothing was written."""
        self.state = moved(self.state, "resend")
        self._forget()

    def skip(self) -> None:
        """Forget the step, and what was launched and has come to its meeting. Nothing was written."""
        if self.state is not StepState.IDLE:
            self.state = moved(self.state, "skip")
        self._forget()

    def _forget(self) -> None:
        for task in self.tasks:
            task.close()
        self.tasks = []
        self.due.clear()

    @contextmanager
    def _sending(self, device: torch.device) -> Iterator[None]:
        """In the channel. On CUDA, on a stream after what was computed so far: backward does not wait for it."""
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
