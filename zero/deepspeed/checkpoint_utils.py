"""DeepSpeed's `deepspeed.checkpoint.utils`, as far as other libraries need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def clone_tensors_for_torch_save(item: Any, device: torch.device | str | None = None) -> Any:
    """Copy all tensors of a tree, so that none is saved with a larger one whose memory it shares.

    Args:
        item: Tensors in dicts, lists and tuples.
        device: Device of the copies. Default None: that of each.
    """
    return tree_map_only(Tensor, lambda x: x.detach().to(device or x.device, copy=True), item)
