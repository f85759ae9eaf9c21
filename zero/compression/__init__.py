"""Compression: quantization and pruning during training, for models that are smaller on disk and in memory.

Start at `composer.py`. The parts are plain functions and modules, which work without an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "CompressionScheduler", "Distillation", "Sizes", "export_compressed", "export_pretrained", "hidden_loss",
    "import_compressed", "init_compression", "logits_loss", "redundancy_clean", "sizes",
]  # fmt: skip

if TYPE_CHECKING:
    from .composer import init_compression, redundancy_clean
    from .distillation import Distillation, hidden_loss, logits_loss
    from .packing import Sizes, export_compressed, import_compressed, sizes
    from .pretrained import export_pretrained
    from .scheduler import CompressionScheduler
else:
    _HOMES = {
        "composer": ("init_compression", "redundancy_clean"),
        "distillation": ("Distillation", "hidden_loss", "logits_loss"),
        "packing": ("Sizes", "export_compressed", "import_compressed", "sizes"),
        "pretrained": ("export_pretrained",),
        "scheduler": ("CompressionScheduler",),
    }

    def __getattr__(name: str):
        """Import on first use: reading a configuration needs only `config.py`."""
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f".{home}", __name__), name)
            if name == home or name in ("compress", "config"):
                return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
