"""A model that is one hidden matrix, and says as transformers' do that nothing makes its outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Headless(nn.Module):
    def __init__(self, matrix: Tensor | None = None):
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1.0, 1.0, 512).view(16, 32) if matrix is None else matrix)

    def get_output_embeddings(self) -> None:
        return None
