"""DeepSpeed's `deepspeed.runtime.pipe`."""

from . import module, topology
from .module import PipelineModule

__all__ = ["PipelineModule", "module", "topology"]
