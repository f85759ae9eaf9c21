"""DeepSpeed's `deepspeed.checkpointing` over `zero/activations.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from ..activations import Keep, checkpoint, kept_by_default
from ..config.compat import load
from ..config.reader import Reading, read_block
from ..config.sections import ActivationCheckpointing
from ..config.whole import Config

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

non_reentrant_checkpoint = checkpoint

_BLOCK = "activation_checkpointing"


def configure(
    mpu_: object = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, object] | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set where `checkpoint` keeps inputs until the backward pass, in this process. All ranks of the mpu's group.

    `initialize` does so by itself if its configuration has the block. Arguments override the configuration.

    Args:
        mpu_: Has get_tensor_model_parallel_group() or get_model_parallel_group(), torch's process group of the ranks
            that compute on the same inputs. Without it nothing is divided, as in DeepSpeed.
        deepspeed_config: A JSON file, its content, or what `read_config` gives; its block "activation_checkpointing".
        partition_activations: Whether each of the group's ranks keeps a share of each input.
        contiguous_checkpointing: Without effect: torch's allocator places them.
        num_checkpoints: Without effect.
        checkpoint_in_cpu: Whether inputs wait in host memory.
        synchronize: Without effect.
        profile: Without effect.

    Raises:
        ValueError: The block has an unknown key.
    """
    settings = _settings_of(deepspeed_config)
    if partition_activations is not None:
        settings = replace(settings, partition_activations=partition_activations)
    if checkpoint_in_cpu is not None:
        settings = replace(settings, cpu_checkpointing=checkpoint_in_cpu)
    kept_by_default(
        Keep(
            _group_of(mpu_) if settings.partition_activations else None,
            "host" if settings.cpu_checkpointing else "device",
        )
    )


def _settings_of(given: object) -> ActivationCheckpointing:
    if isinstance(given, Config):
        return given.activation_checkpointing
    content = load(Path(given)) if isinstance(given, str | os.PathLike) else given
    reading = Reading(os.fspath(given) if isinstance(given, str | os.PathLike) else "deepspeed_config")
    block = content.get(_BLOCK) if isinstance(content, Mapping) else None
    return ActivationCheckpointing() if block is None else read_block(ActivationCheckpointing, block, _BLOCK, reading)


def _group_of(mpu: object) -> dist.ProcessGroup | None:
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            group: dist.ProcessGroup = getattr(mpu, name)()
            return group
    return None


def is_configured() -> bool:
    """Always True: without `configure`, inputs are kept where they are."""
    return True


def reset() -> None:
    """Does nothing: inputs are freed with their graph."""
