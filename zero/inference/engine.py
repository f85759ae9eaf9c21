"""Decoding: prompts in, tokens out, one forward pass a token over a static cache.

1. Prompts are aligned at their ends: row b begins at slot T - len(b), and its positions at 0. A mask hides the slots
   before a row's beginning.
2. One pass over all prompts fills the cache (prefill) and gives the logits of the first token.
3. Rank 0 chooses every row's token and tells the others: ranks cannot part ways.
4. A decode step takes one token of every row to the next slot. It is compiled where the configuration says so.

Shape legend: B rows, T tokens of the longest prompt, S slots that are read, V logits.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from ...comm import Transport
from ...comm.messages import gather_texts
from .cache import StaticCache
from .config import InferenceConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompts = Tensor | Sequence[Tensor] | Sequence[Sequence[int]]


class Options(TypedDict, total=False):
    """Of `generate`. eos_token_id: ends a row; absent: the model's generation_config says it; []: nothing does.
    seed: of what is drawn; the others: see `Sampling`."""

    eos_token_id: int | Sequence[int] | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int | None


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen of its logits: the greatest, or drawn from the top_k greatest (0: all) that hold the first
    top_p of the probability at this temperature."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"expected temperature > 0, top_k >= 0 and 0 < top_p <= 1, got {self}")
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1, 0, 1):
            raise ValueError(f"{self} has no effect without do_sample=True: pass it, or leave the rest out")

    def choose(self, logits_BV: Tensor, generator: torch.Generator) -> Tensor:
        """int64 [B]."""
        if not self.do_sample:
            return logits_BV.argmax(1)
        logits_BV, order_BV = (logits_BV.float() / self.temperature).sort(1, descending=True)
        probability_BV = logits_BV.softmax(1)
        if self.top_k:
            probability_BV[:, self.top_k :] = 0
        before_BV = probability_BV.cumsum(1) / probability_BV.sum(1, keepdim=True) - probability_BV
        probability_BV[:, 1:][before_BV[:, 1:] >= self.top_p] = 0
        drawn_B1 = torch.multinomial(probability_BV.cpu(), 1, generator=generator).to(order_BV.device)
        return order_BV.gather(1, drawn_B1)[:, 0]


class InferenceEngine:
    """A model that serves. `init_inference` makes it. Calling it is calling the model, without gradients.

    module: what runs, on this rank its part; it shares what memory it can with the model that was given. transport:
    between the ranks that compute each layer together, which all make the same calls.
    """

    def __init__(self, module: nn.Module, config: InferenceConfig, transport: Transport):
        self.module, self.config, self.transport = module, config, transport
        self.slots = min(config.max_out_tokens, longest(module) or config.max_out_tokens)
        self._cache = StaticCache(self.slots)
        named = {"use_cache": True, "logits_to_keep": 1}
        taken = inspect.signature(module.forward).parameters
        self._named = {name: value for name, value in named.items() if name in taken}
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self._decode: Callable[..., Tensor] = self._forward
        if config.kernel_inject or config.enable_cuda_graph:
            mode = "reduce-overhead" if config.enable_cuda_graph else None
            self._decode = torch.compile(self._forward, fullgraph=True, mode=mode)

    @torch.no_grad()
    def __call__(self, *inputs: object, **named: object) -> object:
        return self.module(*inputs, **named)

    @property
    def device(self) -> torch.device:
        return next(iter([*self.module.parameters(), *self.module.buffers()])).device

    @property
    def held_bytes(self) -> int:
        """Of weights and buffers on this rank, without the cache."""
        tensors = {x.data_ptr(): x.nbytes for x in (*self.module.parameters(), *self.module.buffers())}
        return sum(tensors.values())

    @property
    def cache_bytes(self) -> int:
        """Of keys and values on this rank; the pages that no token has reached yet are not in memory."""
        return self._cache.nbytes

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        pad_token_id: int | None = None,
        **options: Unpack[Options],
    ) -> Tensor | list[Tensor]:
        """Prompts and what follows, until an end token or max_new_tokens. All ranks, with the same arguments.

        prompts: sequences of tokens of any lengths; the answer is a list with a tensor for each, end token included. Or
        a tensor [B, T], with attention_mask where rows are padded on the left; the answer is a tensor [B, T + n], with
        pad_token_id (else the end token) behind an end. Raises ValueError, on all ranks, where a prompt with its answer
        does not fit into the cache.
        """
        rows = self._rows(prompts, attention_mask)
        steps = list(self.stream(rows, max_new_tokens=max_new_tokens, **options))
        answers = [[token for step in steps if (token := step[b]) is not None] for b in range(len(rows))]
        if not isinstance(prompts, Tensor):
            return [torch.cat([row, torch.tensor(new)]) for row, new in zip(rows, answers, strict=True)]
        ends = self._ends(options.get("eos_token_id"))
        pad = pad_token_id if pad_token_id is not None else min(ends, default=0)
        padded = [new + [pad] * (len(steps) - len(new)) for new in answers]
        return torch.cat([prompts, torch.tensor(padded, dtype=prompts.dtype, device=prompts.device)], 1)

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Iterator[list[int | None]]:
        """As `generate`, step by step: each row's token, None behind its end. All ranks go on together, or end."""
        rows = self._rows(prompts, attention_mask)
        given: dict[str, Any] = dict(options)
        ends, seed = self._ends(given.pop("eos_token_id", None)), given.pop("seed", None)
        how, generator = Sampling(**given), torch.Generator()
        self._check(rows, max_new_tokens, f"{sorted(ends)} {how} {seed}")
        _ = generator.seed() if seed is None else generator.manual_seed(seed)
        return self._steps(rows, max_new_tokens, ends, how, generator)

    def _ends(self, given: int | Sequence[int] | None) -> set[int]:
        ends = (
            getattr(getattr(self.module, "generation_config", None), "eos_token_id", None) if given is None else given
        )
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    def step(self, tokens_BT: Tensor, slot: int) -> Tensor:
        """Logits [B, V] behind tokens that follow those which the first `slot` slots hold; slot 0: new rows.

        Not compiled. For who chooses tokens by other rules than `generate`, on all ranks the same.
        """
        B, T = tokens_BT.shape
        if slot == 0:
            self._cache.fit(B)
        if slot + T > self.slots:
            raise ValueError(
                f"slot {slot} and {T} tokens do not fit into a cache of {self.slots}; raise max_out_tokens"
            )
        device = self.device
        slots_T = torch.arange(slot, slot + T, device=device)
        starts_B = torch.zeros(B, dtype=torch.int64, device=device)
        return self._run(self._forward, tokens_BT.to(device), starts_B, slots_T, slot + T)

    def _steps(
        self, rows: Sequence[Tensor], most: int, ends: set[int], how: Sampling, generator: torch.Generator
    ) -> Iterator[list[int | None]]:
        T, device = max(map(len, rows)), self.device
        starts_B = torch.tensor([T - len(row) for row in rows], device=device)
        tokens_BT = torch.stack([torch.cat([row.new_zeros(T - len(row)), row]) for row in rows]).to(device)
        self._cache.fit(len(rows))
        logits_BV = self._run(self._forward, tokens_BT, starts_B, torch.arange(T, device=device), T)
        has_ended = [False] * len(rows)
        for slot in range(T, T + most):
            chosen_B = self._choose(logits_BV, how, generator)
            step = chosen_B.tolist()
            yield [None if over else token for token, over in zip(step, has_ended, strict=True)]
            has_ended = [over or token in ends for token, over in zip(step, has_ended, strict=True)]
            if all(has_ended) or slot == T + most - 1:
                return
            width = self.slots if self.config.enable_cuda_graph else slot + 1
            logits_BV = self._run(self._decode, chosen_B[:, None], starts_B, torch.tensor([slot], device=device), width)

    def _run(
        self, forward: Callable[..., Tensor], tokens_BT: Tensor, starts_B: Tensor, slots_T: Tensor, S: int
    ) -> Tensor:
        """Logits [B, V] behind the last tokens. S: slots that are read."""
        positions_BT = (slots_T - starts_B[:, None]).clamp(min=0)
        at_S = torch.arange(S, device=slots_T.device)
        # A place before a row's beginning sees itself: a softmax over nothing is not a number.
        is_own_BTS = (at_S >= starts_B[:, None, None]) | (at_S == slots_T[:, None])
        is_seen_BTS = is_own_BTS & (at_S <= slots_T[:, None])
        mask_BTS = torch.zeros(is_seen_BTS.shape, dtype=self._dtype, device=at_S.device)
        mask_B1TS = mask_BTS.masked_fill_(~is_seen_BTS, torch.finfo(self._dtype).min)[:, None]
        if forward is not self._forward and not self.config.enable_cuda_graph:
            torch._dynamo.maybe_mark_dynamic(mask_B1TS, 3)
        with torch.no_grad():
            return forward(tokens_BT, positions_BT, mask_B1TS, slots_T)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, mask_B1TS: Tensor, slots_T: Tensor) -> Tensor:
        cache = self._cache.at(slots_T, mask_B1TS.shape[3])
        out = self.module(
            tokens_BT, attention_mask=mask_B1TS, position_ids=positions_BT, past_key_values=cache, **self._named
        )
        return outputs_of(out)[:, -1]

    def _choose(self, logits_BV: Tensor, how: Sampling, generator: torch.Generator) -> Tensor:
        chosen_B = (
            how.choose(logits_BV, generator)
            if self.transport.rank == 0
            else logits_BV.new_zeros(len(logits_BV), dtype=torch.int64)
        )
        if self.transport.world_size > 1:
            self.transport.broadcast(chosen_B, 0).wait()
        return chosen_B

    # ---------------------------------------------------------------- what is asked

    def _rows(self, prompts: Prompts, attention_mask: Tensor | None) -> list[Tensor]:
        """int64 on the CPU, one of each prompt. Raises TypeError and ValueError."""
        rows = [torch.as_tensor(row).cpu() for row in prompts]
        if attention_mask is not None:
            if not isinstance(prompts, Tensor) or attention_mask.shape != prompts.shape:
                raise ValueError("attention_mask goes with a tensor of prompts of the same shape; a list needs none")
            if (attention_mask.diff(dim=1) < 0).any():
                raise ValueError(
                    "prompts are padded on the right; pad them on the left, or pass a list without padding"
                )
            rows = [row[keep.bool().cpu()] for row, keep in zip(rows, attention_mask, strict=True)]
        if any(row.dim() != 1 or (row.is_floating_point() and len(row)) for row in rows):
            raise TypeError(
                "expected prompts as a tensor [B, T] of tokens, or a list with a sequence of tokens a prompt"
            )
        return [row.long() for row in rows]

    def _check(self, rows: Sequence[Tensor], most: int, options: str) -> None:
        if (why := why_no_decoding(self.module)) is not None:
            raise ValueError(f"{why}; call the engine as the model for what it computes")
        if not rows or min(map(len, rows)) == 0 or most < 1:
            raise ValueError("expected prompts of at least one token each, and max_new_tokens of at least 1")
        if (longest_row := max(map(len, rows))) + most > self.slots:
            limit = longest(self.module)
            raise ValueError(
                f"a prompt of {longest_row} tokens and {most} new ones do not fit into the cache of {self.slots}: "
                f"shorten them, or raise max_out_tokens{f', up to the {limit} of the model' if limit else ''}"
            )
        if self.transport.world_size > 1:
            asked = hashlib.sha256(f"{[row.tolist() for row in rows]} {most} {options}".encode()).hexdigest()
            every = gather_texts(self.transport, asked)
            if other := next((rank for rank, text in enumerate(every) if text != every[0]), None):
                raise ValueError(
                    f"rank {other} generates from other prompts or options than rank 0; give all ranks the same"
                )


def why_no_decoding(model: nn.Module) -> str | None:
    """Why a model cannot decode over the cache; None where it can."""
    name, config = type(model).__name__, getattr(model, "config", None)
    missing = {"past_key_values", "position_ids", "attention_mask"} - inspect.signature(model.forward).parameters.keys()
    if missing or not getattr(model, "can_generate", lambda: True)():
        lacks = ", ".join(sorted(missing)) or "cache"
        return f"{name} does not generate: it is an encoder, or its forward takes no {lacks}"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if others or window:
        return f"{name} has layers that do not attend to all tokens ({', '.join(sorted(others)) or f'window {window}'})"
    return None


def longest(model: nn.Module) -> int | None:
    """Tokens that a row can have: those that the model has positions for."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None) or getattr(model, "context", None)
    return found if isinstance(found, int) else None


def outputs_of(out: object) -> Tensor:
    """Logits, or what an encoder gives."""
    if isinstance(out, Tensor):
        return out
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(out, name, None), Tensor):
            return found
    raise TypeError(f"expected a tensor, or logits or last_hidden_state in it, got {type(out).__name__}")
