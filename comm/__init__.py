"""Compressed collectives: codecs, transports, and the error-compensated all-reduce over them.

Rests on torch alone. Installed as `onebit.comm`. Start reading at `allreduce.py`; the wire format is in
`kernels/reference.py`.
"""

if __name__ != "onebit.comm":
    raise ImportError(f"this package is onebit.comm, it was imported as {__name__!r}; use `from onebit import comm`")

from .allreduce import (
    ErrorFeedback,
    Exchange,
    Flight,
    Wire,
    allreduce_mean,
    compressed_allreduce,
    exchange,
    interleave,
    land,
)
from .codecs import (
    CODECS,
    Bf16Codec,
    Codec,
    FusedCodec,
    IdentityCodec,
    Int4Codec,
    Int8Codec,
    Log4Codec,
    SignCodec,
    check_fused,
    codec_named,
    momentum_codecs,
)
from .hierarchy import Levels, TwoLevelTransport, two_levels
from .kernels.operands import Momentum, MomentumWeights, Outgoing, Segments, Update, Variance
from .launch import init
from .transports.base import PeerError, Transport, Work, check_transport
from .transports.simulated import SimNetwork, SimTransport, run_ranks

__all__ = [
    "CODECS",
    "Bf16Codec",
    "Codec",
    "ErrorFeedback",
    "Exchange",
    "Flight",
    "FusedCodec",
    "IdentityCodec",
    "Int4Codec",
    "Int8Codec",
    "Levels",
    "Log4Codec",
    "Momentum",
    "MomentumWeights",
    "Outgoing",
    "PeerError",
    "Segments",
    "SignCodec",
    "SimNetwork",
    "SimTransport",
    "Transport",
    "TwoLevelTransport",
    "Update",
    "Variance",
    "Wire",
    "Work",
    "allreduce_mean",
    "check_fused",
    "check_transport",
    "codec_named",
    "compressed_allreduce",
    "exchange",
    "init",
    "interleave",
    "land",
    "momentum_codecs",
    "run_ranks",
    "two_levels",
]
