"""How the GPT of `model.py` is divided among ranks that compute each layer together: its tensor-parallel plans."""

from __future__ import annotations

from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from onebit.zero.parallel.tensor import join_sequence, split_sequence
from train.model import ModelSize


def tensor_plan(heads: int, ranks: int) -> dict[str, ParallelStyle]:
    """For `onebit.zero.tensor.parallelize`, of a GPT with so many heads, which the ranks have to divide.

    Each rank computes whole heads and a part of the MLP's features. Between the blocks it holds its part of the
    sequence, T/ranks bytes of each, and so do the norms in them. The embeddings, the last norm and the tied projection
    are whole on each rank, which all do the same work there.
    """
    return _plan(heads, ranks, blocks="blocks", first="blocks.0", last="norm")


def layers_plan(size: ModelSize, ranks: int) -> dict[str, ParallelStyle]:
    """The same of the model as `model_layers.py` lists it: the table, positions, blocks, the last norm, the table."""
    return _plan(size.heads, ranks, blocks="layers", first="layers.2", last=f"layers.{2 + size.layers}")


def _plan(heads: int, ranks: int, *, blocks: str, first: str, last: str) -> dict[str, ParallelStyle]:
    if heads % ranks:
        raise ValueError(f"{ranks} tensor ranks cannot divide {heads} heads; take a number that does")
    along_T = Shard(1)
    return {
        first: split_sequence(),
        f"{blocks}.*.attention_norm": SequenceParallel(use_local_output=True),
        f"{blocks}.*.qkv": ColwiseParallel(input_layouts=along_T),
        f"{blocks}.*.attention_out": RowwiseParallel(output_layouts=along_T),
        f"{blocks}.*.mlp_norm": SequenceParallel(use_local_output=True),
        f"{blocks}.*.mlp_in": ColwiseParallel(input_layouts=along_T),
        f"{blocks}.*.mlp_out": RowwiseParallel(output_layouts=along_T),
        last: join_sequence(),
    }
