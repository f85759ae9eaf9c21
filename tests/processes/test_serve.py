"""`onebit serve` with a GPT over bytes: text in pieces, what stands before a request, and answers over HTTP."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from unittest.mock import Mock

import pytest
import torch
from train.model import ModelSize, build_model

from onebit.cli.serve.text import Text
from onebit.zero import ContinuousBatch, init_inference

pytest.importorskip("fastapi", reason="pip install onebit[serve]")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
responses = pytest.importorskip("fastapi.responses")

from onebit.cli.serve import app  # noqa: E402
from onebit.cli.serve.app import Limits, Served, make_app  # noqa: E402
from onebit.cli.serve.guard import Punctual  # noqa: E402
from onebit.cli.serve.worker import Worker  # noqa: E402

TOKEN = "a secret"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def of_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("text", ["", "a", "Äpfel, 日本語 und 🙂", "ends in half 🙂"])
@pytest.mark.parametrize("stops", [[], ["und"], ["n", "日本"], ["never", ""]])
def test_pieces_are_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    """Whatever the pieces: none has half a character, and together they are what comes before the first stop string."""
    tokens = list(text.encode())
    expected = text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]
    pieces, seen = Text(of_bytes, stops), ""
    for n in range(1, len(tokens) + 1):
        seen += pieces.piece(tokens[:n], is_last=n == len(tokens))
        assert expected.startswith(seen)
    assert seen == expected and pieces.is_stopped == (expected != text)


WORDS = ["<s>", " Once", " upon", "on", "\u00e9", "!"]


def of_words(tokens: list[int]) -> str:
    """As Llama's tokenizers decode: a text begins without the space of its first word. Token 0 is special."""
    return "".join(WORDS[token] for token in tokens if token).removeprefix(" ")


@pytest.mark.parametrize("prompt", [[], [0], [0, 1], [0, 1, 3], [2, 0], [5]])
@pytest.mark.parametrize("answer", [[2, 3], [3, 2], [5, 1], [0, 1]])
def test_an_answer_goes_on_where_its_prompt_ends(prompt: list[int], answer: list[int]) -> None:
    pieces, seen = Text(of_words, after=prompt), ""
    for n in range(1, len(answer) + 1):
        seen += pieces.piece(answer[:n], is_last=n == len(answer))
    assert of_words(prompt) + seen == of_words(prompt + answer)


def test_a_prompt_in_parts_of_characters_is_followed_by_whole_ones() -> None:
    """Whatever part of a character the prompt's last token is, and if it is none at all."""
    prompt = list("x 🙂".encode())
    for end in range(len(prompt) + 1):
        assert Text(of_bytes, after=prompt[:end]).piece(list(b" on"), is_last=True) == " on"


def test_half_a_character_at_the_end_is_shown() -> None:
    pieces = Text(of_bytes)
    tokens = list("é".encode())[:1]
    assert pieces.piece([65, *tokens], is_last=False) == "A"
    assert pieces.piece([65, *tokens], is_last=True) == "\ufffd"


# ---------------------------------------------------------------- a server


class Server:
    """A server in a thread, on a port of its own."""

    def __init__(self, rows: int = 4, waiting: int = 300, limits: Limits = Limits(), token: str | None = TOKEN):  # noqa: B008
        torch.manual_seed(0)
        self.engine = init_inference(build_model(ModelSize(layers=2, width=64, heads=4, context=64), seed=3))
        self.batch = ContinuousBatch(self.engine, rows, chunk=8)
        self.worker = Worker(self.batch, waiting, 0.05, lambda: None)

        def chat(messages: list[dict[str, str]]) -> list[int]:
            if messages[-1]["role"] != "user":
                raise ValueError("a user must speak last")
            return list("".join(message["content"] for message in messages).encode())

        served = Served("bytes", self.engine.slots, lambda text: list(text.encode()), of_bytes, chat)
        app = make_app(served, self.worker, limits, token)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()
        waits = {"timeout_keep_alive": limits.read_s, "timeout_graceful_shutdown": 2}
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, http=Punctual, **waits))
        self.connections = self._server.server_state.connections
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self.socket]))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def post(self, path: str = "/v1/completions", **fields: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=fields, headers=HEADERS, timeout=30.0)

    def alone(self, prompt: str, most: int, **options: object) -> list[int]:
        tokens = list(prompt.encode())
        return self.engine.generate([tokens], max_new_tokens=most, **options)[0].tolist()[len(tokens) :]  # type: ignore[arg-type]

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with closing(Server()) as running:
        yield running


@contextmanager
def narrow(read_s: float) -> Iterator[tuple[Server, socket.socket]]:
    """A server and a connection to it, with so little memory between them that an answer waits to be read."""
    with closing(Server(limits=Limits(read_s=read_s), token=None)) as server, socket.socket() as connection:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(server.address)
        yield server, connection


def eventually(holds: object, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while not holds():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_completion_goes_on_and_a_chat_begins(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole answers and streams: the tokens after which their texts are decoded."""
    after: list[list[int]] = []
    monkeypatch.setattr(app, "Text", lambda *of: after.append(list(of[2])) or Text(*of))
    for stream in (False, True):
        server.post(prompt="Once", max_tokens=1, stream=stream)
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, stream=stream)
    assert after == [list(b"Once"), []] * 2


def test_an_answer_whole_and_in_pieces(server: Server) -> None:
    expected = of_bytes(server.alone("Once", 12))
    whole = server.post(prompt="Once", max_tokens=12, temperature=0).json()
    assert whole["choices"][0]["text"] == expected and whole["choices"][0]["finish_reason"] == "length"
    usage = whole["usage"]
    assert usage.pop("prompt_tokens_details")["cached_tokens"] in range(4)  # as earlier tests have asked
    assert usage == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    streamed = server.post(prompt=list(b"Once"), max_tokens=12, stream=True, temperature=0).text
    lines = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and "".join(event["choices"][0]["text"] for event in events) == expected
    assert [event["choices"][0]["finish_reason"] for event in events[-2:]] == [None, "length"]
    assert all("usage" not in event for event in events)
    talk = [{"role": "system", "content": "On"}, {"role": "user", "content": "ce"}]
    chat = server.post("/v1/chat/completions", messages=talk, max_tokens=12).json()
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert chat["object"] == "chat.completion"


@pytest.mark.parametrize("how", ["prompt", "messages"])
def test_a_streamed_answer_tells_its_usage_if_asked(server: Server, how: str) -> None:
    """By OpenAI's rule: an event of its own before the end, without a choice; null in the others."""
    path = "/v1/completions" if how == "prompt" else "/v1/chat/completions"
    asked = {"prompt": "Once", "messages": [{"role": "user", "content": "Once"}]}
    body = {how: asked[how], "max_tokens": 12, "temperature": 0}
    usage = server.post(path, **body).json()["usage"]
    streamed = server.post(path, **body, stream=True, stream_options={"include_usage": True}).text
    lines = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    *events, last = [json.loads(line) for line in lines[:-1]]
    assert events and all(event["usage"] is None and event["choices"] for event in events)
    reused = last["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert usage.pop("prompt_tokens_details")["cached_tokens"] <= reused <= 3
    assert last["choices"] == [] and last["usage"] == usage and last["object"] == events[0]["object"]
    silent = server.post(path, **body, stream=True, stream_options={"include_usage": False}).text
    assert "usage" not in silent
    refused = server.post(path, **body, stream_options={"include_usage": True})
    assert refused.status_code == 400 and "stream_options" in refused.json()["error"]["message"]


def test_a_talk_computes_its_new_tokens_alone(server: Server) -> None:
    """Sampled answers are as alone, whatever is taken from the turn before."""
    talk = [{"role": "system", "content": "Speak as a pirate."}, {"role": "user", "content": "Who?"}]
    text, held = "".join(message["content"] for message in talk), 0
    for turn in range(3):
        how = {"temperature": 0.9, "seed": turn}
        answer = server.post("/v1/chat/completions", messages=talk, max_tokens=2, **how).json()
        said = answer["choices"][0]["message"]["content"]
        assert said == of_bytes(server.alone(text, 2, do_sample=True, **how))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= held
        held, text = len(text.encode()), text + said + "And?"
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    assert held > 30


def test_a_stop_string_ends_the_answer(server: Server) -> None:
    text = of_bytes(server.alone("Once", 30))
    stop = next(text[n : n + 2] for n in range(3, len(text)) if "\ufffd" not in text[n : n + 2])
    answer = server.post(prompt="Once", max_tokens=30, stop=["x" * 40, stop]).json()["choices"][0]
    assert answer["text"] == text[: text.index(stop)] and answer["finish_reason"] == "stop"
    assert eventually(lambda: not server.batch.running)


@pytest.mark.parametrize(
    ("fields", "status", "about"),
    [
        ({"prompt": "x", "logprobs": 2}, 400, "logprobs: this server has no such option"),
        ({"prompt": "x", "n": 2}, 400, "n: "),
        ({"prompt": "x", "max_tokens": "4"}, 400, "max_tokens: "),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens: "),
        ({"prompt": "x", "temperature": -1}, 400, "temperature: "),
        ({"prompt": "x", "temperature": float("nan")}, 400, "temperature: "),
        ({"prompt": "x", "temperature": 1e-310}, 400, "divided by a temperature that is too small"),
        ({"prompt": "x", "temperature": 5e-324, "top_k": 3}, 400, "divided by a temperature that is too small"),
        ({"prompt": "x", "max_tokens": 100}, 400, "do not fit into the cache of 64"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": [2**70]}, 400, "prompt.0: Input should be less than"),
        ({"prompt": "x", "stop": ["y"] * 17}, 400, "stop: List should have at most 16"),
        ({"prompt": "\ud800"}, 400, "prompt: "),
        ({"prompt": "x", "\ud800": 1}, 400, "expected a JSON object"),
        ({"prompt": "x", "model": "\ud800"}, 404, "this server has bytes"),
        ({"prompt": [-1]}, 400, "expected tokens from 0"),
        ({"prompt": "x", "repetition_penalty": 1.2}, 400, "repetition_penalty"),
        ({"prompt": "x", "model": "gpt-5"}, 404, "this server has bytes, not gpt-5"),
        ({}, 400, "prompt: "),
        ({"prompt": "x" * (1 << 20)}, 413, "may have 1048576 bytes"),
    ],
)
def test_a_wrong_request_is_a_sentence(server: Server, fields: dict, status: int, about: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=json.dumps(fields), headers={
        **HEADERS, "content-type": "application/json"}, timeout=30.0)  # fmt: skip
    assert answer.status_code == status and about in answer.json()["error"]["message"], answer.text


def test_what_is_no_request(server: Server) -> None:
    url, json_type = f"{server.url}/v1/completions", {**HEADERS, "content-type": "application/json"}
    for content, headers, about in ((b"{", json_type, "not JSON"), (b"[]", json_type, "JSON object"),
                                    (b"[" * 100_000, json_type, "parsing the body"),
                                    (b'{"prompt": "x"}', HEADERS, "content-type: application/json")):  # fmt: skip
        answer = httpx.post(url, content=content, headers=headers)
        assert answer.status_code == 400 and about in answer.json()["error"]["message"], answer.text
    talk = [{"role": "assistant", "content": "me"}]
    assert "a user must speak last" in server.post("/v1/chat/completions", messages=talk).text
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": TOKEN}):
        answer = httpx.post(url, json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 401 and "Bearer" in answer.json()["error"]["message"]
    assert httpx.get(server.url).text.startswith("<!doctype html>")
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


@pytest.mark.slow
def test_eighty_requests_of_which_some_go_away(server: Server) -> None:
    """Of random lengths, at once; every answer is that of the request alone, and those who leave free their rows."""
    draw = random.Random(5)
    asked = [("".join(draw.choices("abcdef", k=draw.randint(1, 30))), draw.randint(1, 30)) for _ in range(80)]
    memory = None

    def ask(k: int) -> bool:
        prompt, most = asked[k]
        how = {"temperature": 0.9, "seed": k} if k % 3 == 0 else {"temperature": 0}
        if k % 7 == 0:  # reads a little of the answer, or nothing, and goes away
            fields = {"prompt": prompt, "max_tokens": 34, "stream": k % 2 == 0}
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=fields, headers=HEADERS, timeout=60.0
            ) as left:
                if k % 2 == 0:
                    next(left.iter_text())
            return True
        answer = server.post(prompt=prompt, max_tokens=most, **how)
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected[k]

    expected = {}
    for k, (prompt, most) in enumerate(asked):
        options = {"do_sample": True, "temperature": 0.9, "seed": k} if k % 3 == 0 else {}
        expected[k] = of_bytes(server.alone(prompt, most, **options))
    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(ask, range(40)))
        memory = server.batch.cache_bytes
        assert all(pool.map(ask, range(40, 80)))
    assert eventually(lambda: not server.batch.running and not server.batch.waiting)
    assert server.batch.cache_bytes == memory


def test_a_reader_who_goes_away_frees_the_row(server: Server) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", headers=HEADERS, json={
        "prompt": "x", "max_tokens": 63, "stream": True, "temperature": 1, "seed": 1}) as answer:  # fmt: skip
        next(answer.iter_text())
    assert eventually(lambda: not server.batch.running)


def test_a_reader_of_a_whole_answer_who_goes_away_frees_the_row(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while tokens come faster than the server looks."""
    monkeypatch.setattr(app, "LOOK_S", 1.0)
    step, request = server.batch.step, json.dumps({"prompt": "x", "max_tokens": 63, "temperature": 1, "seed": 1})

    def slow() -> object:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(server.batch, "step", slow)
    with socket.create_connection(server.address, timeout=10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(request)}\r\n\r\n"
        connection.sendall(f"{head}{request}".encode())
        assert eventually(lambda: any(one.tokens for one in server.batch.running))
    (answer,) = server.batch.running
    assert eventually(lambda: answer.reason) and answer.reason == "cancelled"


def test_too_many_too_slow_and_other_names() -> None:
    """A server with little room tells whom it cannot take, whose answer takes too long, and who is too slow to ask."""
    limits = Limits(read_s=0.5, answer_s=2.0, hosts=("127.0.0.1",))
    with closing(Server(rows=1, waiting=0, limits=limits, token=None)) as server:
        hold, step = threading.Event(), server.batch.step

        def slow() -> object:
            hold.wait(0.3)
            return step()

        server.batch.step = slow  # type: ignore[method-assign,assignment]
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.post, prompt="x", max_tokens=30)
            assert eventually(lambda: server.batch.running)
            assert server.post(prompt="y").status_code == 429
            assert first.result().status_code == 504
            hold.set()
        assert eventually(lambda: not server.batch.running)
        assert server.post(prompt="y", max_tokens=1).status_code == 200
        connection = socket.create_connection(server.address, timeout=10)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10\r\n\r\n{")
        assert b"408" in connection.recv(100)
        assert httpx.get(server.url, headers={"host": "evil.example"}).status_code == 400


def test_a_connection_without_a_whole_request_ends() -> None:
    """Those that bring no request, or half of its headers, would leave no connection to others."""
    whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with closing(Server(limits=Limits(read_s=0.5), token=None)) as server:
        for begun, answers in ((b"", 0), (b"GET /health HT", 0), (whole * 2 + b"GET /health HT", 2)):
            with socket.create_connection(server.address) as connection:
                connection.settimeout(0.1)
                connection.sendall(begun)
                began, answer = time.monotonic(), b""
                with suppress(ConnectionError):
                    while time.monotonic() < began + 10:
                        try:
                            if not (part := connection.recv(1000)):
                                break
                            answer += part
                        except TimeoutError:
                            connection.sendall(b"x" * bool(begun))
            assert time.monotonic() < began + 5 and answer.count(b"HTTP/1.1 200") == answers


@pytest.mark.parametrize("path", ["/", "/v1/completions"])
def test_a_connection_that_reads_nothing_ends(path: str) -> None:
    """With its answer: those that ask and do not read would leave no connection to others.

    Eight pages are written before any of them is sent; a stream waits between its events.
    """
    body = json.dumps({"prompt": "x", "max_tokens": 60, "temperature": 0, "stream": True})
    page, head = "GET / HTTP/1.1\r\nhost: x\r\n\r\n", f"POST {path} HTTP/1.1\r\nhost: x\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with narrow(read_s=0.5) as (server, connection):
        connection.sendall((page * 8 if path == "/" else head + body).encode())
        assert eventually(lambda: server.connections)
        assert eventually(lambda: not server.connections and not server.batch.running, within_s=5)


def test_a_connection_that_reads_slowly_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes several times as long as a connection may read nothing."""
    whole = "x" * 2**15
    monkeypatch.setattr(app, "HTMLResponse", lambda page: responses.HTMLResponse(whole))
    with narrow(read_s=0.4) as (_, connection):
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        found = b""
        while part := connection.recv(2048):
            found += part
            time.sleep(0.1)
    assert found.endswith(whole.encode())


def test_a_call_whose_caller_has_gone_does_not_end_the_worker(server: Server) -> None:
    calls = [server.worker.submit([1], 1, {}, lambda _: None) for _ in range(50)]
    assert any(call.cancel() for call in calls)
    assert server.post(prompt="x", max_tokens=1).status_code == 200


def test_a_model_that_fails_tells_all_and_refuses_the_next() -> None:
    with closing(Server(rows=2)) as server:
        server.batch.step = Mock(side_effect=MemoryError("no memory for this"))  # type: ignore[method-assign]
        answers = [server.post(prompt="x", max_tokens=3) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "no memory for this" in answers[0].text and "no memory for this" in answers[1].text
        assert httpx.get(f"{server.url}/health").status_code == 503
