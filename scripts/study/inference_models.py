"""Which models of transformers `init_inference` serves in which form, with whose tokens, and what it refuses.

    python scripts/study.py inference-models --record runs/inference_models.md
    python scripts/study.py inference-models --only Llama T5

A case is a model, a layout of one or two simulated ranks and a dtype. It passes if on every rank

1. in float32: greedy tokens are those of transformers' own `generate`, and logits those of its forward;
2. in few bits on one rank: logits are those of transformers' model with weights rounded by the formats that
   docs/inference.md describes, but for what products in bfloat16 round (`NEAR`);
3. in few bits on two ranks: logits are not much farther from float32's than those of that rounded model (`DRAWN_ANEW`):
   parts of rows have scales of their own, so the codes differ, with an error of the same size;
4. in few bits: each token is the likeliest by the engine's own logits of one pass, to what bfloat16 rounds.

By 4, two ranks choose another token than one only if their logits differ by more than the two tokens do.
A refusal is a ValueError or TypeError that this package raises on every rank, before or instead of generating.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.record import here
from provenance import add_record
from reports import publish, table
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

import onebit
from onebit.comm import Transport, run_ranks
from onebit.zero import InferenceEngine, init_inference
from onebit.zero.parallel.experts import inputs_dim, is_experts, up_name
from study.model_cases import SERVED, Batch, spectra
from study.models import kind_of, one_line, told

NEW = 8  # tokens of an answer
PROMPTS = (3, 7)  # tokens of the prompts of a batch
NOISE = 0.2  # added to weights, so that answers are not one token again and again
EXACT = 1e-5  # relative to the norm: float32 sums in other orders
NEAR = 0.03
"""Of a token's logits: bfloat16 rounds a product's inputs and outputs by .1 to .2 %, and these models have a dozen.

The median of tokens counts: if two experts are about equally likely, rounding may send a token to the other one.
"""
SHORT = 0.1
"""Of the logits' root mean square: two logits, each off by three times as much as most."""
DRAWN_ANEW = 1.5
"""Rounding errors of other codes have the same variance, and each logit sums up those of thousands of weights."""
QUICK = ("Llama", "T5", "BLOOM")
LAYOUTS: Mapping[str, dict[str, object]] = {
    "one rank": {},
    "rows 2": {"tensor_parallel": {"tp_size": 2}},
    "layers 2": {"pipeline_parallel": {"pp_size": 2}},
}
FORMS = [("fp32", layout) for layout in LAYOUTS]
FORMS += [(dtype, layout) for dtype in ("int8", "int4") for layout in ("one rank", "rows 2")]
PACKAGE = tuple(folder for package in (onebit, onebit.comm, onebit.zero) for folder in package.__path__)


@dataclass
class Model:
    """A model of transformers and what it computes itself.

    given: forward's arguments; the first are the inputs. prompts: of `generate`. starts: what each row's answer
    follows. logits: by the dtype of rounded weights; of "fp32" the model's own.
    """

    name: str
    module: Any
    given: Batch
    prompts: list[Tensor] | Tensor
    starts: list[Tensor]
    answers: list[Tensor]
    logits: dict[str, Tensor]


@dataclass
class Found:
    """What a rank found. answers: new tokens. shortfall: of their logits to the largest, by the root mean square."""

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    answers: list[Tensor] = field(default_factory=list)
    shortfall: float = 0.0
    refusal: str = ""


@dataclass(frozen=True)
class Row:
    """error: of logits, relative to float32's. equal: tokens before the first that one rank chooses differently."""

    model: str
    dtype: str
    layout: str
    verdict: str
    error: float = 0.0
    equal: int | None = None
    of: int = 0


# -------------------------------------------------------------------------------- transformers' own


@torch.no_grad()
def built(name: str) -> Model:
    case = SERVED[name]
    module: Any = case.build(NOISE).eval()
    module.generation_config.forced_eos_token_id = None  # BART's last token, otherwise
    batch = case.batch()
    given = {key: x for key, x in batch.items() if key != "labels"}
    (inputs,) = given.values()
    prompts: list[Tensor] | Tensor = [inputs[row, :length] for row, length in enumerate(PROMPTS)]
    starts, batches = prompts, [prompt[None] for prompt in prompts]
    if module.config.is_encoder_decoder:
        given["decoder_input_ids"], prompts = batch["labels"], inputs[:3]
        starts, batches = [torch.tensor([module.config.decoder_start_token_id])] * 3, [prompts]
    whole = [row for rows in batches for row in module.generate(rows, max_new_tokens=NEW, do_sample=False)]
    # Whisper gives answers without what they follow.
    answers = whole if case.batch is spectra else [row[len(start) :] for row, start in zip(whole, starts, strict=True)]
    twins = {"fp32": module, "int8": rounded(module, 8), "int4": rounded(module, 4)}
    return Model(
        name, module, given, prompts, starts, answers, {dtype: twin(**given).logits for dtype, twin in twins.items()}
    )


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """A copy in floats, with the values that weights in few bits have."""
    twin = copy.deepcopy(model)
    tables = {id(module.weight) for module in twin.modules() if isinstance(module, nn.Embedding)}
    for module in twin.modules():
        if is_experts(module):
            for name in (up_name(module), "down_proj"):
                matrices = getattr(module, name)
                setattr(module, name, nn.Parameter(by_rows(matrices, inputs_dim(module))))
        elif type(module) in (nn.Linear, nn.Embedding, transformers.pytorch_utils.Conv1D):
            inputs = 0 if isinstance(module, transformers.pytorch_utils.Conv1D) else 1
            is_table = bits == 8 or id(module.weight) in tables
            made = by_rows(module.weight, inputs) if is_table else by_groups(module.weight.movedim(inputs, 1))
            module.weight = nn.Parameter(made if is_table else made.movedim(1, inputs))
    return twin


def by_rows(w: Tensor, inputs: int) -> Tensor:
    """In 8 bits: symmetric, with a scale for each output. inputs: the dimension of a row."""
    scale = w.abs().amax(inputs, keepdim=True) / 127
    return (w / scale.where(scale > 0, 1)).round() * scale


def by_groups(w_NK: Tensor) -> Tensor:
    """In 4 bits: from the least to the greatest weight of each group of inputs, with scale and zero in bfloat16."""
    K = w_NK.shape[1]
    size = next((size for size in (128, 64, 32) if K % size == 0), 32)
    w_NJg = F.pad(w_NK, (0, -K % size)).unflatten(1, (-1, size))
    low, high = w_NJg.amin(-1, keepdim=True), w_NJg.amax(-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((w_NJg - zero) / scale.where(scale > 0, 1)).round().clamp(-8, 7)
    return (codes * scale + zero).flatten(1)[:, :K]


# -------------------------------------------------------------------------------- on a rank


def serve(model: Model, dtype: str, layout: str, transport: Transport) -> Found:
    """What one rank finds. Raises what is neither a result nor a refusal."""
    found = Found()
    try:
        engine = init_inference(model.module, dtype=dtype, transport=transport, **LAYOUTS[layout])
        found.logits = engine(**model.given).logits
        whole = engine.generate(model.prompts, max_new_tokens=NEW, do_sample=False)
    except (ValueError, TypeError) as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE):
            raise
        said = str(error).partition("; its linear layers are")[0]  # a long list that differs by model
        found.refusal = one_line(said.replace(type(model.module).__name__, "MODEL"))
        return found
    found.answers = [row[len(start) :] for row, start in zip(whole, model.starts, strict=True)]
    found.shortfall = max(shortfall(model, engine, row, answer) for row, answer in enumerate(found.answers))
    return found


def shortfall(model: Model, engine: InferenceEngine, row: int, answer: Tensor) -> float:
    """How far the logits of an answer's tokens are below the largest, relative to all. All ranks call it."""
    tokens, end = answer.tolist(), model.module.generation_config.eos_token_id
    tokens = tokens[: tokens.index(end) + 1 if end in tokens else None]
    text = torch.cat([model.starts[row], torch.tensor(tokens)])[None]
    if isinstance(model.prompts, Tensor):
        out = engine(**{next(iter(model.given)): model.prompts[row, None]}, decoder_input_ids=text)
    else:
        out = engine(text)
    logits = out.logits[0, -len(tokens) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])
    return float((logits.amax(1, keepdim=True) - chosen).max() / logits.square().mean().sqrt())


# -------------------------------------------------------------------------------- verdicts


def examined(
    model: Model, dtype: str, layout: str, answers_of_one: Sequence[Tensor] | None
) -> tuple[Row, list[Tensor]]:
    """A case's row of the report, and its answers."""
    row, ranks = partial(Row, model.name, dtype, layout), 1 if layout == "one rank" else 2
    try:
        found = run_ranks(ranks, partial(serve, model, dtype, layout))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return row(
            f"fails: {type(error).__name__} in {Path(at.filename).name}, line {at.lineno}: {one_line(str(error))}"
        ), []
    first, wrong, error = found[0], [], 0.0
    for rank in found[1:]:
        if rank.refusal != first.refusal:
            wrong.append(f"ranks refuse differently: {first.refusal or 'nothing'}; {rank.refusal or 'nothing'}")
        elif not torch.equal(rank.logits, first.logits) or not same(rank.answers, first.answers):
            wrong.append("ranks differ")
    if len(first.logits):  # which also a model has that does not generate
        error = distance(model.logits["fp32"], first.logits)
        cost = distance(model.logits["fp32"], model.logits[dtype])
        off = (first.logits - model.logits[dtype]).norm(dim=-1) / model.logits[dtype].norm(dim=-1)
        if ranks == 1 and not off.median() <= NEAR:
            wrong.append(f"logits differ from those of rounded weights by {float(off.median()):.1e}")
        if not error <= (EXACT if dtype == "fp32" else DRAWN_ANEW * cost + NEAR):
            wrong.append(f"logits differ from float32's by {error:.1e}, those of rounded weights by {cost:.1e}")
    if not first.refusal:
        if dtype == "fp32" and not same(first.answers, model.answers):
            wrong.append("tokens are not those of transformers")
        if not first.shortfall <= SHORT:
            wrong.append(f"the logit of a token is {first.shortfall:.1e} below the largest")
    equal = None
    if answers_of_one and first.answers:
        pairs = zip(first.answers, answers_of_one, strict=True)
        equal = sum(int((mine == theirs).int().cumprod(0).sum()) for mine, theirs in pairs)
    said = f"fails: {one_line('; '.join(wrong))}" if wrong else f"refused: {first.refusal}" if first.refusal else "ok"
    return row(said, error, equal, sum(map(len, first.answers))), first.answers


def distance(expected: Tensor, got: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -------------------------------------------------------------------------------- the report


def report(rows: Sequence[Row], seconds: float) -> str:
    """Counts for each form, a table of models and forms, and what refusals and failures say."""
    forms = list(dict.fromkeys((row.dtype, row.layout) for row in rows))
    counts = []
    for form in forms:
        kinds = Counter(kind_of(row.verdict) for row in rows if (row.dtype, row.layout) == form)
        counts.append((*form, kinds["ok"], kinds["refused"], kinds["fails"]))
    notes: dict[str, int] = {}
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        lines.append([model, *(cell(row, notes) for row in rows if row.model == model)])
    heads = ["model", *(f"{dtype}, {layout}" for dtype, layout in forms)]
    return f"""# Models of transformers, served

{here()}

{len(lines)} models of transformers {transformers.__version__} with random weights, on one rank and on two simulated
ones that divide rows or layers, {len(rows)} cases in {seconds:.0f} s. In float32 a case is ok if {NEW} greedy tokens
after each prompt are those of transformers' `generate`, and logits differ by at most {EXACT:g} of their norm. In few
bits it is ok if one rank's logits differ by at most {NEAR:g} from those of transformers' model with rounded weights
(median of tokens), those of two ranks from float32's by at most {DRAWN_ANEW:g} times as much as the rounded model's and
{NEAR:g}, and no token's logit is farther than {SHORT:g} below the largest in a pass over all tokens.

{table(("dtype", "layout", "ok", "refused", "fails"), counts, names=2)}

{table(heads, lines, names=len(heads))}

Numbers: error of logits in few bits, relative to the norm of float32's. In brackets, of the tokens of two ranks, those
before the first that differs from one rank's.

{told(notes)}
"""


def cell(row: Row, notes: dict[str, int]) -> str:
    if row.verdict != "ok":
        return f"{kind_of(row.verdict)} [{notes.setdefault(row.verdict, len(notes) + 1)}]"
    if row.dtype == "fp32":
        return "ok"
    return f"{row.error:.3f}" + ("" if row.equal is None else f" ({row.equal} of {row.of})")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py inference-models", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=SERVED, metavar="NAME", help="serve these models; default: all")
    add("--quick", action="store_true", help=f"serve {', '.join(QUICK)}")
    add_record(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("onebit").setLevel(logging.ERROR)  # parameters that stay in floats
    rows, began = [], time.perf_counter()
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        chosen = args.only or (QUICK if args.quick else SERVED)
        bar = progress.add_task("Serving", total=len(chosen))
        for name in chosen:
            model, of_one = built(name), dict[str, list[Tensor]]()
            for dtype, layout in FORMS:
                row, answers = examined(model, dtype, layout, of_one.get(dtype) if dtype != "fp32" else None)
                of_one.setdefault(dtype, answers)
                rows.append(row)
                if kind_of(row.verdict) == "fails":
                    progress.print(row)
            progress.update(bar, advance=1, description=name)
            progress.refresh()
    publish(args, report(rows, time.perf_counter() - began))
    if any(kind_of(row.verdict) == "fails" for row in rows):
        sys.exit(1)
