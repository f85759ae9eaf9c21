"""The driver: the steps of all buckets side by side, from the first Work to the last meeting.

A bucket's next phase is launched with phase 1 of the bucket so many behind it; what is left is brought home in rounds.
So every rank launches the same sequence of operations, whether during backward or in step().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from .. import comm
from ..comm import Exchange, ExchangeTask
from ..layout.bucket import Bucket
from .bucket_step import Answer, Arrived, BucketStep, Decision, Meeting

NEXT_PHASE_BEHIND = 2  # until then so many buckets are on the wire


class BucketTask:
    """A bucket's step under way. said: what it says at the meeting that it has come to; None: it is through."""

    def __init__(self, bucket: Bucket, step: BucketStep):
        self.bucket = bucket
        self.said: Meeting | None = None
        self._step = step
        self.exchange = ExchangeTask(self._works())

    def _works(self) -> Exchange:
        said = next(self._step)
        while not isinstance(said, Meeting):
            yield said
            said = next(self._step)
        self.said = said

    def answer(self, answer: Answer) -> None:
        """Tell it what was decided where it has met the others; it goes on to its next meeting, or to its end."""
        try:
            said = self._step.send(answer)
        except StopIteration:
            self.said = None
        else:
            assert isinstance(said, Meeting), "behind the decision nothing is exchanged by single buckets"
            self.said = said

    def close(self) -> None:
        """Give the step up. Nothing has been written."""
        self._step.close()


class Driver:
    """Runs one step of all buckets. phases: of an exchange, see `Hierarchy.phases`."""

    def __init__(self, phases: int):
        self._phases = phases
        self._tasks: list[BucketTask] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def launched(self) -> int:
        """How many buckets have begun their step."""
        return len(self._tasks)

    def launch(self, bucket: Bucket, make: Callable[[], BucketStep]) -> None:
        """Begin the next bucket's step, up to its first Work; and earlier buckets' next phases."""
        assert bucket.index == len(self._tasks)
        with self._on_comm_stream(bucket.device):
            self._tasks.append(BucketTask(bucket, make()))
            for phase in range(1, self._phases):
                behind = bucket.index - phase * NEXT_PHASE_BEHIND
                if behind >= 0:
                    self._tasks[behind].exchange.advance()

    def wait(self) -> Sequence[Arrived]:
        """Bring every bucket that has been launched to its meeting; what they say."""
        devices = {task.bucket.device for task in self._tasks}
        with ExitStack() as streams:
            for device in devices:
                streams.enter_context(self._on_comm_stream(device))
            comm.wait_all([task.exchange for task in self._tasks])
        for device in devices & self._streams.keys():
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        said = [task.said for task in self._tasks]
        assert all(isinstance(each, Arrived) for each in said)
        return said  # type: ignore[return-value]

    def commit(
        self, decision: Decision, meet: Callable[[Sequence[Bucket], Sequence[Meeting]], Sequence[Answer]]
    ) -> None:
        """The step is good: all buckets go on. Where some meet again, `meet` has the answers."""
        for task in self._tasks:
            task.answer(decision)
        while waiting := [(task, said) for task in self._tasks if (said := task.said) is not None]:
            answers = meet([task.bucket for task, _ in waiting], [said for _, said in waiting])
            for (task, _), answer in zip(waiting, answers, strict=True):
                task.answer(answer)
        self._tasks = []

    def give_up(self) -> None:
        """Forget what was launched and has come to its meeting. Nothing was written."""
        for task in self._tasks:
            task.close()
        self._tasks = []

    @contextmanager
    def _on_comm_stream(self, device: torch.device) -> Iterator[None]:
        """On CUDA, a stream of the optimizer's own, behind what was computed so far: backward does not wait for it."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
