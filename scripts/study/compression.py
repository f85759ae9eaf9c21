"""What compression costs: loss or accuracy against bytes on disk, each technique alone and all together.

    python scripts/study.py compression --results runs/compression.jsonl --record scripts/records/compression.md

Of each seed a dense model is trained; every recipe then compresses a copy of it, "rounded" (no training), "trained"
(as many steps for all, dense too) and "distilled" (the same, with the dense model as teacher). Each is cleaned, written
to a file, read back and validated. Runs that --results already holds are not run again.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from provenance import add_record, check_record, revision
from reports import add_missing, panels_of, publish, read_lines, table
from torch import Tensor, nn
from torch.nn import functional as F
from train.model import ModelSize, build_model, decay_groups, next_byte_loss
from train.schedule import train_steps

from onebit.zero.compression import (
    CompressionScheduler,
    Distillation,
    export_compressed,
    import_compressed,
    init_compression,
    redundancy_clean,
    sizes,
)
from study.tasks import ByteLM, DemoLM, Digits, Task

WEIGHT_DECAY = 0.01
SEEDS = 3

# ---------------------------------------------------------------- tasks


class ShortByteLM(ByteLM):
    """The byte LM, validated on a quarter of the windows."""

    validated = 256


@cache
def task_named(name: str) -> Task:
    """Raises ImportError where a package is missing."""
    return {"byte-lm": ShortByteLM, "demo-lm": DemoLM, "digits": Digits}[name]()


@dataclass(frozen=True)
class Setting:
    """Steps of the dense model, of what follows, rows of a batch, the peak rates of both."""

    steps: int
    more_steps: int
    batch: int
    lr: float
    more_lr: float


DEFAULTS = {
    "byte-lm": Setting(steps=800, more_steps=200, batch=16, lr=8e-3, more_lr=4e-3),
    "demo-lm": Setting(steps=600, more_steps=300, batch=16, lr=3e-3, more_lr=1.5e-3),
    "digits": Setting(steps=400, more_steps=200, batch=64, lr=8e-3, more_lr=4e-3),
}

# ---------------------------------------------------------------- recipes


def technique(modules: list[str], params: dict, related: list[list[str]] | None = None, **shared: Any) -> dict:
    """One technique of the JSON, with one group."""
    group = {"params": params, "modules": modules} | ({} if related is None else {"related_modules": related})
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"all": group}}


def _weights(bits: int, groups: int = 1) -> dict:
    params = {"start_bits": bits, "target_bits": bits}
    return {"weight_quantization": technique(["*"], params, quantize_groups=groups)}


def _blocks_in_4_bits() -> dict:
    chosen = _weights(4, groups=64)
    chosen["weight_quantization"]["different_groups"] = {
        "blocks": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["blocks"]},
        "tables": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["^bytes", "^positions"]},
    }
    return chosen


_HALF = {"dense_ratio": 0.5}
_ACTIVATIONS = {"bits": 8}


def _byte_lm() -> dict[str, dict]:
    rows = technique(["mlp_in"], _HALF, [["mlp_out"]], method="topk")
    heads = technique(["attention_out"], _HALF | {"qkv_layout": "heads"}, [["qkv"]], num_heads=2, method="topk")
    sparse = technique(["blocks"], _HALF, method="topk")
    layers = {
        "enabled": True, "module_name_prefix": "blocks", "teacher_layer": [1], "keep_number_layer": 1,
        "other_module_name": ["bytes", "positions", "norm"],
    }  # fmt: skip
    acts = technique(["blocks"], _ACTIVATIONS, quantization_type="asymmetric")
    together = {"sparse_pruning": sparse, "row_pruning": rows, "head_pruning": heads, "activation_quantization": acts}
    return {
        "8 bits": _weights(8),
        "4 bits": _weights(4, groups=64),
        "4 bits, tables in 8": _blocks_in_4_bits(),
        "2 bits": _weights(2, groups=64),
        "1 bit": _weights(1, groups=64),
        "1 bit, one scale": _weights(1),
        "half the weights": {"sparse_pruning": sparse},
        "half the rows": {"row_pruning": rows},
        "half the heads": {"head_pruning": heads},
        "activations in 8 bits": {"activation_quantization": acts},
        "half the layers": {"layer_reduction": layers},
        "all, 8 bits": _weights(8) | together,
        "all, 4 bits": _weights(4, groups=64) | together,
    }


def _digits() -> dict[str, dict]:
    rows = technique(["^0$", "^2$"], _HALF, [["^2$"], ["^4$"]], method="topk")
    sparse = technique(["^0$", "^2$"], _HALF, method="topk")
    acts = technique(["*"], _ACTIVATIONS, quantization_type="asymmetric")
    together = {"sparse_pruning": sparse, "row_pruning": rows, "activation_quantization": acts}
    return {
        "8 bits": _weights(8),
        "4 bits": _weights(4),
        "2 bits": _weights(2),
        "1 bit": _weights(1),
        "half the weights": {"sparse_pruning": sparse},
        "half the rows": {"row_pruning": rows},
        "activations in 8 bits": {"activation_quantization": acts},
        "all, 8 bits": _weights(8) | together,
        "all, 4 bits": _weights(4) | together,
    }


_OF_THE_DEMO = ("8 bits", "4 bits", "4 bits, tables in 8", "1 bit", "1 bit, one scale")  # what a larger model adds
RECIPES: dict[str, dict[str, dict]] = {
    "byte-lm": {"dense": {}} | _byte_lm(),
    "demo-lm": {"dense": {}} | {name: recipe for name, recipe in _byte_lm().items() if name in _OF_THE_DEMO},
    "digits": {"dense": {}} | _digits(),
}
"""By task and name: the block compression_training."""
MODES = ("rounded", "trained", "distilled")

# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Result:
    """Of one seed, recipe and mode. loss: of the file read back; moved: by how much cleaning moves logits, in float64.

    In float32 a sum in another order may move an activation in few bits to its next level. accuracy: of digits. bytes:
    of the file, its header included; weight_bytes: without.
    """

    task: str
    recipe: str
    mode: str
    seed: int
    loss_before: float
    loss_trained: float
    loss: float
    accuracy: float | None
    moved: float
    parameters: int
    bytes: int
    weight_bytes: int
    memory_bytes: int
    revision: str


Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def fit(
    task: Task, model: nn.Module, loss: Loss, seed: int, steps: Sequence[int], batch: int, lr: float
) -> Iterator[float]:
    """Train by AdamW, and the scheduler where the model has techniques; the loss of each step."""
    optimizer = torch.optim.AdamW(decay_groups(model, WEIGHT_DECAY))
    scheduler = CompressionScheduler(model) if is_armed(model) else None

    def loss_of(k: int) -> Tensor:
        return loss(model, task.batch(seed, steps[k], 0, batch))

    for _, value in train_steps(optimizer, len(steps), loss_of, lr):
        if scheduler is not None:
            scheduler.step()
        yield value.item()


def is_armed(model: nn.Module) -> bool:
    return "compression_step" in dict(model.named_buffers())


def logits_of(task: Task, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(what a model reads, the loss of its logits)."""
    if isinstance(task, ByteLM):
        (windows,) = batch
        return windows[:, :-1], lambda logits: next_byte_loss(logits, windows)
    pixels, labels = batch
    return pixels, lambda logits: F.cross_entropy(logits, labels)


def distilled(task: Task, distillation: Distillation) -> Loss:
    """The mean of the task's loss and the teacher's."""

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        read, of_task = logits_of(task, model, batch)
        taught = distillation.teach(read)
        logits = model(read)
        return (of_task(logits) + distillation.loss(logits, taught)) / 2

    return loss


def dense_model(task: Task, seed: int, setting: Setting) -> nn.Module:
    """Trained without compression."""
    model = task.build(seed)
    for _ in fit(task, model, task.loss, seed, range(setting.steps), setting.batch, setting.lr):
        pass
    return model


def student_of(task: Task, dense: nn.Module, recipe: dict) -> nn.Module:
    """A copy of the dense model or, with fewer layers, a smaller one, under the recipe."""
    config = {"compression_training": recipe}
    reduction = recipe.get("layer_reduction")
    if reduction is None:
        student = copy.deepcopy(dense)
    else:
        whole = dense.blocks[0]
        width = dense.bytes.weight.shape[1]
        size = ModelSize(len(reduction["teacher_layer"]), width, width // whole.head_width, dense.context)
        student = build_model(size, 0)
    return init_compression(student, config, dense) if recipe else student


def plain_of(task: Task, dense: nn.Module, recipe: dict) -> nn.Module:
    """As built before compression: what a file is read into."""
    only = {"layer_reduction": recipe["layer_reduction"]} if "layer_reduction" in recipe else {}
    student = student_of(task, dense, only)
    return redundancy_clean(student) if only else student


def run(name: str, recipe: str, mode: str, seed: int, dense: nn.Module, setting: Setting) -> Result:
    """One recipe of one dense model."""
    task, block = task_named(name), RECIPES[name][recipe]
    model = student_of(task, dense, block)
    before = task.evaluate(model.eval())
    steps = range(setting.steps, setting.steps + setting.more_steps)
    if mode != "rounded":
        loss, teacher = task.loss, None
        if mode == "distilled":
            teacher = Distillation(model, copy.deepcopy(dense), temperature=2.0)
            loss = distilled(task, teacher)
        for _ in fit(task, model.train(), loss, seed, steps, setting.batch, setting.more_lr):
            pass
        if teacher is not None:
            teacher.close()
    trained = before if mode == "rounded" else task.evaluate(model.eval())
    probe, _ = logits_of(task, model, task.batch(seed, 10**6, 0, 16))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        moved = _moved_by_cleaning(model, probe)
        if is_armed(model):
            redundancy_clean(model)
        file = Path(folder) / "model.safetensors"
        written, size = export_compressed(model, file), sizes(model)
        back = import_compressed(plain_of(task, dense, block), file).eval()
    accuracy = task.accuracy(back) if isinstance(task, Digits) else None
    return Result(
        name, recipe, mode, seed, before, trained, task.evaluate(back), accuracy, moved,
        size.parameters, written, size.packed_bytes, size.memory_bytes, revision(),
    )  # fmt: skip


def _moved_by_cleaning(model: nn.Module, probe: Tensor) -> float:
    exact = copy.deepcopy(model).double()
    probe = probe.double() if probe.is_floating_point() else probe
    said = exact(probe)
    return float(((redundancy_clean(exact) if is_armed(exact) else exact)(probe) - said).abs().max())


def read_results(path: Path) -> list[Result]:
    """Those that a file holds."""
    return [Result(**line) for line in read_lines(path)]


def run_missing(args: argparse.Namespace) -> None:
    """Add what --results lacks, line by line. The jobs of a dense model come one after the other."""
    torch.set_num_threads(1)
    jobs = [
        (task, recipe, mode, seed)
        for task in args.task
        for seed in range(args.seeds)
        for recipe, block in RECIPES[task].items()
        for mode in (MODES if block else MODES[:2])
    ]
    made: dict[tuple[str, int], nn.Module] = {}

    def line_of(job: tuple[str, str, str, int]) -> dict:
        name, recipe, mode, seed = job
        setting = _setting(args, name)
        if (name, seed) not in made:
            made.clear()
            made[name, seed] = dense_model(task_named(name), seed, setting)
        return asdict(run(name, recipe, mode, seed, made[name, seed], setting))

    done = {(r.task, r.recipe, r.mode, r.seed) for r in read_results(args.results)}
    add_missing(jobs, done, line_of, args.results)


def _setting(args: argparse.Namespace, task: str) -> Setting:
    known = DEFAULTS[task]
    return Setting(args.steps or known.steps, args.more_steps or known.more_steps, known.batch, known.lr, known.more_lr)


# ---------------------------------------------------------------- report


def report(results: Sequence[Result]) -> str:
    """A table for each task: means over seeds, and the spread of what was trained."""
    parts = ["# Compression: loss against bytes\n"]
    for task in dict.fromkeys(r.task for r in results):
        parts.append(_table(task, [r for r in results if r.task == task]))
    moved = max(r.moved for r in results)
    revisions = ", ".join(sorted({r.revision for r in results}))
    cost = max(abs(r.loss / r.loss_trained - 1) for r in results)
    parts.append(
        f"Cleaning moved no logit by more than {moved:.1e} in float64, and no loss by more than {cost:.1e} in float32. "
        f"Revision {revisions}.\n"
    )
    return "\n".join(parts)


def _table(task: str, results: Sequence[Result]) -> str:
    seeds = len({r.seed for r in results})
    by = {(r.recipe, r.mode): [x for x in results if (x.recipe, x.mode) == (r.recipe, r.mode)] for r in results}
    dense = by["dense", "trained"]
    base, whole = _mean(r.loss for r in dense), dense[0].bytes
    unit = "accuracy" if dense[0].accuracy is not None else "loss"
    rounded, trained, distilled = (f"{unit}, {mode}" for mode in MODES)
    heads = ("recipe", "parameters", "bytes", "smaller", rounded, trained, "±", distilled, "gap", "gap, distilled")
    lines = []
    for recipe in dict.fromkeys(r.recipe for r in results):
        rows = {mode: by.get((recipe, mode), []) for mode in MODES}
        any_row = (rows["trained"] or rows["rounded"])[0]
        shown = {mode: _shown(rows[mode]) for mode in MODES}
        gaps = {mode: f"{_mean(r.loss for r in rows[mode]) / base - 1:+.2%}" if rows[mode] else "" for mode in MODES}
        cells = [recipe, f"{any_row.parameters:,}", f"{any_row.bytes:,}", f"{whole / any_row.bytes:.1f}"]
        cells += [shown["rounded"], shown["trained"], _spread(rows["trained"]), shown["distilled"]]
        lines.append([*cells, gaps["trained"], gaps["distilled"]])
    return f"""## {task}, {seeds} seeds

Rounded: without training. Gap: to the dense model trained as long. Smaller: the file, all of it.

{table(heads, lines)}
"""


def _value(result: Result) -> float:
    return result.loss if result.accuracy is None else result.accuracy


def _mean(values: Any) -> float:
    return statistics.mean(values)


def _shown(results: Sequence[Result]) -> str:
    if not results:
        return ""
    mean = _mean(_value(r) for r in results)
    return f"{mean:.2%}" if results[0].accuracy is not None else f"{mean:.4f}"


def _spread(results: Sequence[Result]) -> str:
    if len(results) < 2:
        return ""
    spread = statistics.stdev(_value(r) for r in results)
    return f"{spread:.2%}" if results[0].accuracy is not None else f"{spread:.4f}"


def draw(results: Sequence[Result], path: Path) -> None:
    """Loss against bytes, a panel for each task. Needs matplotlib: pip install onebit[train]."""
    tasks = list(dict.fromkeys(r.task for r in results))
    with panels_of(path, tasks, (7, 5), xscale="log", yscale="log", xlabel="bytes on disk") as panels:
        for axis, task in zip(panels, tasks, strict=True):
            axis.set_ylabel(f"loss ({task_named(task).unit})")
            for mode, marker in zip(MODES, "xos", strict=True):
                points: dict[str, list[Result]] = {}
                for r in results:
                    if (r.task, r.mode) == (task, mode):
                        points.setdefault(r.recipe, []).append(r)
                places = [(_mean(r.bytes for r in rows), _mean(r.loss for r in rows)) for rows in points.values()]
                if places:
                    axis.scatter(*zip(*places, strict=True), marker=marker, label=mode, alpha=0.8)
                if mode == "trained":
                    for recipe, place in zip(points, places, strict=True):
                        axis.annotate(recipe, place, fontsize=7, xytext=(3, 3), textcoords="offset points")


# ---------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py compression", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--task", nargs="+", choices=RECIPES, default=list(RECIPES))
    add("--seeds", type=int, default=SEEDS)
    add("--steps", type=int, help="of the dense model; default: the task's")
    add("--more-steps", type=int, help="behind it; default: the task's")
    add("--results", type=Path, default=Path("runs/compression.jsonl"), metavar="FILE", help="a JSON line for each run")
    add_record(parser, "the report, with its figure beside it as .png")
    add("--report-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    if not args.report_only:
        check_record(parser, args.results)
        run_missing(args)
    results = read_results(args.results)
    publish(args, report(results), args.results, shows="Loss against bytes", draw=partial(draw, results))
