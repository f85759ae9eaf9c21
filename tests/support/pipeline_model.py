"""A small GPT as a list of layers, and the same as one module: for test_pipeline.py and what its ranks run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

from onebit.zero import LayerSpec, PipelineModule, TiedLayerSpec
from onebit.zero.parallel.tensor import join_sequence, split_sequence

VOCABULARY, WIDTH, HEADS, CONTEXT, BLOCKS = 24, 16, 2, 8, 2

# Between the first block and the last norm each of the tensor ranks holds its part of the sequence.
PLAN = {
    "layers.2": split_sequence(),
    "layers.*.attention_norm": SequenceParallel(use_local_output=True),
    "layers.*.qkv": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.attention_out": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.mlp_norm": SequenceParallel(use_local_output=True),
    "layers.*.mlp_in": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.mlp_out": RowwiseParallel(output_layouts=Shard(1)),
    f"layers.{2 + BLOCKS}": join_sequence(),
}


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    """qkv is laid out by heads: a cut of its rows is a cut by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp_in, self.mlp_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def _logits(table: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, table.weight)  # type: ignore[arg-type]


def layers(tied: bool = True) -> list:
    """Six of them, of which the first and the last share their weight, or do not."""
    if tied:
        ends = [
            TiedLayerSpec("table", nn.Embedding, VOCABULARY, WIDTH),
            TiedLayerSpec("table", nn.Embedding, VOCABULARY, WIDTH, forward_fn=_logits),
        ]
    else:
        ends = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)]
    return [ends[0], LayerSpec(Positions), *[LayerSpec(Block)] * BLOCKS, LayerSpec(nn.LayerNorm, WIDTH), ends[1]]


class Net(nn.Module):
    """Much the same as somebody writes it who has not thought of pipelines."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), Positions()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.table(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def model(tied: bool = True, **options: object) -> PipelineModule:
    return PipelineModule(layers(tied), loss_fn=loss_of, **options)  # type: ignore[arg-type]


def micro_batches(share: int, shares: int, count: int, rows: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Of a text in which each letter follows from the two before it; the same global batches for any number of shares.

    A step has `count` micro-batches of `rows` rows; this share's rows of each of them.
    """
    step = 0
    while True:
        for k in range(count):
            generator = torch.Generator().manual_seed(1000 * step + k)
            text = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
            for t in range(2, CONTEXT + 1):
                text[:, t] = (text[:, t - 1] + text[:, t - 2] // 2 + 1) % VOCABULARY
            mine = text[share * rows // shares : (share + 1) * rows // shares]
            yield mine[:, :-1], mine[:, 1:]
        step += 1
