"""The batch in a thread of its own, so that the web server answers while the model computes.

Only this thread touches the batch: the server gives it calls, which run between two steps, and gets answers piece by
piece through callbacks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ...zero.inference.batch import ContinuousBatch, Request

log = logging.getLogger(__name__)

CLOSING = "the server is closing"
Listener = Callable[[Request], None]


class BusyError(Exception):
    """As many requests wait as may wait."""


class WorkerError(Exception):
    """The model cannot answer any more: a rank is lost, or memory is used up."""


class Worker:
    """Steps a batch while there are requests, and at least every `idle_s` seconds.

    Attributes:
        batch: The batch; other threads may look at how many requests it has, and must not call it.
        failure: Why nothing is answered any more, or None.
    """

    def __init__(self, batch: ContinuousBatch, most_waiting: int, idle_s: float, on_failure: Callable[[], None]):
        """
        Args:
            batch: The batch, on rank 0.
            most_waiting: Requests that may wait for a row; one more is refused.
            idle_s: The other ranks wait for a message, and for no longer than their transport's timeout.
            on_failure: Called in the thread once nothing is answered any more.
        """
        self.batch = batch
        self.failure: str | None = None
        self._most_waiting, self._idle_s, self._on_failure = most_waiting, idle_s, on_failure
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._listeners: dict[Request, Listener] = {}
        self._thread = threading.Thread(target=self._run, name="onebit serve", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], most: int, options: dict[str, Any], listener: Listener) -> Future[Request]:
        """Queue a request. The listener is called in the worker's thread after each of its tokens, and at its end.

        The future raises BusyError, WorkerError, or what `ContinuousBatch.add` raises.
        """

        def add() -> Request:
            if len(self.batch.running) + len(self.batch.waiting) >= self.batch.rows + self._most_waiting:
                raise BusyError(
                    f"{self.batch.rows} requests are answered and {self._most_waiting} wait; try again later"
                )
            request = self.batch.add(prompt, max_new_tokens=most, **options)
            self._listeners[request] = listener
            return request

        return self._call(add)

    def cancel(self, request: Request) -> None:
        """End a request, soon and without a word to its listener."""

        def end() -> None:
            self._listeners.pop(request, None)
            self.batch.cancel(request)

        self._call(end)

    def close(self, timeout_s: float) -> None:
        """End the thread after its step, and the other ranks with it."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, function))
        if self.failure is not None:  # the thread may have ended before it saw this call
            self._refuse()
        return future

    def _run(self) -> None:
        try:
            while self._answer_calls():
                for request in self.batch.step():
                    self._tell(request)
            self.batch.close()
            for request in list(self._listeners):
                self._tell(request)
        except Exception as error:
            log.exception("onebit serve: nothing is answered any more")
            self.failure = f"{type(error).__name__}: {error}"
            for request, listener in list(self._listeners.items()):
                request.reason, request.error = "error", self.failure
                listener(request)
            self._on_failure()
        self.failure = self.failure or CLOSING
        self._refuse()

    def _answer_calls(self) -> bool:
        """Make the calls that came; without requests wait for one. False: close."""
        is_idle = not self.batch.running and not self.batch.waiting
        try:
            while True:
                call = self._calls.get(timeout=self._idle_s) if is_idle else self._calls.get_nowait()
                if call is None:
                    return False
                is_idle = False
                future, function = call
                if not future.set_running_or_notify_cancel():  # who asked has gone away
                    continue
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
        except queue.Empty:
            return True

    def _tell(self, request: Request) -> None:
        listener = self._listeners.get(request)
        if listener is not None:
            listener(request)
        if request.reason is not None:
            self._listeners.pop(request, None)

    def _refuse(self) -> None:
        with suppress(queue.Empty):  # the server's thread and this one may both be here
            while True:
                call = self._calls.get_nowait()
                if call is not None and call[0].set_running_or_notify_cancel():
                    call[0].set_exception(WorkerError(self.failure))
