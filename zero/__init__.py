"""The ZeRO engine around the one-bit optimizers. Installed as `onebit.zero`.

    engine, optimizer, loader, scheduler = onebit.zero.initialize(model=net, config="ds.json", training_data=dataset)

Start reading at `initializing.py`, then `forms.py` (which form a configuration takes) and `engine.py`.
`parallel/fsdp.py` shards inside a node, `sharded/adam.py` across nodes, `parallel/tensor.py` divides each layer; all of
them work without an engine. `pipeline/layers.py` describes a model as a list of layers, `pipeline/run.py` runs it in
stages.
"""

from __future__ import annotations

if __name__ != "onebit.zero":
    raise ImportError(f"this package is onebit.zero, it was imported as {__name__!r}; use `from onebit import zero`")

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "CheckpointError", "Checkpoints", "Config", "Engine", "LayerSpec", "NotFiniteError", "PipelineModule",
    "ShardedOnebitAdam", "ShardedOnebitLamb", "ShardedZeroOneAdam", "TiedLayerSpec", "data", "export_weights", "fsdp",
    "grid", "import_weights", "initialize", "read_config", "split", "tensor",
]  # fmt: skip

if TYPE_CHECKING:
    from ..checkpoint.files import CheckpointError
    from . import data, grid
    from .checkpoint.files import Checkpoints
    from .checkpoint.weights import export_weights, import_weights
    from .config.whole import Config, read_config
    from .engine import Engine
    from .initializing import initialize
    from .parallel import fsdp, tensor
    from .pipeline.layers import LayerSpec, PipelineModule, TiedLayerSpec
    from .pipeline.split import split
    from .sharded.adam import ShardedOnebitAdam
    from .sharded.exchange import NotFiniteError
    from .sharded.lamb import ShardedOnebitLamb
    from .sharded.zero_one_adam import ShardedZeroOneAdam
else:
    _MODULES = {"data": ".data", "fsdp": ".parallel.fsdp", "grid": ".grid", "tensor": ".parallel.tensor"}
    _HOMES = {
        "CheckpointError": "..checkpoint.files",
        "Checkpoints": ".checkpoint.files",
        "Config": ".config.whole",
        "Engine": ".engine",
        "LayerSpec": ".pipeline.layers",
        "NotFiniteError": ".sharded.exchange",
        "PipelineModule": ".pipeline.layers",
        "ShardedOnebitAdam": ".sharded.adam",
        "ShardedOnebitLamb": ".sharded.lamb",
        "ShardedZeroOneAdam": ".sharded.zero_one_adam",
        "TiedLayerSpec": ".pipeline.layers",
        "export_weights": ".checkpoint.weights",
        "import_weights": ".checkpoint.weights",
        "initialize": ".initializing",
        "read_config": ".config.whole",
        "split": ".pipeline.split",
    }

    def __getattr__(name: str):
        """Imported when first asked for: reading a configuration need not wait seconds for FSDP2 and pipelining."""
        if name in _MODULES:
            return import_module(_MODULES[name], __name__)
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
