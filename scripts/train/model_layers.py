"""The GPT of `model.py` as a list of layers, for runs with pipeline stages or tensor-parallel ranks.

The same blocks and the same kind of initial values, drawn layer by layer: a function of (size, seed) for any layout,
but not the values of `build_model`. The table of bytes is the first layer and, transposed, the last.
Shape legend: B sequences, T bytes of each, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onebit.zero import LayerSpec, PipelineModule, TiedLayerSpec
from onebit.zero.sequence.stages import Split
from train.model import SIZES, VOCABULARY, Block, ModelSize


class Positions(nn.Module):
    """x ← x + a vector for each place."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.split: Split | None = None

    def compute_pieces(self, split: Split) -> None:
        """From now on x is of a rank's piece of every text."""
        self.split = split

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.split is None:
            return x_BTD + self.weight[: x_BTD.shape[1]]
        return x_BTD + self.weight[self.split.positions(x_BTD.device)]


def _block(size: ModelSize) -> Block:
    block, residual_std = Block(size), 0.02 / (2 * size.layers) ** 0.5
    for name, p in block.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=residual_std if name in ("attention_out.weight", "mlp_out.weight") else 0.02)
    return block


def _table(size: ModelSize) -> nn.Embedding:
    table = nn.Embedding(VOCABULARY, size.width)
    nn.init.normal_(table.weight, std=0.02)
    return table


def _logits(table: nn.Embedding, x_BTD: Tensor) -> Tensor:
    return F.linear(x_BTD, table.weight)


def _loss(logits_BTV: object, targets_BT: object) -> Tensor:
    assert isinstance(logits_BTV, Tensor) and isinstance(targets_BT, Tensor)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def build_layers(size: str | ModelSize, seed: int, **options: object) -> PipelineModule:
    """options: of `PipelineModule`."""
    shape = size if isinstance(size, ModelSize) else SIZES[size]
    layers = [
        TiedLayerSpec("bytes", _table, shape),
        LayerSpec(Positions, shape),
        *[LayerSpec(_block, shape)] * shape.layers,
        LayerSpec(nn.LayerNorm, shape.width, bias=False),
        TiedLayerSpec("bytes", _table, shape, forward_fn=_logits),
    ]
    return PipelineModule(layers, loss_fn=_loss, base_seed=seed, **options)  # type: ignore[arg-type]


def as_gpt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of `build_layers` under the names of `model.py`; others as they are."""
    if "tied.bytes.weight" not in weights:
        return weights
    last = max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    named = {"tied.bytes.weight": "bytes.weight", "layers.1.weight": "positions.weight"}
    named |= {f"layers.{last}.weight": "norm.weight"}
    for name in weights.keys() - named.keys():
        _, place, rest = name.split(".", 2)
        named[name] = f"blocks.{int(place) - 2}.{rest}"
    return {named[name]: x for name, x in weights.items()}


def count_parameters(model: PipelineModule) -> int:
    """Of the whole model, without building it."""
    with torch.device("meta"):
        (whole,) = model.stages([range(len(model))])
    return sum(p.numel() for p in whole.parameters())
