"""Kernels: the frames in Triton, for CUDA tensors. The same bytes and the same floats as `reference.py`.

Each function makes one pass over memory. `encode.py` has the one loop that encodes, `codes.py` the differences between
the frames, `momentum.py` and `mean.py` the inputs that an optimizer's step encodes, `decode.py` and `apply.py` decoding
and updates, `local.py` a step without frames, `owner.py` the step of a chunk's owner, `clip.py` what clipping needs.
Rests on Triton, which is imported with this module; arguments are checked in `arguments.py`.

Where Triton would round differently from rule 2 of reference.py: a / b and sqrt are approximate (div_rn and sqrt_rn are
not), -x is 0 - x (here a sign is set as a bit), a·b + c is fused (`enable_fp_fusion=False` at each launch), and a sum
takes any order (here lanes are added by hand). bfloat16 is made of integers: rounding is then the same in all versions.
"""

from __future__ import annotations

import functools

from ..arguments import INT4, INT8, LOG4, SIGN
from . import decode as triton_decode
from .apply import apply, int4_apply
from .clip import correct_residual
from .encode import encode, int4_encode, int4_step_masters, int8_encode, log4_encode, step_masters
from .gradients import encode_gradients
from .local import local_step
from .mean import encode_mean
from .momentum import encode_momentum, momentum_sums
from .owner import owner_step

__all__ = [
    "apply",
    "correct_residual",
    "decode",
    "decode_mean",
    "encode",
    "encode_gradients",
    "encode_mean",
    "encode_momentum",
    "int4_apply",
    "int4_decode",
    "int4_decode_mean",
    "int4_encode",
    "int4_step_masters",
    "int8_decode",
    "int8_decode_mean",
    "int8_encode",
    "local_step",
    "log4_decode",
    "log4_decode_mean",
    "log4_encode",
    "momentum_sums",
    "owner_step",
    "step_masters",
]

decode = functools.partial(triton_decode.decode, SIGN)
decode_mean = functools.partial(triton_decode.decode_mean, SIGN)
int8_decode = functools.partial(triton_decode.decode, INT8)
int8_decode_mean = functools.partial(triton_decode.decode_mean, INT8)
int4_decode = functools.partial(triton_decode.decode, INT4)
int4_decode_mean = functools.partial(triton_decode.decode_mean, INT4)
log4_decode = functools.partial(triton_decode.decode, LOG4)
log4_decode_mean = functools.partial(triton_decode.decode_mean, LOG4)
