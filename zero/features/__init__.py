"""The registry of features, in the order in which they act. The contract is in `../feature.py`."""

from __future__ import annotations

from ..feature import Asked, Feature
from .activation_checkpointing import ActivationCheckpointing
from .comms_logger import CommsLogger
from .compression import Compression
from .data_efficiency import DataEfficiency
from .flops_profiler import FlopsProfiler
from .sequence_parallelism import SequenceParallelism
from .sparse_attention import SparseAttention

FEATURES: tuple[type[Feature], ...] = (
    Compression,
    SparseAttention,
    SequenceParallelism,
    DataEfficiency,
    FlopsProfiler,
    CommsLogger,
    ActivationCheckpointing,
)


def features_of(asked: Asked) -> tuple[Feature, ...]:
    """Return the features that the configuration and the model ask for. No communication.

    Args:
        asked: Configuration, model and arguments.

    Raises:
        ValueError: A feature does not fit this model or configuration.
    """
    found = [feature.of(asked) for feature in FEATURES]
    return tuple(feature for feature in found if feature is not None)
