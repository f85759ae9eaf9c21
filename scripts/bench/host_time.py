"""What a step costs the host alone: buckets of one block each, whose arithmetic is next to nothing, or larger ones.

    python scripts/bench.py host_time
    python scripts/bench.py host_time --buckets 15 --elements 1700000 --repeats 20

The most that capturing a step in a CUDA graph could save is the time in which the host prepares and launches it. Here
the CPU's kernels run inside a step, on 256 parameters a bucket; what a GPU's launches take is not measured here.
All optimizers run in turn, so that a noisy machine disturbs them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from reports import publish, table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bench.record import here, parser_of
from bench.silent import Silent
from bench.timing import Timing, seconds
from onebit import OnebitAdam, ZeroOneAdam
from onebit.zero import ShardedOnebitAdam

BLOCK, WARM = 256, 2
MAX_NORM = 1e-3  # less than any norm here
RANKS = 2  # of which this is one; the transport copies within this process
ALWAYS = {"compression": "always"}
SIGNS = {"freeze_step": WARM} | ALWAYS
LOCAL = {"var_freeze_step": WARM, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2**30} | ALWAYS


@dataclass(frozen=True)
class Side:
    """One row.

    make: of parameters. phase: of the steps that are timed; None: of an optimizer that has no phases.
    is_clipped: whether torch clips the gradients before each step.
    """

    name: str
    make: Callable[[list[Tensor]], Optimizer]
    phase: str | None = None
    is_clipped: bool = False


def ours(name: str, kind: Callable[..., Optimizer], phase: str, **options: object) -> Side:
    """With a parameter in each bucket."""

    def make(params: list[Tensor]) -> Optimizer:
        own = options | {"bucket_cap_mb": params[0].numel() * 4 / 2**20}
        return kind(params, lr=1e-4, transport=Silent(0, RANKS), **own)

    return Side(name, make, phase)


SIDES = (
    Side("torch.optim.AdamW(foreach=True)", lambda params: AdamW(params, lr=1e-4, foreach=True)),
    Side("torch.optim.AdamW(fused=True)", lambda params: AdamW(params, lr=1e-4, fused=True)),
    Side("the same after clip_grad_norm_", lambda params: AdamW(params, lr=1e-4, fused=True), is_clipped=True),
    ours("OnebitAdam", OnebitAdam, "compressed", **SIGNS),
    ours("OnebitAdam, every step clipped", OnebitAdam, "compressed", **SIGNS, max_grad_norm=MAX_NORM),
    ours("ZeroOneAdam, a local step", ZeroOneAdam, "local", **LOCAL),
    ours("ShardedOnebitAdam, overlap=False", ShardedOnebitAdam, "compressed", warmup_steps=WARM, overlap=False),
)


class Running:
    """A side in training, past its warm-up."""

    def __init__(self, side: Side, buckets: int, elements: int):
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(elements, generator=generator)) for _ in range(buckets)]
        self.gradients = [torch.randn(elements, generator=generator) for _ in self.params]
        self.side, self.optimizer, self.size = side, side.make(list(self.params)), 1.1
        for _ in range(8 * WARM):
            self.step_s()

    def step_s(self) -> float:
        """Seconds of a step. Gradients are there before, larger and smaller in turn: no norm is as expected."""
        torch._foreach_mul_(self.gradients, self.size)
        self.size = 1 / self.size
        for p, g in zip(self.params, self.gradients, strict=True):
            p.grad = g
        spent = seconds(self._take_step)
        self.optimizer.zero_grad()
        return spent

    def _take_step(self) -> None:
        if self.side.is_clipped:
            nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()


def timings(buckets: int, elements: int, repeats: int) -> list[Timing]:
    """Of each side. Raises RuntimeError where a timed step was of another phase than its row says."""
    running = [Running(side, buckets, elements) for side in SIDES]
    found: list[list[float]] = [[] for _ in running]
    for _ in range(repeats):
        for each, spent in zip(running, found, strict=True):
            spent.append(each.step_s())
            phase = None if each.side.phase is None else each.optimizer.stats.phase
            if phase != each.side.phase:
                raise RuntimeError(f"{each.side.name}: expected steps of phase {each.side.phase}, came one of {phase}")
    return [Timing.of(spent) for spent in found]


def main(argv: Sequence[str]) -> None:
    parser = parser_of("host_time", __doc__)
    parser.add_argument("--buckets", type=int, nargs="+", default=[8, 64], help="how many (default: 8 64)")
    parser.add_argument("--elements", type=int, default=BLOCK, help="of a bucket (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=300, help="steps of each optimizer (default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("onebit").setLevel(logging.ERROR)  # it warns that the absent ranks have the same gradients
    columns = [timings(n, args.elements, args.repeats) for n in args.buckets]
    rows = [(side.name, *row) for side, *row in zip(SIDES, *columns, strict=True)]
    heads = ("ms of a step", *(f"{n} buckets" for n in args.buckets))
    how = f"Buckets of {args.elements:,} elements; {args.repeats} steps of all in turn, one thread, median (quartiles)"
    publish(args, f"# What a step costs the host\n\n{here()}\n\n{how}\n\n{table(heads, rows)}\n")
