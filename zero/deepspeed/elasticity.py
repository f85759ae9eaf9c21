"""DeepSpeed's `deepspeed.elasticity`, which its releases from 0.19.8 on do not have. See `config/elasticity.py`."""

from __future__ import annotations

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
        world_size: Number of data-parallel ranks. Default 0: not known yet.
        return_microbatch: Not used: the micro-batch is returned if world_size is given. Without it an error.

    Returns:
        The samples of a step, the numbers of ranks that divide them and, with world_size, those of a micro-batch.

    Raises:
        ValueError: The block is not there or not enabled, a key of it is unknown or out of range, or this number of
            ranks cannot divide the batch.
        TypeError: A value has the wrong type.
    """
    if not elasticity_enabled(ds_config):
        raise ValueError('expected a configuration with "elasticity": {"enabled": true, ...}')
    block = read_block(Elasticity, ds_config["elasticity"], "elasticity", Reading("config", {}))
    if world_size > 0:
        train, micro = block.batch_sizes(world_size)
        valid = block.choose()[1]
        return train, list(valid) if world_size in valid else [world_size], micro
    if return_microbatch:
        raise ValueError("a micro-batch depends on the number of ranks: pass world_size")
    train, valid = block.choose()
    return train, list(valid)
