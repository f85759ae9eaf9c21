"""Compressed collectives: codecs, transports, and the error-compensated all-reduce over them.

Rests on torch alone. Installed as `onebit.comm`. Start reading at `allreduce.py`; the wire format is in
`kernels/reference.py`.
"""

if __name__ != "onebit.comm":
    raise ImportError(f"this package is onebit.comm, it was imported as {__name__!r}; use `from onebit import comm`")

from .allreduce import (
    ErrorFeedback,
    Exchange,
    ExchangeTask,
    Wire,
    allreduce_mean,
    average_nodes,
    compressed_allreduce,
    exchange,
    interleave,
    wait_all,
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
from .hierarchy import HierarchicalTransport, Hierarchy, hierarchical
from .hops import TwoHopTransport, in_hops
from .kernels.operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
    MomentumInputs,
    MomentumWeights,
    OwnerStep,
    ParamUpdate,
    Segments,
    Variance,
)
from .launch import init
from .transports.base import PeerError, Transport, Work, check_transport
from .transports.simulated import SimNetwork, SimTransport, run_ranks

__all__ = [
    "CODECS",
    "Bf16Codec",
    "Codec",
    "EncodeOutput",
    "ErrorFeedback",
    "Exchange",
    "ExchangeTask",
    "FusedCodec",
    "GradientSum",
    "HierarchicalTransport",
    "Hierarchy",
    "IdentityCodec",
    "Int4Codec",
    "Int8Codec",
    "LocalStep",
    "Log4Codec",
    "MasterStep",
    "MomentumInputs",
    "MomentumWeights",
    "OwnerStep",
    "ParamUpdate",
    "PeerError",
    "Segments",
    "SignCodec",
    "SimNetwork",
    "SimTransport",
    "Transport",
    "TwoHopTransport",
    "Variance",
    "Wire",
    "Work",
    "allreduce_mean",
    "average_nodes",
    "check_fused",
    "check_transport",
    "codec_named",
    "compressed_allreduce",
    "exchange",
    "hierarchical",
    "in_hops",
    "init",
    "interleave",
    "momentum_codecs",
    "run_ranks",
    "wait_all",
]
