"""The ZeRO engine around the one-bit optimizers. Installed as `onebit.zero`.

    engine, optimizer, loader, scheduler = onebit.zero.initialize(model=net, config="ds.json", training_data=dataset)

Start reading at `initializing.py`, then `forms.py` (which form a configuration takes) and `engine.py`; `fsdp.py` shards
inside a node, `shard.py` across nodes, `tensor.py` divides each layer, and all of them can be used without an engine.
`layers.py` describes a model as a list of layers, `pipeline.py` runs it in stages.
"""

if __name__ != "onebit.zero":
    raise ImportError(f"this package is onebit.zero, it was imported as {__name__!r}; use `from onebit import zero`")

from . import data, fsdp, grid, tensor
from .checkpoint import CheckpointError, Checkpoints
from .config import Config, read_config
from .engine import Engine
from .initializing import initialize
from .layers import LayerSpec, PipelineModule, TiedLayerSpec
from .shard import ShardedOnebitAdam
from .shard_lamb import ShardedOnebitLamb
from .shard_zero_one import ShardedZeroOneAdam
from .split import split
from .weights import export_weights, import_weights

__all__ = [
    "CheckpointError", "Checkpoints", "Config", "Engine", "LayerSpec", "PipelineModule", "ShardedOnebitAdam",
    "ShardedOnebitLamb", "ShardedZeroOneAdam", "TiedLayerSpec", "data", "export_weights", "fsdp", "grid",
    "import_weights", "initialize", "read_config", "split", "tensor",
]  # fmt: skip
