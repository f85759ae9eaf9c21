"""A small GPT over bytes: pre-norm blocks, learned positions, the output projection tied to the embedding.

Plain torch, in the sizes that the experiments here need. `build_model("tiny", seed=0)` gives the same bits everywhere.
Shape legend: B sequences, T bytes of each, D features, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class ModelSize:
    """The shape of a GPT; its parameters are about 12·layers·width²."""

    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": ModelSize(layers=2, width=64, heads=2, context=64),  # 0.12 M
    "small": ModelSize(layers=5, width=128, heads=4, context=128),  # 1.03 M
    "25m": ModelSize(layers=8, width=512, heads=8, context=256),  # 25.4 M
    "25m-short": ModelSize(layers=8, width=512, heads=8, context=128),  # 25.4 M; half the work per sequence
}


class Block(nn.Module):
    """x ← x + attention(norm(x)), then x ← x + mlp(norm(x)).

    The rows of qkv are q, k and v of the first head, then of the next: ranks that cut them compute whole heads each
    (`layouts.py`). There are as many heads as come out of it. core_attention: of queries, keys and values
    [B, H, T, d]; `onebit.zero.sparse_attention` puts another in its place.
    """

    is_causal = True

    def __init__(self, size: ModelSize):
        super().__init__()
        D = size.width
        self.heads, self.head_width = size.heads, D // size.heads
        self.core_attention: Callable[[Tensor, Tensor, Tensor], Tensor] = partial(
            F.scaled_dot_product_attention, is_causal=self.is_causal
        )
        self.attention_norm = nn.LayerNorm(D, bias=False)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.attention_out = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.LayerNorm(D, bias=False)
        self.mlp_in = nn.Linear(D, 4 * D, bias=False)
        self.mlp_out = nn.Linear(4 * D, D, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD))))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(x_BTD)
        q, k, v = qkv.unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        mixed_BHTd = self.core_attention(q, k, v)
        return self.attention_out(mixed_BHTd.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.context = size.context
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)

    def forward(self, text_BT: Tensor) -> Tensor:
        """Logits [B, T, 256] for the byte after each byte; text: int64, T ≤ context."""
        x_BTD = self.bytes(text_BT) + self.positions.weight[: text_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.bytes.weight)

    def get_output_embeddings(self) -> nn.Module:
        """The module whose matrix makes the outputs; transformers' word for it."""
        return self.bytes

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of windows [B, T+1], int64: T bytes read, the T after them predicted."""
        return next_byte_loss(self(windows[:, :-1]), windows)


def next_byte_loss(logits_BTV: Tensor, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in float32, of the logits for windows[:, :-1] against the bytes that came next."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), windows[:, 1:].flatten())


def build_model(size: str | ModelSize, seed: int) -> GPT:
    """A model with GPT-2's initialisation: a function of (size, seed) that leaves torch's global generator alone."""
    shape = size if isinstance(size, ModelSize) else SIZES[size]
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / (2 * shape.layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=residual_std if is_residual else 0.02, generator=generator)
        else:
            nn.init.ones_(parameter)
    return model


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups for an optimizer: the matrices decay, the norms' scales do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
