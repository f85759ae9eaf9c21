"""Drop-in optimizers for PyTorch that exchange about one bit per parameter.

    optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3, total_steps=10_000)

Start reading at `onebit_adam.py` (one paper, one leaf), then `base.py` (what the family shares), then `comm/`.
"""

from . import comm
from .onebit_adam import OnebitAdam
from .replicas import ReplicaError
from .zero_one_adam import ZeroOneAdam

__all__ = ["OnebitAdam", "ReplicaError", "ZeroOneAdam", "comm"]
