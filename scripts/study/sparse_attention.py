"""What a sparse layout costs in loss: a key far back that it can or cannot see, and the byte LM at equal CPU time.

    python scripts/study.py sparse-attention retrieval --results runs/retrieval.jsonl
    python scripts/study.py sparse-attention byte-lm --results runs/long_bytes.jsonl

Retrieval: 4,096 tokens. The first 64 say two pairs of a key and a value, 32 times each; all others are noise. The last
one asks for a key, and the model says its value: one of eight. The byte LM reads 2,048 bytes, by a sparse layout and by
dense attention, and 512 by dense attention, as many bytes a step; all train for as many seconds of the processor and
are judged by the same held-out bytes. One run after the other, on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from provenance import add_record, check_record, revision
from reports import add_missing, publish, read_lines, table
from torch import Tensor, nn
from torch.nn import functional as F
from train.model import ModelSize, build_model, decay_groups
from train.run import Windows

from onebit.zero.sparse_attention import build_layout, reach, read_sparsity, replace_attention
from study.tasks import corpus

KEYS, VALUES = 2, 8
_NOISE, _ASK = 0, 128  # the first token of noise, and of the questions; pairs are 192 to 255

# A block that all see holds the pairs; a window of three blocks does not reach them through two layers.
SEES: dict[str, Mapping[str, object] | None] = {
    "bslongformer": {"mode": "bslongformer", "block": 64},
    "bigbird": {"mode": "bigbird", "block": 64},
    "window": {"mode": "local_sliding_window", "block": 64, "num_sliding_window_blocks": 5},
}
BYTE_LMS: dict[str, tuple[int, Mapping[str, object] | None]] = {
    "sparse, 2048": (2048, {"mode": "bigbird", "block": 64, "num_sliding_window_blocks": 5}),
    "dense, 2048": (2048, None),
    "dense, 512": (512, None),
}


@dataclass
class Result:
    """One run. loss: nats per answer or byte, held out; right: share of answers; budget_s: given to a byte LM."""

    task: str
    name: str
    seed: int
    steps: int
    cpu_s: float
    loss: float
    right: float | None
    revision: str
    budget_s: float | None = None


# ---------------------------------------------------------------- retrieval


def questions(sequences: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens [B, S], the value that is asked for [B]); the first 64 tokens say each pair 32 times."""
    text = torch.randint(_NOISE, _ASK, (sequences, length), generator=generator)
    values = torch.randint(VALUES, (sequences, KEYS), generator=generator)
    pairs = (192 + torch.arange(KEYS) * VALUES + values).repeat(1, 64 // KEYS)
    text[:, :64] = pairs.gather(1, torch.rand(sequences, 64, generator=generator).argsort(1))
    asked = torch.randint(KEYS, (sequences,), generator=generator)
    text[:, -1] = _ASK + asked
    return text, values.gather(1, asked[:, None])[:, 0]


def answers(model: nn.Module, text: Tensor) -> Tensor:
    """Scores of the values [B, 8], of the last token."""
    scores: Tensor = model(text)[:, -1, :VALUES]
    return scores


def retrieve(name: str, seed: int, steps: int, length: int = 4096, batch: int = 8, lr: float = 5e-3) -> Result:
    """Train two layers of width 32 to answer, then ask 128 new questions."""
    began = time.process_time()
    model = build_model(ModelSize(layers=2, width=32, heads=2, context=length), seed)
    if (sparsity := SEES[name]) is not None:
        replace_attention(model, sparsity)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=lr)
    for step in range(steps):
        text, value = questions(batch, length, torch.Generator().manual_seed((seed << 32) + step))
        loss = F.cross_entropy(answers(model, text), value)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    text, value = questions(128, length, torch.Generator().manual_seed(-1 - seed))
    with torch.no_grad():
        scores = torch.cat([answers(model, part) for part in text.split(batch)])
    right = (scores.argmax(1) == value).float().mean().item()
    cpu_s = time.process_time() - began
    return Result("retrieval", name, seed, steps, cpu_s, F.cross_entropy(scores, value).item(), right, revision())


def farthest_tokens(name: str, length: int, layers: int) -> int:
    """How far back the last token sees through so many layers."""
    config = read_sparsity(SEES[name] or {"mode": "dense"}).of_model(True)
    return reach(build_layout(config, 1, length), layers)[-1].farthest


# ---------------------------------------------------------------- bytes


def read_bytes(name: str, seed: int, budget_s: float, layers: int = 4, width: int = 128) -> Result:
    """Train for so many seconds of the processor; 8,192 bytes a step. Judged by the last 512 bytes of each window."""
    context, sparsity = BYTE_LMS[name]
    model = build_model(ModelSize(layers=layers, width=width, heads=4, context=context), seed)
    if sparsity is not None:
        replace_attention(model, sparsity)
    optimizer, windows = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-3), Windows(corpus(), context)
    steps, began = 0, time.process_time()
    while (spent := time.process_time() - began) < budget_s:
        rate = 1e-3 * min(1.0, (steps + 1) / 20) * (1 - 0.9 * spent / budget_s)  # falls with the time that is left
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model.loss(windows.training(8192 // context, seed, steps, 0, 0))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    return Result("byte-lm", name, seed, steps, spent, held_out_loss(model, context), None, revision(), budget_s)


@torch.no_grad()
def held_out_loss(model: nn.Module, context: int, windows: int = 32) -> float:
    """Of the last 512 bytes of windows of 2,048, which every model reads with as much of what precedes as it can."""
    text = Windows(corpus(), 2048).validation(0, 1, windows)[:, -context - 1 :]
    total = 0.0
    for part in text.split(4):
        scores = model(part[:, :-1])[:, -512:]
        total += F.cross_entropy(scores.flatten(0, 1), part[:, -512:].flatten(), reduction="sum").item()
    return total / (512 * windows)


# ---------------------------------------------------------------- runs and report


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, int, float | None]]:
    """(what attends, seed, budget in seconds)"""
    for budget_s in [None] if args.task == "retrieval" else args.budgets:
        for seed in range(args.seeds):
            for name in SEES if args.task == "retrieval" else BYTE_LMS:
                yield name, seed, budget_s


def report(task: str, results: Sequence[Result]) -> str:
    """A row for each run."""
    rows = []
    for result in (r for r in results if r.task == task):
        right = "" if result.right is None else f"{100 * result.right:.1f} %"
        rows.append([result.name, result.seed, result.steps, f"{result.cpu_s:.0f}", f"{result.loss:.4f}", right])
    lines = [table(("attention", "seed", "steps", "CPU s", "loss", "answers right"), rows)]
    if task == "retrieval":
        lines.append("")
        for name in SEES:
            lines.append(f"- {name}: the last token sees {farthest_tokens(name, 4096, 2)} tokens back, in two layers")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="study.py sparse-attention", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("task", choices=("retrieval", "byte-lm"))
    add("--results", type=Path, required=True, metavar="FILE", help="a line for each run; those there are not repeated")
    add("--seeds", type=int, default=1)
    add("--steps", type=int, default=150, help="of retrieval")
    add("--budgets", type=float, nargs="+", default=[300.0], metavar="SECONDS", help="of the processor, for a byte LM")
    add_record(parser)
    args = parser.parse_args(argv)
    check_record(parser, args.results)
    torch.set_num_threads(1)

    def line_of(asked: tuple[str, int, float | None]) -> dict:
        name, seed, budget_s = asked
        return asdict(retrieve(name, seed, args.steps) if budget_s is None else read_bytes(name, seed, budget_s))

    results = [Result(**line) for line in read_lines(args.results)]
    done = [(r.name, r.seed, r.budget_s) for r in results if r.task == args.task]
    results += [Result(**line) for line in add_missing(wanted(args), done, line_of, args.results)]
    text = report(args.task, results)
    title = "Retrieval over 4,096 tokens" if args.task == "retrieval" else "The byte LM at equal time"
    publish(args, f"# {title}\n\n{text}\n\nRevision {revision()}.\n", args.results)
