"""The registry of features, in the order in which they are asked: see `../feature.py` for the contract."""

from __future__ import annotations

from ..feature import Asked, Feature
from .compression import Compression
from .data_efficiency import DataEfficiency
from .sparse_attention import SparseAttention

FEATURES: tuple[type[Feature], ...] = (
    Compression,
    SparseAttention,
    DataEfficiency,
)


def features_of(asked: Asked) -> tuple[Feature, ...]:
    """Those that the configuration and the model ask for. Raises ValueError if one cannot be had. No communication."""
    found = [feature.of(asked) for feature in FEATURES]
    return tuple(feature for feature in found if feature is not None)
