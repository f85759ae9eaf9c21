"""DeepSpeed's `deepspeed.checkpointing`: activations are recomputed in the backward pass, by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.utils.checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


def checkpoint(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call function(*args, **kwargs) without keeping activations: torch.utils.checkpoint, non-reentrant.

    Args:
        function: A part of the model.
        *args: Its inputs.
        **kwargs: Its named inputs.

    Returns:
        Its outputs.
    """
    return torch.utils.checkpoint.checkpoint(partial(function, **kwargs), *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: object = None,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Check a call of DeepSpeed's; there is nothing to configure.

    `read_config` warns about activation settings in a configuration.

    Args:
        mpu_: Without effect.
        deepspeed_config: Without effect.
        partition_activations: Must be false or None: activations are not divided over ranks.
        contiguous_checkpointing: Must be false or None.
        num_checkpoints: Without effect.
        checkpoint_in_cpu: Must be false or None: activations are not moved to host memory.
        synchronize: Without effect.
        profile: Without effect.

    Raises:
        ValueError: The call asks to keep activations in another place.
    """
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    if wanted := [name for name, value in asked.items() if value]:
        raise ValueError(
            f"{wanted[0]}=True is not supported: activations are kept on the device that computed them, or computed "
            "again; leave it out"
        )


def is_configured() -> bool:
    """Always True."""
    return True


def reset() -> None:
    """Does nothing: there is no state between calls."""
