"""The ZeRO engine around the one-bit optimizers. Installed as `onebit.zero`.

    engine, optimizer, loader, scheduler = onebit.zero.initialize(model=net, config="ds.json", training_data=dataset)

Start reading at `initializing.py`, then `form.py` (what becomes of model and optimizer) and `engine.py`.
`parallel/partitioned.py` and `parallel/fsdp.py` shard inside a node, `sharded/adam.py` across nodes, and
`parallel/tensor.py` divides each layer; all of them work without an engine. `pipeline/layers.py` describes a model as a
list of layers, `pipeline/run.py` runs it in stages.

`import onebit.zero as deepspeed` runs DeepSpeed's scripts: `deepspeed/` and docs/deepspeed.md.
"""

from __future__ import annotations

if __name__ != "onebit.zero":
    raise ImportError(f"this package is onebit.zero, it was imported as {__name__!r}; use `from onebit import zero`")

from importlib import import_module
from typing import TYPE_CHECKING

from ..version import VERSION as __version__  # noqa: F401

__all__ = [
    "CheckpointError", "Checkpoints", "Config", "ContinuousBatch", "DeepSpeedEngine", "Engine", "InferenceConfig",
    "InferenceEngine", "LayerSpec", "NotFiniteError", "Offload", "PipelineModule", "SequenceRanks", "ShardedOnebitAdam",
    "ShardedOnebitLamb", "ShardedZeroOneAdam", "TiedLayerSpec", "add_config_arguments", "data", "data_efficiency",
    "export_compressed", "export_pretrained", "export_weights", "fsdp", "get_accelerator", "grid", "import_compressed",
    "import_weights", "init_compression", "init_distributed", "init_inference", "initialize", "log_dist", "materialize",
    "read_checkpoint_weights", "read_config", "redundancy_clean", "ring_attention", "sequence_parallel", "split",
    "stand_in", "tensor", "tp_model_init",
]  # fmt: skip

if TYPE_CHECKING:
    from ..checkpoint.files import CheckpointError
    from . import accelerator as accelerator
    from . import checkpointing as checkpointing
    from . import comm as comm
    from . import compression as compression
    from . import data, data_efficiency, grid
    from . import elasticity as elasticity
    from . import moe as moe
    from . import ops as ops
    from . import pipe as pipe
    from . import runtime as runtime
    from . import utils as utils
    from . import zero as zero
    from .checkpoint.exporting import export_weights
    from .checkpoint.files import Checkpoints
    from .checkpoint.importing import import_weights
    from .checkpoint.materialize import materialize
    from .checkpoint.whole import read_checkpoint_weights
    from .compression import (
        export_compressed,
        export_pretrained,
        import_compressed,
        init_compression,
        redundancy_clean,
    )
    from .config.whole import Config, read_config
    from .deepspeed.accelerator import get_accelerator
    from .deepspeed.comm import init_distributed
    from .deepspeed.engine import DeepSpeedEngine
    from .deepspeed.initializing import add_config_arguments, initialize, tp_model_init
    from .deepspeed.stand_in import stand_in
    from .deepspeed.utils import log_dist
    from .deepspeed.utils import logger as logger
    from .engine import Engine
    from .inference import ContinuousBatch, InferenceConfig, InferenceEngine, init_inference
    from .offload import Offload
    from .parallel import fsdp, tensor
    from .pipeline.layers import LayerSpec, PipelineModule, TiedLayerSpec
    from .pipeline.split import split
    from .sequence import SequenceRanks, ring_attention, sequence_parallel
    from .sharded.adam import ShardedOnebitAdam
    from .sharded.exchange import NotFiniteError
    from .sharded.lamb import ShardedOnebitLamb
    from .sharded.zero_one_adam import ShardedZeroOneAdam
else:
    _MODULES = {
        "data": ".data",
        "data_efficiency": ".data_efficiency",
        "fsdp": ".parallel.fsdp",
        "grid": ".grid",
        "tensor": ".parallel.tensor",
    }
    _MODULES |= {  # by DeepSpeed's names
        name: f".{name}"
        for name in (
            "accelerator",
            "checkpointing",
            "comm",
            "compression",
            "elasticity",
            "moe",
            "ops",
            "pipe",
            "runtime",
            "utils",
            "zero",
        )
    }
    _HOMES = {
        "CheckpointError": "..checkpoint.files",
        "Checkpoints": ".checkpoint.files",
        "Config": ".config.whole",
        "DeepSpeedEngine": ".deepspeed.engine",
        "Engine": ".engine",
        "InferenceConfig": ".inference",
        "ContinuousBatch": ".inference",
        "InferenceEngine": ".inference",
        "LayerSpec": ".pipeline.layers",
        "NotFiniteError": ".sharded.exchange",
        "Offload": ".offload.optimizer",
        "PipelineModule": ".pipeline.layers",
        "SequenceRanks": ".sequence",
        "ShardedOnebitAdam": ".sharded.adam",
        "ShardedOnebitLamb": ".sharded.lamb",
        "ShardedZeroOneAdam": ".sharded.zero_one_adam",
        "TiedLayerSpec": ".pipeline.layers",
        "add_config_arguments": ".deepspeed.initializing",
        "export_compressed": ".compression",
        "export_pretrained": ".compression",
        "export_weights": ".checkpoint.exporting",
        "get_accelerator": ".deepspeed.accelerator",
        "import_compressed": ".compression",
        "import_weights": ".checkpoint.importing",
        "init_compression": ".compression",
        "init_distributed": ".deepspeed.comm",
        "init_inference": ".inference",
        "initialize": ".deepspeed.initializing",
        "log_dist": ".deepspeed.utils",
        "logger": ".deepspeed.utils",
        "materialize": ".checkpoint.materialize",
        "read_config": ".config.whole",
        "redundancy_clean": ".compression",
        "read_checkpoint_weights": ".checkpoint.whole",
        "ring_attention": ".sequence",
        "sequence_parallel": ".sequence",
        "split": ".pipeline.split",
        "stand_in": ".deepspeed.stand_in",
        "tp_model_init": ".deepspeed.initializing",
    }

    def __getattr__(name: str):
        """Import on first use: reading a configuration must not wait seconds for FSDP2 and pipelining."""
        if name in _MODULES:
            return import_module(_MODULES[name], __name__)
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        from .deepspeed.names import MODULE, why_not

        why = None if name.startswith("__") else why_not(name, MODULE)
        if why is not None:
            raise AttributeError(f"DeepSpeed's {name} is not here: {why}")
        spelling = {known.lower(): known for known in import_module("..", __name__).__all__}.get(name.lower())
        hint = f"; did you mean onebit.{spelling}?" if spelling else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
