"""The registry of features, in the order in which they act. The contract is in `../feature.py`."""

from __future__ import annotations

from ..config.schema import changed
from ..feature import Asked, Feature
from .activation_checkpointing import ActivationCheckpointing
from .comms_logger import CommsLogger
from .compression import Compression
from .data_efficiency import DataEfficiency
from .flops_profiler import FlopsProfiler
from .progressive_layer_drop import ProgressiveLayerDrop
from .sequence_parallelism import SequenceParallelism
from .sparse_attention import SparseAttention

FEATURES: tuple[type[Feature], ...] = (
    Compression,
    SparseAttention,
    SequenceParallelism,
    DataEfficiency,
    ProgressiveLayerDrop,
    FlopsProfiler,
    CommsLogger,
    ActivationCheckpointing,
)


def features_of(asked: Asked) -> tuple[Feature, ...]:
    """Return the features that the configuration and the model ask for. No communication.

    A plain configuration, of a model without marks, asks none of them.

    Args:
        asked: Configuration, model and arguments.

    Raises:
        ValueError: A feature does not fit this model or configuration.
    """
    blocks, keys = set(changed(asked.config)), set(changed(asked.config.onebit))
    marks = {name for module in asked.outline.modules() for name in vars(module)}
    found = []
    for kind in FEATURES:
        is_asked = blocks.intersection(kind.blocks) or keys.intersection(kind.keys) or kind.mark in marks
        if is_asked and (feature := kind.of(asked)) is not None:
            found.append(feature)
    return tuple(found)
