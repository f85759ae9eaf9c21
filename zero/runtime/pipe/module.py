"""DeepSpeed's `deepspeed.runtime.pipe.module`."""

from ...pipeline.layers import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
