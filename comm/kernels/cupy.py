"""Kernels: the frames in CUDA, for CUDA tensors. The same bytes and the same floats as `reference.py`.

The code is csrc/*.cu, beside this file in an installation; CuPy compiles it on first use, once per block size and kind
of GPU, and keeps the result on disk. Tensors are passed as addresses, launches go to torch's current stream of their
device, and nothing here waits for the GPU. Arguments are checked in `arguments.py`, once.

Shape legend: K rows, N elements, J blocks, B bytes, S segments.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy
import torch
from torch import Tensor

from . import reference
from .arguments import INT4, INT8, LOG4, SIGN, Edge, Frame, check_scale
from .gpu_tables import Table, address, current_stream, kind, readable, write_back
from .operands import EncodeOutput, GradientSum, LocalStep, MasterStep, MomentumInputs, OwnerStep, ParamUpdate

NAME = "cupy"
SERVES = "cuda"
FRAMES = dict.fromkeys(("sign", "int8", "int4", "log4"), ".cupy")

EDGE = Edge("cuda", frame_alignment=8)
SOURCES = tuple(Path(__file__).with_name(name) for name in ("lanes.cu", "sign.cu", "codes.cu"))

# No contraction; division and square root to nearest, subnormals kept: the floats of reference.py to the last bit.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

THREADS = 128
"""Of a launched block, as in lanes.cu: 16 of them do one block of elements."""

_BLOCKS_PER_LAUNCHED = THREADS // 16

# Ranks may be threads (`SimTransport`): one of them compiles.
_compile_lock = threading.Lock()


class Kernel(Protocol):
    """A compiled function. CuPy passes Python integers as 8 bytes, and numpy's float32 as 4."""

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[object, ...]) -> None: ...


class Module(Protocol):
    """Compiled source."""

    def get_function(self, name: str) -> Kernel: ...


def source() -> str:
    """The CUDA code, in one piece."""
    return "\n".join(path.read_text() for path in SOURCES)


@functools.cache
def why_not() -> str:
    """One sentence: what is missing and what to do. Empty if CuPy is installed and torch is built for CUDA."""
    if torch.version.hip is not None:
        return "the CUDA kernels need a GPU of NVIDIA's"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed; pip install 'onebit[cupy]' (cupy-cuda13x; for CUDA 12 pip install cupy-cuda12x)"
    return ""


def describe() -> str:
    """What runs, e.g. "CUDA, compiled by CuPy 14.2.0"."""
    return f"CUDA, compiled by CuPy {_cupy().__version__}"


def encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int, scale: str
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32 in place; error float32/bfloat16, read only.

    Rows may have gaps between them (a slice of a wider tensor); elements of a row are contiguous. Rows of frames start
    at multiples of 8 bytes. Asynchronous, like all functions below.
    """
    check_scale(scale)
    _encode(SIGN, x_KN, error_KN, frames_KB, counts_KJ, block=block, options=(int(scale == "mean_abs"),))


def decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """out ← keep·out + weight·values; out float32 [K, N]. With keep = 0 the old content of out is not read."""
    _decode(SIGN, frames_KB, out_KN, block=block, weight=weight, keep=keep)


def decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """out ← mean over the K frames; out float32 [N], written once."""
    _decode_mean(SIGN, frames_KB, out_N, block=block)


def encode_mean(received_WB: Tensor, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frame ← frame of the mean of the W frames + error; residual ← the rest. Reads each frame once."""
    check_scale(scale)
    W, J = EDGE.check_encode_mean(SIGN, received_WB, out, block=block)
    _launch(
        "sign_encode_mean",
        out.residual_KN.device,
        block,
        J,
        *_rows(received_WB),
        W,
        numpy.float32(1.0 / W),
        *_typed(out.error_KN),
        out.frames_KB.data_ptr(),
        out.frames_KB.shape[1],
        address(out.counts_KJ),
        *_typed(out.residual_KN),
        J,
        int(scale == "mean_abs"),
    )


def encode_momentum(momentum: MomentumInputs, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frames ← frames of c, the new momentum plus the residual (rule 6); residual ← c - decode(frames).

    One pass: reads gradients in place, D, the old momentum and the error; writes frames and residual. A gradient
    of another type than float32, bfloat16 and float16, or not contiguous, is copied first.
    """
    check_scale(scale)
    K, J = EDGE.check_encode_momentum(SIGN, momentum, out, block=block)
    D, floor, correction, eps = momentum.divisor
    weights, device = momentum.weights, out.residual_KN.device
    table = Table(readable(momentum.grads), momentum.segments, K * J, device)
    _launch(
        f"sign_encode_momentum{'_packed' if momentum.is_packed else ''}{'' if floor is None else '_variance'}",
        device,
        block,
        K * J,
        *_tensors(table),
        D.data_ptr(),
        address(floor),
        numpy.float32(correction),
        numpy.float32(eps),
        *_rows(momentum.old),
        *(numpy.float32(w) for w in (weights.keep, weights.add, weights.own, weights.unscale)),
        *_typed(out.error_KN),
        *_rows(out.frames_KB),
        out.frames_KB.shape[1],
        *_rows(out.counts_KJ),
        *_typed(out.residual_KN),
        K,
        J,
        int(scale == "mean_abs"),
    )
    if out.sums_KJ2 is not None:
        momentum_sums(momentum, out.sums_KJ2, block=block)


def apply(frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None:
    """p ← keep·p + weight·value, parameters in place, with the values of frames of rows of n elements (rule 7).

    One pass over each. A parameter of another type than float32, bfloat16 and float16, or not contiguous, goes through
    a copy.
    """
    _apply(SIGN, frames_KB, n, update, block=block)


def local_step(step: LocalStep, *, block: int) -> None:
    """Update m, u, anchors and parameters in place by this rank's gradients alone (rule 8).

    One pass over each. Tensors of another type than float32, bfloat16 and float16, or not contiguous, go through a
    copy.
    """
    K, J = EDGE.check_local_step(step, block=block)
    momentum, weights, device = step.momentum, step.momentum.weights, step.momentum.old.device
    D, floor, correction, eps = momentum.divisor
    written = readable(step.params)
    grads = Table(readable(momentum.grads), momentum.segments, K * J, device)
    params = Table(written, momentum.segments, K * J, device)
    _launch(
        f"local_step{'' if floor is None else '_variance'}",
        device,
        block,
        K * J,
        *_tensors(grads),
        params.pointers.data_ptr(),
        D.data_ptr(),
        address(floor),
        numpy.float32(correction),
        numpy.float32(eps),
        momentum.old.data_ptr(),
        *(numpy.float32(w) for w in (weights.keep, weights.add, weights.own, weights.unscale)),
        step.sum_KN.data_ptr(),
        address(step.anchor_KN),
        numpy.float32(step.weight),
        numpy.float32(step.kept),
        K,
        J,
    )
    write_back(step.params, written)


def correct_residual(momentum: MomentumInputs, factor: float, residual_KN: Tensor, *, block: int) -> None:
    """Residual ← what it would be if the gradients had been sent with `factor` times theirs (rule 11). One pass."""
    K, J = EDGE.check_correct_residual(momentum, residual_KN, block=block)
    D, floor, correction, eps = momentum.divisor
    weights, device = momentum.weights, residual_KN.device
    table = Table(readable(momentum.grads), momentum.segments, K * J, device)
    scales = weights.add, weights.own, weights.unscale, weights.unscale * factor
    _launch(
        f"correct_residual{'' if floor is None else '_variance'}",
        device,
        block,
        K * J,
        *_tensors(table),
        D.data_ptr(),
        address(floor),
        numpy.float32(correction),
        numpy.float32(eps),
        *(numpy.float32(scale) for scale in scales),
        *_typed(residual_KN),
        K * J,
    )


def momentum_sums(momentum: MomentumInputs, sums_KJ2: Tensor, *, block: int) -> None:
    """Sums ← those of g² and g·(m·D) of each block (rule 12). One pass."""
    K, J = EDGE.check_momentum_sums(SIGN, momentum, sums_KJ2, block=block)
    D, floor, correction, eps = momentum.divisor
    table = Table(readable(momentum.grads), momentum.segments, K * J, sums_KJ2.device)
    _launch(
        f"sign_momentum_sums{'_packed' if momentum.is_packed else ''}{'' if floor is None else '_variance'}",
        sums_KJ2.device,
        block,
        K * J,
        *_tensors(table),
        D.data_ptr(),
        address(floor),
        numpy.float32(correction),
        numpy.float32(eps),
        *_rows(momentum.old),
        sums_KJ2.data_ptr(),
        K,
        J,
    )


def encode_gradients(step: GradientSum, *, block: int, scale: str) -> None:
    """frames ← frames of c = add·g + owed, the residual; owed becomes the new residual, or stays (rule 10).

    One pass. A gradient of another type than float32, bfloat16 and float16, or not contiguous, is copied first.
    """
    check_scale(scale)
    K, J = EDGE.check_encode_gradients(SIGN, step, block=block)
    device = step.owed_KN.device
    table = Table(readable(step.grads), step.segments, K * J, device)
    _launch(
        f"sign_encode_gradients{'' if step.returned is None else '_returning'}",
        device,
        block,
        K * J,
        *_tensors(table),
        numpy.float32(step.add),
        numpy.float32(step.unscale),
        *_typed(step.owed_KN),
        numpy.float32(step.returned or 0.0),
        *_rows(step.frames_KB),
        step.frames_KB.shape[1],
        *_rows(step.counts_KJ),
        K,
        J,
        int(scale == "mean_abs"),
    )


def owner_step(step: OwnerStep, *, block: int) -> None:
    """Update v and compute m̂/D of the owner's chunk from all ranks' frames and its gradient (rule 9). One pass."""
    W, J = EDGE.check_owner_step(step, block=block)
    corrections, *correcting = step.correcting
    numbers = (step.weight, step.own, step.common, step.eps, step.floor, step.inverse_limit)
    _launch(
        "sign_owner_step",
        step.grad_N.device,
        block,
        J,
        *_rows(step.received_WB),
        W,
        step.row,
        numpy.float32(1.0 / W),
        step.grad_N.data_ptr(),
        step.counts_J.data_ptr(),
        step.variance_N.data_ptr(),
        step.direction_N.data_ptr(),
        address(step.D_N),
        step.sums_J4.data_ptr(),
        address(corrections),
        *(numpy.float32(number) for number in (*correcting, *numbers)),
        J,
    )


def step_masters(step: MasterStep, *, block: int, scale: str) -> None:
    """Masters ← those after the step, by torch's operations; frame ← frame of what their replicas lack (rule 13)."""
    lacking_1N = reference.step_masters_(step)
    encode(lacking_1N, None, step.frame_1B, step.counts_J.unsqueeze(0), block=block, scale=scale)


def int4_step_masters(step: MasterStep, *, block: int) -> None:
    """The same, with a frame of int4."""
    int4_encode(reference.step_masters_(step), None, step.frame_1B, step.counts_J.unsqueeze(0), block=block)


def _apply(frame: Frame, frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None:
    K, J = EDGE.check_apply(frame, frames_KB, n, update, block=block)
    written = readable(update.params)
    table = Table(written, update.segments, K * J, frames_KB.device)
    _launch(
        f"{frame.name}_apply",
        frames_KB.device,
        block,
        K * J,
        *_rows(frames_KB),
        K,
        J,
        *_tensors(table),
        update.weight_S.data_ptr(),
        update.keep_S.data_ptr(),
    )
    write_back(update.params, written)


def _encode(
    frame: Frame,
    x_KN: Tensor,
    error_KN: Tensor | None,
    frames_KB: Tensor,
    counts_KJ: Tensor | None,
    *,
    block: int,
    options: tuple[int, ...] = (),
) -> None:
    K, J = EDGE.check_encode(frame, x_KN, error_KN, frames_KB, counts_KJ, block=block)
    _launch(
        f"{frame.name}_encode",
        x_KN.device,
        block,
        K * J,
        *_rows(x_KN),
        *_rows(error_KN),
        kind(error_KN),
        *_rows(frames_KB),
        frames_KB.shape[1],
        *_rows(counts_KJ),
        K,
        J,
        *options,
    )


def _decode(frame: Frame, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    K, J = EDGE.check_decode(frame, frames_KB, out_KN, block=block)
    _launch(
        f"{frame.name}_decode",
        out_KN.device,
        block,
        K * J,
        *_rows(frames_KB),
        *_rows(out_KN),
        K,
        J,
        numpy.float32(weight),
        numpy.float32(keep),
        int(keep != 0.0),
    )


def _decode_mean(frame: Frame, frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    K, J = EDGE.check_decode_mean(frame, frames_KB, out_N, block=block)
    _launch(
        f"{frame.name}_decode_mean",
        out_N.device,
        block,
        J,
        *_rows(frames_KB),
        K,
        out_N.data_ptr(),
        J,
        numpy.float32(1.0 / K),
    )


int8_encode, int4_encode, log4_encode = (functools.partial(_encode, frame) for frame in (INT8, INT4, LOG4))
int8_decode, int4_decode, log4_decode = (functools.partial(_decode, frame) for frame in (INT8, INT4, LOG4))
int8_decode_mean, int4_decode_mean, log4_decode_mean = (
    functools.partial(_decode_mean, frame) for frame in (INT8, INT4, LOG4)
)
int4_apply = functools.partial(_apply, INT4)


def _tensors(table: Table) -> tuple[int, ...]:
    """As sign.cu's `Pointers`."""
    return table.owners.data_ptr(), table.pointers.data_ptr(), table.layout.data_ptr(), table.pointers.shape[1]


def _rows(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def _typed(x: Tensor | None) -> tuple[int, int]:
    return address(x), kind(x)


def _launch(name: str, device: torch.device, block: int, blocks: int, *args: object) -> None:
    """Launch on torch's current stream of the device, with 16 threads for each of `blocks` blocks."""
    if blocks == 0:
        return
    if blocks >= 2**31:
        raise ValueError(f"{blocks} blocks of {block} elements are too many for one launch; use smaller buckets")
    with _on(device):
        kernel = _kernel(name, block, device.index)
        kernel((-(-blocks // _BLOCKS_PER_LAUNCHED),), (THREADS,), args)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """CuPy's launches go to torch's current stream of the device."""
    stream = _stream(current_stream(device), device.index)
    return stream if device.index == torch.cuda.current_device() else _on_other_device(device.index, stream)


@contextlib.contextmanager
def _on_other_device(index: int, stream: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with _cupy().cuda.Device(index), stream:
        yield


@functools.lru_cache(maxsize=256)
def _stream(address: int, index: int) -> contextlib.AbstractContextManager[object]:
    """CuPy's object for a stream of torch."""
    stream: contextlib.AbstractContextManager[object] = _cupy().cuda.ExternalStream(address, index)
    return stream


@functools.cache
def _kernel(name: str, block: int, index: int) -> Kernel:
    """A kernel, loaded on a device."""
    with _compile_lock:
        return _module(block, _cupy().cuda.Device(index).compute_capability).get_function(name)


@functools.cache
def _module(block: int, capability: str) -> Module:
    module: Module = _cupy().RawModule(path=str(_compiled(block, capability)))
    return module


def _compiled(block: int, capability: str) -> Path:
    """The file of machine code for devices of this capability, compiled if it is not in CuPy's cache.

    Not through `RawModule(code=...)`: CuPy puts --ftz=true after all options, and a kernel would lose subnormals.
    """
    compiler = importlib.import_module("cupy.cuda.compiler")
    code, options = source(), (*OPTIONS, f"-DONEBIT_BLOCK={block}")
    version = _cupy().cuda.nvrtc.getVersion()
    digest = hashlib.sha256(repr((code, options, version, capability)).encode()).hexdigest()
    folder = _writable(Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")))
    file = folder / f"onebit_{digest}.cubin"
    if not file.exists():
        machine_code, _ = compiler.compile_using_nvrtc(code, options, capability)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(machine_code)
        os.replace(part.name, file)
    return file


def _writable(folder: Path) -> Path:
    """The folder if it is writable, else a temporary one of this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _own_folder()
    return folder if os.access(folder, os.W_OK) else _own_folder()


@functools.cache
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="onebit-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _cupy() -> ModuleType:
    if why := why_not():
        raise ImportError(why)
    return importlib.import_module("cupy")
