"""Drop-in optimizers for PyTorch that exchange about one bit per parameter.

    optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3)

Start reading at `onebit_adam.py` (one paper), then `optimizer.py` (what the family shares), then `comm/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from . import comm
from .agreement.replicas import ReplicaError
from .agreement.skips import SkippedStepsError
from .agreement.step_vote import DesyncError
from .arithmetic.muon import muon_groups
from .host_adam import HostAdam
from .lamb import Lamb
from .laprop import LaProp
from .lion import Lion
from .local.intervals import QSR, Auto
from .local.local_steps import LocalSteps
from .model_parallel import transports_of
from .muon import Muon
from .onebit_adam import OnebitAdam
from .onebit_lamb import OnebitLamb
from .onebit_muon import OnebitMuon
from .usage.buffers import sync_buffers
from .version import VERSION as __version__
from .zero_one_adam import ZeroOneAdam

__all__ = [
    "QSR", "Auto", "DDPHookState", "DesyncError", "HostAdam", "LaProp", "Lamb", "Lion", "LocalSteps", "Muon",
    "OnebitAdam", "OnebitLamb", "OnebitMuon", "ReplicaError", "SkippedStepsError", "ZeroOneAdam", "__version__", "comm",
    "ddp_hook", "muon_groups", "sync_buffers", "transports_of",
]  # fmt: skip

if TYPE_CHECKING:
    from . import zero as zero
    from .integrations.ddp_hook import DDPHookState, ddp_hook
else:

    def __getattr__(name: str):
        """Import `onebit.zero` and the DDP hook on first use, so that `import onebit` does not wait for them."""
        if name == "zero":
            return import_module(".zero", __name__)
        if name in ("DDPHookState", "ddp_hook"):
            return getattr(import_module(".integrations.ddp_hook", __name__), name)
        spelling = {known.lower(): known for known in __all__}.get(name.lower().removesuffix("w"))
        meant = f"onebit.{spelling}" if spelling else f"onebit.zero.{name}" if name.startswith("Sharded") else ""
        hint = f"; did you mean {meant}?" if meant and not name.startswith("__") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
