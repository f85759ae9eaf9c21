"""What weights in few bits cost a served model in perplexity: int8, int4 rounded to nearest, int4 calibrated.

    python scripts/study.py calibration --record runs/calibration.md

Models are trained dense, then served in each form, and read the same held-out text. Samples for calibration are of the
text that they were trained on.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.record import here
from provenance import add_record, check_record, revision
from reports import add_missing, gap_text, publish, read_lines, table
from torch import Tensor, nn
from train.model import SIZES, VOCABULARY, next_byte_loss

from onebit.zero import init_inference
from study.compression import Setting, dense_model
from study.tasks import ByteLM

SAMPLES, ROWS = 256, 16


class LlamaLM(ByteLM):
    """The next byte, by a Llama of transformers. Context 128."""

    name, size, validated = "llama-lm", "10m", 256

    def build(self, seed: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        size = SIZES[self.size]
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=size.width, intermediate_size=1024, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, num_key_value_heads=size.heads // 2, max_position_embeddings=size.context,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LlamaForCausalLM(config)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        (windows,) = batch
        return next_byte_loss(model(windows[:, :-1]).logits, windows)


class SmallLM(ByteLM):
    """`DemoLM`, validated on more text."""

    name, size, validated = "demo-lm", "small", 512


TASKS = {task.name: task for task in (ByteLM, SmallLM, LlamaLM)}
SETTINGS = {  # steps of AdamW
    "byte-lm": Setting(steps=800, more_steps=0, batch=16, lr=8e-3, more_lr=0),
    "demo-lm": Setting(steps=400, more_steps=0, batch=16, lr=3e-3, more_lr=0),
    "llama-lm": Setting(steps=80, more_steps=0, batch=8, lr=2e-3, more_lr=0),
}
SEEDS = {"byte-lm": 3, "demo-lm": 3, "llama-lm": 1}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "fp32"},
    "int8": {"dtype": "int8"},
    "int4, rounded": {"dtype": "int4"},
    "int4, calibrated": {"dtype": "int4", "calibration": None},  # of the task's samples
}


@dataclass(frozen=True)
class Result:
    """Of one model in one form. seconds: until it is served."""

    task: str
    seed: int
    form: str
    parameters: int
    loss: float
    held_bytes: int
    seconds: float
    revision: str


def measure(task: ByteLM, model: nn.Module, seed: int, form: str) -> Result:
    options = copy.copy(FORMS[form])
    if "calibration" in options:
        options["calibration"] = [task.batch(seed, 10**6 + k, 0, ROWS)[0][:, :-1] for k in range(SAMPLES // ROWS)]
    started = time.perf_counter()
    engine = init_inference(model, **options)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        loss = task.evaluate(engine.module)
    parameters = sum(p.numel() for p in model.parameters())
    return Result(task.name, seed, form, parameters, loss, engine.held_bytes, seconds, revision())


def report(results: Sequence[Result]) -> str:
    """For each model and form the mean perplexity, and how far it is from float32's for the same seed."""
    rows = []
    for task, form in dict.fromkeys((r.task, r.form) for r in results):
        found = [r for r in results if (r.task, r.form) == (task, form)]
        whole = [r for r in results if (r.task, r.form) == (task, "float32")]
        perplexity, before = ([math.exp(r.loss) for r in each] for each in (found, whole))
        row = [task, f"{found[0].parameters:,}", form, f"{statistics.mean(perplexity):.4f}"]
        row += [gap_text(perplexity, before), f"{found[0].held_bytes / whole[0].held_bytes:.3f}"]
        rows.append([*row, f"{statistics.mean(r.seconds for r in found):.1f}", len(found)])
    heads = ("model", "parameters", "weights", "perplexity", "to float32", "bytes", "seconds", "seeds")
    return f"""# Weights in few bits: perplexity

{here()}

Runs of revision {", ".join(sorted({r.revision for r in results}))}, one thread. Means over seeds, in brackets the least
and the largest. Perplexity: of a byte of held-out text. Calibrated: by {SAMPLES} windows of the training text. Seconds:
until the model is served.

{table(heads, rows, names=3)}
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py calibration", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, default=list(TASKS))
    add("--seeds", type=int, help="default: 3, of the Llama 1")
    add("--steps", type=int, help="default: the task's")
    add("--results", type=Path, default=Path("runs/calibration.jsonl"), metavar="FILE", help="a JSON line for each run")
    add_record(parser)
    args = parser.parse_args(argv)
    check_record(parser, args.results)
    torch.set_num_threads(1)
    trained: dict[tuple[str, int], tuple[ByteLM, nn.Module]] = {}

    def line_of(job: tuple[str, int, str]) -> dict:
        name, seed, form = job
        if (name, seed) not in trained:
            trained.clear()
            task, setting = TASKS[name](), SETTINGS[name]
            steps = args.steps or setting.steps
            model = dense_model(task, seed, Setting(steps, 0, setting.batch, setting.lr, 0)).eval()
            trained[name, seed] = (task, model)
        return asdict(measure(*trained[name, seed], seed, form))

    jobs = [(task, seed, form) for task in args.task for seed in range(args.seeds or SEEDS[task]) for form in FORMS]
    done = {(line["task"], line["seed"], line["form"]) for line in read_lines(args.results)}
    add_missing(jobs, done, line_of, args.results)
    publish(args, report([Result(**line) for line in read_lines(args.results)]), args.results)
