"""Kernels: the frames in C++, for host tensors. The same bytes and the same floats as `reference.py`.

The code is csrc/kernels.cpp, built by setup.py into `_kernels.so` beside this file and loaded with ctypes on
first use; calls release the GIL. Arguments are checked in `arguments.py`, once.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .arguments import INT4, INT8, LOG4, SIGN, Edge, Frame, check_scale
from .library import SharedLibrary
from .operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
    MomentumInputs,
    OwnerStep,
    ParamUpdate,
    Segments,
)

NAME = "cpu"
SERVES = "cpu"
FRAMES = dict.fromkeys(("sign", "int8", "int4", "log4"), ".cpu")

EDGE = Edge("cpu")
_KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2}


def encode(
    x_KN: Tensor,
    error_KN: Tensor | None,
    frames_KB: Tensor,
    counts_KJ: Tensor | None,
    *,
    block: int,
    scale: str,
    isa: str = "auto",
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32 in place; error float32/bfloat16, read only.

    One pass over memory. Rows may have gaps between them (a slice of a wider tensor); elements of a row are contiguous.
    """
    check_scale(scale)
    _encode(SIGN, x_KN, error_KN, frames_KB, counts_KJ, block=block, options=(scale == "mean_abs",), isa=isa)


def decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float, isa: str = "auto") -> None:
    """out ← keep·out + weight·values; out float32 [K, N]. With keep = 0 the old content of out is not read."""
    _decode(SIGN, frames_KB, out_KN, block=block, weight=weight, keep=keep, isa=isa)


def decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int, isa: str = "auto") -> None:
    """out ← mean over the K frames; out float32 [N], written once."""
    _decode_mean(SIGN, frames_KB, out_N, block=block, isa=isa)


def encode_mean(received_WB: Tensor, out: EncodeOutput, *, block: int, scale: str, isa: str = "auto") -> None:
    """frame ← frame of the mean of the W frames + error; residual ← the rest. Reads each frame once."""
    check_scale(scale)
    W, J = EDGE.check_encode_mean(SIGN, received_WB, out, block=block)
    _library.run(
        "sign_encode_mean",
        *_rows(received_WB),
        W,
        *_typed(out.error_KN),
        out.frames_KB.data_ptr(),
        out.frames_KB.shape[1],
        _address(out.counts_KJ),
        *_typed(out.residual_KN),
        J,
        block,
        scale == "mean_abs",
        isa=isa,
        elements=out.residual_KN.numel(),
    )


def encode_momentum(momentum: MomentumInputs, out: EncodeOutput, *, block: int, scale: str, isa: str = "auto") -> None:
    """frames ← frames of c, the new momentum plus the residual (rule 6); residual ← c - decode(frames).

    One pass: reads gradients in place, D, the old momentum and the error; writes frames, residual and sums. A gradient
    that is neither float32 nor bfloat16, or not contiguous, is copied first.
    """
    check_scale(scale)
    K, J = EDGE.check_encode_momentum(SIGN, momentum, out, block=block)
    readable = [None if grad is None else _readable(grad) for grad in momentum.grads]
    D, floor, correction, eps = momentum.divisor
    weights = momentum.weights
    _library.run(
        "sign_encode_momentum",
        *_pointers(readable, momentum.segments),
        D.data_ptr(),
        _address(floor),
        correction,
        eps,
        *_rows(momentum.old if momentum.is_packed else None),
        None if momentum.is_packed else momentum.old.data_ptr(),
        weights.keep,
        weights.add,
        weights.own,
        weights.unscale,
        *_typed(out.error_KN),
        *_rows(out.frames_KB),
        out.frames_KB.shape[1],
        *_rows(out.counts_KJ),
        *_typed(out.residual_KN),
        _address(out.sums_KJ2),
        K,
        J,
        block,
        scale == "mean_abs",
        isa=isa,
        elements=out.residual_KN.numel(),
    )


def apply(frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int, isa: str = "auto") -> None:
    """p ← keep·p + weight·value, parameters in place, with the values of frames of rows of n elements (rule 7).

    One pass over each. A parameter that is neither float32 nor bfloat16, or not contiguous, goes through a copy.
    """
    _apply(SIGN, frames_KB, n, update, block=block, isa=isa)


def step_masters(step: MasterStep, *, block: int, scale: str, isa: str = "auto") -> None:
    """Masters ← those after the step; frame ← frame of what their replicas lack (rule 13).

    One pass: reads the replicas in place. One that is neither float32 nor bfloat16, or not contiguous, is copied first.
    """
    check_scale(scale)
    _step_masters(SIGN, step, block=block, option=scale == "mean_abs", isa=isa)


def int4_step_masters(step: MasterStep, *, block: int, isa: str = "auto") -> None:
    """The same, with a frame of int4."""
    _step_masters(INT4, step, block=block, option=False, isa=isa)


def local_step(step: LocalStep, *, block: int, isa: str = "auto") -> None:
    """Update m, u, anchors and parameters in place by this rank's gradients alone (rule 8).

    One pass over each. Tensors that are neither float32 nor bfloat16, or not contiguous, go through a copy.
    """
    K, J = EDGE.check_local_step(step, block=block)
    momentum, weights = step.momentum, step.momentum.weights
    readable = [None if grad is None else _readable(grad) for grad in momentum.grads]
    writable = [None if p is None else _readable(p) for p in step.params]
    D, floor, correction, eps = momentum.divisor
    _library.run(
        "local_step",
        *_pointers(readable, momentum.segments),
        *_pointers(writable, momentum.segments)[:2],
        D.data_ptr(),
        _address(floor),
        correction,
        eps,
        momentum.old.data_ptr(),
        weights.keep,
        weights.add,
        weights.own,
        weights.unscale,
        step.sum_KN.data_ptr(),
        _address(step.anchor_KN),
        step.weight,
        step.kept,
        K,
        J,
        block,
        isa=isa,
        elements=momentum.old.numel(),
    )
    _write_back(step.params, writable)


def correct_residual(
    momentum: MomentumInputs, factor: float, residual_KN: Tensor, *, block: int, isa: str = "auto"
) -> None:
    """Residual ← what it would be if the gradients had been sent with `factor` times their factor (rule 11).

    One pass: reads gradients and D, modifies the residual. A gradient that is neither float32 nor bfloat16, or not
    contiguous, is copied first.
    """
    K, J = EDGE.check_correct_residual(momentum, residual_KN, block=block)
    readable = [None if grad is None else _readable(grad) for grad in momentum.grads]
    D, floor, correction, eps = momentum.divisor
    weights = momentum.weights
    _library.run(
        "correct_residual",
        *_pointers(readable, momentum.segments),
        D.data_ptr(),
        _address(floor),
        correction,
        eps,
        weights.add,
        weights.own,
        weights.unscale,
        weights.unscale * factor,
        *_typed(residual_KN),
        K * J,
        block,
        isa=isa,
        elements=residual_KN.numel(),
    )


def momentum_sums(momentum: MomentumInputs, sums_KJ2: Tensor, *, block: int, isa: str = "auto") -> None:
    """Sums ← those of g² and g·(m·D) of each block (rule 12). One pass: reads gradients, D and the old momentum."""
    K, J = EDGE.check_momentum_sums(SIGN, momentum, sums_KJ2, block=block)
    readable = [None if grad is None else _readable(grad) for grad in momentum.grads]
    D, floor, correction, eps = momentum.divisor
    _library.run(
        "sign_momentum_sums",
        *_pointers(readable, momentum.segments),
        D.data_ptr(),
        _address(floor),
        correction,
        eps,
        *_rows(momentum.old if momentum.is_packed else None),
        None if momentum.is_packed else momentum.old.data_ptr(),
        sums_KJ2.data_ptr(),
        K,
        J,
        block,
        isa=isa,
        elements=K * J * block,
    )


def encode_gradients(step: GradientSum, *, block: int, scale: str, isa: str = "auto") -> None:
    """frames ← frames of c = add·g + owed, the residual; owed becomes the new residual, or stays (rule 10).

    One pass. A gradient that is neither float32 nor bfloat16, or not contiguous, is copied first.
    """
    check_scale(scale)
    K, J = EDGE.check_encode_gradients(SIGN, step, block=block)
    readable = [None if grad is None else _readable(grad) for grad in step.grads]
    _library.run(
        "sign_encode_gradients",
        *_pointers(readable, step.segments),
        step.add,
        step.unscale,
        *_typed(step.owed_KN),
        step.returned is not None,
        step.returned or 0.0,
        *_rows(step.frames_KB),
        step.frames_KB.shape[1],
        *_rows(step.counts_KJ),
        K,
        J,
        block,
        scale == "mean_abs",
        isa=isa,
        elements=step.owed_KN.numel(),
    )


def owner_step(step: OwnerStep, *, block: int, isa: str = "auto") -> None:
    """Update v and compute m̂/D of the owner's chunk from all ranks' frames and its gradient (rule 9). One pass."""
    W, J = EDGE.check_owner_step(step, block=block)
    corrections, correction1, correction2 = step.correcting
    _library.run(
        "sign_owner_step",
        *_rows(step.received_WB),
        W,
        step.row,
        step.grad_N.data_ptr(),
        step.counts_J.data_ptr(),
        step.variance_N.data_ptr(),
        step.direction_N.data_ptr(),
        _address(step.D_N),
        step.sums_J4.data_ptr(),
        _address(corrections),
        correction1,
        correction2,
        step.weight,
        step.own,
        step.common,
        step.eps,
        step.floor,
        step.inverse_limit,
        J,
        block,
        isa=isa,
        elements=step.grad_N.numel(),
    )


def _encode(
    frame: Frame,
    x_KN: Tensor,
    error_KN: Tensor | None,
    frames_KB: Tensor,
    counts_KJ: Tensor | None,
    *,
    block: int,
    options: tuple[int, ...] = (),
    isa: str = "auto",
) -> None:
    K, J = EDGE.check_encode(frame, x_KN, error_KN, frames_KB, counts_KJ, block=block)
    _library.run(
        f"{frame.name}_encode",
        *_rows(x_KN),
        *_rows(error_KN),
        _kind(error_KN),
        *_rows(frames_KB),
        frames_KB.shape[1],
        *_rows(counts_KJ),
        K,
        J,
        block,
        *options,
        isa=isa,
        elements=x_KN.numel(),
    )


def _decode(
    frame: Frame, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float, isa: str = "auto"
) -> None:
    K, J = EDGE.check_decode(frame, frames_KB, out_KN, block=block)
    _library.run(
        f"{frame.name}_decode",
        *_rows(frames_KB),
        *_rows(out_KN),
        K,
        J,
        block,
        weight,
        keep,
        isa=isa,
        elements=out_KN.numel(),
    )


def _decode_mean(frame: Frame, frames_KB: Tensor, out_N: Tensor, *, block: int, isa: str = "auto") -> None:
    K, J = EDGE.check_decode_mean(frame, frames_KB, out_N, block=block)
    _library.run(
        f"{frame.name}_decode_mean",
        *_rows(frames_KB),
        K,
        out_N.data_ptr(),
        J,
        block,
        isa=isa,
        elements=out_N.numel(),
    )


def _apply(frame: Frame, frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int, isa: str = "auto") -> None:
    K, J = EDGE.check_apply(frame, frames_KB, n, update, block=block)
    writable = [None if p is None else _readable(p) for p in update.params]
    _library.run(
        f"{frame.name}_apply",
        *_rows(frames_KB),
        K,
        J,
        block,
        *_pointers(writable, update.segments),
        update.weight_S.data_ptr(),
        update.keep_S.data_ptr(),
        isa=isa,
        elements=K * n,
    )
    _write_back(update.params, writable)


def _step_masters(frame: Frame, step: MasterStep, *, block: int, option: bool, isa: str) -> None:
    J = EDGE.check_step_masters(frame, step, block=block)
    readable = [_readable(replica) for replica in step.replicas]
    _library.run(
        f"{frame.name}_step_masters",
        step.update_N.data_ptr(),
        step.masters_N.data_ptr(),
        *_pointers(readable, step.segments),
        step.counts_J.data_ptr(),
        step.frame_1B.data_ptr(),
        step.frame_1B.shape[1],
        step.weight,
        step.keep,
        J,
        block,
        option,
        isa=isa,
        elements=step.masters_N.numel(),
    )


int8_encode, int4_encode, log4_encode = (functools.partial(_encode, frame) for frame in (INT8, INT4, LOG4))
int8_decode, int4_decode, log4_decode = (functools.partial(_decode, frame) for frame in (INT8, INT4, LOG4))
int8_decode_mean, int4_decode_mean, log4_decode_mean = (
    functools.partial(_decode_mean, frame) for frame in (INT8, INT4, LOG4)
)
int4_apply = functools.partial(_apply, INT4)


def _write_back(tensors: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> None:
    """Copy back the tensors that `_readable` had to copy."""
    for x, copy in zip(tensors, written, strict=True):
        if x is not None and copy is not None and copy is not x:
            x.copy_(copy)


def _readable(x: Tensor) -> Tensor:
    x = x if x.dtype in _KINDS else x.to(torch.float32)
    return x if x.is_contiguous() else x.contiguous()


def _kind(x: Tensor | None) -> int:
    return _KINDS[None if x is None else x.dtype]


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _rows(x: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if x is None else (x.data_ptr(), x.stride(0))


def _typed(x: Tensor | None) -> tuple[int | None, int]:
    return _address(x), _kind(x)


def _pointers(tensors: Sequence[Tensor | None], segments: Segments) -> tuple[object, ...]:
    """The fields of PointersJob in kernels.cpp."""
    S = len(tensors)
    addresses = (ctypes.c_void_p * S)(*(_address(x) for x in tensors))
    kinds = (ctypes.c_int32 * S)(*(_kind(x) for x in tensors))
    return addresses, kinds, *segments.addresses, S


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, flag, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
    rows = (pointer, size)
    encode = (*rows, *rows, flag, *rows, size, *rows, size, size, size)
    library.onebit_sign_encode.argtypes = (*encode, flag, flag, flag)
    for frame in (INT8, INT4, LOG4):
        getattr(library, f"onebit_{frame.name}_encode").argtypes = (*encode, flag, flag)
    for frame in (SIGN, INT8, INT4, LOG4):
        decode, decode_mean = (getattr(library, f"onebit_{frame.name}_{name}") for name in ("decode", "decode_mean"))
        decode.argtypes = (*rows, *rows, size, size, size, real, real, flag, flag)
        decode_mean.argtypes = (*rows, size, pointer, size, size, flag, flag)
    tensors = (pointer, pointer, pointer, pointer, size)
    typed = (pointer, flag)
    library.onebit_sign_encode_mean.argtypes = (
        *rows, size, *typed, *rows, pointer, *typed, size, size, flag, flag, flag
    )  # fmt: skip
    library.onebit_sign_encode_momentum.argtypes = (
        *tensors, pointer, pointer, real, real, *rows, pointer, real, real, real, real, *typed, *rows, size, *rows,
        *typed, pointer, size, size, size, flag, flag, flag,
    )  # fmt: skip
    for frame in (SIGN, INT4):
        apply, step_masters = (getattr(library, f"onebit_{frame.name}_{name}") for name in ("apply", "step_masters"))
        apply.argtypes = (*rows, size, size, size, *tensors, pointer, pointer, flag, flag)
        step_masters.argtypes = (
            pointer, pointer, *tensors, pointer, pointer, size, real, real, size, size, flag, flag, flag
        )  # fmt: skip
    library.onebit_local_step.argtypes = (
        *tensors, pointer, pointer, pointer, pointer, real, real, pointer, real, real, real, real, pointer, pointer,
        real, real, size, size, size, flag, flag,
    )  # fmt: skip
    library.onebit_correct_residual.argtypes = (
        *tensors, pointer, pointer, *(real,) * 6, *typed, size, size, flag, flag,
    )  # fmt: skip
    library.onebit_sign_momentum_sums.argtypes = (
        *tensors, pointer, pointer, real, real, *rows, pointer, pointer, size, size, size, flag, flag,
    )  # fmt: skip
    library.onebit_sign_owner_step.argtypes = (
        *rows, size, size, *(pointer,) * 7, *(real,) * 8, size, size, flag, flag,
    )  # fmt: skip
    library.onebit_sign_encode_gradients.argtypes = (
        *tensors, real, real, *typed, flag, real, *rows, size, *rows, size, size, size, flag, flag, flag,
    )  # fmt: skip


_library = SharedLibrary(
    Path(__file__).with_name("_kernels.so"),
    prefix="onebit",
    abi_version=11,
    declare=_declare,
    log=logging.getLogger(__name__),
    without="the codecs run on the pure-torch reference, about ten times slower",
)
is_built, why_not, describe, available_isas = (
    _library.is_built,
    _library.why_not,
    _library.describe,
    _library.available_isas,
)
