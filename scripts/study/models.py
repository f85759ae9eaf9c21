"""Which models of transformers train in which form of the engine, and what a form that refuses one says.

    python scripts/study.py models --record scripts/records/models_2026-11.md
    python scripts/study.py models --only Llama T5

A case is a model, a layout of two or eight ranks, an optimizer and a dtype. It passes if

1. its float32 weights are those of one process with torch's AdamW on the same rows (the one-bit warm-up, too),
2. its loss falls, and all ranks have the same weights,
3. a new engine that loads its checkpoint takes the last step to the same bits,
4. `from_pretrained` reads the weights that it exports.

Ranks are forked for each model; if they are lost, new ones go on with the next case.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch._dynamo  # in the process that forks instead of in each rank
import transformers
from bench.command import free_port
from bench.record import here
from provenance import add_record
from reports import publish, table
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from onebit import zero
from onebit.zero import grid as grids
from study.model_cases import MODELS, ROWS, Batch, Model

MICRO_BATCHES = 2
WARMUP, AFTER = 3, 3  # steps
TOLERANCE = 1e-5  # of a tensor's largest element: float32 sums in other orders
QUICK = ("Llama", "BERT")
QUICK_PAIRS = (("AdamW", "float32"), ("OneBitAdam", "bfloat16"))
RATES = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}  # eps: or Adam makes whole steps of gradients that are noise
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS = ("AdamW", "OneBitAdam")
TIMEOUT_S = 120.0  # of a case; an operation waits half of it for the other ranks


@dataclass(frozen=True)
class Layout:
    """blocks: of the configuration. sizes: ranks along the axes of the grid that have several."""

    blocks: Mapping[str, Mapping[str, object]]
    sizes: Mapping[str, int]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def shares(self) -> int:
        """Of a batch; ranks of a pipeline, or of a layer's slices, read the same."""
        return self.sizes.get("replica", 1) * self.sizes.get("shard", 1)


def _zero(stage: int, ranks_per_node: int) -> dict[str, Mapping[str, object]]:
    return {"zero_optimization": {"stage": stage}, "onebit": {"ranks_per_node": ranks_per_node}}


_TENSOR: dict[str, Mapping[str, object]] = {"tensor_parallel": {"autotp_size": 2}}
_PIPE: dict[str, Mapping[str, object]] = {"pipeline": {"stages": 2}}
LAYOUTS = {
    "ZeRO 0": Layout({"zero_optimization": {"stage": 0}}, {"replica": 2}),
    **{f"ZeRO {stage}": Layout(_zero(stage, 2), {"shard": 2}) for stage in (1, 2, 3)},
    "tensor 2": Layout(_TENSOR, {"tensor": 2}),
    "pipe 2": Layout(_PIPE, {"pipe": 2}),
    "3D": Layout(_PIPE | _TENSOR, {"pipe": 2, "replica": 2, "tensor": 2}),
    "3D, ZeRO 1": Layout(_PIPE | _TENSOR | _zero(1, 4), {"pipe": 2, "shard": 2, "tensor": 2}),
}


@dataclass(frozen=True)
class Case:
    """By name. Steps are those of a warm-up, then others in one bit."""

    model: str
    layout: str
    optimizer: str
    dtype: str = "float32"
    warmup: ClassVar[int] = WARMUP
    after: ClassVar[int] = AFTER

    @property
    def config(self) -> dict[str, Any]:
        params = RATES | ({"freeze_step": self.warmup} if self.optimizer == "OneBitAdam" else {})
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "steps_per_print": None,
            "communication_data_type": "fp32",
            "optimizer": {"type": self.optimizer, "params": params},
            "bf16": {"enabled": self.dtype == "bfloat16"},
            **self.on.blocks,
        }
        if self.optimizer == "OneBitAdam":
            config["onebit"] = {"compression": "always"} | config.get("onebit", {})
        return config

    @property
    def its(self) -> Model:
        return MODELS[self.model]

    @property
    def on(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def rows(self) -> int:
        """Of a micro-batch on a rank."""
        return ROWS // MICRO_BATCHES // self.on.shares


CASES = tuple(
    Case(model, layout, optimizer, dtype)
    for model in MODELS
    for layout in LAYOUTS
    for dtype in DTYPES
    for optimizer in OPTIMIZERS
)


@dataclass
class Found:
    """What a rank found, by the names of weights. weights, exported: digests; deviations: from those of one process.

    alone: that process's losses.
    """

    losses: list[float] = field(default_factory=list)
    deviations: dict[str, float] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    resumes: bool = False
    exported: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    error: str = ""
    is_refused: bool = False  # by initialize(), before anything was trained
    alone: list[float] = field(default_factory=list)


# -------------------------------------------------------------------------------- on a rank


def _rank(rank: int, port: int, folder: Path, cases: Sequence[Case], answers: Connection) -> None:
    """A rank's process: these cases, until one fails."""
    ranks = str(cases[0].on.ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    known = Grids()
    for number, case in enumerate(cases):
        found = Found()
        try:
            run(case, known, folder / str(number), found)
        except Exception as error:
            found.error = f"{type(error).__name__}: {error}"
            found.is_refused = found.is_refused and isinstance(error, ValueError | TypeError)
        answers.send(found)
        if found.error and not found.is_refused:
            break
    else:
        time.sleep(TIMEOUT_S)  # others may still talk to it; the process that forked ends it
    os._exit(0)  # without taking apart what was imported before the fork


class Grids(dict[tuple[tuple[str, int], ...], grids.Grid]):
    """Those that have been started, by the sizes of a layout."""

    def of(self, layout: Layout) -> grids.Grid:
        if (sizes := tuple(layout.sizes.items())) not in self:
            self[sizes] = grids.start(timeout_s=TIMEOUT_S / 2, **({"shard": 1} | dict(sizes)))
        return self[sizes]


def run(case: Case, known: Grids, folder: Path, found: Found) -> zero.DeepSpeedEngine:
    """Train, resume and export a case; the engine that has done it. All ranks."""
    grid, found.is_refused = known.of(case.on), True
    engine, again = (zero.initialize(model=case.its.build(), config=case.config, grid=grid)[0] for _ in range(2))
    found.is_refused = False
    steps = case.warmup + (case.after if case.optimizer == "OneBitAdam" else 0)
    for number in range(steps):
        if number == steps - 1:
            engine.save_checkpoint(folder / "checkpoints")
        found.losses.append(step(case, engine))
        if number == case.warmup - 1 and case.dtype == "float32":
            found.alone, expected = alone(case.its, case.rows, case.warmup)
            found.deviations = deviations(engine.module_state_dict(), expected)
    again.load_checkpoint(folder / "checkpoints")
    resumed = step(case, again)
    engine.save_16bit_model(folder)
    weights = engine.module_state_dict()
    found.weights = _digests(weights, case.dtype)
    found.resumes = resumed == found.losses[-1] and _digests(again.module_state_dict(), case.dtype) == found.weights
    if engine.grid.world.rank == 0:
        plain: Any = case.its.build()
        plain.config.save_pretrained(folder)
        read, about = type(plain).from_pretrained(folder, dtype=DTYPES[case.dtype], output_loading_info=True)
        found.lost = sorted(f"{name} ({kind})" for kind, names in about.items() for name in names)
        found.exported = _digests(read.state_dict(), case.dtype)
    return engine


def step(case: Case, engine: zero.DeepSpeedEngine) -> float:
    """One step; this rank's mean loss."""
    place, count = engine.grid.data
    micros = [_rows(case.its, (micro * count + place) * case.rows, case.rows) for micro in range(MICRO_BATCHES)]
    if engine.is_pipe_parallel:
        return float(engine.train_batch(iter(micros)))
    total = 0.0
    for micro in micros:
        loss = engine(**micro).loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / MICRO_BATCHES
    return total


def _rows(model: Model, first: int, count: int) -> Batch:
    return {name: x[first : first + count] if x.dim() else x for name, x in model.batch().items()}


@cache
def alone(its: Model, rows: int, steps: int) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses and weights of steps by torch's AdamW in one process; the loss is the mean over groups of rows."""
    model, losses = its.build().train(), []
    optimizer = torch.optim.AdamW(model.parameters(), **RATES)
    for _ in range(steps):
        losses.append(0.0)
        for first in range(0, ROWS, rows):
            loss = model(**_rows(its, first, rows)).loss * rows / ROWS
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def deviations(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each weight, in units of its largest element."""
    least = torch.finfo(torch.float32).tiny  # BART has a buffer of zeros
    floats = {name: expected[name] for name, x in weights.items() if x.is_floating_point()}
    return {name: float((weights[name] - x).abs().max() / x.abs().max().clamp(min=least)) for name, x in floats.items()}


def _digests(weights: Mapping[str, Tensor], dtype: str) -> dict[str, int]:
    """Of the values in the dtype of an export."""
    cast_ = {name: x.to(DTYPES[dtype]) if x.is_floating_point() else x for name, x in weights.items()}
    return {name: zlib.crc32(x.contiguous().flatten().view(torch.uint8).numpy().data) for name, x in cast_.items()}


# -------------------------------------------------------------------------------- verdicts


def verdict(case: Case, ranks: Sequence[Found | None]) -> str:
    """Return "ok", "refused: " with the error, or "fails: " with all that is wrong."""
    found = [rank for rank in ranks if rank is not None]
    errors = [rank for rank in found if rank.error]
    if errors:
        first = next((rank for rank in errors if "PeerError" not in rank.error), errors[0])
        is_refused = all(rank.is_refused for rank in errors) and len(errors) == case.on.ranks
        model = case.its.kind + case.its.task
        return f"{'refused' if is_refused else 'fails'}: {one_line(first.error.replace(model, 'MODEL'))}"
    if len(found) < case.on.ranks:
        return "fails: a rank was lost"
    first, wrong = found[0], []
    far = {name: x for rank in found for name, x in rank.deviations.items() if not x <= TOLERANCE}
    if far:
        name, most = next(iter(far.items()))
        wrong.append(f"weights differ from one process by {most:.1e} of the largest ({name}, {len(far)} in all)")
    elif case.dtype == "float32" and not all(rank.deviations for rank in found):
        wrong.append("weights were not compared")
    losses = [sum(of_ranks) / len(found) for of_ranks in zip(*(rank.losses for rank in found), strict=True)]
    if not losses[-1] < losses[0]:
        wrong.append(f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}")
    weights: dict[str, int] = {}
    for rank in found:
        if differing := _differing(rank.weights, weights):
            wrong.append(f"ranks differ in {differing}")
            break
        weights |= rank.weights
    if not all(rank.resumes for rank in found):
        wrong.append("a resumed run has other bits")
    if first.lost:
        wrong.append(f"from_pretrained: {', '.join(first.lost[:3])}")
    elif differing := _differing(first.exported, weights):
        wrong.append(f"from_pretrained has other values in {differing}")
    return f"fails: {'; '.join(wrong)}" if wrong else "ok"


def _differing(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    names = [name for name in one if name in other and one[name] != other[name]]
    return f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def one_line(text: str) -> str:
    """Of at most 400 characters, for a table of Markdown, without the rank."""
    text = re.sub(r"rank \d+: ", "", " ".join(text.split()).replace("|", "/"))
    return text if len(text) <= 400 else text[:397] + "..."


# -------------------------------------------------------------------------------- all ranks


def outcomes(cases: Sequence[Case]) -> Iterator[tuple[Case, str, float | None]]:
    """The verdict of each case, and the deviation of its weights, in order."""
    left = list(cases)
    while left:
        same = [case for case in left if case.model == left[0].model and case.on.ranks == left[0].on.ranks]
        for case, found in _together(same):
            known = [x for rank in found if rank is not None for x in rank.deviations.values()]
            yield case, verdict(case, found), max(known, default=None)
            left.remove(case)


def _together(cases: Sequence[Case]) -> Iterator[tuple[Case, list[Found | None]]]:
    """Fork the ranks; what they found, until one fails or is lost."""
    fork = multiprocessing.get_context("fork")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(cases[0].on.ranks)]
        ranks = [
            fork.Process(target=_rank, args=(rank, port, Path(folder), cases, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, theirs in pipes:
                theirs.close()
            for case in cases:
                found = [_received(mine) for mine, _ in pipes]
                yield case, found
                if any(rank is None or (rank.error and not rank.is_refused) for rank in found):
                    return
                if len({rank is not None and rank.is_refused for rank in found}) > 1:  # one refused what another ran
                    return
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _received(mine: Connection) -> Found | None:
    """None if the rank is lost, or hangs."""
    try:
        return cast(Found, mine.recv()) if mine.poll(TIMEOUT_S) else None
    except EOFError:
        return None


# -------------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Row:
    case: Case
    verdict: str
    deviation: float | None


def report(rows: Sequence[Row], seconds: float) -> str:
    """Counts for each layout, a table of models and layouts, and what refusals and failures say."""
    layouts = [layout for layout in LAYOUTS if any(row.case.layout == layout for row in rows)]
    counts, lines, notes = [], [], dict[str, int]()
    for layout in [*layouts, "all"]:
        kinds = Counter(kind_of(row.verdict) for row in rows if layout in (row.case.layout, "all"))
        counts.append((layout, kinds["ok"], kinds["refused"], kinds["fails"]))
    for model in dict.fromkeys(row.case.model for row in rows):
        own = [row for row in rows if row.case.model == model]
        cells = [_cell([row for row in own if row.case.layout == layout], notes) for layout in layouts]
        most = max((row.deviation for row in own if row.deviation is not None), default=None)
        lines.append([model, *cells, "" if most is None else f"{most:.0e}"])
    return f"""# Models of transformers in the forms of the engine

{here()}

{len(lines)} models of transformers {transformers.__version__} on two ranks over Gloo, in 3D on eight, {len(rows)} cases
in {seconds:.0f} s. Each layout is run with {" and ".join(OPTIMIZERS)}, in {" and ".join(DTYPES)}. A case is ok if its
float32 weights after {WARMUP} steps (OneBitAdam: of warm-up, then {AFTER} more) are those of torch's AdamW in one
process to {TOLERANCE:g} of a tensor's largest element, its loss falls, all ranks have the same weights, a new engine
resumes it to the bit, and `from_pretrained` reads the weights that it exports.

{table(("layout", "ok", "refused", "fails"), counts)}

{table(("model", *layouts, "deviation"), lines, names=1 + len(layouts))}

Deviation: the largest of the model's float32 cases.

{told(notes)}
"""


def told(notes: Mapping[str, int]) -> str:
    """Verdicts by their numbers in a table."""
    return "\n".join(f"{number}. {said}" for said, number in notes.items())


def kind_of(said: str) -> str:
    """The first word of a verdict."""
    return said.partition(":")[0]


def _cell(rows: Sequence[Row], notes: dict[str, int]) -> str:
    """One verdict if all cases of a layout have the same, else each with its cases."""
    told: dict[str, list[str]] = {}
    for row in rows:
        number = "" if row.verdict == "ok" else f" [{notes.setdefault(row.verdict, len(notes) + 1)}]"
        told.setdefault(kind_of(row.verdict) + number, []).append(f"{row.case.optimizer} {row.case.dtype}")
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(said if said == "ok" else f"{', '.join(cases)}: {said}" for said, cases in told.items())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py models", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=MODELS, metavar="NAME", help="run these models; default: all")
    add("--quick", action="store_true", help=f"run {', '.join(QUICK)}, in each layout one case")
    add_record(parser)
    args = parser.parse_args(argv)
    chosen = args.only or (QUICK if args.quick else MODELS)
    cases = [case for case in CASES if case.model in chosen]
    if args.quick:
        pairs = dict(zip(LAYOUTS, cycle(QUICK_PAIRS)))
        cases = [case for case in cases if (case.optimizer, case.dtype) == pairs[case.layout]]
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    gc.collect()
    gc.freeze()  # or each rank would read, and so copy, all that was imported
    rows, began = [], time.perf_counter()
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("Training", total=len(cases))
        for found in outcomes(cases):
            rows.append(row := Row(*found))
            if kind_of(row.verdict) == "fails":
                progress.print(row.case, row.verdict)
            progress.update(bar, advance=1, description=row.case.model)
            progress.refresh()
    publish(args, report(rows, time.perf_counter() - began))
    if any(kind_of(row.verdict) == "fails" for row in rows):
        sys.exit(1)
