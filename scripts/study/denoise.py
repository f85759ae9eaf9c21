"""The task denoise: noise is taken off pictures by a small vision transformer.

Shape legend: B pictures, P patches of a picture, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train.model import ModelSize

from study.tasks import Batch, BidirectionalBlock, generator_of, initialised, mean_loss, read_digits

SIDE, PATCH, NOISE = 16, 2, 0.5


class Denoise:
    """Pictures of four handwritten digits, 16×16, from the same with noise of deviation .5. 0.11 M parameters.

    The digits are scikit-learn's, 1200 to train on and 597 to test. A batch is the noisy pictures and the clean ones,
    in patches of 2×2: both float32 [B, 64, 4]. The best constant has a loss of .14.
    """

    name, unit = "denoise", "squared error per pixel"

    def __init__(self) -> None:
        pixels_N64, _ = read_digits()
        digits = pixels_N64[torch.randperm(len(pixels_N64), generator=generator_of("digits"))].view(-1, 8, 8)
        self._train, test = digits[:1200], digits[1200:]
        self._test = _pictures(test, 512, generator_of("denoise", "test"))

    def build(self, seed: int) -> nn.Module:
        size = ModelSize(layers=2, width=64, heads=2, context=(SIDE // PATCH) ** 2)
        return initialised(lambda: Denoiser(size), seed, size.layers)

    def batch(self, seed: int, step: int, rank: int, size: int) -> Batch:
        return _pictures(self._train, size, generator_of("denoise", seed, step, rank))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        noisy_BP4, clean_BP4 = batch
        return F.mse_loss(model(noisy_BP4), clean_BP4)

    def evaluate(self, model: nn.Module) -> float:
        return mean_loss(self, model, self._test)


class Denoiser(nn.Module):
    """Patches in, patches out, by blocks in which every patch sees every other."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, size.width, bias=False)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(BidirectionalBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, PATCH * PATCH, bias=False)

    def forward(self, noisy_BP4: Tensor) -> Tensor:
        x_BPD = self.patches(noisy_BP4) + self.positions.weight
        for block in self.blocks:
            x_BPD = block(x_BPD)
        return self.head(self.norm(x_BPD))


def _pictures(digits_N88: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Pictures of four digits each, with noise and without, in patches: two of float32 [size, P, 4]."""
    drawn = digits_N88[torch.randint(len(digits_N88), (size, 2, 2), generator=generator)]
    clean = drawn.permute(0, 1, 3, 2, 4).reshape(size, SIDE, SIDE)
    noisy = clean + NOISE * torch.randn(clean.shape, generator=generator)
    return tuple(x.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2) for x in (noisy, clean))
