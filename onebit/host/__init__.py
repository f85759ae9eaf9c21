"""Adam on the host: one pass over memory for a flat chunk of parameters, in C++ if the library is built.

    v = empty_variance(n)                                       # 8 bits; or torch.zeros(n)
    adam_(master, grad, m, v, lr=1e-3, step=1, out=parameter)   # parameter: the copy for the device

`adam.py` has the public functions, `reference.py` the specification, `native.py` the same floats in C++
(csrc/host_adam.cpp), `variance.py` a variance in 8 bits. `onebit.HostAdam` is the optimizer on top.
"""

from .adam import adam_, direction_
from .variance import BLOCK, EightBitVariance, empty_variance, from_eight_bits, to_eight_bits

__all__ = ["BLOCK", "EightBitVariance", "adam_", "direction_", "empty_variance", "from_eight_bits", "to_eight_bits"]
