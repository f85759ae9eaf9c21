"""Compress a small model by a DeepSpeed JSON, and say what came of it.

    python scripts/compress.py --config ds.json --out runs/small.safetensors     (a JSON with "compression_training")

A dense model of the task is trained, compressed while it trains on, cleaned, written, read back and validated at each
point.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from study.tasks import ByteLM, DemoLM, Digits, Task
from torch import Tensor, nn
from torch.nn import functional as F
from train.model import ModelSize, build_model, decay_groups, next_byte_loss
from train.schedule import train_steps

from onebit.comm import SimTransport
from onebit.zero import export_weights
from onebit.zero.compression import (
    CompressionScheduler,
    Distillation,
    export_compressed,
    import_compressed,
    init_compression,
    redundancy_clean,
    sizes,
)
from onebit.zero.compression.config import compression_in

WEIGHT_DECAY = 0.01


class ShortByteLM(ByteLM):
    """The byte LM, validated on a quarter of the windows."""

    validated = 256


@dataclass(frozen=True)
class Setting:
    """Steps of the dense model, of what follows, rows of a batch, the peak rates of both."""

    task: type[Task]
    steps: int
    more_steps: int
    batch: int
    lr: float
    more_lr: float


SETTINGS = {
    "byte-lm": Setting(ShortByteLM, steps=800, more_steps=200, batch=16, lr=8e-3, more_lr=4e-3),
    "demo-lm": Setting(DemoLM, steps=600, more_steps=300, batch=16, lr=3e-3, more_lr=1.5e-3),
    "digits": Setting(Digits, steps=400, more_steps=200, batch=64, lr=8e-3, more_lr=4e-3),
}

# ---------------------------------------------------------------- training

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


def distilled(task: Task, distillation: Distillation) -> Loss:
    """The mean of the task's loss and the teacher's."""

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if isinstance(task, ByteLM):
            (windows,) = batch
            taught = distillation.teach(windows[:, :-1])
            logits = model(windows[:, :-1])
            own = next_byte_loss(logits, windows)
        else:
            pixels, labels = batch
            taught = distillation.teach(pixels)
            logits = model(pixels)
            own = F.cross_entropy(logits, labels)
        return (own + distillation.loss(logits, taught)) / 2

    return loss


def student_of(dense: nn.Module, block: dict) -> nn.Module:
    """A copy of the dense model or, with fewer layers, a smaller one, under the JSON's block."""
    reduction = block.get("layer_reduction")
    if reduction is None:
        student = copy.deepcopy(dense)
    else:
        width = dense.bytes.weight.shape[1]
        heads = width // dense.blocks[0].head_width
        student = build_model(ModelSize(len(reduction["teacher_layer"]), width, heads, dense.context), 0)
    return init_compression(student, {"compression_training": block}, dense) if block else student


def plain_of(dense: nn.Module, block: dict) -> nn.Module:
    """As built before compression: what a file is read into."""
    only = {"layer_reduction": block["layer_reduction"]} if "layer_reduction" in block else {}
    student = student_of(dense, only)
    return redundancy_clean(student) if only else student


# ---------------------------------------------------------------- the way


@dataclass(frozen=True)
class Row:
    """A point of the model's way. file_bytes: of a safetensors file with all of it."""

    name: str
    parameters: int
    memory_bytes: int
    file_bytes: int
    loss: float
    accuracy: float | None


def row(name: str, task: Task, model: nn.Module, folder: Path) -> Row:
    """Measured now."""
    accuracy = task.accuracy(model) if isinstance(task, Digits) else None
    file, size = folder / ".measured.safetensors", sizes(model)
    if is_armed(model):
        export_weights(model, file, SimTransport())
        written = file.stat().st_size
    else:
        written = export_compressed(model, file)
    file.unlink()
    return Row(name, size.parameters, size.memory_bytes, written, task.evaluate(model.eval()), accuracy)


def compress(args: argparse.Namespace) -> list[Row]:
    """The whole way; its points."""
    progress = _rich("progress")
    torch.set_num_threads(args.threads)
    setting, folder = SETTINGS[args.task], args.out.parent
    task = setting.task()
    block = _block(args.config)
    folder.mkdir(parents=True, exist_ok=True)
    with progress.Progress() as bars:
        dense = task.build(args.seed)
        student_of(dense, block)
        steps = range(args.steps or setting.steps)
        taken = fit(task, dense, task.loss, args.seed, steps, setting.batch, setting.lr)
        for _ in bars.track(taken, total=len(steps), description="dense"):
            pass
        rows = [row("dense", task, dense, folder)]
        model = student_of(dense, block)
        rows.append(row("compressed, as it starts", task, model, folder))
        loss, teacher = task.loss, None
        if args.distill:
            teacher = Distillation(model, dense, temperature=args.temperature)
            loss = distilled(task, teacher)
        more = range(len(steps), len(steps) + (args.more_steps or setting.more_steps))
        bar = bars.add_task("compressed", total=len(more))
        for value in fit(task, model.train(), loss, args.seed, more, setting.batch, setting.more_lr):
            on = ", ".join(CompressionScheduler(model).describe())
            bars.update(bar, advance=1, description=f"loss {value:.3f}; {on or 'nothing on yet'}")
        if teacher is not None:
            teacher.close()
    rows.append(row("trained", task, model, folder))
    redundancy_clean(model, args.config)
    rows.append(row("cleaned", task, model, folder))
    export_compressed(model, args.out)
    back = import_compressed(plain_of(dense, block), args.out)
    rows.append(row(f"read from {args.out.name}", task, back, folder))
    return rows


def _block(config: Path) -> dict:
    """The JSON's compression_training as it stands there."""
    from onebit.zero.config.compat import load

    data = load(config)
    assert isinstance(data, dict)
    block = data["compression_training"]
    assert isinstance(block, dict)
    return block


def show(rows: Sequence[Row]) -> None:
    """The final table."""
    table = _rich("table").Table()
    has_accuracy = rows[0].accuracy is not None
    for column in (
        "",
        "parameters",
        "in memory",
        "on disk",
        "smaller",
        "loss",
        *(["accuracy"] if has_accuracy else []),
    ):
        table.add_column(column, justify="left" if not column else "right")
    for r in rows:
        cells = [r.name, f"{r.parameters:,}", f"{r.memory_bytes:,}", f"{r.file_bytes:,}"]
        cells += [f"{rows[0].file_bytes / r.file_bytes:.2f}", f"{r.loss:.5f}"]
        table.add_row(*cells, *([f"{r.accuracy:.2%}"] if r.accuracy is not None else []))
    _rich("console").Console().print(table)


def _rich(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"rich.{name}")
    except ImportError as error:
        raise ImportError("the bar and the table need rich: pip install onebit[train]") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="compress.py", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help='a DeepSpeed JSON with "compression_training"')
    add("--out", type=Path, required=True, metavar="FILE", help="the compressed model, a safetensors file")
    add("--task", choices=SETTINGS, default="byte-lm")
    add("--steps", type=int, help="of the dense model; default: the task's")
    add("--more-steps", type=int, help="under compression; default: the task's")
    add("--distill", action="store_true", help="the dense model teaches: half of the loss")
    add("--temperature", type=float, default=2.0, help="of the teacher's logits")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    try:
        compression_in(args.config)
    except (OSError, ValueError) as error:
        parser.error(f"--config {args.config}: {getattr(error, 'strerror', None) or error}")
    show(compress(args))


if __name__ == "__main__":
    main()
