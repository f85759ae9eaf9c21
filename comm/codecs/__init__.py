"""Codecs: rows of floats to byte frames and back. Byte layouts: `kernels/reference.py`, `kernels/int4_reference.py`.

`CODECS` is the registry: the engine's configuration, the plan, the pipeline's wire, the training script and the
contract tests read it. To add a codec write its file, and its line here.
"""

from __future__ import annotations

from .base import Codec, FusedCodec, IdentityCodec, Witness, all_finite
from .bf16 import Bf16Codec
from .int4 import Int4Codec
from .int8 import Int8Codec
from .log4 import Log4Codec
from .sign import SignCodec

__all__ = [
    "CODECS", "Bf16Codec", "Codec", "FusedCodec", "IdentityCodec", "Int4Codec", "Int8Codec", "Log4Codec", "SignCodec",
    "Witness", "all_finite", "check_fused", "codec_named", "momentum_codecs",
]  # fmt: skip

_KINDS: tuple[type[Codec], ...] = (
    IdentityCodec,
    Bf16Codec,
    Int8Codec,
    Int4Codec,
    Log4Codec,
    SignCodec,
)
CODECS = {kind.name: kind for kind in _KINDS}


def momentum_codecs() -> tuple[str, ...]:
    """Names of the codecs in which an optimizer's momentum can travel: those that are a `FusedCodec`."""
    return tuple(name for name, kind in CODECS.items() if issubclass(kind, FusedCodec))


def check_fused(codec: object) -> FusedCodec:
    """Return the codec if an optimizer's momentum can travel in it.

    Args:
        codec: What a user passed as `codec`.

    Raises:
        TypeError: It is not a `FusedCodec` object.
    """
    if not isinstance(codec, FusedCodec):
        raise TypeError(
            f"codec must be one that momentum can travel in, {' or '.join(momentum_codecs())}, or another FusedCodec, "
            "and an object of it, as onebit.comm.Log4Codec(); "
            f"got {codec!r}. To choose the codec of gradients, set warmup_codec, or variance_codec of ZeroOneAdam"
        )
    return codec


def codec_named(name: str, block: int) -> Codec:
    """Construct a codec by its name.

    Args:
        name: A key of `CODECS`.
        block: Elements per block; each codec accepts multiples of its own minimum.

    Raises:
        ValueError: No codec has this name.
    """
    if name not in CODECS:
        raise ValueError(f"no codec is named {name!r}; there are {', '.join(CODECS)}")
    return CODECS[name](block)  # type: ignore[call-arg]
