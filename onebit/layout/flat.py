"""The flat layout of the optimizers' state: the place of each parameter's elements in a bucket.

Parameters stay in their own memory; momentum, errors and frames are flat. Each parameter starts at a block border and
is padded to whole blocks, so no block straddles two parameters; the bucket is padded to one equal chunk of blocks per
rank, at least one. Only integers and views: nothing here computes.

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk; a bucket has W·N elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..comm import Segments

SMALL = 2**20  # elements (4 MiB): for the sake of overlap, `partition` limits no bucket to less than this


@dataclass(frozen=True)
class Layout:
    """The places of the parameters of one bucket.

    Attributes:
        shapes: Shapes of the parameters, or of this rank's parts of them.
        offsets: First element of each parameter, a multiple of block.
        block: Elements of a block.
        world_size: Number of ranks, W.
        numel: Elements of the bucket with padding, W·N.
    """

    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    block: int
    world_size: int
    numel: int

    @cached_property
    def segments(self) -> Segments:
        """The same places for kernels, which read the parameters in their own memory."""
        numels = tuple(shape.numel() for shape in self.shapes)
        return Segments(tuple(offset // self.block for offset in self.offsets), numels, self.block)

    @cached_property
    def chunk(self) -> int:
        """N: elements per rank."""
        return self.numel // self.world_size

    @cached_property
    def parameter_numel(self) -> int:
        """Elements without padding."""
        return sum(shape.numel() for shape in self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' segments of a flat tensor [W·N], each in its parameter's shape."""
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def flat_views(self, flat: Tensor) -> Sequence[Tensor]:
        """The parameters' segments of a flat tensor [W·N], each of one dimension."""
        sizes, at = [], 0
        for offset, numel in zip(self.offsets, self.segments.numels, strict=True):
            sizes += [offset - at, numel]
            at = offset + numel
        pieces: Sequence[Tensor] = flat.split([*sizes, self.numel - at])
        return pieces[1::2]

    def by_parameter(self, per_block_J: Tensor) -> list[Tensor]:
        """The parameters' segments of a tensor with one element per block, [W·J]."""
        starts = [offset // self.block for offset in self.offsets]
        return [
            per_block_J[start : start + _blocks(shape.numel(), self.block)]
            for start, shape in zip(starts, self.shapes, strict=True)
        ]

    def counts(self, device: torch.device | str = "cpu") -> Tensor:
        """Real elements of each block, int32 [W, J]."""
        counts = torch.zeros(self.numel // self.block, dtype=torch.int32, device="cpu")
        for offset, shape in zip(self.offsets, self.shapes, strict=True):
            first, blocks = offset // self.block, _blocks(shape.numel(), self.block)
            counts[first : first + blocks] = self.block
            if shape.numel() % self.block:
                counts[first + blocks - 1] = shape.numel() % self.block
        return counts.view(self.world_size, -1).to(device)


def lay_out(shapes: Sequence[torch.Size], block: int, world_size: int) -> Layout:
    """The layout of a bucket of parameters of these shapes, in this order.

    Args:
        shapes: Shapes of the parameters, or of this rank's parts of them.
        block: Elements of a block.
        world_size: Number of ranks.
    """
    blocks = [_blocks(shape.numel(), block) for shape in shapes]
    starts = [0, *accumulate(blocks)]
    chunk_blocks = max(1, _blocks(starts[-1], world_size))  # a shard may have no elements of any parameter
    return Layout(
        shapes=tuple(shapes),
        offsets=tuple(start * block for start in starts[:-1]),
        block=block,
        world_size=world_size,
        numel=chunk_blocks * world_size * block,
    )


def least_elements(world_size: int) -> int:
    """Elements that buckets have at least: padding to whole blocks for each rank must stay below some 3 %.

    Args:
        world_size: Number of ranks.
    """
    return max(SMALL, world_size << 12)  # sixteen blocks of 256 for each


def partition(sizes: Sequence[int], capacity: int, least: int = SMALL) -> list[list[int]]:
    """Group parameters into buckets of at most `capacity` elements; the last parameter comes first.

    Backward produces gradients from the last layer to the first, so this is the order in which buckets fill. A
    parameter larger than the capacity has a bucket to itself; empty parameters belong to none.

    A bucket is sent when it is full, and after backward the step waits for the last one. So a bucket above `least`
    elements has at most a twelfth of the total. Buckets are smaller at both ends: at most as large as all buckets
    before, or as half of the remaining elements.

    Args:
        sizes: Elements of each parameter.
        capacity: Elements of a bucket at most.
        least: No bucket is limited to less than this. Default `SMALL`.

    Returns:
        Indices into sizes, for each bucket.
    """
    buckets: list[list[int]] = []
    room, begun, rest = 0, 0, sum(sizes)
    most = rest // 12
    for index in reversed(range(len(sizes))):
        if sizes[index] == 0:
            continue
        if sizes[index] > room:
            buckets.append([])
            room = min(capacity, max(least, min(most, begun, rest // 2)))
        buckets[-1].append(index)
        room -= sizes[index]
        begun += sizes[index]
        rest -= sizes[index]
    return buckets


def _blocks(n: int, block: int) -> int:
    return -(-n // block)
