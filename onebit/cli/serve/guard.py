"""What stands before every request: who may ask, how large a request may be, and how long its sender may take."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/", "/health")
"""Paths that need no token: they tell nothing of the model's texts."""


class Punctual(H11Protocol):
    """A connection that ends if the other side keeps it waiting for more than `timeout_keep_alive` seconds.

    It has this time for the headers of a request, and to read some of what is ready to be sent. uvicorn would wait for
    both for ever: `Guard` sees a request after its headers have come, and an answer is not asked for while none of it
    is read.
    """

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that every byte that cannot be sent pauses writing
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in filter(None, (self._late, self._unread)):
            timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.timeout_keep_alive, self._look_for_reader, unread)

    def _look_for_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._await_reader()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._limit()
        elif self._late is not None:
            self._late.cancel()
            self._late = None

    def _limit(self) -> None:
        self._late = self._late or self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


class _TooLarge(Exception):
    """The request has more bytes than allowed."""


class Guard:
    """Middleware: 401 without the token, 413 for more bytes than allowed, 408 for a sender that is too slow."""

    def __init__(self, app: ASGIApp, token: str | None, most_bytes: int, read_s: float):
        self._app, self._token, self._most, self._read_s = app, token, most_bytes, read_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._token is not None and scope["path"] not in OPEN and not self._is_known(scope):
            await _refuse(send, 401, "send the server's token: Authorization: Bearer TOKEN", "authentication_error")
            return
        try:
            body = await asyncio.wait_for(self._body(receive), self._read_s)
        except asyncio.TimeoutError:
            about = f"the request did not arrive within {self._read_s:g} seconds"
            await _refuse(send, 408, about, "invalid_request_error")
            return
        except _TooLarge:
            await _refuse(
                send, 413, f"a request may have {self._most} bytes; this one has more", "invalid_request_error"
            )
            return
        if body is None:
            return
        is_given = False

        async def again() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole request; None if its sender went away."""
        body, is_more = bytearray(), True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._most:
                raise _TooLarge
            is_more = message.get("more_body", False)
        return bytes(body)

    def _is_known(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())


async def _refuse(send: Send, status: int, about: str, kind: str) -> None:
    body = json.dumps(error_of(about, kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def error_of(about: str, kind: str) -> dict[str, object]:
    """An error in the form that clients of this interface expect."""
    about = about.encode("utf-8", "backslashreplace").decode()  # it may repeat what is no Unicode
    return {"error": {"message": about, "type": kind, "param": None, "code": None}}
