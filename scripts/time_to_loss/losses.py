"""The loss half: every way trains the same model on the same batches, for so many steps, by ranks that are threads.

DeepSpeed's ranks are processes of its own environment, over Gloo on loopback; `work` is one of them. A run of N steps
has a schedule of N steps: a short one is not a long one cut off. What is counted beside the loss: how many steps the
run took in each phase, and the bits that a rank sent per parameter.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from provenance import refuse_dirty_tree, revision
from reports import add_missing, append, read_lines
from study.catalog import load_task
from study.tasks import Task, joined
from torch import Tensor
from train.schedule import train_steps

from onebit import comm
from onebit.comm import Transport, run_ranks
from time_to_loss.deepspeed import worker_command
from time_to_loss.ways import WAYS, phase_of


@dataclass(frozen=True)
class Run:
    """What is run. rows: of a rank's batch. device: of all ranks; on a GPU autocast to bfloat16."""

    task: str
    way: str
    ranks: int
    rows: int
    steps: int
    lr: float
    seed: int
    device: str = "cpu"


@dataclass(frozen=True)
class Found:
    """How it ended. loss: of validation, inf where it is not finite. phases: steps in each. bits: sent by a rank, per
    parameter, in the whole run; of a single worker none are sent here."""

    run: Run
    loss: float
    phases: dict[str, int]
    bits: float
    seconds: float
    revision: str


def train(run: Run) -> Found:
    """One run."""
    torch.set_num_threads(1)
    way, task, began = WAYS[run.way], load_task(run.task), time.perf_counter()
    if way.make is None:
        raise ValueError(f"{run.way} has the loss of {way.loss_of}, and no run of its own")
    if way.is_one_worker:
        loss, phases, bits = _train(run, task, None)
    else:
        loss, phases, bits = run_ranks(run.ranks, lambda transport: _train(run, task, transport), timeout_s=600.0)[0]
    return Found(run, loss, phases, bits, round(time.perf_counter() - began, 1), revision())


def _train(run: Run, task: Task, transport: Transport | None) -> tuple[float, dict[str, int], float]:
    model, device = task.build(run.seed).to(run.device), torch.device(run.device)
    make = WAYS[run.way].make
    assert make is not None
    optimizer = make(WAYS[run.way].groups(model), transport, run.steps)
    counter = optimizer if hasattr(optimizer, "sent_bytes") else transport
    sent, phases = 0 if counter is None else counter.sent_bytes, Counter[str]()
    together = range(1 if WAYS[run.way].is_alone else run.ranks)
    workers = together if transport is None else [transport.rank]

    def loss_of(step: int) -> Tensor:
        batch = tuple(column.to(device) for column in joined(task, run.seed, step, workers, run.rows))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return task.loss(model, batch)

    for _ in train_steps(optimizer, run.steps, loss_of, run.lr, part=20):
        phases[phase_of(optimizer)] += 1
    found = task.evaluate(model) if transport is None or transport.rank == 0 else 0.0
    numel = sum(p.numel() for p in model.parameters())
    bits = 0.0 if counter is None else 8 * (counter.sent_bytes - sent) / numel
    return (found if math.isfinite(found) else math.inf), dict(phases), bits


# ---------------------------------------------------------------- many


def read(path: Path) -> list[Found]:
    """The runs that a file of JSON lines holds."""
    return [Found(**(content | {"run": Run(**content["run"])})) for content in read_lines(path)]


def wanted(
    task: str,
    ways: Iterable[str],
    ranks: int,
    rows: int,
    lengths: Sequence[int],
    lrs: Sequence[float],
    seeds: int,
    device: str = "cpu",
) -> Iterator[Run]:
    """By length, the shortest first: an interrupted command has the short ones of all."""
    for steps in sorted(lengths):
        for way in ways:
            for lr in lrs if WAYS[way].make is not None else ():
                yield from (Run(task, way, ranks, rows, steps, lr, seed, device) for seed in range(seeds))


def train_missing(runs: Iterable[Run], path: Path, processes: int) -> None:
    """Those that the file does not hold; each is added to it as soon as it is done."""
    done = {found.run for found in read(path)}
    missing = [run for run in dict.fromkeys(runs) if run not in done]
    here, apart = ([run for run in missing if WAYS[run.way].is_deepspeeds == is_apart] for is_apart in (False, True))
    for ranks, together in itertools.groupby(apart, lambda run: run.ranks):
        refuse_dirty_tree(path)
        _train_apart(list(together), ranks, path)
    if here:
        with ProcessPoolExecutor(processes) as pool:
            add_missing(here, (), line_of, path, pool, "losses")


def line_of(run: Run) -> dict:
    return asdict(train(run))


def _train_apart(runs: Sequence[Run], ranks: int, path: Path) -> None:
    """As processes of DeepSpeed's environment. Raises CalledProcessError where they fail."""
    asked = {"runs": [asdict(run) for run in runs], "revision": revision(), "out": str(path.resolve())}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"TIME_TO_LOSS": json.dumps(asked)}
    subprocess.run(worker_command("trainer", *torchrun), env=env, check=True)


def work() -> None:
    """Be one rank of `_train_apart`. All ranks."""
    asked = json.loads(os.environ["TIME_TO_LOSS"])
    torch.set_num_threads(1)
    transport = comm.init("gloo", levels=1)
    for run in (Run(**content) for content in asked["runs"]):
        began = time.perf_counter()
        loss, phases, bits = _train(run, load_task(run.task), transport)
        seconds = round(time.perf_counter() - began, 1)
        if transport.rank == 0:
            print(f"{run.way}, {run.steps} steps at {run.lr:g}: {seconds:.0f} s", file=sys.stderr, flush=True)
            append(Path(asked["out"]), asdict(Found(run, loss, phases, bits, seconds, asked["revision"])))
    transport.close()
