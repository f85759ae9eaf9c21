"""A running batch that requests join and leave: continuous batching over a cache with a row for each request.

1. A request waits until a row is free. Requests begin in the order in which they came.
2. Its prompt is read in chunks, one a step, so that a long prompt does not stop the answers of others.
3. A step also decodes one token of every other request at once. Rows stay dense: when a request ends, the last one
   changes places with it. So a step costs what its requests cost, and memory is that of the cache, whatever comes.
4. A row keeps its tokens when its request ends. A prompt that begins as any row does takes those keys and values, and
   computes the rest. If no row is free of tokens, the one whose request ended first is given away.

Rank 0 decides all of this and chooses the tokens. The other ranks `follow`: each message is one pass over the model,
two rows that change places, a copy of a prefix, or an end.

Shape legend: B rows, T new tokens of a row, S slots, V logits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cache import StaticCache
from .engine import InferenceEngine
from .requests import Choice, Options, choice_of, ends_of, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

CHUNK = 256
"""Tokens of a prompt that a step reads: more read prompts faster, and let the answers of others wait longer."""
NOTHING, PASS, COPY, SWAP, CLEAR, END = range(6)
"""What a message asks of the other ranks."""


@dataclass(eq=False)
class Request:
    """One prompt and its answer.

    Attributes:
        prompt: int64 [T], on the CPU.
        most: The most tokens of the answer.
        tokens: The answer so far, with its end token.
        reason: None while it goes on, then "stop" after an end token, "length", "cancelled" or "error".
        error: With the reason "error", why.
        reused: Tokens of the prompt whose keys and values another request had computed.
    """

    prompt: Tensor
    most: int
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    reused: int = 0
    _ends: frozenset[int] = frozenset()
    _choice: Choice | None = None
    _read: int = 0  # tokens of the prompt that are in the cache

    @property
    def filled(self) -> int:
        """Slots of the cache that hold this request's tokens. The newest token of an answer is not there yet."""
        return self._read + max(0, len(self.tokens) - 1)

    @property
    def computed(self) -> Tensor:
        """The tokens in these slots, int64 [filled], on the CPU."""
        answer = torch.tensor(self.tokens[:-1], dtype=torch.int64, device="cpu")
        return torch.cat([self.prompt[: self._read], answer])


@dataclass(eq=False)
class FreeRow:
    """A row that no request has, and the tokens whose keys and values an earlier one left in its first slots."""

    row: int
    tokens: Tensor


class ContinuousBatch:
    """Requests that are answered together, each as `engine.generate` would answer it alone.

    Rank 0 calls `add`, `cancel`, `step` and `close`; every other rank of the engine's transport calls `follow`, once.
    A batch is for one thread. It keeps keys and values of requests that have ended: if the weights have changed, create
    another one.

    Attributes:
        engine: The engine. On one rank it may serve `generate` as well; other ranks only follow, until `close`.
        rows: The most requests that are answered at once.
        running: Requests that have a row, in the order of rows; a prompt that is still being read is the last.
        waiting: Requests that have none yet.
    """

    def __init__(self, engine: InferenceEngine, rows: int = 8, chunk: int = CHUNK):
        """All ranks create it with the same arguments.

        Args:
            engine: The engine.
            rows: The most requests that are answered at once (default 8).
            chunk: Tokens of a prompt that a step reads (default 256).

        Raises:
            ValueError: rows or chunk is below 1, the model does not decode or has an encoder, rows are so long that
                LongRoPE changes with the longest, or the engine replays CUDA graphs, which are of one shape.
        """
        if rows < 1 or chunk < 1:
            raise ValueError(f"expected rows and chunk of at least 1, got {rows} and {chunk}")
        if engine.config.enable_cuda_graph:
            raise ValueError("a batch that requests join has no one shape to replay: set enable_cuda_graph to false")
        if engine.has_encoder:
            raise ValueError(
                f"{type(engine.module).__name__} encodes inputs, which a batch that requests join does not do; call "
                "engine.generate() with a batch of inputs"
            )
        engine.check([torch.zeros(1, dtype=torch.int64, device="cpu")], 1)
        if (most := engine.longest_of_one_rope) is not None and most < engine.slots:
            raise ValueError(
                f"{type(engine.module).__name__} has LongRoPE: a row of more than {most} tokens would change the keys "
                f"of all rows beside it; set max_out_tokens to {most}, or call engine.generate() with one prompt"
            )
        self.engine, self.rows = engine, rows
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._free = [FreeRow(row, nothing) for row in range(rows)]  # in the order in which their requests ended
        self._chunk = min(chunk, engine.slots)
        self._cache = StaticCache(engine.slots)
        self._cache.fit(rows)
        self._message = torch.zeros(4 + rows + max(rows, self._chunk), dtype=torch.int64, device=engine.device)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on this rank, from the first pass on."""
        return self._cache.nbytes

    def add(self, prompt: Tensor | Sequence[int], *, max_new_tokens: int, **options: Unpack[Options]) -> Request:
        """Queue a prompt. Options are those of `engine.generate`.

        Raises:
            ValueError: The prompt with its answer does not fit into a row, a token is none of the vocabulary, or an
                option is not supported.
            TypeError: The prompt is no sequence of integers, or an option is unknown.
        """
        engine = self.engine
        (row,) = rows = rows_of([torch.as_tensor(prompt, device="cpu")], None)
        engine.check(rows, max_new_tokens)
        choice = choice_of(engine.module, rows, None, max_new_tokens, options, engine.device)
        ends = frozenset(ends_of(engine.module, options))
        # clone: the caller may write to its own tensor, and the row would be taken for another prompt's.
        self.waiting.append(request := Request(row.clone(), max_new_tokens, _ends=ends, _choice=choice))
        return request

    def cancel(self, request: Request) -> None:
        """End a request at once, with the tokens that it has. Nothing happens if it has ended."""
        if request.reason is None:
            self._end(request, "cancelled")

    def step(self) -> list[Request]:
        """Read a chunk of a prompt, and decode a token of every other request.

        Without requests it tells the other ranks just that: call it more often than the transport's timeout.

        Returns:
            The requests that got a token or ended, in no order.
        """
        if self.waiting and len(self.running) < self.rows and not self._is_reading():
            self._join(self.waiting.popleft())
        if not self.running:
            self._tell(NOTHING)
            return []
        changed: list[Request] = []
        decoding = self.running[: -1 if self._is_reading() else None]
        if decoding:
            tokens_B1 = torch.tensor([[request.tokens[-1]] for request in decoding], dtype=torch.int64, device="cpu")
            filled = [request.filled for request in decoding]
            self._choose(decoding, self._pass(0, tokens_B1, filled), changed)
        if self._is_reading():
            request = self.running[-1]
            chunk = request.prompt[request._read :][: self._chunk]
            logits_1V = self._pass(len(self.running) - 1, chunk[None], [request._read])
            request._read += len(chunk)
            # A chunk that is not finite ends its request, so that no row keeps what it made.
            if not self._is_reading() or not bool(logits_1V.isfinite().all()):
                self._choose([request], logits_1V, changed)
        return changed

    def follow(self) -> None:
        """Compute what rank 0 computes, until it closes its batch. Raises PeerError if rank 0 is lost or silent."""
        while True:
            self.engine.transport.broadcast(self._message, 0).wait()
            what, first, B, T = self._message[:4].tolist()
            if what == END:
                return
            if what == PASS:
                starts = self._message[4 : 4 + B].tolist()
                self._compute(first, self._message[4 + self.rows :][: B * T].view(B, T).clone(), starts)
            elif what == COPY:
                self._cache.copy(first, B, T)
            elif what == SWAP:
                self._cache.swap(first, B, T)
            elif what == CLEAR:
                self._cache.clear(first)

    def close(self) -> None:
        """End all requests, and the other ranks' `follow`. Once, after the last `step`."""
        for request in [*self.waiting, *self.running]:
            self.cancel(request)
        self._tell(END)

    # ---------------------------------------------------------------- one step

    def _is_reading(self) -> bool:
        return bool(self.running) and self.running[-1]._read < len(self.running[-1].prompt)

    def _join(self, request: Request) -> None:
        """Give a request the next row, with the longest beginning of its prompt that a row has.

        It takes that row itself if the row is free and has no more than this. Else it takes the row whose request ended
        first, and a copy: the rest of the other row may be asked for, too.
        """
        row, wanted = len(self.running), request.prompt[:-1]  # the last token is computed: its logits choose the next
        held = [*self._free, *(FreeRow(at, other.computed) for at, other in enumerate(self.running))]
        # Of several with the same beginning the shortest: it may have no more.
        source = max(held, key=lambda one: (_in_common(wanted, one.tokens), -len(one.tokens)))
        reused = _in_common(wanted, source.tokens)
        own = source if source in self._free and reused == len(source.tokens) else self._free[0]
        if own.row != row:
            moved = next(one for one in self._free if one.row == row)
            self._swap(own.row, row, max(reused, len(moved.tokens)))
            own.row, moved.row = row, own.row
        self._free.remove(own)
        if own is not source and reused:
            self._tell(COPY, source.row, row, reused)
            self._cache.copy(source.row, row, reused)
        request._read = request.reused = reused
        self.running.append(request)

    def _choose(self, requests: list[Request], logits_BV: Tensor, changed: list[Request]) -> None:
        """Append a token to each request, and end those that have their last."""
        changed += requests
        is_finite_B = logits_BV.isfinite().all(1).tolist()
        failed: dict[Request, str] = {}
        for b, request in enumerate(requests):
            if not is_finite_B[b]:
                failed[request] = "the model's logits are not finite"
                continue
            assert request._choice is not None
            try:
                chosen_1 = request._choice.choose(logits_BV[b : b + 1])
                request._choice.follow(chosen_1)
            except (RuntimeError, ValueError, IndexError) as error:  # a rule that fails ends its request alone
                failed[request] = str(error)
            else:
                request.tokens.append(int(chosen_1))
        # Requests end when all have their tokens: then a row that moves knows how far it is filled.
        for request in requests:
            if request in failed:
                self._fail(request, failed[request])
            elif request.tokens[-1] in request._ends:
                self._end(request, "stop")
            elif len(request.tokens) == request.most:
                self._end(request, "length")

    def _fail(self, request: Request, why: str) -> None:
        request.error = why
        row = self.running.index(request)
        self._tell(CLEAR, row)
        self._cache.clear(row)
        self._end(request, "error")

    def _end(self, request: Request, reason: str) -> None:
        request.reason, request._choice = reason, None
        if request in self.waiting:
            self.waiting.remove(request)
            return
        # The last decoding row comes here, and a prompt that is being read takes that one's place: its row is the last.
        row, last = self.running.index(request), len(self.running) - 1
        way = [row, last - 1, last] if self._is_reading() and row < last else [row, last]
        for at, to in pairwise(way):
            one, other = self.running[at], self.running[to]
            self._swap(at, to, max(one.filled, other.filled))
            self.running[at], self.running[to] = other, one
        self.running.pop()
        self._free.append(FreeRow(last, request.computed if reason != "error" else request.prompt[:0]))

    def _swap(self, row: int, to: int, filled: int) -> None:
        if row != to and filled:
            self._tell(SWAP, row, to, filled)
            self._cache.swap(row, to, filled)

    # ---------------------------------------------------------------- over ranks

    def _pass(self, first: int, tokens_BT: Tensor, starts: list[int]) -> Tensor:
        self._tell(PASS, first, *tokens_BT.shape, starts=starts, tokens_BT=tokens_BT)
        return self._compute(first, tokens_BT.to(self.engine.device), starts)

    def _compute(self, first: int, tokens_BT: Tensor, starts: list[int]) -> Tensor:
        """The logits [B, V] after the tokens, each row's own from its slot in `starts` on."""
        (B, T), device = tokens_BT.shape, tokens_BT.device
        slots = (
            torch.arange(starts[0], starts[0] + T, device=device)
            if B == 1
            else torch.tensor(starts, dtype=torch.int64, device=device)[:, None]
        )
        zeros_B = torch.zeros(B, dtype=torch.int64, device=device)
        decodes = first == 0 and T == 1
        return self.engine.run(self._cache, tokens_BT, zeros_B, slots, max(starts) + T, first=first, decodes=decodes)

    def _tell(self, what: int, *about: int, starts: Sequence[int] = (), tokens_BT: Tensor | None = None) -> None:
        if self.engine.transport.world_size == 1:
            return
        payload = [] if tokens_BT is None else tokens_BT.flatten().tolist()
        numbers = [what, *about, *[0] * (3 - len(about)), *starts, *[0] * (self.rows - len(starts)), *payload]
        self._message[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.engine.transport.broadcast(self._message, 0).wait()


def _in_common(tokens: Tensor, others: Tensor) -> int:
    """How many tokens both begin with."""
    T = min(len(tokens), len(others))
    return int((tokens[:T] == others[:T]).cumprod(0).sum())
