"""A running batch that requests join and leave: continuous batching over a cache with a row for each request.

1. A request waits until a row is free. Requests begin in the order in which they came.
2. Its prompt is read in chunks, one a step, so that a long prompt does not stop the answers of others.
3. A step also decodes one token of every other request at once. Rows stay dense: when a request ends, the last one
   changes places with it. So a step costs what its requests cost, and memory is that of the cache, whatever comes.
4. A row keeps its tokens when its request ends. A prompt that begins as any row does takes those keys and values, and
   computes the rest. If no row is free of tokens, the one whose request ended first is given away.
5. An encoder-decoder encodes a request's inputs in one pass, just before its decoder's prompt is read. A row then also
   has the keys and values that attend to these inputs, and takes nothing from other rows: they depend on the inputs.

LongRoPE turns the keys of a row beyond its border by other angles (`rope.py`). So the first chunk of a longer prompt
ends beyond it, a row that grows beyond it is computed anew in one pass, and prompts take nothing from rows on its other
side.

Rank 0 decides all of this and chooses the tokens. The other ranks `follow`: each order is one pass over the model, two
rows that change places, a copy of a prefix, inputs to encode, or an end.

If the ranks are stages of a pipeline, rows are divided into as many groups as there are stages, each of which is such a
dense batch. A group's pass goes from stage to stage while those of other groups do; its tokens are chosen in the next
step, when it has come to rank 0. All ranks, rank 0 too, carry out orders one after the other, so that what is decided
while passes are under way comes after them everywhere. The chunks of a prompt need not wait for each other.

Shape legend: B rows, T new tokens of a row, S slots, V logits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...comm import PeerError
from .cache import Source, StaticCache
from .encoded import SourceRows, place_by_row
from .engine import InferenceEngine
from .initializing import a_few_tokens, distance, tolerance
from .requests import Choice, Options, choice_of, ends_of, rows_of, start_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack

CHUNK = 256
"""Tokens of a prompt that a step reads: more read prompts faster, and let the answers of others wait longer."""
NOTHING, PASS, COPY, SWAP, CLEAR, ENCODE, END = range(7)
"""What an order asks of all ranks."""


@dataclass(eq=False)
class Request:
    """One prompt and its answer.

    Attributes:
        prompt: int64 [T], on the CPU. Of an encoder-decoder its decoder's prompt.
        most: The most tokens of the answer.
        tokens: The answer so far, with its end token.
        reason: None while it goes on, then "stop" after an end token, "length", "cancelled" or "error".
        error: With the reason "error", why.
        is_refused: With the reason "error", whether the request's own options are why.
        reused: Tokens of the prompt whose keys and values another request had computed.
        inputs: Of an encoder-decoder what it encodes, int64 [E], on the CPU; else None.
    """

    prompt: Tensor
    most: int
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    is_refused: bool = False
    reused: int = 0
    inputs: Tensor | None = None
    _ends: frozenset[int] = frozenset()
    _choice: Choice | None = None
    _read: int = 0  # tokens of the prompt that are in the cache
    _under_way: int = 0  # tokens of passes that have not been answered

    @property
    def filled(self) -> int:
        """Slots of the cache that hold this request's tokens. The newest token of an answer is not there yet."""
        return self._read + max(0, len(self.tokens) - 1)

    @property
    def computed(self) -> Tensor:
        """The tokens in these slots, int64 [filled], on the CPU; none if their keys depend on an encoder's inputs."""
        if self.inputs is not None:
            return self.prompt[:0]
        answer = torch.tensor(self.tokens[:-1], dtype=torch.int64, device="cpu")
        return torch.cat([self.prompt[: self._read], answer])


@dataclass(eq=False)
class FreeRow:
    """A row that no request has, and the tokens whose keys and values an earlier one left in its first slots."""

    row: int
    tokens: Tensor


class Order(NamedTuple):
    """What all ranks do: `what`, with up to three numbers; for a pass each row's first slot and the tokens [B, T]."""

    what: int
    about: tuple[int, ...] = ()
    starts: Sequence[int] = ()
    tokens_BT: Tensor | None = None


@dataclass(eq=False)
class Pass:
    """A pass that has been ordered: the requests of its rows, and how many tokens of a prompt it reads; 0: it decodes.

    logits_BV: After this rank has computed it.
    """

    requests: list[Request]
    chunk: int = 0
    logits_BV: Tensor | None = None


@dataclass(eq=False)
class Group:
    """Requests that are decoded in one pass, in the rows from `first` on, and their passes that are under way.

    free: The other rows, in the order in which their requests ended.
    """

    first: int
    free: list[FreeRow]
    running: list[Request] = field(default_factory=list)
    passes: deque[Pass] = field(default_factory=deque)

    @property
    def is_reading(self) -> bool:
        """Whether the last request's prompt is not yet read."""
        return bool(self.running) and self.running[-1]._read < len(self.running[-1].prompt)

    @property
    def unread(self) -> Tensor:
        """What no pass reads yet of the prompt that is being read."""
        return self.running[-1].prompt[self.running[-1]._read + self.running[-1]._under_way :]


class ContinuousBatch:
    """Requests that are answered together, each as `engine.generate` would answer it alone.

    Rank 0 calls `add`, `cancel`, `step` and `close`; every other rank of the engine's transport calls `follow`, once.
    A batch is for one thread. It keeps keys and values of requests that have ended: if the weights have changed, create
    another one.

    Attributes:
        engine: The engine. On one rank it may serve `generate` as well; other ranks only follow, until `close`.
        rows: The most requests that are answered at once.
        running: Requests that have a row, in the order of rows.
        waiting: Requests that have none yet.
    """

    def __init__(self, engine: InferenceEngine, rows: int = 8, chunk: int = CHUNK):
        """All ranks create it with the same arguments.

        Args:
            engine: The engine.
            rows: The most requests that are answered at once (default 8).
            chunk: Tokens of a prompt that a step reads (default 256).

        Raises:
            ValueError: rows or chunk is below 1, the model does not decode, encodes other inputs than tokens or gives
                all rows of a pass one position, or the engine replays CUDA graphs, which are of one shape.
        """
        if rows < 1 or chunk < 1:
            raise ValueError(f"expected rows and chunk of at least 1, got {rows} and {chunk}")
        if engine.config.enable_cuda_graph:
            raise ValueError("a batch that requests join has no one shape to replay: set enable_cuda_graph to false")
        if engine.has_encoder and (takes := getattr(engine.module, "main_input_name", "input_ids")) != "input_ids":
            raise ValueError(
                f"{type(engine.module).__name__} encodes {takes}, and requests of a batch bring tokens: call "
                "engine.generate() with a batch of inputs"
            )
        engine.check([torch.zeros(1, dtype=torch.int64, device="cpu")], 1)
        self.engine, self.rows = engine, rows
        self.waiting: deque[Request] = deque()
        self._is_closed = False
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        parts = torch.arange(rows, device="cpu").tensor_split(min(engine.ranks.stages, rows))
        self._groups = [Group(int(part[0]), [FreeRow(row, nothing) for row in part.tolist()]) for part in parts]
        self._todo: deque[tuple[Order, Pass | None]] = deque()  # orders that this rank has yet to carry out
        self._chunk = min(chunk, engine.slots)
        self._border = engine.slots if engine.border is None else engine.border
        self._cache = StaticCache(engine.slots)
        self._cache.fit(rows)
        self._encoded: Source | None = None  # of the request whose prompt the next pass reads
        self._sources = SourceRows(rows, engine.slots) if engine.has_encoder else None
        self._message = torch.zeros(4 + rows + max(rows, self._chunk), dtype=torch.int64, device=engine.device)
        _window_by_row(engine.module)
        if engine.has_encoder:
            place_by_row(engine.module)
        # transformers' decoders take positions by rows; in bf16 a router that is undecided between two experts would
        # differ between one row and two.
        is_known = type(engine.module).__module__.startswith("transformers.")
        if engine.has_encoder or (rows > 1 and engine.ranks.stages == 1 and not is_known):
            self._check_rows()

    @property
    def running(self) -> list[Request]:
        return [request for group in self._groups for request in group.running]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on this rank, from the first pass on."""
        return self._cache.nbytes + (0 if self._sources is None else self._sources.nbytes)

    def add(self, prompt: Tensor | Sequence[int], *, max_new_tokens: int, **options: Unpack[Options]) -> Request:
        """Queue a prompt, which an encoder-decoder encodes. Options are those of `engine.generate`.

        Raises:
            ValueError: The prompt with its answer does not fit into a row, a token is none of the vocabulary, or an
                option is not supported.
            TypeError: The prompt is no sequence of integers, or an option is unknown.
            RuntimeError: The batch is closed.
        """
        if self._is_closed:
            raise RuntimeError("this batch is closed; create another ContinuousBatch for further requests")
        engine, inputs = self.engine, None
        # clone: the caller may write to its own tensor, and the row would be taken for another prompt's.
        row = rows_of([prompt], None)[0].clone()
        if engine.has_encoder:
            inputs = row
            x_1E, _ = engine.read_inputs([inputs])
            if len(inputs) > engine.slots:
                raise ValueError(
                    f"inputs of {len(inputs)} tokens do not fit into the {engine.slots} that a row has for them: "
                    "shorten them, or raise max_out_tokens"
                )
            (row,), choice, _ = start_of(engine.module, x_1E, None, max_new_tokens, options, encodes=False)
            engine.check([row], max_new_tokens)
        else:
            engine.check([row], max_new_tokens)
            choice = choice_of(engine.module, [row], None, max_new_tokens, options, engine.device)
        ends = frozenset(ends_of(engine.module, options))
        self.waiting.append(request := Request(row, max_new_tokens, inputs=inputs, _ends=ends, _choice=choice))
        return request

    def cancel(self, request: Request) -> None:
        """End a request at once, with the tokens that it has. Nothing happens if it has ended."""
        if request.reason is None:
            self._end(request, "cancelled")

    def step(self) -> list[Request]:
        """Read a chunk of a prompt, and decode a token of every other request.

        In a pipeline each group does, and the passes that a step orders give their tokens in the next one. Without
        requests it tells the other ranks just that: call it more often than the transport's timeout.

        Returns:
            The requests that got a token or ended, in no order.
        """
        changed: list[Request] = []
        if not self.running and not self.waiting:
            self._drain()
            self._order(Order(NOTHING))
        for group in self._groups:
            self._answer(group, changed)
            self._join(group)
            self._launch(group)
            if self.engine.ranks.stages == 1:
                self._answer(group, changed)
        return changed

    def follow(self) -> None:
        """Compute what rank 0 orders, until it closes its batch. Raises PeerError if rank 0 is lost or silent."""
        ranks = self.engine.ranks
        while True:
            ranks.hear(self._message)
            what, *about = self._message[:4].tolist()
            if what == END:
                ranks.flush()
                return
            B, T = about[1:] if what in (PASS, ENCODE) else (0, 0)
            starts, tokens = self._message[4 : 4 + B].tolist(), self._message[4 + self.rows :][: B * T].clone()
            if len(tokens) < B * T:
                ranks.hear(tokens := self._message.new_empty(B * T))
            self._do(Order(what, tuple(about), starts, tokens.view(B, T)))

    def close(self) -> None:
        """End all requests, and the other ranks' `follow`. Once, after the last `step`."""
        for request in [*self.waiting, *self.running]:
            self.cancel(request)
        self._drain()
        self._order(Order(END))
        self.engine.ranks.flush()
        self._is_closed = True

    # ---------------------------------------------------------------- one step

    def _join(self, group: Group) -> None:
        """Give the next request a row of this group, if no other one has fewer requests.

        The row has the longest beginning of its prompt that a row has. It is that row itself if it is of the group,
        free, and has no more than this. Else it is the row whose request ended first, with a copy: the rest of the
        other row may be asked for, too.
        """
        able = [other for other in self._groups if other.free and not other.is_reading]
        if not self.waiting or not able or group is not min(able, key=lambda other: len(other.running)):
            return
        request = self.waiting.popleft()
        row = group.first + len(group.running)
        held = [row for other in self._groups for row in other.free]
        for other in self._groups:
            held += [FreeRow(at, running.computed) for at, running in enumerate(other.running, other.first)]
        # Of several with the same beginning the shortest: it may have no more.
        source = max(held, key=lambda one: (self._shared(request, one.tokens), -len(one.tokens)))
        reused = self._shared(request, source.tokens)
        own = source if source in group.free and reused == len(source.tokens) else group.free[0]
        if own.row != row:
            moved = next(one for one in group.free if one.row == row)
            self._swap(own.row, row, max(reused, len(moved.tokens)))
            own.row, moved.row = row, own.row
        group.free.remove(own)
        if own is not source and reused:
            self._order(Order(COPY, (source.row, row, reused)))
        request._read = request.reused = reused
        group.running.append(request)

    def _shared(self, request: Request, tokens: Tensor) -> int:
        """How many tokens of a row are the beginning of a prompt, and have the angles that the prompt is to have."""
        shared = _in_common(request.prompt[:-1], tokens)  # the last token's logits choose the next
        is_like = shared > self._border if len(request.prompt) > self._border else len(tokens) < self._border
        return shared if is_like else 0

    def _launch(self, group: Group) -> None:
        """Order a pass that decodes a token of each request that has one, and one that reads a chunk of a prompt."""
        decoding = group.running[: -1 if group.is_reading else None]
        if decoding:
            tokens_B1 = torch.tensor([[request.tokens[-1]] for request in decoding], dtype=torch.int64, device="cpu")
            for b, request in enumerate(decoding):
                if request.filled == self._border:
                    anew_1T = torch.cat([request.computed, tokens_B1[b]])[None]
                    self._order(Order(PASS, (group.first + b, *anew_1T.shape), [0], anew_1T))
            self._pass(group, Pass(decoding), group.first, tokens_B1, [request.filled for request in decoding])
        if self._reads_more(group):
            request, unread = group.running[-1], group.unread
            start = len(request.prompt) - len(unread)
            is_beyond = start == 0 and len(request.prompt) > self._border
            chunk = unread[: max(self._chunk, self._border + 1) if is_beyond else self._chunk]
            row = group.first + len(decoding)
            if request.inputs is not None and not request._read:
                self._order(Order(ENCODE, (row, 1, len(request.inputs)), (), request.inputs[None]))
            self._pass(group, Pass([request], len(chunk)), row, chunk[None], [start])

    def _reads_more(self, group: Group) -> bool:
        """Whether a chunk can be read: as many may be under way as there are stages."""
        under_way = sum(made.chunk > 0 for other in self._groups for made in other.passes)
        return group.is_reading and len(group.unread) > 0 and under_way < self.engine.ranks.stages

    def _pass(self, group: Group, made: Pass, first: int, tokens_BT: Tensor, starts: list[int]) -> None:
        for request in made.requests:
            request._under_way += tokens_BT.shape[1]
        group.passes.append(made)
        self._order(Order(PASS, (first, *tokens_BT.shape), starts, tokens_BT), made)

    def _answer(self, group: Group, changed: list[Request]) -> None:
        """Choose the tokens that passes under way give: of all if one decodes, else of a prompt's oldest chunk.

        The next chunk is ordered first if it can be.
        """
        due = len(group.passes)
        if self.engine.ranks.stages > 1 and all(made.chunk for made in group.passes):
            due = min(due, 0 if self._reads_more(group) else 1)
        for _ in range(due):
            made = group.passes.popleft()
            while made.logits_BV is None:
                self._do_next()
            for request in made.requests:
                request._under_way -= made.chunk or 1
            if made.chunk:
                (request,) = made.requests
                request._read += made.chunk if request.reason is None else 0
                # A chunk that is not finite ends its request, so that no row keeps what it made.
                if request._read < len(request.prompt) and bool(made.logits_BV.isfinite().all()):
                    continue
            self._choose(made.requests, made.logits_BV, changed)

    def _choose(self, requests: list[Request], logits_BV: Tensor, changed: list[Request]) -> None:
        """Append a token to each request that goes on, and end those that have their last."""
        going = [request for request in requests if request.reason is None]
        changed += going
        is_finite_B = logits_BV.isfinite().all(1).tolist()
        failed: dict[Request, str] = {}
        for b, request in enumerate(requests):
            if request not in going:
                continue
            if not is_finite_B[b]:
                failed[request] = "the model's logits are not finite"
                continue
            assert request._choice is not None
            try:
                chosen_1 = request._choice.choose(logits_BV[b : b + 1])
                request._choice.follow(chosen_1)
            except (RuntimeError, ValueError, IndexError) as error:  # a rule that fails ends its request alone
                failed[request], request.is_refused = str(error), True
            else:
                request.tokens.append(int(chosen_1))
        # Requests end when all have their tokens: then a row that moves knows how far it is filled.
        for request in going:
            if request in failed:
                self._fail(request, failed[request])
            elif request.tokens[-1] in request._ends:
                self._end(request, "stop")
            elif len(request.tokens) == request.most:
                self._end(request, "length")

    def _fail(self, request: Request, why: str) -> None:
        request.error = why
        group = self._group_of(request)
        self._order(Order(CLEAR, (group.first + group.running.index(request), 0, self.engine.slots)))
        self._end(request, "error")

    def _group_of(self, request: Request) -> Group:
        return next(group for group in self._groups if request in group.running)

    def _end(self, request: Request, reason: str) -> None:
        request.reason, request._choice = reason, None
        if request in self.waiting:
            self.waiting.remove(request)
            return
        group = self._group_of(request)
        # The last decoding row comes here, and a prompt that is being read takes that one's place: its row is the last.
        row, last = group.running.index(request), len(group.running) - 1
        if request._under_way:  # nobody will look whether what these passes make is finite
            self._order(Order(CLEAR, (group.first + row, request.filled, request.filled + request._under_way)))
        way = [row, last - 1, last] if group.is_reading and row < last else [row, last]
        for at, to in pairwise(way):
            one, other = group.running[at], group.running[to]
            filled = max(one.filled + one._under_way, other.filled + other._under_way)
            self._swap(group.first + at, group.first + to, filled)
            group.running[at], group.running[to] = other, one
        group.running.pop()
        group.free.append(FreeRow(group.first + last, request.computed if reason != "error" else request.prompt[:0]))

    def _swap(self, row: int, to: int, filled: int) -> None:
        if row != to and filled:
            self._order(Order(SWAP, (row, to, filled)))

    # ---------------------------------------------------------------- over ranks

    def _order(self, order: Order, made: Pass | None = None) -> None:
        """Have all ranks do this. In a pipeline this rank does it when the tokens of a later pass are asked for."""
        if self.engine.transport.world_size > 1:
            about, starts = [*order.about, 0, 0, 0][:3], [*order.starts, *[0] * (self.rows - len(order.starts))]
            numbers = torch.tensor([order.what, *about, *starts], dtype=torch.int64, device="cpu")
            if order.tokens_BT is not None:
                numbers = torch.cat([numbers, order.tokens_BT.flatten()])
            # Inputs, and what LongRoPE changes, may be longer than a chunk, and have a message themselves.
            apart = 4 + self.rows if len(numbers) > len(self._message) else len(numbers)
            self._message[:apart] = numbers[:apart]
            self.engine.ranks.tell(self._message)
            if apart < len(numbers):
                self.engine.ranks.tell(numbers[apart:].to(self.engine.device))
        self._todo.append((order, made))
        if self.engine.ranks.stages == 1:
            self._do_next()

    def _do_next(self) -> None:
        order, made = self._todo.popleft()
        logits_BV = self._do(order)
        if made is not None:
            made.logits_BV = logits_BV

    def _drain(self) -> None:
        """Carry out what is ordered, for no request."""
        while self._todo:
            self._do_next()
        for group in self._groups:
            group.passes.clear()

    def _do(self, order: Order) -> Tensor | None:
        """Carry out an order on this rank. Returns the logits [B, V] of a pass."""
        what, about, starts, tokens_BT = order
        if what == PASS:
            assert tokens_BT is not None
            return self._compute(about[0], tokens_BT.to(self.engine.device), starts)
        if what == COPY:
            self._cache.copy(*about[:3])
        elif what == SWAP:
            self._cache.swap(*about[:3])
            if self._sources is not None:
                self._sources.swap(*about[:2])
        elif what == CLEAR:
            self._cache.clear(*about[:3])
        elif what == ENCODE:
            assert tokens_BT is not None
            self._encoded = self.engine.encode(tokens_BT)
        return None

    def _compute(self, first: int, tokens_BT: Tensor, starts: Sequence[int]) -> Tensor:
        """The logits [B, V] after the tokens, each row's own from its slot in `starts` on."""
        (B, T), device = tokens_BT.shape, tokens_BT.device
        slots = (
            torch.arange(starts[0], starts[0] + T, device=device)
            if B == 1
            else torch.tensor(starts, dtype=torch.int64, device=device)[:, None]
        )
        zeros_B = torch.zeros(B, dtype=torch.int64, device=device)
        decodes = T == 1 and self._encoded is None and any(first == group.first for group in self._groups)
        if self._sources is not None:
            self._cache.source = self._encoded or self._sources.at(slice(first, first + B))
        logits_BV = self.engine.run(
            self._cache, tokens_BT, zeros_B, slots, max(starts) + T, first=first, decodes=decodes
        )
        if self._sources is not None:
            if self._encoded is not None:
                self._sources.put(first, self._encoded)
            self._encoded = self._cache.source = None
        return logits_BV

    def _check_rows(self) -> None:
        """Raise ValueError if rows at unlike positions have other logits than each alone."""
        name, tokens_1T = type(self.engine.module).__name__, a_few_tokens(self.engine.module)[:, : self.engine.slots]
        starts = [tokens_1T.shape[1] - 1, 1][: self.rows]
        alone = []
        try:
            for row, start in enumerate(starts):
                if self._sources is not None:
                    self._do(Order(ENCODE, tokens_BT=tokens_1T[:, : start + 1]))
                self._compute(row, tokens_1T, [0])  # what an earlier request has left there
                self._compute(row, tokens_1T[:, :start], [0])
                alone.append(self._compute(row, tokens_1T[:, start : start + 1], [start]))
            together = self._compute(0, tokens_1T[0, starts][:, None], starts)
        except (PeerError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model raises that has one position for all rows
            raise ValueError(f"{name} does not decode rows of unlike positions in one pass: {error}") from error
        if not (off := distance(torch.cat(alone), together)) <= tolerance(together, self.engine.module):
            raise ValueError(
                f"{name} gives rows of unlike positions other outputs in one pass than each alone (off by {off:.2g} of "
                "the largest output): call engine.generate() with a batch of inputs"
            )


def _window_by_row(model: nn.Module) -> None:
    """Make GPT-Neo's windows follow rows at unlike positions: they begin at the last slot of a pass, for all rows.

    Changes nothing of passes in which all rows have the same slots.
    """
    for module in map(partial(cast, Any), model.modules()):
        if getattr(module, "attention_type", None) == "local" and isinstance(getattr(module, "bias", None), Tensor):
            module.forward = partial(_see_window, module.config.window_size, type(module).forward, module)
            module.bias = torch.ones_like(module.bias[..., :1, :1]).expand_as(module.bias)  # it hides nothing itself


def _see_window(
    window: int, forward: Callable[..., object], module: nn.Module, x: Tensor, attention_mask: Tensor, **named: object
) -> object:
    """A layer's forward pass whose tokens see their own slot, the last that the mask shows, and those before it."""
    at_S = torch.arange(attention_mask.shape[-1], device=x.device)
    own_B1T1 = at_S.masked_fill(attention_mask < 0, 0).amax(-1, keepdim=True)
    is_outside = at_S <= own_B1T1 - window
    attention_mask = attention_mask.masked_fill(is_outside, torch.finfo(attention_mask.dtype).min)
    return forward(module, x, attention_mask=attention_mask, **named)


def _in_common(tokens: Tensor, others: Tensor) -> int:
    """How many tokens both begin with."""
    T = min(len(tokens), len(others))
    return int((tokens[:T] == others[:T]).cumprod(0).sum())
