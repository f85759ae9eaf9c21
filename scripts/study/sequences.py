"""What splitting a sequence over ranks costs in loss: keys and values in few bits, and layouts that see far or do not.

    python scripts/study.py sequences codecs --results runs/sequence_codecs.jsonl
    python scripts/study.py sequences retrieval --results runs/sequence_retrieval.jsonl

Codecs: the byte LM reads 4,096 bytes, whose keys and values travel in each format; all formats have the same batches.
Retrieval: 32,768 tokens of noise. One block of 64 has two pairs of a key and a value, 32 times each. In the last
quarter a key is asked for 16 times, too far apart for a window to see the last answer. Pairs and questions are on
different ranks. Four simulated ranks share each sequence; gradients are averaged in float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from provenance import add_record, check_record, revision
from reports import add_missing, gap_text, publish, read_lines, table
from torch import Tensor, nn
from train.model import GPT, ModelSize, build_model, decay_groups, next_byte_loss
from train.run import Windows
from train.schedule import lr_fraction

from onebit.comm import Bf16Codec, Codec, Int4Codec, Int8Codec, SimTransport, run_ranks
from onebit.dense import DenseAverager
from onebit.zero import sequence_parallel
from onebit.zero.sequence import Pieces
from study.tasks import corpus

RANKS, BLOCK = 4, 64
KEYS, VALUES, QUESTIONS = 2, 8, 16
CODECS: dict[str, Codec | None] = {
    "float32": None,
    "bf16": Bf16Codec(),
    "int8": Int8Codec(BLOCK),
    "int4": Int4Codec(BLOCK),
}
PAIRS_AT = (
    5 / 16
)  # of the sequence: in the third chunk of eight, the third rank's; the last two are the second's and the first's


def layouts(length: int) -> dict[str, Mapping[str, object]]:
    """Windows of three blocks, with a block that all see: that of the pairs, another one, or none."""
    seen = {"mode": "bslongformer", "block": BLOCK}
    pairs = int(PAIRS_AT * length) // BLOCK
    return {
        "windows and the pairs' block": seen | {"global_block_indices": [pairs]},
        "windows and another block": seen | {"global_block_indices": [pairs // 2]},
        "windows": {"mode": "local_sliding_window", "block": BLOCK},
    }


@dataclass(frozen=True)
class Job:
    """One run: a format of `CODECS`, or a layout of `layouts`."""

    task: str
    name: str
    seed: int
    steps: int
    length: int
    rows: int


def train(job: Job, model: nn.Module, loss_of: Callable[[int], Tensor], lr: float, transport: SimTransport) -> None:
    """AdamW on gradients averaged over the ranks, clipped at 1; the rate falls to a tenth."""
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1 if job.task == "codecs" else 0.01), lr=lr)
    averager = DenseAverager(model.parameters(), transport)
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_fraction(step, job.steps, max(1, job.steps // 20))
        loss_of(step).backward()
        averager.finish()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- bytes


def read_bytes(job: Job, model: GPT, transport: SimTransport) -> dict[str, float]:
    """Nats per held-out byte; the mean over ranks is the whole's."""
    model = sequence_parallel(model, transport, codec=CODECS[job.name])
    windows = Windows(corpus(), job.length)

    def loss_of(text: Tensor) -> Tensor:
        return next_byte_loss(model(text[:, :-1]), text, model.split)

    train(job, model, lambda step: loss_of(windows.training(job.rows, job.seed, step, 0, 0)), 2e-3, transport)
    with torch.no_grad():
        losses = [loss_of(part).item() for part in windows.validation(0, 1, windows=64).split(4)]
    return {"loss": statistics.mean(losses)}


# ---------------------------------------------------------------- retrieval


def asked_at(length: int) -> Tensor:
    """int64 [QUESTIONS]: where keys are asked for; each answer is the next token."""
    return length // 4 * 3 + torch.arange(QUESTIONS) * (length // 4 // QUESTIONS)


def questions(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """int64 [rows, length]: noise of 0 to 127; pairs, 192 to 255; keys that are asked for, 128 on; values, 184 on."""
    text = torch.randint(128, (rows, length), generator=generator)
    values = torch.randint(VALUES, (rows, KEYS), generator=generator)
    pairs = (192 + torch.arange(KEYS) * VALUES + values).repeat(1, BLOCK // KEYS)
    first = int(PAIRS_AT * length) // BLOCK * BLOCK
    text[:, first : first + BLOCK] = pairs.gather(1, torch.rand(rows, BLOCK, generator=generator).argsort(1))
    asked = torch.randint(KEYS, (rows, QUESTIONS), generator=generator)
    text[:, asked_at(length)] = 128 + asked
    text[:, asked_at(length) + 1] = 184 + values.gather(1, asked)
    return text


def retrieve(job: Job, model: nn.Module, transport: SimTransport) -> dict[str, float]:
    """Nats per answer, and the share of right ones in 32 new sequences; the means over ranks are the whole's."""
    model = sequence_parallel(model, transport, sparsity=layouts(job.length)[job.name])
    places = Pieces(job.length, RANKS).positions(transport.rank)
    here = torch.isin(places, asked_at(job.length))

    def answer(text: Tensor) -> tuple[Tensor, Tensor]:
        labels = torch.full_like(text, -100)
        labels[:, asked_at(job.length) + 1] = text[:, asked_at(job.length) + 1]
        out = model(input_ids=text, labels=labels)
        return out.loss, out.logits

    def loss_of(step: int) -> Tensor:
        generator = torch.Generator().manual_seed((job.seed << 32) + step)
        return answer(questions(job.rows, job.length, generator))[0]

    train(job, model, loss_of, 1e-2, transport)
    text = questions(32, job.length, torch.Generator().manual_seed(-1 - job.seed))
    losses, right = [], 0
    with torch.no_grad():
        for part in text.split(job.rows):
            loss, logits = answer(part)
            losses.append(loss.item())
            right += int((logits[:, here].argmax(2) == part[:, places[here] + 1]).sum())
    return {"loss": statistics.mean(losses), "right": right * RANKS / (len(text) * QUESTIONS)}


# ---------------------------------------------------------------- runs and report


def line_of(job: Job) -> dict:
    """Run a job; its line."""
    began = time.process_time()
    if job.task == "codecs":
        gpt = build_model(ModelSize(layers=2, width=128, heads=4, context=job.length), job.seed)
        found = run_ranks(RANKS, lambda transport: read_bytes(job, copy.deepcopy(gpt), transport), timeout_s=600.0)
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"vocab_size": 256, "n_positions": job.length, "n_embd": 32, "n_layer": 1, "n_head": 2}
        shape |= {"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}  # .02 takes far more steps
        torch.manual_seed(job.seed)
        model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        found = run_ranks(RANKS, lambda transport: retrieve(job, copy.deepcopy(model), transport), timeout_s=600.0)
    means = {key: statistics.mean(its[key] for its in found) for key in found[0]}
    return asdict(job) | means | {"cpu_s": time.process_time() - began, "revision": revision()}


def report(lines: Sequence[dict]) -> Iterator[str]:
    """A row for each format or layout: the mean over its seeds."""
    first = lines[0]
    seeds = sorted({line["seed"] for line in lines})
    its = f"{first['length']:,} tokens over {RANKS} ranks, {first['rows']} sequences a step, {first['steps']} steps"
    yield f"{its}, seeds {', '.join(map(str, seeds))}.\n"
    by_name: dict[str, list[dict]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        by_name.setdefault(line["name"], []).append(line)
    rows, exact = [], [line["loss"] for line in by_name.get("bf16", [])]
    for name, mine in by_name.items():
        losses = [line["loss"] for line in mine]
        if first["task"] == "retrieval":
            last = f"{100 * statistics.mean(line['right'] for line in mine):.1f} %"
        else:
            last = gap_text(losses, exact) if len(exact) == len(losses) and name != "bf16" else ""
        rows.append([name, f"{statistics.mean(losses):.4f}", last])
    what = "answers right" if first["task"] == "retrieval" else "to bf16 (least to largest)"
    yield table(("keys and values" if first["task"] == "codecs" else "sees", "loss", what), rows)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="study.py sequences", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("task", choices=("codecs", "retrieval"))
    add("--results", type=Path, required=True, metavar="FILE", help="a line for each run; those there are not repeated")
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=300)
    add("--length", type=int, help="tokens; default 4,096 of bytes, and 32,768 of retrieval")
    add("--rows", type=int, default=2, help="sequences a step; default: %(default)s")
    add_record(parser)
    args = parser.parse_args(argv)
    check_record(parser, args.results)
    torch.set_num_threads(1)
    has_bytes = args.task == "codecs"
    length = args.length or (4096 if has_bytes else 32768)
    names = CODECS if has_bytes else layouts(length)
    jobs = [Job(args.task, name, seed, args.steps, length, args.rows) for seed in range(args.seeds) for name in names]
    lines = read_lines(args.results)
    done = [Job(**{key: line[key] for key in asdict(jobs[0])}) for line in lines]
    lines += add_missing(jobs, done, line_of, args.results)
    asked = [line for line in lines if Job(**{key: line[key] for key in asdict(jobs[0])}) in jobs]
    title = "The byte LM, its sequences split" if has_bytes else "Retrieval over ranks"
    revisions = ", ".join(dict.fromkeys(line["revision"] for line in asked))
    publish(args, f"# {title}\n\n{chr(10).join(report(asked))}\n\nRevision {revisions}.\n", args.results)
