"""Decoding: prompts in, tokens out, one forward pass a token over a static cache.

1. Prompts are aligned at their ends: row b begins at slot T - len(b), with position 0. A mask hides the slots before
   it.
2. One pass over all prompts fills the cache (prefill) and gives the logits of the first token.
3. Rank 0 tells the others the token it chose for every row, so that ranks cannot diverge.
4. A decode step puts one token of every row into the next slot. It is compiled if the configuration asks for it.
   Before a row grows beyond the border of LongRoPE its keys and values are computed anew (`rope.py`).

An encoder-decoder encodes its inputs first, once. Its decoder's prompts then take this way (`encoded.py`).

Shape legend: B rows, T tokens of the longest prompt, S slots that are read, V logits.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...comm.messages import gather_texts
from ...usage.graphs import compiled_apart
from .cache import Source, StaticCache
from .config import InferenceConfig
from .encoded import EncoderDecoder, decoder_of, inputs_of, source_of
from .pipeline import Together
from .requests import Choice, Mask, Options, Prompts, choice_of, ends_of, given_of, mask_of, pad_of, rows_of, start_of
from .rope import border_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class InferenceEngine:
    """A model that serves: calling it calls the model without gradients, and `generate` decodes. See `init_inference`.

    All ranks of the transport compute each token together, so all must make the same calls in the same order.

    Attributes:
        module: This rank's part of the model. It shares memory with the model that was given, where possible.
        config: The configuration.
        transport: The transport between the ranks that serve together.
        ranks: How these ranks divide the model.
        slots: Slots of the cache: the most tokens of a prompt with its answer.
        border: The most tokens of a row with LongRoPE's angles of short ones (`rope.py`); None: they never change.
        before_first_call: Checks the split model on the first call's inputs, or None. It raises ValueError on all ranks
            if the split model computes something else than the whole one.
    """

    def __init__(self, module: nn.Module, config: InferenceConfig, ranks: Together):
        self.module, self.config, self.ranks, self.transport = module, config, ranks, ranks.transport
        self._decoder = decoder_of(module)
        self.slots = min(config.max_out_tokens, longest(module) or config.max_out_tokens)
        self.border = border_of(module)
        self._stepped, self._free = StaticCache(self.slots), [StaticCache(self.slots)]
        named = {"use_cache": True, "logits_to_keep": 1}
        self._cache_name = cache_name(self._decoder)
        taken = inspect.signature(self._decoder.forward).parameters
        self._named = {name: value for name, value in named.items() if name in taken}
        self._windows = windows_of(module)
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self._decode: Callable[..., Tensor] = self._forward
        self._replays = config.enable_cuda_graph
        self.before_first_call: Callable[[Sequence[Any], Mapping[str, Any]], None] | None = None
        if config.kernel_inject or config.enable_cuda_graph:
            mode = "reduce-overhead" if config.enable_cuda_graph else None
            self._decode = partial(_compiled_forward(str(self.module), mode), self)

    @torch.no_grad()
    def __call__(self, *inputs: object, **named: object) -> Any:
        self._check_call(inputs, named)
        return self.ranks.share(self.module(*inputs, **named))

    if not TYPE_CHECKING:  # else any name would be one for type checkers

        def __getattr__(self, name: str) -> NoReturn:
            about = f"{type(self).__name__} has no {name}"
            if hasattr(vars(self).get("module"), name):
                about += f"; its module has: engine.module.{name}"
            raise AttributeError(about, name=name, obj=self)

    def _check_call(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        if self.before_first_call is not None:
            self.before_first_call(inputs, named)
            self.before_first_call = None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(iter([*self.module.parameters(), *self.module.buffers()])).device

    @property
    def has_encoder(self) -> bool:
        """Whether the model encodes inputs, and its decoder answers them."""
        return isinstance(self._decoder, EncoderDecoder)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model knows, by its configuration; None if it does not tell."""
        found = getattr(getattr(self.module, "config", None), "vocab_size", None)
        return found if isinstance(found, int) else None

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and buffers on this rank, without the cache."""
        tensors = {x.data_ptr(): x.nbytes for x in (*self.module.parameters(), *self.module.buffers())}
        return sum(tensors.values())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches on this rank, for `step` and for streams that have ended.

        Pages that no token has reached yet count, but are not in memory.
        """
        return sum(cache.nbytes for cache in (self._stepped, *self._free))

    def generate(
        self,
        prompts: Prompts | None = None,
        *,
        max_new_tokens: int,
        attention_mask: Mask | None = None,
        **options: Unpack[Options],
    ) -> Tensor | list[Tensor]:
        """Continue prompts until an end token or max_new_tokens. All ranks call it with the same arguments.

        A model of transformers gives the same tokens as its own `generate`.

        Args:
            prompts: Sequences of tokens of any lengths, or an integer tensor [B, T] padded on the left. For an
                encoder-decoder its encoder's inputs: the same padded on any side, or a tensor of features [B, ...].
                Or by transformers' name of them: `generate(**tokenizer(texts), max_new_tokens=64)`.
            max_new_tokens: The most tokens to add.
            attention_mask: 1 for text, 0 for padding, in the shape of the prompts. None (default): pad tokens of a
                tensor are padding, unless the pad token is also an end token; to an encoder, as in transformers, all
                are text.
            **options: do_sample, temperature, top_k, top_p, seed, eos_token_id, pad_token_id; for a model of
                transformers also the other options of a GenerationConfig.

        Returns:
            For sequences a list with a tensor for each, with the end token. For a tensor a tensor [B, T + n], filled
            after an end with the pad token, or without one with the first end token. Of an encoder-decoder the
            decoder's prompts with the answers.

        Raises:
            ValueError: On all ranks: a prompt with its answer does not fit into the cache, or an option is not
                supported.
            TypeError: The prompts have another form, or an option is unknown.
        """
        prompts, mask, options = given_of(self.module, prompts, attention_mask, options)
        rows, choice, source = self._begin(prompts, max_new_tokens, mask, options)
        ends, pad = ends_of(self.module, options), pad_of(self.module, options)
        steps = list(self._steps(rows, max_new_tokens, set(ends), choice, source))
        answers = [[token for step in steps if (token := step[b]) is not None] for b in range(len(rows))]
        if not isinstance(prompts, Tensor):
            return [
                torch.cat([row, torch.tensor(new, dtype=torch.int64, device="cpu")])
                for row, new in zip(rows, answers, strict=True)
            ]
        pad = (ends or [0])[0] if pad is None else pad
        padded = [new + [pad] * (len(steps) - len(new)) for new in answers]
        before = prompts if source is None else torch.stack(rows).to(prompts.device)
        return torch.cat([before, torch.tensor(padded, dtype=torch.int64, device=before.device)], 1)

    def stream(
        self,
        prompts: Prompts | None = None,
        *,
        max_new_tokens: int,
        attention_mask: Mask | None = None,
        **options: Unpack[Options],
    ) -> Iterator[list[int | None]]:
        """As `generate`, step by step: yields each row's token, or None after its end.

        All ranks must iterate together, and stop at the same step. Several streams may be open at once, each with a
        cache of its own, if all ranks advance them in the same order.
        """
        prompts, mask, options = given_of(self.module, prompts, attention_mask, options)
        rows, choice, source = self._begin(prompts, max_new_tokens, mask, options)
        return self._steps(rows, max_new_tokens, set(ends_of(self.module, options)), choice, source)

    def _begin(
        self, prompts: Prompts, most: int, attention_mask: Tensor | None, options: Options
    ) -> tuple[list[Tensor], Choice, Source | None]:
        """The decoder's prompts, how the tokens after them are chosen, and what an encoder has made of the prompts."""
        if most < 1:
            raise ValueError(f"expected max_new_tokens of at least 1, got {most}")
        ends, pad = ends_of(self.module, options), pad_of(self.module, options)
        asked = f"{most} {ends} {pad} {sorted(options.items())}"
        if not self.has_encoder:
            mask = mask_of(prompts, attention_mask, pad, ends)
            rows = rows_of(prompts, mask)
            self.check(rows, most)
            self._agree(f"{[row.tolist() for row in rows]} {asked}")
            return rows, choice_of(self.module, prompts, mask, most, options, self.device), None
        inputs, mask = self.read_inputs(prompts, attention_mask)
        self._agree(f"{inputs.tolist()} {None if mask is None else mask.tolist()} {asked}")
        if self.before_first_call is not None:
            first = torch.zeros(len(inputs), 1, dtype=torch.int64, device=self.device)
            self._check_call((inputs,), {"attention_mask": mask, "decoder_input_ids": first})
        rows, choice, named = start_of(self.module, inputs, mask, most, options)
        self.check(rows, most)
        return rows, choice, source_of(named)

    def step(
        self, tokens_BT: Tensor, slot: int, inputs: Prompts | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """One forward pass over the cache, for callers that choose tokens by their own rules. Not compiled.

        All ranks call it with the same arguments.

        Args:
            tokens_BT: int64 [B, T], the tokens of the slots from `slot` on.
            slot: How many slots of each row are filled already; 0 begins new rows.
            inputs: Of an encoder-decoder with slot 0: what it encodes, as in `generate`.
            attention_mask: With a tensor of inputs: 1 for text, 0 for padding.

        Returns:
            The logits [B, V] after the last tokens.

        Raises:
            ValueError: The tokens do not fit into the cache, LongRoPE would turn those before them by other angles, or
                inputs are missing or not expected.
        """
        B, T = tokens_BT.shape
        if (inputs is not None) != (self.has_encoder and slot == 0):
            raise ValueError("step(inputs=...) is for encoder-decoders, which need it with slot 0 and only there")
        if slot == 0:
            self._stepped.fit(B, None if inputs is None else self.encode(inputs, attention_mask))
        if slot + T > self.slots:
            raise ValueError(
                f"slot {slot} and {T} tokens do not fit into a cache of {self.slots}; raise max_out_tokens"
            )
        if self.border is not None and 0 < slot <= self.border < slot + T:
            raise ValueError(
                f"{T} tokens from slot {slot} on make rows of more than {self.border}, and LongRoPE changes the keys "
                "before them: pass the tokens of whole rows with slot 0"
            )
        device = self.device
        slots_T = torch.arange(slot, slot + T, device=device)
        starts_B = torch.zeros(B, dtype=torch.int64, device=device)
        return self.ranks.share(self.run(self._stepped, tokens_BT.to(device), starts_B, slots_T, slot + T))

    @torch.no_grad()
    def encode(self, inputs: Prompts, attention_mask: Tensor | None = None) -> Source:
        """What the encoder makes of inputs, in one pass. All ranks call it with the same arguments, as in `generate`.

        Raises:
            ValueError, TypeError: As `read_inputs`.
        """
        x, mask = self.read_inputs(inputs, attention_mask)
        outputs = self.module.get_encoder()(x, attention_mask=mask)  # type: ignore[operator]
        return source_of({"encoder_outputs": outputs, "attention_mask": mask})

    def _steps(
        self, rows: Sequence[Tensor], most: int, ends: set[int], choice: Choice, source: Source | None
    ) -> Iterator[list[int | None]]:
        T, device = max(map(len, rows)), self.device
        starts_B = torch.tensor([T - len(row) for row in rows], device=device, dtype=torch.int64)
        tokens_BT = torch.stack([torch.cat([row.new_zeros(T - len(row)), row]) for row in rows]).to(device)
        cache = self._free.pop() if self._free else StaticCache(self.slots)
        try:
            cache.fit(len(rows), source)
            logits_BV = self.run(cache, tokens_BT, starts_B, torch.arange(T, device=device), T)
            has_ended = [False] * len(rows)
            for slot in range(T, T + most):
                chosen_B = self.ranks.choose(choice, logits_BV)
                choice.follow(chosen_B)
                step = chosen_B.tolist()
                yield [None if over else token for token, over in zip(step, has_ended, strict=True)]
                has_ended = [over or token in ends for token, over in zip(step, has_ended, strict=True)]
                if all(has_ended) or slot == T + most - 1:
                    return
                at, width = (
                    torch.tensor([slot], device=device, dtype=torch.int64),
                    self.slots if self._replays else slot + 1,
                )
                if self.border is not None:
                    tokens_BT = torch.cat([tokens_BT, chosen_B[:, None]], 1)
                    for b in (slot - starts_B == self.border).nonzero().flatten().tolist():
                        first = int(starts_B[b])
                        own, slots = slice(b, b + 1), torch.arange(first, slot + 1, device=device)
                        self.run(cache, tokens_BT[own, first:], starts_B[own], slots, slot + 1, first=b)
                logits_BV = self.run(cache, chosen_B[:, None], starts_B, at, width, decodes=True)
        finally:
            cache.source = None
            self._free.append(cache)

    def run(
        self,
        cache: StaticCache,
        tokens_BT: Tensor,
        starts_B: Tensor,
        slots: Tensor,
        S: int,
        *,
        first: int = 0,
        decodes: bool = False,
    ) -> Tensor:
        """One forward pass over rows of a cache.

        All ranks call it with the same arguments.

        Args:
            cache: The cache, which it fills.
            tokens_BT: int64 [B, T], the tokens.
            starts_B: int64 [B], each row's first slot.
            slots: int64 [T], the tokens' slots; or [B, 1], for one token a row each row's own.
            S: How many slots are read.
            first: The first of the cache's rows; the others follow it.
            decodes: Run the decode step, which may be compiled.

        Returns:
            The logits [B, V] after the last tokens; in a pipeline on rank 0, and on other ranks anything of that shape.
        """
        slots_BT = slots if slots.dim() == 2 else slots[None]
        positions_BT = (slots_BT - starts_B[:, None]).clamp(min=0)
        at_S, at_BT1 = torch.arange(S, device=slots.device), slots_BT[:, :, None]
        # A slot before a row's beginning sees itself: a softmax over nothing would be NaN.
        is_seen_BTS = ((at_S >= starts_B[:, None, None]) | (at_S == at_BT1)) & (at_S <= at_BT1)
        masks_B1TS = {}
        for kind, window in self._windows.items():
            is_hidden_BTS = ~(is_seen_BTS if window is None else is_seen_BTS & (at_S > at_BT1 - window))
            mask_BTS = torch.zeros(is_hidden_BTS.shape, dtype=self._dtype, device=at_S.device)
            masks_B1TS[kind] = mask_BTS.masked_fill_(is_hidden_BTS, torch.finfo(self._dtype).min)[:, None]
        forward = self._decode if decodes else self._forward
        if forward is not self._forward and not self._replays:
            for mask_B1TS in masks_B1TS.values():
                torch._dynamo.maybe_mark_dynamic(mask_B1TS, 3)
        with torch.no_grad():
            return forward(cache, tokens_BT, positions_BT, masks_B1TS, slots, first)

    def _forward(
        self,
        cache: StaticCache,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        masks_B1TS: dict[str, Tensor],
        slots: Tensor,
        first: int,
    ) -> Tensor:
        mask = masks_B1TS.get(ALL_LAYERS, masks_B1TS)  # a model with layers of several kinds takes a mask of each
        view = cache.at(slots, next(iter(masks_B1TS.values())).shape[3], slice(first, first + len(tokens_BT)))
        named = {"attention_mask": mask, "position_ids": positions_BT, self._cache_name: view}
        return outputs_of(self._decoder(tokens_BT, **named, **self._named))[:, -1]

    # ---------------------------------------------------------------- what is asked

    def check(self, rows: Sequence[Tensor], most: int) -> None:
        """Check that these prompts with `most` new tokens each can be continued.

        Raises:
            ValueError: They cannot.
            TypeError: `most` is not an integer.
        """
        if not isinstance(most, Integral):  # an answer of 2.5 tokens would not end
            raise TypeError(f"expected max_new_tokens as an integer, got {most!r}")
        if (why := why_no_decoding(self.module)) is not None:
            raise ValueError(f"{why}; call the engine like the model instead of generate()")
        if not rows or min(map(len, rows)) == 0 or most < 1:
            raise ValueError("expected prompts of at least one token each, and max_new_tokens of at least 1")
        self._check_tokens(rows)
        if (longest_row := max(map(len, rows))) + most > self.slots:
            limit = longest(self.module)
            raise ValueError(
                f"a prompt of {longest_row} tokens and {most} new ones do not fit into the cache of {self.slots}: "
                f"shorten them, or raise max_out_tokens{f', up to the {limit} of the model' if limit else ''}"
            )

    def read_inputs(self, inputs: Prompts, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Inputs of an encoder on its device, features in its dtype. Raises as `inputs_of`, and for unknown tokens."""
        x, mask = inputs_of(inputs, attention_mask)
        if not x.is_floating_point():
            self._check_tokens([*x])
        x = x.to(self.device, self._dtype if x.is_floating_point() else torch.int64)
        return x, None if mask is None else mask.to(self.device)

    def _check_tokens(self, rows: Sequence[Tensor]) -> None:
        least, greatest = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
        if least < 0 or greatest >= (self.vocabulary or greatest + 1):
            known = f" to {self.vocabulary - 1}" if self.vocabulary else ""
            raise ValueError(f"expected tokens from 0{known}, got {least} to {greatest}")

    def _agree(self, asked: str) -> None:
        if self.transport.world_size > 1:
            every = gather_texts(self.transport, hashlib.sha256(asked.encode()).hexdigest())
            if other := next((rank for rank, text in enumerate(every) if text != every[0]), None):
                raise ValueError(
                    f"rank {other} generates from other prompts or options than rank 0; give all ranks the same"
                )


def why_no_decoding(model: nn.Module) -> str | None:
    """Why a model cannot decode over the cache; None if it can."""
    name, config, model = type(model).__name__, getattr(model, "config", None), decoder_of(model)
    if hasattr(model, "merge_and_unload"):  # PEFT's
        return f"{name} wraps the model that generates: pass its merge_and_unload(), or get_base_model() with adapters"
    missing = {cache_name(model), "position_ids", "attention_mask"} - inspect.signature(model.forward).parameters.keys()
    if missing or not getattr(model, "can_generate", lambda: True)():
        lacks = ", ".join(sorted(missing)) or "cache"
        return f"{name} does not generate: it is an encoder, or its forward takes no {lacks}"
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"{name} has layers that attend neither to all tokens nor over a window ({', '.join(sorted(others))})"
    return None


ALL_LAYERS = ""
"""The kind of layers of a model that takes one mask."""


def windows_of(model: nn.Module) -> dict[str, int | None]:
    """By kind of layer, how many tokens it looks back over, itself included; None for all."""
    config = getattr(model, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if "sliding_attention" in kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    return {ALL_LAYERS: None if kinds else window}


def cache_name(model: nn.Module) -> str:
    """The argument of the model's forward that takes the cache: transformers 5.24 renamed it to `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def longest(model: nn.Module) -> int | None:
    """The most tokens that the model has positions for; None if it does not tell."""
    config = getattr(model, "config", None)
    names = ("max_position_embeddings", "max_target_positions")
    found = next((found for name in names if (found := getattr(config, name, None))), getattr(model, "context", None))
    return found if isinstance(found, int) else None


def outputs_of(out: object) -> Tensor:
    """The logits of a model's output, or an encoder's last hidden state.

    Raises:
        TypeError: The output has neither.
    """
    if isinstance(out, Tensor):
        return out
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(out, name, None), Tensor):
            return found
    raise TypeError(f"expected a tensor, or logits or last_hidden_state in it, got {type(out).__name__}")


@cache
def _compiled_forward(kind: str, mode: str | None) -> Callable[..., Tensor]:
    """A compiled `InferenceEngine._forward` that engines of one kind of model share.

    Args:
        kind: The module as text. If it does not tell two models apart, these are variants of the same code.
        mode: As for torch.compile.
    """
    return compiled_apart(InferenceEngine._forward, fullgraph=True, mode=mode)
