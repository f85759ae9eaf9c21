"""The time half: whole steps of every way on emulated hosts, by phase, while computing is emulated by sleeping.

The ways share nothing but the hosts: each has its own model of the doctor's shapes, and is timed when the one before it
is gone. The slowest rank's time counts; a phase's seconds are the median of its steps. All processes keep what they
free (ALLOCATOR): gradients that come fresh from the kernel in every step, as it happens, are no optimizer's time.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bench.command import words
from bench.peer_deepspeed import ALLOCATOR
from provenance import refuse_dirty_tree, revision
from reports import append, read_lines, table

from onebit import comm
from onebit.agreement import wrappers
from onebit.cli.cluster import Cluster
from onebit.cli.doctor.contenders import Contender, EmulatedModel
from onebit.cli.doctor.samples import model_shapes
from onebit.comm import Transport
from onebit.comm.messages import gather_bytes
from onebit.usage import marks
from time_to_loss.deepspeed import worker_command
from time_to_loss.ways import PLAIN, STARTS, WAYS, Way, phase_of

LONGEST = 40  # steps of a way in which all of its phases come
STUCK_S = 3600.0
# NCCL takes ranks with an id of their own for hosts: they may share a GPU, and talk by sockets.
NCCL_HOSTS_ON_ONE_GPU = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True)
class Timed:
    """A way on a network. seconds: of a step, by phase. steps: how many were timed, by phase. backend: of the traffic;
    over "nccl" the hosts share a GPU."""

    rate: str
    hosts: int
    params: float
    compute_s: float
    way: str
    seconds: dict[str, float]
    steps: dict[str, int]
    revision: str
    backend: str = "gloo"


def time_on(
    rates: Sequence[str],
    hosts: int,
    params: float,
    compute_s: float,
    ways: Sequence[str],
    budget_s: float,
    path: Path,
    backend: str = "gloo",
) -> None:
    """Each rate and way that the file does not hold, on hosts laid for it; a line as soon as it is timed.

    Needs root and iproute2.
    """
    for rate in rates:
        held = {(t.rate, t.hosts, t.params, t.compute_s, t.way, t.backend) for t in read(path)}
        missing = [
            way for way in ways if WAYS[way].timed and (rate, hosts, params, compute_s, way, backend) not in held
        ]
        if not missing:
            continue
        refuse_dirty_tree(path)
        same = {"rate": rate, "hosts": hosts, "params": params, "compute_s": compute_s, "backend": backend}
        same["revision"] = revision()
        work = {"same": same, "budget_s": budget_s, "out": str(path.resolve())}
        with Cluster(hosts, rate) as cluster:
            for is_deepspeeds, together in itertools.groupby(missing, lambda way: WAYS[way].is_deepspeeds):
                command = worker_command("worker") if is_deepspeeds else words("time_to_loss", "worker")
                asked = json.dumps(work | {"ways": list(together)})
                env = ALLOCATOR | {"TIME_TO_LOSS": asked}
                ended = cluster.run(command, launcher="none", env=env, timeout_s=STUCK_S)
                if ended.status:
                    raise SystemExit(f"the ranks on {hosts} hosts at {rate} ended with status {ended.status}")


def read(path: Path) -> list[Timed]:
    """What a file of JSON lines holds."""
    return [Timed(**line) for line in read_lines(path)]


def report(timed: Sequence[Timed]) -> str:
    """Markdown: the seconds of a step of each way on each network, of the phase that most steps are in; in brackets
    those of the others."""
    rates = list(dict.fromkeys(each.rate for each in timed))
    first = timed[0]
    rows = []
    for way in dict.fromkeys(each.way for each in timed):
        of = {each.rate: each.seconds for each in timed if each.way == way}
        cells = []
        for rate in rates:
            main = WAYS[way].phases[-1]
            others = ", ".join(f"{phase} {s:.2f}" for phase, s in of.get(rate, {}).items() if phase != main)
            cells.append(f"{of[rate][main]:.3f}{f' ({others})' if others else ''}" if rate in of else "")
        rows.append([way, *cells])
    return f"""# Seconds of a step

{first.params / 1e6:g} M parameters, {first.hosts} emulated hosts, {first.compute_s:g} s of sleep as compute, revision
{first.revision}. torch's own optimizers are fused, and every process keeps the memory that it frees. Every step of a
row "clipped" is clipped.

{table(("", *rates), rows)}
"""


# ---------------------------------------------------------------- one rank


def work() -> None:
    """Time every way among the hosts this rank finds itself on. All ranks."""
    asked = json.loads(os.environ["TIME_TO_LOSS"])
    same = asked["same"]
    # What ranks compare in the first steps alone is left out: few steps are timed here, and a run has many.
    marks.INSPECTED, wrappers.COMPARED_STEPS = 0, 0
    if same["backend"] == "nccl":
        os.environ.update(NCCL_HOSTS_ON_ONE_GPU, NCCL_HOSTID=f"rank{os.environ['RANK']}")
    transport = comm.init(same["backend"])
    for name in asked["ways"]:
        way = WAYS[name]
        if way.needs_group and not dist.is_initialized():
            raise RuntimeError(f"{name} needs a process group of torch")
        model = EmulatedModel(model_shapes(same["params"]), transport, same["compute_s"])
        assert way.timed is not None
        contender = way.timed(model, transport)
        began = time.monotonic()
        timed = _by_cycle if way.cycle > 1 else _by_phase
        taken = timed(way, contender, transport, asked["budget_s"])
        if transport.rank == 0:
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            seconds = {phase: statistics.median(times) for phase, times in taken.items()}
            steps = {phase: len(times) for phase, times in taken.items()}
            append(Path(asked["out"]), asdict(Timed(way=name, seconds=seconds, steps=steps, **same)))
        del contender, model
        gc.collect()
    transport.close()


def _by_phase(
    way: Way, contender: Contender, transport: Transport, budget_s: float, repeats: int = 8
) -> dict[str, list[float]]:
    """Seconds of steps, by phase; of the first step none, nor of the first in the last phase of `way`, which allocates.

    Until every phase has come, and then until the last of them has come so often or the budget is spent on some rank.
    """
    taken: dict[str, list[float]] = {}
    last, began = way.phases[-1], math.inf
    for step in range(LONGEST):
        seconds = _slowest(transport, lambda: _step(contender))
        phase = "warmup" if step < way.full_steps else phase_of(contender.optimizer)
        if step > 0:
            taken.setdefault(phase, []).append(seconds)
        if all(phase in taken for phase in way.phases):
            began = min(began, time.monotonic())
            if len(taken[last]) >= repeats or _any(transport, time.monotonic() - began > budget_s):
                break
    if last in taken:
        taken[last] = taken[last][1:] or taken[last]
    if way.run > 1:
        taken[last] = _by_run(way, contender, transport)
    return taken


def _by_run(way: Way, contender: Contender, transport: Transport, runs: int = 2) -> list[float]:
    """Seconds of a step, mean over a run of the last phase, whose last step lands in it: its traffic counts in full."""
    optimizer = contender.optimizer
    while not optimizer.rule.schedule.rests(optimizer.steps_taken(), way.run * runs + 1):
        _step(contender)
    optimizer.sync()

    def run() -> None:
        for _ in range(way.run):
            _step(contender)
        optimizer.sync()

    return [_slowest(transport, run) / way.run for _ in range(runs)]


def _by_cycle(way: Way, contender: Contender, transport: Transport, budget_s: float) -> dict[str, list[float]]:
    """Seconds of a step, mean over a cycle; of the first cycle of a length none, whose traffic is the first.

    Of two lengths of cycles, S and E: a step without a round, and one with it, as S·t_S and E·t_E have one each.
    """
    began = time.monotonic()
    start = _cycles(way.start_cycle, STARTS, contender, transport) if way.start_cycle else []
    main = _cycles(way.cycle, 2, contender, transport)
    if way.cycle <= 32 and not _any(transport, time.monotonic() - began > budget_s):
        main += _cycles(way.cycle, 1, contender, transport, skipped=0)
    if not start:
        return {PLAIN: [s / way.cycle for s in main]}
    local = (statistics.median(main) - statistics.median(start)) / (way.cycle - way.start_cycle)
    return {"round": [s - (way.start_cycle - 1) * local for s in start], "local": [local]}


def _cycles(length: int, count: int, contender: Contender, transport: Transport, skipped: int = 1) -> list[float]:
    """Seconds of each cycle but the first `skipped`."""

    def cycle() -> None:
        for _ in range(length):
            _step(contender)

    return [_slowest(transport, cycle) for _ in range(count)][skipped:]


def _step(contender: Contender) -> None:
    contender.backward()
    contender.update()
    contender.optimizer.zero_grad()


def _any(transport: Transport, holds: bool) -> bool:
    """Whether it holds on some rank. All ranks."""
    return any(map(any, gather_bytes(transport, bytes([holds]), transport.device)))


def _slowest(transport: Transport, act: Callable[[], object]) -> float:
    """All start together; the seconds of the rank that took longest, and the same number on all. All ranks."""
    gather_bytes(transport, b"ready", transport.device)
    began = time.perf_counter()
    act()
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)
    mine = struct.pack("<d", time.perf_counter() - began)
    return max(struct.unpack("<d", each)[0] for each in gather_bytes(transport, mine, transport.device))
