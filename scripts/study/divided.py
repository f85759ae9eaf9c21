"""Tasks whose ranks have different data, each with its control: the same rows in every step, dealt to the ranks evenly.

A dense method sees the same batch in both, so what a method loses in the one and not in the other is the price of
ranks that differ. Four ranks, or a multiple: rank r has part r mod 4.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train.corpus import is_validation
from train.model import SIZES
from train.run import Windows

from study.tasks import Batch, ByteLM, Digits, corpus, generator_of, initialised, mean_loss

PARTS = 4


class _Divided:
    """is_mixed: every rank has a quarter of its rows from each part."""

    is_mixed = False

    def rows(self, part: int, seed: int, step: int, block: int, size: int) -> Batch:
        """`size` rows of this part of the data; block: rank // 4."""
        raise NotImplementedError

    def batch(self, seed: int, step: int, rank: int, size: int) -> Batch:
        """As `Task.batch`. Raises ValueError where rows cannot be dealt evenly."""
        if size % PARTS:
            raise ValueError(f"{PARTS} parts of the data in equal shares: batch size {size} is no multiple of {PARTS}")
        block, part = divmod(rank, PARTS)
        if not self.is_mixed:
            return self.rows(part, seed, step, block, size)
        share = size // PARTS
        mine = slice(part * share, (part + 1) * share)
        quarters = [[x[mine] for x in self.rows(p, seed, step, block, size)] for p in range(PARTS)]
        return tuple(torch.cat(column) for column in zip(*quarters, strict=True))


class UnlikeBytes(_Divided, ByteLM):
    """byte-lm, a rank each of the four largest directories: the modules at the top, encodings, idlelib, distutils."""

    name = "byte-lm-unlike"

    def __init__(self) -> None:
        super().__init__()
        self._directories = [
            Windows(replace(corpus(), train=text), SIZES[self.size].context) for text in largest_directories(PARTS)
        ]

    def rows(self, part: int, seed: int, step: int, block: int, size: int) -> Batch:
        return (self._directories[part].training(size, seed, step, part + PARTS * block, 0),)


class MixedBytes(UnlikeBytes):
    """Its control."""

    name, is_mixed = "byte-lm-mixed", True


def largest_directories(count: int) -> list[bytes]:
    """The training text of each, largest first; the modules at the top are one."""
    texts: dict[str, list[bytes]] = defaultdict(list)
    start, text = 0, corpus().train
    for file in corpus().files:
        if not is_validation(file.path):
            texts[file.path.rpartition("/")[0].partition("/")[0]].append(text[start : start + file.size])
            start += file.size
    return sorted((b"".join(files) for files in texts.values()), key=len, reverse=True)[:count]


class UnlikeDigits(_Divided, Digits):
    """digits, each class divided over the parts by a draw from Dirichlet(.3): most of it lies in one or two."""

    name = "digits-unlike"

    def __init__(self) -> None:
        super().__init__()
        _, labels_N = self._train
        shares_10P = dirichlet(0.3, 10, PARTS, generator_of("digits", "parts"))
        self._parts: list[Tensor] = []
        ends_10P = shares_10P.cumsum(1)
        places_N = torch.empty(len(labels_N))
        for digit in range(10):  # a digit's n-th row, as a share of its rows
            is_it_N = labels_N == digit
            places_N[is_it_N] = (torch.arange(int(is_it_N.sum())) + 0.5) / is_it_N.sum()
        part_N = (places_N[:, None] > ends_10P[labels_N]).sum(1).clamp_max(PARTS - 1)
        self._parts = [(part_N == part).nonzero().squeeze(1) for part in range(PARTS)]

    def rows(self, part: int, seed: int, step: int, block: int, size: int) -> Batch:
        mine = self._parts[part]
        picked = torch.randint(len(mine), (size,), generator=generator_of("rows", seed, step, part, block))
        return tuple(column[mine[picked]] for column in self._train)


class MixedDigits(UnlikeDigits):
    """Its control."""

    name, is_mixed = "digits-mixed", True


def dirichlet(alpha: float, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """float32 [rows, columns], rows that sum to 1; from the generator alone."""
    draws = torch._standard_gamma(torch.full((rows, columns), alpha), generator)
    return draws / draws.sum(1, keepdim=True)


class UnlikeSums(_Divided):
    """a + b modulo 97, by an MLP over two embeddings. 35 k parameters.

    A rank has the pairs whose sum is its part modulo 4. All pairs are trained on, and validated: what counts is how far
    the loss has come. A batch is int64 [B, 2] and [B].
    """

    name, unit = "sums-unlike", "nats per sum"
    modulus, width = 97, 64

    def __init__(self) -> None:
        pairs_N2 = torch.cartesian_prod(torch.arange(self.modulus), torch.arange(self.modulus))
        sums_N = pairs_N2.sum(1) % self.modulus
        self._all = (pairs_N2, sums_N)
        self._parts = [tuple(column[sums_N % PARTS == part] for column in self._all) for part in range(PARTS)]

    def build(self, seed: int) -> nn.Module:
        return initialised(lambda: Adder(self.modulus, self.width), seed)

    def rows(self, part: int, seed: int, step: int, block: int, size: int) -> Batch:
        mine = self._parts[part]
        picked = torch.randint(len(mine[1]), (size,), generator=generator_of("sums", seed, step, part, block))
        return tuple(column[picked] for column in mine)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pairs_B2, sums_B = batch
        return F.cross_entropy(model(pairs_B2), sums_B)

    def evaluate(self, model: nn.Module) -> float:
        return mean_loss(self, model, self._all, rows=1024)


class MixedSums(UnlikeSums):
    """Its control."""

    name, is_mixed = "sums-mixed", True


class Adder(nn.Module):
    """Logits [B, M] of what two numbers below M, int64 [B, 2], add up to."""

    def __init__(self, modulus: int, width: int):
        super().__init__()
        self.numbers = nn.Embedding(modulus, width)
        self.layers = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, modulus))

    def forward(self, pairs_B2: Tensor) -> Tensor:
        return self.layers(self.numbers(pairs_B2).flatten(1))
