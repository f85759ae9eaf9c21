"""Drop-in optimizers for PyTorch that exchange about one bit per parameter.

    optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3)

Start reading at `onebit_adam.py` (one paper, one leaf), then `base.py` (what the family shares), then `comm/`.
"""

from . import comm
from .lamb import Lamb
from .onebit_adam import OnebitAdam
from .onebit_lamb import OnebitLamb
from .replicas import ReplicaError
from .zero_one_adam import ZeroOneAdam

__all__ = ["Lamb", "OnebitAdam", "OnebitLamb", "ReplicaError", "ZeroOneAdam", "comm"]
