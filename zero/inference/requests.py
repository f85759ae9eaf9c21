"""A request to `generate`: its prompts, what ends them, and the rules by which a token is chosen.

A model of transformers follows transformers' own rules: its generation_config, overridden by the options, and the
processors that transformers' `generate` makes from both, in its order. Any other model has `Sampling`, three of these.

Shape legend: B rows, T tokens of the longest prompt, V logits; G rows of a group.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

Prompts = Tensor | Sequence[Tensor | Sequence[int]]
Mask = Tensor | Sequence[Sequence[int]]
Rules = Callable[[Tensor, Tensor], Tensor]
"""A function (tokens so far [G, T], logits [G, V]) that returns logits, as transformers' LogitsProcessor."""


class Options(TypedDict, total=False):
    """The options of `generate`.

    `eos_token_id` ends a row: absent, the model's generation_config decides; [] means that nothing ends it.
    `pad_token_id` stands before prompts and after ends. `input_ids` or `input_features` are the prompts, under the name
    that a model of transformers has for them. `seed` is that of the sampling. For do_sample, temperature, top_k and
    top_p see `Sampling`; all others are a GenerationConfig's, and only for models of transformers. `language` and
    `task` are of Whisper.
    """

    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    input_ids: Prompts
    input_features: Tensor
    seed: int | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: list[list[int]]
    sequence_bias: object
    min_length: int
    min_new_tokens: int
    suppress_tokens: list[int]
    begin_suppress_tokens: list[int]
    forced_bos_token_id: int
    forced_eos_token_id: int | list[int]
    decoder_start_token_id: int
    language: str | list[str]
    task: str
    exponential_decay_length_penalty: tuple[int, float]
    num_beams: int


# ---------------------------------------------------------------- prompts

_OTHER_SHAPE = "expected an attention_mask of the shape of the prompts, or none"


def given_of(
    model: nn.Module, prompts: Prompts | None, mask: Mask | None, options: Options
) -> tuple[Prompts, Tensor | None, Options]:
    """The prompts, if need be by transformers' name of them, a tensor's mask, and the other options.

    Of lists only the tokens remain that their mask does not hide.

    Raises:
        TypeError: There are no prompts, or prompts by both names.
        ValueError: The mask has another shape than a list of prompts.
    """
    name = getattr(model, "main_input_name", "input_ids")
    others = {key: value for key, value in options.items() if key != name}
    if (prompts is None) != (name in options):
        raise TypeError(f"expected prompts, or {name}=, and not both")
    found: Any = options.get(name) if prompts is None else prompts
    if mask is not None and not isinstance(found, Tensor):
        rows, seen = rows_of(found, None), [torch.as_tensor(row, device="cpu").bool() for row in mask]
        if [row.shape for row in rows] != [row.shape for row in seen]:
            raise ValueError(_OTHER_SHAPE)
        found, mask = [row[keep] for row, keep in zip(rows, seen, strict=True)], None
    if mask is not None and not isinstance(mask, Tensor):
        mask = torch.tensor(mask, device="cpu", dtype=torch.int64)
    return found, mask, cast(Options, others)


def rows_of(prompts: Prompts, mask: Tensor | None) -> list[Tensor]:
    """The prompts as int64 tensors on the CPU, without the tokens that the mask [B, T] hides.

    Raises:
        TypeError: A prompt is no sequence of integers.
    """
    given = list(prompts)
    has_text = isinstance(prompts, str) or any(isinstance(row, str) for row in given)
    rows = [] if has_text else [torch.as_tensor(row, device="cpu") for row in given]
    if has_text or any(
        row.dim() != 1 or (len(row) and (row.is_floating_point() or row.dtype == torch.bool)) for row in rows
    ):
        raise TypeError(
            "expected prompts as a tensor [B, T] of tokens, or a list with a sequence of tokens a prompt: of one text "
            "tokenizer([text])"
        )
    if mask is not None:
        rows = [row[keep.bool().cpu()] for row, keep in zip(rows, mask, strict=True)]
    return [row.long() for row in rows]


def mask_of(prompts: Prompts, given: Tensor | None, pad: int | None, ends: Collection[int]) -> Tensor | None:
    """Which tokens of a tensor of prompts are text, [B, T]; None if all are.

    Without a given mask pad tokens are padding, unless the pad token is also an end token (transformers' rule).

    Raises:
        ValueError: A prompt is padded on the right, or the mask does not fit the prompts.
    """
    is_tensor = isinstance(prompts, Tensor) and prompts.dim() == 2
    if given is not None and not (is_tensor and given.shape == prompts.shape):  # type: ignore[union-attr]
        raise ValueError(_OTHER_SHAPE)
    mask = given
    if given is None and isinstance(prompts, Tensor) and is_tensor and pad is not None and pad not in ends:
        mask = prompts != pad
    if mask is None or bool(mask.all()):
        return None
    if not bool(mask[:, -1].all()):
        raise ValueError(
            "prompts are padded on the right; pad them on the left (tokenizer.padding_side = 'left'), or pass a list"
        )
    return mask.long()


def ends_of(model: nn.Module, options: Options) -> list[int]:
    """The tokens that end a row."""
    given = options.get("eos_token_id")
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None) if given is None else given
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def pad_of(model: nn.Module, options: Options) -> int | None:
    """The pad token, or None."""
    given = options.get("pad_token_id")
    return getattr(getattr(model, "generation_config", None), "pad_token_id", None) if given is None else given


# ---------------------------------------------------------------- what is chosen


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    The greatest or, with do_sample, drawn at `temperature` from the `top_k` greatest (0: from all), and among these
    from the most likely ones that together have the probability `top_p`.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"expected temperature > 0, top_k >= 0 and 0 < top_p <= 1, got {self}")
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1, 0, 1):
            raise ValueError(f"{self} has no effect without do_sample=True: pass it, or remove the others")

    def __call__(self, tokens_GT: Tensor, logits_GV: Tensor) -> Tensor:
        """The logits, with -inf for tokens that are left out; equal to transformers' processors to the bit."""
        logits_GV = logits_GV / self.temperature
        if self.top_k:
            least_G1 = logits_GV.topk(min(self.top_k, logits_GV.shape[1])).values[:, -1:]
            logits_GV = logits_GV.masked_fill(logits_GV < least_G1, -torch.inf)
        if self.top_p < 1:
            rising_GV, order_GV = logits_GV.sort(1)
            is_out_GV = rising_GV.softmax(1).cumsum(1) <= 1 - self.top_p
            is_out_GV[:, -1] = False
            logits_GV = logits_GV.masked_fill(is_out_GV.scatter(1, order_GV, is_out_GV), -torch.inf)
        return logits_GV


@dataclass
class Group:
    """Rows of one length, which share rules. `tokens_GT`: those so far, with a tensor's padding, as in transformers."""

    rows: list[int]
    tokens_GT: Tensor
    rules: Rules


@dataclass
class Choice:
    """Chooses every row's next token, and records those that all ranks use."""

    do_sample: bool
    groups: list[Group]
    generator: torch.Generator

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Choose each row's next token, int64 [B]. Changes nothing.

        Raises:
            ValueError: No token can be drawn. Rules raise their own errors, too.
        """
        logits_BV = logits_BV.to(torch.float32, copy=True)
        for group in self.groups:
            logits_BV[group.rows] = group.rules(group.tokens_GT, logits_BV[group.rows])
        if not self.do_sample:
            return logits_BV.argmax(1)
        shares_BV = logits_BV.softmax(1).cpu()
        if not bool(shares_BV.isfinite().all()):  # as torch.multinomial, which does not tell why
            raise ValueError(
                "no token can be drawn: the logits are not finite, or are divided by a temperature that is too small; "
                "draw at a larger one, or take the likeliest token"
            )
        drawn_B1 = torch.multinomial(shares_BV, 1, generator=self.generator)
        return drawn_B1[:, 0].to(logits_BV.device)

    def follow(self, chosen_B: Tensor) -> None:
        """Append the tokens that were chosen, which the rules of later ones may need."""
        for group in self.groups:
            group.tokens_GT = torch.cat([group.tokens_GT, chosen_B[group.rows, None]], 1)


def choice_of(
    model: nn.Module, prompts: Prompts, mask: Tensor | None, most: int, options: Options, device: torch.device
) -> Choice:
    """How the tokens of these prompts are chosen.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is not supported, or has no effect.
    """
    given = {name: value for name, value in options.items() if name not in ("eos_token_id", "pad_token_id", "seed")}
    by_length: dict[int, list[int]] = {}
    whole = rows_of(prompts, None)
    for b, row in enumerate(whole):
        by_length.setdefault(len(row), []).append(b)
    groups = [
        Group(rows, torch.stack([whole[b] for b in rows]).to(device), _as_they_are) for rows in by_length.values()
    ]
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.GenerationMixin):
        how = Sampling(**given)  # type: ignore[arg-type]
        for group in groups:
            group.rules = how
        return Choice(how.do_sample, groups if how.do_sample else [], _generator(options))
    do_sample = False
    for group in groups:
        tokens = group.tokens_GT
        seen = torch.ones_like(tokens) if mask is None else mask[group.rows].to(device)
        _, config, group.rules, _ = transformers_start(model, tokens, seen, most, options)
        do_sample = bool(config.do_sample)
    return Choice(do_sample, [group for group in groups if group.rules is not _as_they_are], _generator(options))


def start_of(
    model: nn.Module, inputs: Tensor, mask: Tensor | None, most: int, options: Options, *, encodes: bool = True
) -> tuple[list[Tensor], Choice, dict[str, Any]]:
    """What an encoder-decoder of transformers begins with.

    Args:
        model: The model, whose encoder runs.
        inputs: What it encodes, on its device.
        mask: Which of the inputs are no padding, or None.
        most: The most new tokens.
        options: The options of `generate`.
        encodes: Whether the encoder runs (default). False: its outputs are those of the caller, who has inputs of
            tokens.

    Returns:
        The decoder's prompts on the CPU, how the tokens after them are chosen, and what else the model's forward takes.

    Raises:
        TypeError, ValueError: As `choice_of`.
    """
    outputs = None
    if not encodes:
        nothing_BE1 = torch.zeros(*inputs.shape, 1, dtype=torch.float32, device=inputs.device)
        outputs = sys.modules["transformers"].modeling_outputs.BaseModelOutput(nothing_BE1)
    tokens_BT, config, rules, named = transformers_start(model, inputs, mask, most, options, outputs)
    groups = [] if rules is _as_they_are else [Group(list(range(len(tokens_BT))), tokens_BT, rules)]
    return list(tokens_BT.cpu()), Choice(bool(config.do_sample), groups, _generator(options)), named


def _generator(options: Options) -> torch.Generator:
    generator, seed = torch.Generator(), options.get("seed")
    _ = generator.seed() if seed is None else generator.manual_seed(seed)
    return generator


_OF_DRAWS = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
_ELSEWHERE = {
    "num_return_sequences": "pass a prompt as often as you want answers",
    "guidance_scale": "it takes a second pass over other prompts",
    "stop_strings": "it takes a tokenizer: look at the text of stream(), and stop",
    "max_time": "stop reading stream()",
    "token_healing": "it takes a tokenizer",
    "return_dict_in_generate": "the answer is tokens; step() gives logits",
    "output_scores": "the answer is tokens; step() gives logits",
    "output_logits": "the answer is tokens; step() gives logits",
    "output_attentions": "the answer is tokens",
    "return_timestamps": "pass inputs of one segment each, and read the tokens",
    "no_speech_threshold": "it skips segments by their probability",
    "logprob_threshold": "it decodes again at other temperatures",
    "compression_ratio_threshold": "it decodes again at other temperatures",
    "output_hidden_states": "the answer is tokens",
}
"""Options of transformers' generate that this one does not support, and what to do instead."""


def _as_they_are(tokens_GT: Tensor, logits_GV: Tensor) -> Tensor:
    return logits_GV


class _Left(Exception):
    """transformers' generate has prepared everything, and would begin to decode."""


def transformers_start(
    model: nn.Module, inputs: Tensor, mask: Tensor | None, most: int, options: Options, outputs: object = None
) -> tuple[Tensor, Any, Rules, dict[str, Any]]:
    """What transformers' own generate would begin to decode with.

    outputs: Those of an encoder that shall not run.

    Returns:
        The tokens of the (decoder's) prompts, the GenerationConfig, the processors, and the other arguments of forward.
    """
    transformers = sys.modules["transformers"]
    generate = type(model).generate  # type: ignore[attr-defined]
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "seed"}
    taken = inspect.signature(generate).parameters.keys()
    known = vars(transformers.GenerationConfig()).keys() | taken & {"language", "task"}
    if unknown := given.keys() - known | given.keys() & {"max_length"}:
        raise TypeError(
            f"generate() takes no {', '.join(sorted(unknown))}: expected options of a GenerationConfig; max_new_tokens "
            "sets how long answers are"
        )
    given |= {"eos_token_id": ends_of(model, options) or None, "pad_token_id": pad_of(model, options)}
    given["use_cache"] = False  # scripts ask for one; the tokens are the same, and no step follows that would fill it
    for name, remedy in _ELSEWHERE.items():
        asked = given.get(name, getattr(model.generation_config, name, None))
        if asked and (asked is True or asked != 1):  # the number 1 is the neutral value
            raise ValueError(
                f"{name}={asked!r}, of the options or the model's generation_config, cannot be followed here: {remedy}"
            )
    if "return_timestamps" in taken:  # None would begin long inputs, and take only their first segment
        given["return_timestamps"] = False
    if outputs is not None:
        given["encoder_outputs"] = outputs
    found: dict[str, Any] = {}

    def take(_: object, tokens: Tensor, **named: object) -> None:
        found.update(named, tokens=tokens)
        raise _Left

    with contextlib.suppress(_Left):
        generate(model, inputs, custom_generate=take, attention_mask=mask, max_new_tokens=most, **given)
    config, rules = found["generation_config"], found["logits_processor"]
    if (mode := config.get_generation_mode().value) not in ("greedy_search", "sample"):
        raise ValueError(
            f"this asks for {mode}, which is not here: of num_beams, penalty_alpha, prompt_lookup_num_tokens and their "
            "like, in the options and in the model's generation_config, none can be followed"
        )
    if not config.do_sample and (idle := given.keys() & _OF_DRAWS):
        raise ValueError(
            f"{', '.join(sorted(idle))} has no effect without do_sample=True: pass it, or remove the others"
        )
    if given.get("do_sample") and not config.do_sample:
        raise ValueError(f"do_sample has no effect on {type(model).__name__}, which draws if a temperature is given")
    return found["tokens"], config, rules if len(rules) else _as_they_are, found
