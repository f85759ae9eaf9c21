"""How ranks agree on something small: every rank sees what every rank says, and all draw the same conclusion.

Each function is called by all ranks and sends a few bytes. Used by `train.py` (stop together) and `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from onebit.comm import Transport
from onebit.replicas import gather_texts


def raise_together(
    link: Transport,
    problem: str | None,
    error: type[Exception],
    device: torch.device,
    hint: Callable[[], str] = lambda: "",
) -> None:
    """Raise on all ranks where any of them has a problem: the lowest such rank's text, followed by `hint()`."""
    problems = [text for text in gather_texts(link, problem or "", device) if text]
    if problems:
        raise error(problems[0] + hint())
