"""DeepSpeed's `deepspeed.ops`: its fused optimizers by name, as the dense ones that are here."""

from . import adam, lamb, lion

__all__ = ["adam", "lamb", "lion"]
