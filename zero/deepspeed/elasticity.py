"""DeepSpeed's `deepspeed.elasticity`, which its releases from 0.19.8 on do not have. See `config/elasticity.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..config.elasticity import Elasticity
from ..config.reader import Reading, read_block

__all__ = ["compute_elastic_config", "elasticity_enabled"]


def elasticity_enabled(ds_config: Mapping[str, object]) -> bool:
    """Whether a configuration's block "elasticity" is there and enabled."""
    block = ds_config.get("elasticity")
    return isinstance(block, Mapping) and bool(block.get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, object],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The batch that `initialize` chooses for a configuration, for the script that starts the ranks. No communication.

    Args:
        ds_config: The configuration.
        target_deepspeed_version: Not used.
        world_size: Number of data-parallel ranks. Default 0: not known yet. The batch of a number that does not divide
            the one returned without it is another.
        return_microbatch: Whether world_size is WORLD_SIZE of the environment, if it is not given. Default False.

    Returns:
        The samples of a step, the numbers of ranks that divide them and, with world_size, those of a micro-batch.

    Raises:
        ValueError: The block is not there or not enabled, a key of it is unknown or out of range, this number of ranks
            cannot divide the batch, or a micro-batch is asked for without it.
        TypeError: A value has the wrong type.
    """
    if not elasticity_enabled(ds_config):
        raise ValueError('expected a configuration with "elasticity": {"enabled": true, ...}')
    if return_microbatch and world_size == 0:
        world_size = int(os.environ.get("WORLD_SIZE", "0"))
        if world_size == 0:
            raise ValueError("a micro-batch depends on the number of ranks: pass world_size, or set WORLD_SIZE")
    if world_size < 0:
        raise ValueError(f"expected world_size of at least 0, got {world_size}")
    block = read_block(Elasticity, ds_config["elasticity"], "elasticity", Reading("config", {}))
    if world_size > 0:
        train, micro = block.batch_sizes(world_size)
        valid = block.choose()[1]
        return train, list(valid) if world_size in valid else [world_size], micro
    train, valid = block.choose()
    return train, list(valid)
