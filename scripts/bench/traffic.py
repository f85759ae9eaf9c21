"""Memory traffic of an optimizer step, counted: bytes per parameter that its operations read and write.

    python scripts/bench.py traffic --record scripts/records/traffic_2026-11.md

Every torch operation counts the bytes of the tensors it reads and writes, every kernel of ours those of its arguments,
once each: what must cross the memory bus if no operand of one operation is still in a cache at the next. One rank of
four; what the network moves is not counted. Exact and the same on every machine; no clock is read.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from reports import publish, table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import onebit
from bench.record import here, parser_of
from bench.silent import Silent, skip_warmup
from onebit.comm import Work, kernels

WORLD_SIZE = 4
KERNELS = ("encode", "decode", "decode_mean", "encode_mean", "encode_momentum", "apply")
FREE = (
    "view", "reshape", "detach", "alias", "split", "slice", "select", "unbind", "unsqueeze", "empty", "empty_like",
    "as_strided", "t",
)  # fmt: skip


class Alone(Silent):
    """One rank of several, without the others; what it moves in their place is not counted."""

    def __init__(self, counter: Counter | None = None):
        super().__init__(0, WORLD_SIZE)
        self.counter = counter

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        with self._uncounted():
            return super().all_to_all(out_WB, in_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        with self._uncounted():
            return super().all_gather(out_WB, in_B)

    def _uncounted(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.counter is None else self.counter.paused()


class Counter(TorchDispatchMode):
    """Bytes by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: collections.Counter[str] = collections.Counter()
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused, before = True, self._is_paused
        yield
        self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self._is_paused and name.rstrip("_") not in FREE and not name.endswith("view"):
            read = [x for x in _tensors((args, kwargs or {})) if x.numel() > 1]
            written = [x for x in _tensors(result) if x.numel() > 1]
            is_copy = name in ("copy_", "_foreach_copy_", "zero_", "fill_", "full", "zeros")
            if name == "_fused_adamw_":
                written = list(_tensors([args[0], args[2], args[3]]))  # parameters and moments
            elif name.endswith("_") and not is_copy and not written:  # _foreach_*_ return nothing
                written = list(_tensors(args[0]))
            elif is_copy:
                written = list(_tensors(args[0])) if name.endswith("_") else written
                read = list(_tensors(args[1:]))
            self.bytes[f"torch.{name}"] += sum(map(_memory, read)) + sum(map(_memory, written))
        return result


def _tensors(found: object) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _tensors(item)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif dataclasses.is_dataclass(found):
        yield from _tensors([getattr(found, field.name) for field in dataclasses.fields(found)])


def _memory(x: Tensor) -> int:
    """Bytes behind a tensor; an expanded dimension is read once."""
    n = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n *= size if stride else 1
    return n * x.element_size() if x.numel() else 0


@contextlib.contextmanager
def counted_kernels(counter: Counter) -> Iterator[None]:
    """Calls of our kernels count the bytes of their arguments: those written in place twice."""
    module = kernels.select("auto", torch.device("cpu"))
    names = [name for base in KERNELS for name in (base, f"int8_{base}") if hasattr(module, name)]
    before = {name: getattr(module, name) for name in names}

    def wrap(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            total = sum(map(_memory, _tensors([args, options])))
            kind = name.removeprefix("int8_")
            if kind == "encode":
                total += _memory(args[0])
            elif kind == "apply":
                total += sum(map(_memory, _tensors(args[2].params)))
            elif kind == "decode" and options["keep"] != 0.0:
                total += _memory(args[1])
            counter.bytes[name] += total
            with counter.paused():
                function(*args, **options)

        return call

    for name, function in before.items():
        setattr(module, name, wrap(name, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def count(
    make: Callable[[list[Tensor], Alone], torch.optim.Optimizer], elements: int, steps: int = 6
) -> dict[str, float]:
    """Bytes per parameter of the last of some steps, by operation."""
    torch.manual_seed(0)
    shapes = [(elements // 8 // 256, 256)] * 8
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    transport = Alone()
    optimizer = make(params, transport)
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(steps - 1):
        optimizer.step()
    counter = Counter()
    transport.counter = counter
    with counter, counted_kernels(counter):
        optimizer.step()
    n = sum(p.numel() for p in params)
    return {name: total / n for name, total in counter.bytes.most_common() if total / n >= 0.005}


def cases() -> dict[str, Callable[[list[Tensor], Any], torch.optim.Optimizer]]:
    common: dict[str, Any] = {"lr": 1e-4, "check_replicas_every": 0, "overlap": False, "compression": "always"}
    half = {"error_dtype": torch.bfloat16}
    return {
        "OnebitAdam": lambda ps, transport: onebit.OnebitAdam(ps, freeze_step=2, transport=transport, **common),
        "OnebitAdam, bf16 errors": lambda ps, transport: onebit.OnebitAdam(
            ps, freeze_step=2, transport=transport, **common, **half
        ),
        "OnebitLamb": lambda ps, transport: _soon(onebit.OnebitLamb(ps, transport=transport, **common)),
        "ZeroOneAdam": lambda ps, transport: onebit.ZeroOneAdam(ps, var_freeze_step=2, transport=transport, **common),
        "ZeroOneAdam, bf16 errors": lambda ps, transport: onebit.ZeroOneAdam(
            ps, var_freeze_step=2, transport=transport, **common, **half
        ),
        "AdamW, for each": lambda ps, transport: torch.optim.AdamW(ps, lr=1e-4, foreach=True),
        "AdamW, fused": lambda ps, transport: torch.optim.AdamW(ps, lr=1e-4, fused=True),
    }


def _soon(optimizer: onebit.OnebitLamb) -> onebit.OnebitLamb:
    """In "auto": with a number of warm-up steps it would follow the variance as well."""
    skip_warmup(optimizer.rule)
    return optimizer


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("traffic", __doc__)
    parser.add_argument("--elements", type=int, default=1 << 22)
    args = parser.parse_args(argv)
    rows = []
    for name, make in cases().items():
        by_operation = count(make, args.elements)
        parts = ", ".join(f"{operation} {number:.2f}" for operation, number in by_operation.items())
        rows.append([name, f"**{sum(by_operation.values()):.1f}**", parts])
    text = f"""# Memory traffic of a step

{here()}

Bytes per parameter and step of one rank of {WORLD_SIZE}, float32 parameters and gradients, after warm-up, without what
the network moves; {args.elements:,} parameters. Every operation counts the bytes of its operands. For comparison:
DeepSpeed 0.19.6's compressed all-reduce alone moves 206 bytes per element, and Adam's arithmetic comes on top.

{table(("optimizer", "bytes per parameter and step", "of these"), rows, names=3)}
"""
    publish(args, text)
