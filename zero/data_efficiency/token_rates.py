"""Learning rates by consumed tokens: with short sequences or dropped tokens, a step consumes less of the training.

    scheduler = TokenLR(optimizer, total_tokens=10**9, warmup_tokens=10**7)
    ...; optimizer.step(); scheduler.step(tokens=batch.numel())

Source: arXiv 2212.03597, section 3.3: rates decay by consumed tokens, so that all runs end at the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


class TokenLR(LRScheduler):
    """A learning rate schedule that counts consumed tokens instead of steps: linear warmup, then decay.

    Call `step(tokens=n)` after each optimizer step, with the same number on all ranks. Source: arXiv 2212.03597,
    section 3.3.

    Args:
        optimizer: The optimizer whose groups' rates are set; their current rates are the highest.
        total_tokens: The tokens after which the decay ends.
        warmup_tokens: The tokens over which rates rise linearly, 0 by default.
        min_fraction: The fraction of each rate that the decay ends at, 0 by default.
        decay: "cosine" (default), "linear" or "constant".

    Attributes:
        tokens: The tokens consumed so far.

    Raises:
        ValueError: warmup_tokens is not below total_tokens, or the decay is unknown.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_tokens: int,
        warmup_tokens: int = 0,
        *,
        min_fraction: float = 0.0,
        decay: str = "cosine",
    ):
        if not 0 <= warmup_tokens < total_tokens:
            raise ValueError(f"expected 0 <= warmup_tokens < total_tokens, got {warmup_tokens} and {total_tokens}")
        if decay not in ("cosine", "linear", "constant"):
            raise ValueError(f'decay must be "cosine", "linear" or "constant", got {decay!r}')
        self.total_tokens, self.warmup_tokens, self.tokens = total_tokens, warmup_tokens, 0
        self._min_fraction, self._decay = min_fraction, decay
        super().__init__(optimizer)

    def fraction(self) -> float:
        """The current fraction of the groups' rates."""
        if self.tokens < self.warmup_tokens:
            return max(1, self.tokens) / self.warmup_tokens
        done = min(1.0, (self.tokens - self.warmup_tokens) / (self.total_tokens - self.warmup_tokens))
        if self._decay == "constant":
            return 1.0
        left = 1.0 - done if self._decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self._min_fraction + (1.0 - self._min_fraction) * left

    def get_lr(self) -> list[float | Tensor]:
        """The current rate of each group."""
        return [float(lr) * self.fraction() for lr in self.base_lrs]

    def step(self, epoch: int | None = None, *, tokens: int = 0) -> None:
        """Set the rates after an optimizer step that consumed `tokens` tokens, over all ranks."""
        self.tokens += tokens
        super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Tokens consumed and the groups' rates, as plain numbers."""
        base_lrs = [float(lr) for lr in self.base_lrs]
        return {"tokens": self.tokens, "last_epoch": self.last_epoch, "base_lrs": base_lrs}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` gave, and set the groups' rates.

        Raises:
            ValueError: The optimizer has another number of groups.
        """
        if len(state_dict["base_lrs"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"cannot load this scheduler state: it has {len(state_dict['base_lrs'])} groups, the optimizer "
                f"{len(self.optimizer.param_groups)}"
            )
        self.tokens, self.last_epoch = state_dict["tokens"], state_dict["last_epoch"]
        self.base_lrs = list(state_dict["base_lrs"])
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
