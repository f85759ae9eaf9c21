"""Which models split their sequences: those of transformers, and those that have a method for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar, runtime_checkable

from torch import nn

from ...comm import Codec, Transport
from ..sparse_attention.config import SparsityConfig, read_sparsity
from . import huggingface
from .ranks import SequenceRanks

M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class SplitsSequences(Protocol):
    """A model that computes its own attention, and can do so on pieces of sequences."""

    def split_sequences(self, ranks: SequenceRanks, codec: Codec | None) -> None:
        """From now on, compute a rank's piece of each sequence, with `ring_attention` and `ranks.pieces(length)`.

        All ranks of the sequence call forward with the same whole batch. The mean of their losses, and so of their
        gradients, must be that of the whole batch.

        Args:
            ranks: Those that share a sequence; they go to `ring_attention` as they are.
            codec: Format in which keys and values travel; None: as they are.
        """


def check_splits(model: nn.Module, rank: int, *, has_layout: bool = False) -> None:
    """Check that sequences of this model can be split. No communication.

    Args:
        model: The model.
        rank: This rank, for the message.
        has_layout: Whether its attention shall have a block layout. Default False.

    Raises:
        ValueError: They cannot, or are split already.
    """
    if isinstance(model, SplitsSequences) and has_layout:
        raise ValueError(
            f"rank {rank}: {type(model).__name__} splits its own sequences, so its attention cannot be replaced by a "
            "sparse one; call ring_attention(layout=...) in it, and leave sparse_attention out"
        )
    if not isinstance(model, SplitsSequences):
        huggingface.check_splits(model, rank)


def sequence_parallel(
    model: M,
    transport: Transport | SequenceRanks,
    *,
    codec: Codec | None = None,
    sparsity: SparsityConfig | Mapping[str, object] | None = None,
) -> M:
    """Split the sequences of a model over ranks, in place. All ranks.

    From now on all ranks call the model with the same whole batch, and each computes its piece, see `Pieces`. The mean
    of the ranks' losses, and so of their gradients, is that of the whole batch: to an optimizer, and in the engine, a
    rank of the sequence is a rank of the data.

    A model of transformers takes input_ids or inputs_embeds, and, if given, token_type_ids, labels, and an
    attention_mask with padding before or after the tokens of a row. Positions are those in the whole sequence; if they
    start anew, and no attention_mask is given, a document begins there that does not see those before it. Labels are
    shifted before the cut, and outputs such as logits are the piece's. The loss is the sum over the piece's tokens,
    divided by 1/W of all that count.

    Args:
        model: A model of transformers whose attention comes from its registry of attention functions, or one with a
            method `split_sequences(ranks, codec)`, see `sequence.models.SplitsSequences`.
        transport: Between the ranks of the sequence; or these ranks on two levels, see `SequenceRanks.of`.
        codec: Format in which keys and values travel; see `ring_attention`. Default None: as they are.
        sparsity: Block layout of all attention of a model of transformers, as in `replace_attention`; blocks that
            nobody sees do not travel. Default None: what the model has.

    Returns:
        The model.

    Raises:
        ValueError: It is no such model, or some of its layers have another kind of attention. The forward of a model of
            transformers raises it if ranks have different inputs, for a layout by which a rank sees nothing of others,
            and for what ring attention does not have: caches, chunks.
    """
    ranks = SequenceRanks.of(transport)
    check_splits(model, ranks.rank, has_layout=sparsity is not None)
    if isinstance(model, SplitsSequences):
        model.split_sequences(ranks, codec)
    else:
        huggingface.split_sequences(model, ranks, codec, None if sparsity is None else read_sparsity(sparsity))
    return model
