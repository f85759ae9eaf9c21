"""DeepSpeed's `deepspeed.runtime`: seeds, memory usage, the names that `engine.optimizer_name()` returns."""

from __future__ import annotations

import importlib
import random
import resource

import torch

from .accelerator import get_accelerator
from .utils import log_dist

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    importlib.import_module("numpy").random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """With force, log on rank 0 the memory of tensors on its device, and the peaks of device and process."""
    if force:
        device, host_kib = get_accelerator(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        allocated, most = device.memory_allocated() / 2**20, device.max_memory_allocated() / 2**20
        line = (
            f"{message}: device {allocated:.0f} MiB, at most {most:.0f} MiB; process at most {host_kib / 2**10:.0f} MiB"
        )
        log_dist(line, ranks=[0])
