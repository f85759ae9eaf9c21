"""DeepSpeed's `deepspeed.checkpointing`: activations that are computed again in the backward pass, by torch."""

from __future__ import annotations

from collections.abc import Callable

import torch.utils.checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "reset"]


def checkpoint(function: Callable[..., object], *args: object) -> object:
    """function(*args), whose activations are not kept: torch.utils.checkpoint, non-reentrant."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


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
    """Nothing is to be configured. Raises ValueError where the call asks for activations elsewhere than where they are.

    num_checkpoints, synchronize and profile have no effect; nor has what a configuration says of activations, of which
    `read_config` warns.
    """
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    if wanted := [name for name, value in asked.items() if value]:
        raise ValueError(
            f"{wanted[0]}=True is not here: activations are kept where they are computed, or computed again; leave it "
            "out"
        )


def is_configured() -> bool:
    """Always."""
    return True


def reset() -> None:
    """Nothing is kept between calls."""
