"""Split sequences in the stages of a pipeline: a batch is cut before the first stage, and all layers get its pieces.

The ranks of a sequence are at the same stage of different pipelines, which run the same schedule. So blocks of keys and
values travel between them in the same order, and each pipeline's activations are its pieces'. Models that are one
module cut their own batches instead (`models.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...comm import Codec
from ..sparse_attention.config import SparsityConfig
from ..sparse_attention.layouts import build_layout
from .huggingface import find_mixing, shifted_labels
from .ranks import SequenceRanks, check_same
from .ring import ring_attention

Batch = tuple[object, object]


@dataclass(frozen=True)
class TargetPiece:
    """The piece of a target.

    Attributes:
        target: [b, s, ...], of this rank's tokens.
        tokens: What the sum of its tokens' losses is divided by, 1/W of all tokens that count, so that the mean over
            ranks is that of the whole batch.
    """

    target: Tensor
    tokens: Tensor | float


class Split:
    """How the sequences that pass through a rank's stages are split.

    Args:
        ranks: The ranks of the sequence.
        codec: Format in which keys and values travel; None: as they are.
        sparsity: Block layout of all attention. Default None: all that is seen otherwise.

    Attributes:
        ranks: The ranks of the sequence.
        codec: Format in which keys and values travel.
        sparsity: Block layout of all attention.
        pieces: Of the batches that were cut last.
    """

    def __init__(self, ranks: SequenceRanks, codec: Codec | None, sparsity: SparsityConfig | None = None):
        self.ranks, self.codec, self.sparsity = ranks, codec, sparsity
        self.pieces = ranks.pieces(0)

    def cut(self, batches: Sequence[Batch], *, shifts: bool) -> list[Batch]:
        """Return this rank's pieces of a step's micro-batches, targets as `TargetPiece`. All ranks of the sequence.

        Sends a few bytes, which compare checksums.

        Args:
            batches: Inputs and target of each, of whole sequences.
            shifts: Whether a token's loss is that of the next one's label, and labels of -100 do not count.

        Raises:
            ValueError: Ranks have different batches; a tensor has no token for each of the first input's; a target,
                perhaps among the inputs, hides tokens and `shifts` is false; or the sequence is too short.
        """
        rank = self.ranks.rank
        columns = [(*_several(inputs), *([] if target is None else [target])) for inputs, target in batches]
        tensors = [x for column in columns for x in column if isinstance(x, Tensor)]
        lengths = {x.shape[1] if x.dim() > 1 else None for x in tensors}
        check_same(self.ranks, tensors, f"shapes {[tuple(x.shape) for x in tensors]}")
        length = next(iter(lengths), None)
        if len(tensors) < sum(map(len, columns)) or len(lengths) > 1 or length is None:
            raise ValueError(
                f"rank {rank}: inputs and targets of split sequences are tensors [b, tokens, ...] of one length, got "
                f"{[tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in columns[0]]}; shift "
                "targets before, so that each token has one"
            )
        # Inputs, too: without loss_fn the targets are among them.
        if not shifts and any(not x.is_floating_point() and bool((x == -100).any()) for x in tensors):
            raise ValueError(
                f"rank {rank}: targets of -100 hide tokens, and it is not known how the loss counts the others; give "
                "every token a target"
            )
        self.pieces = self.ranks.pieces(length)
        self.pieces.check_length(rank)
        return [(self._inputs(inputs), self._target(target, shifts)) for inputs, target in batches]

    def positions(self, device: torch.device) -> Tensor:
        """Return the places of this rank's tokens in the sequence, int64 [s].

        Args:
            device: Of the result.
        """
        return self.pieces.positions(self.ranks.rank, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Return `ring_attention` of the pieces' queries, keys and values. All ranks of the sequence.

        Args:
            q: [b, h, s, d].
            k: [b, g, s, d].
            v: [b, g, s, d].
            **options: Of `ring_attention`: is_causal, window, layout (default: of `sparsity`), scale, dropout.
        """
        if self.sparsity is not None:
            config = self.sparsity.of_model(options.get("is_causal", True))
            options = {"layout": build_layout(config, q.shape[1], self.pieces.length)} | options
        return ring_attention(q, k, v, self.ranks, self.pieces, codec=self.codec, **options)

    def _inputs(self, inputs: object) -> object:
        cut = tuple(self.pieces.cut(x, self.ranks.rank) for x in _several(inputs))
        return cut if isinstance(inputs, tuple | list) else cut[0]

    def _target(self, target: object, shifts: bool) -> TargetPiece | None:
        if not isinstance(target, Tensor):
            return None
        if shifts:
            return TargetPiece(*shifted_labels(target, self.pieces, self.ranks.rank))
        return TargetPiece(self.pieces.cut(target, self.ranks.rank), self.pieces.length / self.pieces.world_size)


@runtime_checkable
class ComputesPieces(Protocol):
    """A layer of a `PipelineModule` that mixes tokens or adds positions, and can do so on pieces of sequences."""

    def compute_pieces(self, split: Split) -> None:
        """From now on, take activations of this rank's piece, with `split.attend` and `split.positions`.

        Args:
            split: How sequences are split; `split.pieces` changes with the batches.
        """


def check_stages_split(layers: nn.Module, rank: int) -> None:
    """Check that layers of a `PipelineModule` can compute pieces. No communication.

    Args:
        layers: All of them.
        rank: This rank, for the message.

    Raises:
        ValueError: None of them has a method for it, or some mix tokens in another way.
    """
    if not any(isinstance(module, ComputesPieces) for module in layers.modules()):
        raise ValueError(
            f"rank {rank}: no layer of the PipelineModule has a method compute_pieces(split), so tokens would see "
            "only their own piece; write one that calls split.attend in its attention (docs/long-sequences.md)"
        )
    if mixing := find_mixing(layers):
        raise ValueError(
            f"rank {rank}: layer {mixing} mixes tokens as attention does, and would see those of its own piece alone; "
            "sequences cannot be split over ranks"
        )


def _several(inputs: object) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
