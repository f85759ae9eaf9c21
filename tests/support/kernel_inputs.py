"""What the tests of every kernel share: inputs, frames to write into, and comparisons to the bit.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebit.comm import Int4Codec, Int8Codec, Log4Codec, SignCodec
from onebit.comm.kernels import cpu, int4_reference, log4_reference, reference

if TYPE_CHECKING:
    import pytest  # machines with a GPU may lack it

ERRORS = (None, torch.float32, torch.bfloat16)

SPECIAL = (
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e30, -1e30, 1e-30, 1e-23,
    1.8e19, 1.9e19, 3e38, -3.4e38, 1.0,
)  # fmt: skip


def load(monkeypatch: pytest.MonkeyPatch, module: ModuleType, path: Path) -> None:
    """For this test, the library of `module` is the one at `path`, if there is one."""
    for name, value in {"path": path, "_loaded": None, "_problem": None}.items():
        monkeypatch.setattr(module._library, name, value)


@cache
def with_isa(isa: str) -> SimpleNamespace:
    """The C++ kernel, with these instructions alone."""
    chosen = {
        name: partial(function, isa=isa)
        for name, function in vars(cpu).items()
        if isinstance(function, FunctionType | partial) and "isa" in inspect.signature(function).parameters
    }
    return SimpleNamespace(__name__=cpu.__name__, **chosen)


def bits(t: Tensor) -> Tensor:
    return torch.where(t.isnan(), torch.nan, t).view(torch.int32) if t.dtype == torch.float32 else t


def assert_same(got: Tensor, expected: Tensor) -> None:
    different = bits(got) != bits(expected)
    assert not different.any(), f"{int(different.sum())} differ, first at {different.nonzero()[0].tolist()}"


def random(*shape: int, seed: int = 0) -> Tensor:
    """Values of many sizes, some of them zeros of either sign."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=g) * 10 ** torch.randint(-4, 4, shape, generator=g).float()
    values[torch.rand(shape, generator=g) < 0.05] *= 0.0
    return values


def random_counts(K: int, J: int, block: int, seed: int = 0) -> Tensor:
    near = (0, 1, 15, 16, 17, 31, 63, block - 17, block - 16, block - 1, block, block)
    edges = torch.tensor(near, dtype=torch.int32).clamp(0, block)
    return edges[torch.randint(len(edges), (K, J), generator=torch.Generator().manual_seed(seed))]


SPECIFIED = {"int8": reference, "int4": int4_reference, "log4": log4_reference}


def steps_of(kernel: ModuleType) -> list[str]:
    """The frames that this kernel computes, apart from those of signs."""
    return [frame for frame in SPECIFIED if kernel is reference or hasattr(kernel, f"{frame}_encode")]


def function(kernel: ModuleType, name: str, frame: str) -> Callable[..., None]:
    """The kernel's encode, decode or decode_mean for a frame, without its scale option."""
    if frame in SPECIFIED:
        return getattr(SPECIFIED[frame] if kernel is reference else kernel, f"{frame}_{name}")
    return partial(kernel.encode, scale=frame) if name == "encode" else getattr(kernel, name)


def frames_for(K: int, N: int, block: int, fill: int = 0xAB, *, frame: str = "rms") -> Tensor:
    codec = {"int8": Int8Codec, "int4": Int4Codec, "log4": Log4Codec}.get(frame, SignCodec)(block)
    return torch.full((K, codec.frame_bytes(N)), fill, dtype=torch.uint8)


def misaligned(n: int) -> Tensor:
    return torch.frombuffer(bytearray(4 * n + 4), dtype=torch.float32, count=n, offset=1).view(1, n)


def overlapping(K: int, n: int) -> Tensor:
    return torch.zeros(n).expand(K, n)
