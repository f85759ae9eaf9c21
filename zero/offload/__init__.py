"""Optimizer state, gradients and parameters in host memory or in files, around any torch optimizer, without an engine.

    offload = onebit.zero.Offload(model, lambda params: torch.optim.AdamW(params, lr=1e-4), mode="state", to="/nvme")

`optimizer.py` takes the steps, `layout.py` decides where everything is, `store.py` and `files.py` hold the bytes.
`stored_params.py` brings parameters to where they are used; `mapped.py` puts a one-bit optimizer's state into files.
docs/offload.md explains which mode to use when.
"""

from __future__ import annotations

from .checks import MODES
from .files import FileStore
from .optimizer import Offload
from .store import Extent, Lease, MemoryStore, Store, StoreError

__all__ = ["MODES", "Extent", "FileStore", "Lease", "MemoryStore", "Offload", "Store", "StoreError"]
