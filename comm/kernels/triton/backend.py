"""Kernels: the frames in Triton, for CUDA tensors. The same bytes and the same floats as `reference.py`.

One pass over memory each. `encode.py` has the one loop that encodes, `codes.py` what differs between the frames,
`momentum.py` and `mean.py` what an optimizer's step encodes, `decode.py` and `apply.py` what it does with frames,
`local.py` a step without any, `owner.py` what a chunk's owner makes of frames.
Rests on Triton, which is imported with this module; arguments are checked in `arguments.py`.

What Triton would round otherwise than rule 2 of reference.py: a / b and sqrt are approximate (div_rn and sqrt_rn are
not), -x is 0 - x (a sign is set as a bit here), a·b + c is fused (`enable_fp_fusion=False` at each launch), and a sum
takes any order (lanes are added by hand here). bfloat16 is made of integers: rounding is then the same in all versions.
"""

from __future__ import annotations

import functools

from ..arguments import INT4, INT8, SIGN
from . import decode as triton_decode
from .apply import apply
from .encode import encode, int4_encode, int8_encode
from .gradients import encode_gradients
from .local import local_step
from .mean import encode_mean
from .momentum import encode_momentum
from .owner import owner_step

__all__ = [
    "apply",
    "decode",
    "decode_mean",
    "encode",
    "encode_gradients",
    "encode_mean",
    "encode_momentum",
    "int4_decode",
    "int4_decode_mean",
    "int4_encode",
    "int8_decode",
    "int8_decode_mean",
    "int8_encode",
    "local_step",
    "owner_step",
]

decode = functools.partial(triton_decode.decode, SIGN)
decode_mean = functools.partial(triton_decode.decode_mean, SIGN)
int8_decode = functools.partial(triton_decode.decode, INT8)
int8_decode_mean = functools.partial(triton_decode.decode_mean, INT8)
int4_decode = functools.partial(triton_decode.decode, INT4)
int4_decode_mean = functools.partial(triton_decode.decode_mean, INT4)
