"""Tasks of study.py: a model, its batches and its loss. Nothing is downloaded, nothing rests on a global generator.

Three kinds of gradient: "byte-lm" reaches every parameter in every step, and so do "demo-lm", the demo's own, and
"large-lm", for a GPU; "masked-lm" never reaches three quarters of its position table; "digits" has
inputs that are always zero, and labels of which a tenth are wrong. `denoise.py` and `divided.py` have further ones.
Shape legend: B rows of a batch, T bytes of each, D features, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train.corpus import Corpus, read_corpus
from train.model import SIZES, VOCABULARY, Block, ModelSize, build_model
from train.run import Windows

Batch = tuple[Tensor, ...]  # tensors of equally many rows


class Task(Protocol):
    """What an optimizer is given to do. All methods are functions of their arguments: ranks may be threads."""

    name: str
    unit: str  # of the loss

    def build(self, seed: int) -> nn.Module:
        """The initial model on the CPU."""

    def batch(self, seed: int, step: int, rank: int, size: int) -> Batch:
        """`size` rows of training data, each with the same number of targets: the mean of ranks' means is the mean."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch's targets, a scalar."""

    def evaluate(self, model: nn.Module) -> float:
        """The mean loss over a fixed set of held-out data."""


def joined(task: Task, seed: int, step: int, ranks: Iterable[int], size: int) -> Batch:
    """The rows of several ranks."""
    batches = [task.batch(seed, step, rank, size) for rank in ranks]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


class ByteLM:
    """The next byte of Python source, by the tiny GPT of train/model.py. 0.12 M parameters, context 64."""

    name, unit = "byte-lm", "nats per byte"
    size, validated = "tiny", 1024

    def __init__(self) -> None:
        self._windows = Windows(corpus(), SIZES[self.size].context)
        self._validation = (self._windows.validation(0, 1, windows=self.validated),)

    def build(self, seed: int) -> nn.Module:
        return build_model(self.size, seed)

    def batch(self, seed: int, step: int, rank: int, size: int) -> Batch:
        return (self._windows.training(size, seed, step, rank, 0),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model.loss(*batch)

    def evaluate(self, model: nn.Module) -> float:
        return mean_loss(self, model, self._validation)


class DemoLM(ByteLM):
    """The same with the model, the batches and the validation text of the demo. 1.03 M parameters, context 128."""

    name = "demo-lm"
    size, validated = "small", 64


class TenMillionLM(ByteLM):
    """The same by a GPT of 10.8 M parameters, context 128."""

    name = "lm-10m"
    size, validated = "10m", 64


class LargeLM(ByteLM):
    """The same by a GPT of 128.0 M parameters, context 512: for a GPU."""

    name = "large-lm"
    size, validated = "125m", 512


class MaskedLM:
    """Hidden bytes of Python source, from both sides, by a small BERT. 0.15 M parameters.

    Windows are 128 bytes; the table of positions has 512 rows, as if they were to grow later: 384 never get a gradient.
    A batch is what is read and what was there, both int64 [B, 128]: equal but where MASK is read.
    """

    name, unit = "masked-lm", "nats per masked byte"
    length, positions, hidden_per_row = 128, 512, 19  # 15 %

    def __init__(self) -> None:
        self._windows = Windows(corpus(), context=self.length - 1)
        text_BT = self._windows.validation(0, 1, windows=512)
        self._validation = (self._hide(text_BT, generator_of("validation")), text_BT)

    def build(self, seed: int) -> nn.Module:
        size = ModelSize(layers=2, width=64, heads=2, context=self.positions)
        return initialised(lambda: Encoder(size), seed, size.layers)

    def batch(self, seed: int, step: int, rank: int, size: int) -> Batch:
        text_BT = self._windows.training(size, seed, step, rank, 0)
        return self._hide(text_BT, generator_of("mask", seed, step, rank)), text_BT

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model.loss(*batch)

    def evaluate(self, model: nn.Module) -> float:
        return mean_loss(self, model, self._validation)

    def _hide(self, text_BT: Tensor, generator: torch.Generator) -> Tensor:
        places = torch.rand(text_BT.shape, generator=generator).argsort(dim=1)[:, : self.hidden_per_row]
        return text_BT.scatter(1, places, MASK)


class Digits:
    """Handwritten digits of 8×8 pixels (scikit-learn's own), by an MLP. 27 k parameters.

    1200 to train on, of which a tenth have a random label, so that the loss does not fall to zero; 597 to test, as they
    are. Some pixels are always 0. A batch is float32 [B, 64] in [0, 1], and int64 [B].
    """

    name, unit = "digits", "nats per digit"
    training = 1200

    def __init__(self) -> None:
        pixels_N64, labels_N = read_digits()
        generator = generator_of("digits")
        order = torch.randperm(len(labels_N), generator=generator)
        pixels_N64, labels_N = pixels_N64[order], labels_N[order]
        self._test = (pixels_N64[self.training :], labels_N[self.training :].clone())
        wrong = self.training // 10
        labels_N[:wrong] = torch.randint(10, (wrong,), generator=generator)
        self._train = (pixels_N64[: self.training], labels_N[: self.training])

    def build(self, seed: int) -> nn.Module:
        def mlp() -> nn.Module:
            return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

        return initialised(mlp, seed)

    def batch(self, seed: int, step: int, rank: int, size: int) -> Batch:
        rows = torch.randint(self.training, (size,), generator=generator_of("rows", seed, step, rank))
        return tuple(part[rows] for part in self._train)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels_B64, labels_B = batch
        return F.cross_entropy(model(pixels_B64), labels_B)

    def evaluate(self, model: nn.Module) -> float:
        return mean_loss(self, model, self._test)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of the test digits that are told right."""
        pixels_B64, labels_B = self._test
        return (model(pixels_B64).argmax(dim=1) == labels_B).float().mean().item()


# ---------------------------------------------------------------- the encoder

MASK = VOCABULARY  # the token after the bytes


class BidirectionalBlock(Block):
    """A Block in which every place sees every other."""

    is_causal = False


class Encoder(nn.Module):
    """Says which bytes were hidden. The output projection is tied to the embedding, as in train/model.py."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY + 1, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(BidirectionalBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)

    def forward(self, read_BT: Tensor) -> Tensor:
        """Features [B, T, D] of what is read, int64, T ≤ context."""
        x_BTD = self.bytes(read_BT) + self.positions.weight[: read_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)

    def loss(self, read_BT: Tensor, text_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per hidden byte."""
        is_hidden_BT = read_BT == MASK
        return F.cross_entropy(F.linear(self(read_BT)[is_hidden_BT], self.bytes.weight), text_BT[is_hidden_BT])


# ---------------------------------------------------------------- what the tasks share


@cache
def corpus() -> Corpus:
    """The text of both language models, read once per process."""
    return read_corpus()


def read_digits() -> tuple[Tensor, Tensor]:
    """float32 [1797, 64] in [0, 1] and int64 [1797], in scikit-learn's order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the task digits needs scikit-learn: pip install onebit[study]") from error
    digits = load_digits()
    return torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()


def generator_of(*key: object) -> torch.Generator:
    """A generator seeded by all of the key, as for train.py's windows."""
    digest = sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initialised(make: Callable[[], nn.Module], seed: int, layers: int = 0) -> nn.Module:
    """make() with initial values that depend on the seed alone; torch's global generator is left alone.

    layers > 0: a transformer, initialised as `build_model` does. 0: matrices by He's rule, biases zero.
    """
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            std = 0.02 / (2 * layers if residual else 1) ** 0.5 if layers else (2 / parameter.shape[1]) ** 0.5
            nn.init.normal_(parameter, std=std, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return model


@torch.no_grad()
def mean_loss(task: Task, model: nn.Module, batch: Batch, rows: int = 64) -> float:
    """The loss over a large batch, where the model is, in parts of so many rows that stay in the cache."""
    device = next(model.parameters()).device
    parts = list(zip(*(tensor.to(device).split(rows) for tensor in batch), strict=True))
    return sum(float(task.loss(model, part)) * len(part[0]) for part in parts) / len(batch[0])
