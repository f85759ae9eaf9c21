"""DeepSpeed's `deepspeed.ops`: its fused optimizers by name, as the dense ones that are here."""

from . import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
