"""The web interface: OpenAI's completions and chat completions, for one model.

Source: OpenAI's API reference, "Completions" and "Chat completions". A field that is not here is an error by its name.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ...zero.inference.batch import Request as Answer
from .guard import Guard, error_of
from .text import Text
from .worker import BusyError, Worker, WorkerError

LOOK_S = 0.25
"""How often an answer under way looks whether its reader is still there."""


@dataclass(frozen=True)
class Served:
    """The model as the interface sees it.

    Attributes:
        name: The name in answers, and the only one that requests may name.
        slots: The most tokens of a prompt with its answer; of an encoder-decoder, of each.
        encode: Text to tokens.
        decode: Tokens to text, without special tokens.
        chat: Messages to tokens; None if the model has no chat template. It raises what its template raises.
    """

    name: str
    slots: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    chat: Callable[[list[dict[str, str]]], list[int]] | None


@dataclass(frozen=True)
class Limits:
    """What a request may ask, and how long it may take.

    Attributes:
        most_bytes: Of a request.
        read_s: Seconds until all of it must be here, counted again once its headers are.
        answer_s: Seconds until its answer must have ended.
        hosts: Names by which requests may address this server; None: any.
    """

    most_bytes: int = 1 << 20
    read_s: float = 20.0
    answer_s: float = 600.0
    hosts: tuple[str, ...] | None = None


class StreamOptions(BaseModel):
    """include_usage: Whether an event before [DONE] has the usage, and no choice."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Asked(BaseModel):
    """What both kinds of requests may say. Fields that are absent follow the model's generation_config."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    user: str | None = None

    def options(self) -> dict[str, Any]:
        """The options of `generate`. Temperature 0 is the likeliest token, whatever else is asked."""
        names = ("temperature", "top_p", "top_k", "min_p")
        draws = {name: value for name in names if (value := getattr(self, name)) is not None}
        how: dict[str, Any] = {"seed": self.seed}
        if self.repetition_penalty is not None:
            how["repetition_penalty"] = self.repetition_penalty
        if self.temperature == 0:
            return how | {"do_sample": False}
        return how | draws | ({"do_sample": True} if draws else {})

    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop


class Completion(_Asked):
    prompt: str | list[Annotated[int, Field(ge=-(2**63), lt=2**63)]]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class Chat(_Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class _Refusal(Exception):
    """An answer that is an error: status, kind and sentence."""

    def __init__(self, status: int, about: str, kind: str = "invalid_request_error"):
        super().__init__(about)
        self.status, self.kind = status, kind


@dataclass
class _Form:
    """How a kind of answer is written: OpenAI's `object`, whole and in pieces."""

    name: str
    whole: Callable[[str], dict[str, object]]
    piece: Callable[[str], dict[str, object]]


_FORMS = {
    Completion: _Form("text_completion", lambda text: {"text": text}, lambda text: {"text": text}),
    Chat: _Form(
        "chat.completion",
        lambda text: {"message": {"role": "assistant", "content": text}},
        lambda text: {"delta": {"role": "assistant", "content": text}},
    ),
}


def make_app(served: Served, worker: Worker, limits: Limits, token: str | None) -> FastAPI:
    """The application. The worker must run, and is closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close, 30.0)

    app = FastAPI(title="onebit serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, token=token, most_bytes=limits.most_bytes, read_s=limits.read_s)
    if limits.hosts is not None:  # a page of another site that calls its own name 127.0.0.1 does not come through
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(limits.hosts))
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_of(_sentence(error.errors()[-1]), "invalid_request_error"), 400)

    @app.exception_handler(HTTPException)
    async def _(_: Request, error: HTTPException) -> JSONResponse:
        about = error_of(str(error.detail), "invalid_request_error")
        return JSONResponse(about, error.status_code, error.headers)

    @app.exception_handler(_Refusal)
    async def _(_: Request, refusal: _Refusal) -> JSONResponse:
        headers = {"retry-after": "1"} if refusal.status == 429 else None
        return JSONResponse(error_of(str(refusal), refusal.kind), refusal.status, headers)

    @app.get("/")
    async def _() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/health")
    async def _() -> JSONResponse:
        about = {"status": "failed" if worker.failure else "ok", "running": len(worker.batch.running)}
        return JSONResponse(about | {"waiting": len(worker.batch.waiting)}, 503 if worker.failure else 200)

    @app.get("/v1/models")
    async def _() -> dict[str, object]:
        one = {"id": served.name, "object": "model", "created": 0, "owned_by": "onebit", "max_model_len": served.slots}
        return {"object": "list", "data": [one]}

    @app.post("/v1/completions")
    async def _(asked: Completion, request: Request) -> Response:
        try:
            tokens = served.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        except (ValueError, TypeError) as error:  # a text that is no Unicode
            raise _Refusal(400, f"prompt: {error}") from error
        # An encoder-decoder's answer is a text of its own, and so is that of a chat.
        after = [] if worker.batch.engine.has_encoder else tokens
        return await _answer(asked, tokens, asked.max_tokens or 16, request, after)

    @app.post("/v1/chat/completions")
    async def _(asked: Chat, request: Request) -> Response:
        if served.chat is None:
            raise _Refusal(400, f"{served.name} has no chat template: use /v1/completions")
        try:
            tokens = served.chat([message.model_dump() for message in asked.messages])
        except Exception as error:  # a template may raise anything, as for two users in a row
            raise _Refusal(400, f"messages: the model's chat template refuses them: {error}") from error
        # An encoder's inputs have positions of their own: only the decoder's first token is beside the answer.
        held = 1 if worker.batch.engine.has_encoder else len(tokens)
        most = asked.max_completion_tokens or asked.max_tokens or max(1, served.slots - held)
        return await _answer(asked, tokens, most, request)

    async def _answer(
        asked: Completion | Chat, tokens: list[int], most: int, request: Request, after: Sequence[int] = ()
    ) -> Response:
        if asked.model not in (None, served.name):
            raise _Refusal(404, f"model: this server has {served.name}, not {asked.model}")
        if asked.stream_options is not None and not asked.stream:
            raise _Refusal(400, 'stream_options: they belong to "stream": true')
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[list[int], str | None]]()

        def tell(answer: Answer) -> None:
            loop.call_soon_threadsafe(news.put_nowait, (list(answer.tokens), answer.reason))

        try:
            answer = await asyncio.wrap_future(worker.submit(tokens, most, asked.options(), tell))
        except BusyError as error:
            raise _Refusal(429, str(error), "rate_limit_error") from error
        except WorkerError as error:
            raise _Refusal(503, str(error), "server_error") from error
        except (ValueError, TypeError) as error:
            raise _Refusal(400, str(error)) from error
        text = Text(served.decode, asked.stops(), after)
        form, about = _FORMS[type(asked)], {"id": f"onebit-{uuid.uuid4().hex}", "created": int(time.time())}
        about["model"] = served.name
        pieces = _pieces(answer, news, text, request)

        def usage() -> dict[str, object]:
            return {
                "prompt_tokens": len(tokens),
                "completion_tokens": len(answer.tokens),
                "total_tokens": len(tokens) + len(answer.tokens),
                "prompt_tokens_details": {"cached_tokens": answer.reused},
            }

        if asked.stream:
            tells_usage = asked.stream_options is not None and asked.stream_options.include_usage
            events = _events(form, about, pieces, usage if tells_usage else None)
            return StreamingResponse(events, media_type="text/event-stream")
        parts = [part async for part in pieces]
        choice = {"index": 0, **form.whole("".join(piece for piece, _ in parts)), "logprobs": None}
        choice["finish_reason"] = parts[-1][1]
        return JSONResponse({**about, "object": form.name, "choices": [choice], "usage": usage()})

    async def _pieces(
        answer: Answer, news: asyncio.Queue[tuple[list[int], str | None]], text: Text, request: Request
    ) -> AsyncIterator[tuple[str, str | None]]:
        """Pieces of the answer's text, the last with the reason for its end. Whoever leaves early cancels it."""
        end, next_look = time.monotonic() + limits.answer_s, 0.0
        try:
            while True:
                if (now := time.monotonic()) > end:
                    raise _Refusal(504, f"not answered within {limits.answer_s:g} seconds", "server_error")
                if now > next_look:  # between tokens, too: who waits for a whole answer is sent nothing that could fail
                    next_look = now + LOOK_S
                    if await request.is_disconnected():
                        raise _Refusal(499, "the client went away")
                try:
                    tokens, reason = await asyncio.wait_for(news.get(), LOOK_S)
                except asyncio.TimeoutError:
                    continue
                if answer.is_refused:  # by the rules that its options make of the logits
                    raise _Refusal(400, str(answer.error))
                if reason in ("error", "cancelled"):
                    raise _Refusal(500 if worker.failure is None else 503, answer.error or reason, "server_error")
                piece = text.piece(tokens, is_last=reason is not None)
                if text.is_stopped or reason is not None:
                    yield piece, "stop" if text.is_stopped else reason
                    return
                if piece:
                    yield piece, None
        finally:
            if answer.reason is None:
                worker.cancel(answer)

    return app


def _sentence(error: dict[str, Any]) -> str:
    """What is wrong with a request, from pydantic's last error: if text or a list may come, the first is of text."""
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "str") and "[" not in str(part))
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    if error["type"] == "extra_forbidden":
        return f"{place}: this server has no such option"
    return f"{place}: {error['msg']}" if place else "expected a JSON object, with content-type: application/json"


async def _events(
    form: _Form,
    about: dict[str, Any],
    pieces: AsyncIterator[tuple[str, str | None]],
    usage: Callable[[], dict[str, object]] | None,
) -> AsyncIterator[str]:
    """Server-sent events: a line for each piece, one for the usage if it is asked for, and [DONE].

    An error after the first piece is a line, too, and the last before [DONE].
    """
    about = {**about, "object": form.name if form.name == "text_completion" else f"{form.name}.chunk"}
    no_usage = {} if usage is None else {"usage": None}
    try:
        async for piece, reason in pieces:
            choice = {"index": 0, **form.piece(piece), "logprobs": None, "finish_reason": reason}
            yield f"data: {json.dumps({**about, 'choices': [choice], **no_usage})}\n\n"
        if usage is not None:
            yield f"data: {json.dumps({**about, 'choices': [], 'usage': usage()})}\n\n"
    except _Refusal as refusal:
        yield f"data: {json.dumps(error_of(str(refusal), refusal.kind))}\n\n"
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    yield "data: [DONE]\n\n"
