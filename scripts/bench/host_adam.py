"""`HostAdam`'s kernel against the memory's speed, and against the Adams of torch and torchao, on this machine.

    python scripts/bench.py host_adam --record runs/host_adam.md

The floor is torch.add(x, y, out=z): 12 bytes per element, as torch counts them. All sides run in turn, so that a noisy
machine disturbs them all. The roof of a side is the time in which the floor would move the bytes that it must move. The
same in place, out=x, is faster: nothing is read but to be used.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from reports import publish, table
from torch import Tensor

from bench.record import here, parser_of
from bench.timing import Timing, in_turn
from onebit.arithmetic.adam import direction_in_torch_
from onebit.host import BLOCK, EightBitVariance, direction_, empty_variance, native
from onebit.host.operands import AdamChunk, AdamConstants

FLOOR = "torch.add(x, y, out=z)"
IN_PLACE = "torch.add(x, y, out=x)"
TARGET = 1.3
_TORCHAO = "torchao.optim"


@dataclass(frozen=True)
class Side:
    """One row. bytes: per parameter, read and written by one call."""

    name: str
    bytes: float
    call: Callable[[], object]


def ours(elements: int) -> list[Side]:
    """The kernel's variants: types of gradient, m, v and output."""
    wide, narrow = torch.float32, torch.bfloat16
    return [
        variant("m, v float32", elements, wide, wide, False, None),
        variant("the same, gradient and output bfloat16", elements, narrow, wide, False, narrow),
        variant("m bfloat16, v float32", elements, wide, narrow, False, None),
        variant("m float32, v 8 bits", elements, wide, wide, True, None),
        variant("m bfloat16, v 8 bits", elements, wide, narrow, True, None),
        variant("the same, gradient and output bfloat16", elements, narrow, narrow, True, narrow),
    ]


def variant(
    name: str,
    n: int,
    grad_dtype: torch.dtype,
    m_dtype: torch.dtype,
    is_packed: bool,
    out_dtype: torch.dtype | None,
) -> Side:
    grad, m = torch.randn(n).to(grad_dtype), torch.zeros(n, dtype=m_dtype)
    v: Tensor | EightBitVariance = empty_variance(n) if is_packed else torch.zeros(n)
    out = None if out_dtype is None else torch.zeros(n, dtype=out_dtype)
    chunk = AdamChunk(torch.randn(n), grad, m, v, out)
    chunk.check(0)
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "step": 10, "grad_scale": 1.0}
    constants = AdamConstants.of(**options, is_decoupled=True, bias_correction=True)
    moved = 8 + grad.element_size() + 2 * m.element_size() + (2 * (1 + 4 / BLOCK) if is_packed else 8)
    moved += 0 if out is None else out.element_size()
    return Side(f"onebit: {name}", moved, lambda: native.adam_(chunk, constants, 0))


def directions(n: int) -> list[Side]:
    """Of 1-bit Adam's warm-up, which moves parameters in a pass of its own: the gradient becomes the direction."""
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "step": 10, "bias_correction": True}

    def side(name: str, call: Callable[..., None]) -> Side:
        # A direction is no gradient, but no worse to add: it stays near 1.
        return Side(name, 24, functools.partial(call, torch.randn(n), torch.zeros(n), torch.zeros(n), **options))

    return [side("onebit: a direction", direction_), side("the same, seven operations of torch", direction_in_torch_)]


def peers(elements: int) -> tuple[list[Side], list[str]]:
    """The steps of others, and a line for each that is not here."""

    def step(kind: type[torch.optim.Optimizer], **options: object) -> Callable[[], object]:
        p = torch.randn(elements, requires_grad=True)
        p.grad = torch.randn(elements)
        return kind([p], lr=1e-3, weight_decay=0.01, **options).step

    sides = [
        Side(f"torch.optim.AdamW({name})", 28, step(torch.optim.AdamW, **{name.split("=")[0]: name.endswith("True")}))
        for name in ("fused=True", "foreach=True", "foreach=False")
    ]
    try:
        low_bit = importlib.import_module(_TORCHAO)
    except ImportError:
        return sides, ["torchao's low-bit AdamW is left out: torchao is not installed"]
    # Bytes: float32 parameter and gradient, both moments in 8 bits with a float32 scale for each 256.
    return [*sides, Side("torchao AdamW8bit", 12 + 4 * (1 + 4 / BLOCK), step(low_bit.AdamW8bit))], []


def measure(args: argparse.Namespace) -> tuple[list[list[object]], list[str]]:
    """A row for each side and number of threads, and a line for each peer that is not here."""
    n = args.elements
    x, y, z = torch.randn(n), torch.randn(n), torch.zeros(n)
    others, left_out = peers(n)
    floors = [Side(FLOOR, 12, lambda: torch.add(x, y, out=z)), Side(IN_PLACE, 12, lambda: torch.add(x, y, out=x))]
    sides = [*floors, *ours(n), *directions(n), *others]
    rows: list[list[object]] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        found = in_turn(dict(enumerate(side.call for side in sides)), args.repeats)
        times = [Timing.of(spent) for spent in found.values()]
        for side, timing in zip(sides, times, strict=True):
            roof = times[0].median * side.bytes / 12
            ns, rate = 1e6 * timing.median / n, side.bytes * n / timing.median / 1e6
            cells = [threads, side.name, f"{side.bytes:.2f}", timing, f"{ns:.3f}", f"{rate:.1f}"]
            rows.append([*cells, f"{timing.median / roof:.2f}"])
    return rows, left_out


HEADS = ("threads", "step", "bytes per parameter", "ms", "ns per parameter", "GB/s", "times its roof")


def main(argv: Sequence[str]) -> None:
    parser = parser_of("host_adam", __doc__)
    parser.add_argument("--elements", type=int, default=25_000_000, help="parameters (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument("--repeats", type=int, default=25, help="of each side (default: %(default)s)")
    args = parser.parse_args(argv)
    if not native.is_built():
        parser.error(native.why_not())
    about = here()
    rows, left_out = measure(args)
    text = f"""# Adam on the host

{about}

{args.elements} parameters in one tensor; {args.repeats} repetitions of all sides in turn; median (quartiles). Kernel:
{native.describe()}. The roof of a step is the time in which `{FLOOR}` moves as many bytes,
at 12 per element; the aim is {TARGET} times it.

{table(HEADS, rows, names=2)}
"""
    publish(args, "\n".join([text, *left_out]))
