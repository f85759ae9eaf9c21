"""Drop-in optimizers for PyTorch that exchange about one bit per parameter.

    optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3)

Start reading at `onebit_adam.py` (one paper), then `optimizer.py` (what the family shares), then `comm/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .version import VERSION as __version__

__all__ = [
    "QSR", "Auto", "AveragedSteps", "DDPHookState", "DesyncError", "HostAdam", "LaProp", "Lamb", "Lion", "LocalSteps",
    "Muon", "OnebitAdam", "OnebitLamb", "OnebitMuon", "ReplicaError", "SkippedStepsError", "ZeroOneAdam",
    "__version__", "comm", "ddp_hook", "muon_groups", "sync_buffers", "transports_of",
]  # fmt: skip

if TYPE_CHECKING:
    from . import comm
    from . import dense as dense
    from . import host as host
    from . import membership as membership
    from . import zero as zero
    from .agreement.replicas import ReplicaError
    from .agreement.skips import SkippedStepsError
    from .agreement.step_vote import DesyncError
    from .arithmetic.muon import muon_groups
    from .averaged_steps import AveragedSteps
    from .host_adam import HostAdam
    from .integrations.ddp_hook import DDPHookState, ddp_hook
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
    from .zero_one_adam import ZeroOneAdam
else:
    from importlib import import_module
    from importlib.util import find_spec

    _HOMES = {
        "Auto": ".local.intervals",
        "AveragedSteps": ".averaged_steps",
        "DDPHookState": ".integrations.ddp_hook",
        "DesyncError": ".agreement.step_vote",
        "HostAdam": ".host_adam",
        "LaProp": ".laprop",
        "Lamb": ".lamb",
        "Lion": ".lion",
        "LocalSteps": ".local.local_steps",
        "Muon": ".muon",
        "OnebitAdam": ".onebit_adam",
        "OnebitLamb": ".onebit_lamb",
        "OnebitMuon": ".onebit_muon",
        "QSR": ".local.intervals",
        "ReplicaError": ".agreement.replicas",
        "SkippedStepsError": ".agreement.skips",
        "ZeroOneAdam": ".zero_one_adam",
        "ddp_hook": ".integrations.ddp_hook",
        "muon_groups": ".arithmetic.muon",
        "sync_buffers": ".usage.buffers",
        "transports_of": ".model_parallel",
    }

    def __getattr__(name: str):
        """Import on first use: who takes one optimizer does not wait for the others, nor `onebit --help` for torch."""
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        if not name.startswith("_") and find_spec(f".{name}", __name__) is not None:
            return import_module(f".{name}", __name__)
        spelling = {known.lower(): known for known in __all__}.get(name.lower().removesuffix("w"))
        meant = f"onebit.{spelling}" if spelling else f"onebit.zero.{name}" if name.startswith("Sharded") else ""
        hint = f"; did you mean {meant}?" if meant and not name.startswith("__") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
