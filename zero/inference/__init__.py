"""Inference: the model just trained, split over ranks, compiled and in int8, in one call.

    engine = onebit.zero.init_inference(model, dtype="int8", kernel_inject=True)
    texts = engine.generate([prompt], max_new_tokens=64)

Start at `initializing.py`. `engine.py` decodes, and `requests.py` reads its prompts and options; `batch.py` answers
requests that come and go. `split.py` divides the rows of layers among ranks, and `pipeline.py` the layers; `layers.py`
and `experts.py` hold the parts, in floats or packed, and `calibration.py` rounds them by samples; `cache.py` keeps keys
and values; `plan.py` estimates what a token costs.
"""

from .batch import ContinuousBatch
from .config import InferenceConfig
from .engine import InferenceEngine
from .initializing import init_inference

__all__ = ["ContinuousBatch", "InferenceConfig", "InferenceEngine", "init_inference"]
