"""Layouts of a small model over ranks, written down by hand; what their optimizers know, as whole tensors in float64.

A layout is the pieces that each part of the model holds; every part has as many replicas. Ranks are numbered as on the
grid: part by part within a replica. Nothing here goes by the code that is tested but for `ParamSlice` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import onebit
from onebit.comm import SignCodec, SimTransport
from onebit.model_parallel import ModelParallelGroup
from onebit.optimizer import CompressedOptimizer
from onebit.zero.checkpoint.reshard import ParamSlice

BLOCK = 64
SHAPES = {"embed": (21, 8), "up": (40, 24), "norm": (24,), "down": (10, 40), "one": (1, 5)}
Layout = Sequence[Sequence[ParamSlice]]


def whole(name: str) -> ParamSlice:
    return ParamSlice(name, SHAPES[name], (0,) * len(SHAPES[name]), SHAPES[name])


def cut(piece: ParamSlice, dim: int, k: int, n: int) -> ParamSlice:
    """The k-th of n slices along dim, as torch cuts: of ceil(size/n) rows, the last ones fewer or none."""
    rows = -(-piece.sizes[dim] // n)
    start = min(k * rows, piece.sizes[dim])
    stop = min(start + rows, piece.sizes[dim])
    offsets, sizes = list(piece.offsets), list(piece.sizes)
    offsets[dim], sizes[dim] = offsets[dim] + start, stop - start
    return replace(piece, offsets=tuple(offsets), sizes=tuple(sizes))


def index_of(piece: ParamSlice) -> tuple[slice | Tensor, ...]:
    """A slice as an index into the whole: along stacked matrices the numbers of its rows."""
    index: list[slice | Tensor] = [slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True)]
    if piece.stack:
        dim, count = piece.stack
        each = torch.arange(piece.shape[dim]).view(count, -1)
        index[dim] = each[:, piece.offsets[dim] : piece.offsets[dim] + piece.sizes[dim] // count].flatten()
    return tuple(index)


def rows(n: int) -> Layout:
    """FSDP2's shards."""
    return [[cut(whole(name), 0, k, n) for name in SHAPES] for k in range(n)]


def _tensor(name: str, k: int) -> ParamSlice:
    """Column- and row-wise, and what every rank of a tensor axis of two holds."""
    return {"up": cut(whole("up"), 0, k, 2), "down": cut(whole("down"), 1, k, 2)}.get(name, whole(name))


def three_axes() -> Layout:
    """Two stages, the embedding tied between them, each of two shards of two tensor ranks."""
    stages = (("embed", "up", "norm"), ("one", "down", "embed"))
    return [[cut(_tensor(name, t), 0, s, 2) for name in names] for names in stages for s in range(2) for t in range(2)]


def stacks(ranks: int, shards: int) -> Layout:
    """Shards of rows, each of tensor ranks; "up" stacks three matrices of 8 columns, and a rank has some of each."""
    parts = [ParamSlice("up", (40, 24), (0, 8 // ranks * t), (40, 24 // ranks), (1, 3)) for t in range(ranks)]
    return [
        [cut(parts[t] if name == "up" else whole(name), 0, s, shards) for name in SHAPES]
        for s in range(shards)
        for t in range(ranks)
    ]


LAYOUTS: dict[str, Layout] = {
    "whole": [[whole(name) for name in SHAPES]],
    "rows": rows(2),
    "rows of 3": rows(3),
    "tensor": [[_tensor(name, t) for name in SHAPES] for t in range(2)],
    "stages": [[whole("embed"), whole("up")], [whole("down"), whole("one"), whole("norm"), whole("embed")]],
    "three axes": three_axes(),
    "stacks": stacks(2, 1),
    "stacks in shards": stacks(4, 2),
}

FAMILY: dict[str, tuple[type[CompressedOptimizer], dict]] = {
    "OnebitAdam": (onebit.OnebitAdam, {"lr": 0.01, "freeze_step": 3}),
    "OnebitLamb": (onebit.OnebitLamb, {"lr": 0.02, "freeze_step": 3}),
    "ZeroOneAdam": (
        onebit.ZeroOneAdam,
        {"lr": 0.01, "var_freeze_step": 2, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 2},
    ),
}


class Rank:
    """One rank of a layout: its parameters, its optimizer, and gradients that depend on the replica alone."""

    def __init__(self, transport: SimTransport, layout: Layout, name: str, **options: object):
        W, P = transport.world_size, len(layout)
        self.replica, self.part = divmod(transport.rank, P)
        self.pieces = layout[self.part]
        self.params = [nn.Parameter(values(piece)) for piece in self.pieces]
        # To the optimizer plain tensors are no shards: it takes all parts for stages, which have other layers each.
        parts = transport.split(range(self.replica * P, (self.replica + 1) * P))
        kind, defaults = FAMILY[name]
        decayed = {"params": [p for p in self.params if p.dim() > 1], "weight_decay": 0.01}
        rest = {"params": [p for p in self.params if p.dim() == 1], "weight_decay": 0.0}
        self.optimizer = kind(
            [decayed, rest],
            transport=transport.split(range(self.part, W, P)),
            model_parallel_group=ModelParallelGroup(SimTransport(), stages=parts),
            **{"codec": SignCodec(BLOCK), "bucket_cap_mb": 1e-3, "compression": "always"} | defaults | options,
        )

    @property
    def model(self) -> nn.Module:
        """Whose parameters have the names of the pieces."""
        return nn.ParameterDict({piece.name: p for piece, p in zip(self.pieces, self.params, strict=True)})

    @property
    def numbered(self) -> list[ParamSlice]:
        """The pieces in the order of the optimizer's groups."""
        piece_of = dict(zip(self.params, self.pieces, strict=True))
        return [piece_of[p] for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for p, piece in zip(self.params, self.pieces, strict=True):
                p.grad = values(piece, step, self.replica)
                if piece.name == "embed":  # rows that no text has
                    p.grad *= (torch.arange(piece.offsets[0], piece.offsets[0] + len(p)) < 13).unsqueeze(1)
            self.optimizer.step()


def values(piece: ParamSlice, *key: int) -> Tensor:
    """A slice of a random whole parameter, the same for the same key."""
    seed = 1 + list(SHAPES).index(piece.name) + 100 * sum((k + 1) * 1000**i for i, k in enumerate(key))
    x = torch.randn(piece.shape, generator=torch.Generator().manual_seed(seed))
    return x[index_of(piece)].clone()


Known = list[tuple[ParamSlice, dict[str, Tensor]]]


def known(optimizer: CompressedOptimizer, pieces: Mapping[Tensor, ParamSlice]) -> Known:
    """What a rank's optimizer says of the elements it holds. "owed": this rank's share of what the mean is owed."""
    found: Known = []
    for bucket in optimizer.buckets:
        flats = {name: flat.clone() for name, flat in bucket.flat.items() if name not in ("anchor", "accumulated")}
        if bucket.frames is not None:
            flats["momentum"] = torch.empty(bucket.layout.numel)
            optimizer.codec.decode(bucket.frames, flats["momentum"].view(optimizer.transport.world_size, -1))
        if bucket.ef is not None:
            flats["owed"] = bucket.spread(bucket.ef.worker.double()) / bucket.hierarchy.nodes
            bucket.own_chunk(flats["owed"]).add_(bucket.ef.server.double())
        views = {name: bucket.layout.views(flat.double()) for name, flat in flats.items()}
        for k, p in enumerate(bucket.params):
            numbers = {name: table_K[k].double() for name, table_K in bucket.layers.items() if name != "numel"}
            own = {name: view[k] for name, view in views.items()}
            found.append((pieces[p], own | numbers))
    return found


def assembled(ranks: Sequence[Known], parts: int) -> dict[str, dict[str, Tensor]]:
    """Whole tensors of what all ranks know: shares of replicas added up, all else checked to be the same on them."""
    found: dict[str, dict[str, Tensor]] = {}
    for part in range(parts):
        replicas = ranks[part::parts]
        for k, (piece, mine) in enumerate(replicas[0]):
            index = index_of(piece)
            for name, x in mine.items():
                others = [replica[k][1][name] for replica in replicas[1:]]
                if name == "owed":
                    x = x + sum(others)
                else:
                    assert all(torch.equal(x, other) for other in others), (piece, name)
                if x.dim() == 0:
                    found.setdefault(piece.name, {}).setdefault(name, x)
                    continue
                empty = torch.full(piece.shape, float("nan"), dtype=torch.float64)
                found.setdefault(piece.name, {}).setdefault(name, empty)[index] = x
    assert not any(x.isnan().any() for tensors in found.values() for x in tensors.values())
    return found
