"""LongRoPE, of Phi-3: a row of more tokens than the first training had turns its queries and keys by other angles.

transformers takes the angles of the longest row for all rows of a pass. `RopeByRow` takes each row's, as if it were
alone. A row that grows beyond the border has keys of the other angles, on which those of later layers depend: they are
computed anew from all its tokens, as transformers does for a lone Phi-3. `engine.py` and `batch.py` see to that.

Shape legend: B rows, T new tokens of a row, d features of a head.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class RopeByRow(nn.Module):
    """The angles of each row by its own last position.

    Args:
        rope: The model's module. Copied: it writes to its buffers in every pass.
        border: The most tokens of a row with the angles of short ones.
    """

    def __init__(self, rope: nn.Module, border: int):
        super().__init__()
        self.rope, self.border = copy.deepcopy(rope), border

    def forward(self, x: Tensor, position_ids: Tensor, *args: object, **named: object) -> tuple[Tensor, ...]:
        """Cosines and sines [B, T, d] of positions [B, T], in the dtype of x."""
        beyond = nn.functional.pad(position_ids, (0, 1), value=self.border)  # the module looks at the last position
        short = self.rope(x, position_ids.clamp(max=self.border - 1), *args, **named)
        long = self.rope(x, beyond, *args, **named)
        is_long_B11 = (position_ids.amax(1) >= self.border)[:, None, None]
        return tuple(torch.where(is_long_B11, far[:, :-1], near) for near, far in zip(short, long, strict=True))


def border_of(model: nn.Module) -> int | None:
    """The most tokens of a row with LongRoPE's angles of short rows; None if a model's angles never change."""
    ropes = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    of_kinds = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    found = [rope["original_max_position_embeddings"] for rope in of_kinds if rope.get("rope_type") == "longrope"]
    return min(found, default=None)


def turn_by_row(model: nn.Module) -> None:
    """Put a `RopeByRow` in the place of each module of LongRoPE."""
    if (border := border_of(model)) is None:
        return
    for parent in [module for module in model.modules() if not isinstance(module, RopeByRow)]:
        for name, module in parent.named_children():
            if "longrope" in str(getattr(module, "rope_type", "")):  # of one kind of layers, or a dict of several
                setattr(parent, name, RopeByRow(module, border))
