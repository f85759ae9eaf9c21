"""DeepSpeed's `deepspeed.moe`, as far as scripts without experts import it: there are no experts."""

from __future__ import annotations

from typing import NoReturn

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    """Raises AttributeError, for the layer above all."""
    raise AttributeError(
        f"DeepSpeed's moe.{name} is not here: there are no experts; train a dense model, or with DeepSpeed"
    )
