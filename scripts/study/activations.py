"""What few bits between pipeline stages cost: the byte LM, cut into stages, every cut a `quantised_boundary`.

    python scripts/study.py activations --gradients                        the error of the gradients, in a minute
    python scripts/study.py activations --results runs/activations.jsonl   losses of whole runs

One process computes what a pipeline computes: a cut sends activations down and their gradients up. Runs that --results
already holds are not run again. Error feedback adds what the last tensor in the same place lost to the next one:
"own", in the same micro-batch of the step before; "shared", in the micro-batch before.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path

import torch
from provenance import check_record, revision
from reports import add_missing, gap_text, read_lines, table
from torch import Tensor, nn
from train.model import build_model, decay_groups
from train.run import Windows
from train.schedule import lr_fraction, train_steps

from onebit.comm import Bf16Codec, Codec, Int4Codec, Int8Codec, SimTransport, run_ranks
from onebit.zero.pipeline.wire import quantised_boundary
from study.run import METHODS, WEIGHT_DECAY
from study.tasks import corpus

PLACES = {("tiny", 2): (1,), ("tiny", 4): (0, 1, 2), ("small", 4): (1, 2, 4)}  # blocks before each cut
SEEDS = 3

# ---------------------------------------------------------------- cuts


@dataclass(frozen=True)
class Wire:
    """Codecs by name, and which direction has error feedback: "" (none), "own" or "shared"."""

    forward: str = "fp32"
    backward: str = "fp32"
    block: int = 64
    forward_feedback: str = ""
    backward_feedback: str = ""

    @property
    def is_shared(self) -> bool:
        return "shared" in (self.forward_feedback, self.backward_feedback)


@dataclass(frozen=True)
class Job:
    """One training run; batch: sequences of a step, over all ranks."""

    optimizer: str
    stages: int
    wire: Wire
    seed: int
    model: str = "tiny"
    steps: int = 250
    batch: int = 16
    lr: float = 2e-3
    micro_batches: int = 1


@dataclass
class WithMemory:
    """A codec that adds to a tensor what the last one lost: as much of `Codec` as a boundary needs."""

    codec: Codec
    error: Tensor | None = None

    @property
    def block(self) -> int:
        return self.codec.block

    def frame_bytes(self, n: int) -> int:
        return self.codec.frame_bytes(n)

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        self.codec.encode(x_KN, self.error, frames_KB, counts_KJ)
        self.error = x_KN

    def decode(self, frames_KB: Tensor, out_KN: Tensor) -> None:
        self.codec.decode(frames_KB, out_KN)


@dataclass
class Cut:
    """A forward hook on the last module of a stage. Where no gradient is wanted, nothing is remembered."""

    wire: Wire
    micro_batch: int = 0
    memories: dict[tuple[str, int], WithMemory] = field(default_factory=dict)

    def __call__(self, module: nn.Module, args: object, x: Tensor) -> Tensor:
        wire = self.wire
        if not torch.is_grad_enabled():
            return quantised_boundary(x, codec_of(wire.forward, wire.block), None)
        return quantised_boundary(
            x, self._codec("forward", wire.forward_feedback), self._codec("backward", wire.backward_feedback)
        )

    def _codec(self, direction: str, feedback: str) -> Codec | WithMemory | None:
        codec = codec_of(getattr(self.wire, direction), self.wire.block)
        if codec is None or not feedback:
            return codec
        return self.memories.setdefault((direction, self.micro_batch * (feedback == "own")), WithMemory(codec))


def codec_of(name: str, block: int) -> Codec | None:
    return {"fp32": None, "bf16": Bf16Codec(), "int8": Int8Codec(block), "int4": Int4Codec(block)}[name]


def cut(model: nn.Module, job: Job) -> list[Cut]:
    """Lay the cuts into the model, after so many blocks each."""
    cuts = []
    for place in PLACES[job.model, job.stages]:
        cuts.append(each := Cut(job.wire))
        if place:
            model.blocks[place - 1].register_forward_hook(each)
        else:
            model.blocks[0].register_forward_pre_hook(lambda module, args, each=each: each(module, args, args[0]))
    return cuts


# ---------------------------------------------------------------- the error of gradients


def measure_gradients(wires: Sequence[Wire], steps: int = 200, batches: int = 24, batch: int = 16) -> str:
    """A table: how far the weights' gradients are from those without cuts, at the weights after a short training.

    One: |error| / |gradient| of a batch, mean over the batches. Sum: the same of the sum over them. Growth:
    |sum of errors| / sqrt(sum of |error|²): 1 where errors are independent and without bias, sqrt(batches) where they
    are all the same.
    """
    job = Job("adamw", 4, Wire(), 0, steps=steps, batch=batch, lr=8e-3)
    model = build_model(job.model, job.seed)
    cuts, windows = cut(model, job), Windows(corpus(), context=model.context)
    optimizer = METHODS[job.optimizer].make(decay_groups(model, WEIGHT_DECAY), None, steps)
    for _ in train_steps(optimizer, steps, lambda k: model.loss(windows.training(batch, job.seed, k, 0, 0)), job.lr):
        pass

    def gradients(wire: Wire) -> Tensor:
        for each in cuts:
            each.wire, each.memories = wire, {}
        rows = []
        for k in range(batches):
            parts = windows.training(batch, job.seed, 10_000 + k, 0, 0).chunk(4 if wire.is_shared else 1)
            for part in parts:
                (model.loss(part) / len(parts)).backward()
            rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            model.zero_grad()
        return torch.stack(rows)

    exact, rows = gradients(Wire()), []
    for wire in wires:
        error = gradients(wire) - exact
        one = (error.norm(dim=1) / exact.norm(dim=1)).mean()
        total = error.sum(0).norm()
        growth = total / error.norm(dim=1).square().sum().sqrt()
        names = (
            f"{name}, feedback {feedback}" if feedback else name
            for name, feedback in ((wire.forward, wire.forward_feedback), (wire.backward, wire.backward_feedback))
        )
        rows.append([*names, wire.block, f"{one:.2%}", f"{total / exact.sum(0).norm():.2%}", f"{growth:.2f}"])
    noise = ((exact - exact.mean(0)).norm(dim=1) / exact.norm(dim=1)).mean()
    text = table(("forward", "backward", "block", "one", "sum", "growth"), rows, names=2)
    return f"{text}\n\nA batch's gradient differs from the mean over the batches by {noise:.0%} of itself."


# ---------------------------------------------------------------- one run


def run_job(job: Job) -> dict[str, object]:
    """A record: the validation loss as trained, and of the same weights without cuts."""
    began = time.process_time()
    is_dense = METHODS[job.optimizer].is_dense
    losses = train(job, None) if is_dense else run_ranks(2, lambda transport: train(job, transport), timeout_s=3600)[0]
    cost = {"seconds": round(time.process_time() - began, 1), "revision": revision()}
    return {"job": asdict(job), "loss": losses[0], "uncut": losses[1]} | cost


def train(job: Job, transport: SimTransport | None) -> tuple[float, float]:
    model = build_model(job.model, job.seed)
    cuts = cut(model, job)
    windows = Windows(corpus(), context=model.context)
    optimizer = METHODS[job.optimizer].make(decay_groups(model, WEIGHT_DECAY), transport, job.steps)
    rank, rows = (0, job.batch) if transport is None else (transport.rank, job.batch // transport.world_size)
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.lr * lr_fraction(step, job.steps, max(1, job.steps // 10))
        parts = windows.training(rows, job.seed, step, rank, 0).chunk(job.micro_batches)
        for k, part in enumerate(parts):
            for each in cuts:
                each.micro_batch = k
            (model.loss(part) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank:
        return math.inf, math.inf
    loss = validation_loss(model, windows)
    for each in cuts:
        each.wire = Wire()
    return loss, validation_loss(model, windows)


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Windows) -> float:
    """Over 65,536 bytes that are always the same; inf where it is not finite."""
    parts = windows.validation(0, 1, windows=65_536 // model.context).split(64)
    loss = sum(float(model.loss(part)) for part in parts) / len(parts)
    return loss if math.isfinite(loss) else math.inf


# ---------------------------------------------------------------- many runs

INT8, MIXED, INT4 = ("int8", "int8"), ("int4", "int8"), ("int4", "int4")
WIRES = (
    Wire(),
    *(Wire(*pair) for pair in (INT8, MIXED, ("int8", "int4"), INT4)),
    Wire("int8", "int4", backward_feedback="own"),
    Wire(*MIXED, forward_feedback="own"),
    Wire("int8", "int4", backward_feedback="shared"),
    Wire(*MIXED, block=256),
    Wire("bf16", "bf16"),
)


GRADIENT_WIRES = (
    Wire("bf16", "bf16"),
    *(Wire(*pair, block=block) for pair in (INT8, MIXED, ("int8", "int4"), INT4) for block in (64, 256)),
    Wire("fp32", "int4"),
    Wire("fp32", "int4", backward_feedback="own"),
    Wire("fp32", "int4", backward_feedback="shared"),
    Wire("int4", "fp32"),
    Wire("int4", "fp32", block=32),
    Wire("int4", "fp32", forward_feedback="own"),
)


def jobs() -> Iterator[Job]:
    """All of the study, the first seeds of everything first."""
    few = (Wire(), Wire(*INT8), Wire(*MIXED), Wire(*INT4))
    for seed in range(SEEDS):
        for wire in WIRES:
            yield Job("adamw", 4, wire, seed, micro_batches=4 if wire.is_shared else 1)
        yield from (Job("onebit-adam", 4, wire, seed) for wire in few)
    for seed in range(SEEDS):
        yield from (Job("adamw", 2, wire, seed) for wire in few[1:])
    for wire in few:
        yield Job("adamw", 4, wire, 0, model="small", steps=300, batch=8, lr=4e-3)


def job_of(record: dict) -> Job:
    return Job(**record["job"] | {"wire": Wire(**record["job"]["wire"])})


def rows_of(results: Sequence[dict]) -> Iterator[list[object]]:
    """Losses, and the gap to the uncompressed run of the same seed, mean over seeds and extremes."""
    runs = {job_of(record): record for record in results}
    for key in dict.fromkeys(replace(job, seed=0) for job in runs):
        mine = {job.seed: record for job, record in runs.items() if replace(job, seed=0) == key}
        plain = {seed: replace(key, seed=seed, wire=Wire(), stages=4, micro_batches=1) for seed in mine}
        both = [(mine[seed]["loss"], runs[job]["loss"]) for seed, job in plain.items() if job in runs]
        loss, uncut = (statistics.mean(record[name] for record in mine.values()) for name in ("loss", "uncut"))
        gap = gap_text(*zip(*both, strict=True)) if both and key.wire != Wire() else ""
        wire = ", ".join(str(value) for value in astuple(key.wire) if value)
        yield [key.optimizer, key.model, key.stages, wire, len(mine), f"{loss:.4f}", f"{uncut:.4f}", gap]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py activations", description=__doc__.split("\n\n")[0])
    parser.add_argument("--gradients", action="store_true", help="measure the error of gradients, and no losses")
    parser.add_argument("--results", type=Path, default=Path("runs/activations.jsonl"), metavar="FILE")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    if not args.report_only:
        check_record(parser, args.results)
    torch.set_num_threads(1)
    if args.gradients:
        print(measure_gradients(GRADIENT_WIRES))
        return
    if not args.report_only:
        with ProcessPoolExecutor(args.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            done = {job_of(record) for record in read_lines(args.results)}
            add_missing(jobs(), done, run_job, args.results, pool)
    heads = ("optimizer", "model", "stages", "wire", "seeds", "loss", "without cuts", "gap")
    print(table(heads, rows_of(read_lines(args.results)), names=4))
