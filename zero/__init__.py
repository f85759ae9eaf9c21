"""The ZeRO engine around the one-bit optimizers. Installed as `onebit.zero`.

    engine, optimizer, loader, scheduler = onebit.zero.initialize(model=net, config="ds.json", training_data=dataset)

Start reading at `initializing.py`, then `forms.py` (which form a configuration takes) and `engine.py`.
`parallel/fsdp.py` shards inside a node, `sharded/adam.py` across nodes, `parallel/tensor.py` divides each layer; all of
them work without an engine. `pipeline/layers.py` describes a model as a list of layers, `pipeline/run.py` runs it in
stages.
"""

if __name__ != "onebit.zero":
    raise ImportError(f"this package is onebit.zero, it was imported as {__name__!r}; use `from onebit import zero`")

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
from .sharded.lamb import ShardedOnebitLamb
from .sharded.zero_one_adam import ShardedZeroOneAdam

__all__ = [
    "CheckpointError", "Checkpoints", "Config", "Engine", "LayerSpec", "PipelineModule", "ShardedOnebitAdam",
    "ShardedOnebitLamb", "ShardedZeroOneAdam", "TiedLayerSpec", "data", "export_weights", "fsdp", "grid",
    "import_weights", "initialize", "read_config", "split", "tensor",
]  # fmt: skip
