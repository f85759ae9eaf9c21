"""DeepSpeed's `deepspeed.pipe`: a model as a list of layers. The classes are those of `pipeline/layers.py`."""

from __future__ import annotations

from .pipeline.layers import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
