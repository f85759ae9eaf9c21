"""Two levels: full precision between the ranks of a node, compressed between nodes, on a share of the data each.

`hierarchical` makes a `HierarchicalTransport` of a flat one; `allreduce.py` asks `Hierarchy.of` what its transport has.
`decide` finds the nodes from what every rank sees; `launch.py` calls it. Rests on `transports/base.py`.

A bucket keeps its W chunks, one per rank, as rows. Ranks with local rank l exchange rows l·H to l·H + H - 1, of which
the one on node h owns row l·H + h. In a flat world every rank counts as a node: L = 1.

Shape legend: W = L·H ranks, L on each of H nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .hops import in_hops
from .transports.base import Transport, Work, check_transport
from .transports.composite import Composite


@dataclass(eq=False)
class Hierarchy:
    """The two transports of one rank, and the rows of a bucket that are this rank's.

    Attributes:
        intra_node: Transport to the ranks of its node; None in a flat world.
        inter_node: Transport to the ranks with the same local rank, one per node; to all ranks in a flat world.
        local_size: Ranks per node, L.
        nodes: Number of nodes, H.
        own: The rows of a bucket that this rank exchanges between nodes.
        owner: The row that this rank averages.
    """

    intra_node: Transport | None
    inter_node: Transport
    local_size: int = field(init=False)
    nodes: int = field(init=False)
    own: slice = field(init=False)
    owner: int = field(init=False)

    def __post_init__(self) -> None:
        self.count()

    @classmethod
    def of(cls, transport: Transport) -> Hierarchy:
        """The hierarchy of a transport; a flat one has L = 1.

        Raises:
            TypeError: This is not a transport.
        """
        check_transport(transport, may_change=True)
        return cls(transport.intra_node, transport.inter_node)

    def count(self) -> None:
        """Count the ranks; again if members have come or gone, before anything else is asked."""
        local_rank = 0 if self.intra_node is None else self.intra_node.rank
        self.local_size = 1 if self.intra_node is None else self.intra_node.world_size
        self.nodes = self.inter_node.world_size
        self.own = slice(local_rank * self.nodes, (local_rank + 1) * self.nodes)
        self.owner = local_rank * self.nodes + self.inter_node.rank

    @property
    def phases(self) -> int:
        """Number of operations of an exchange, one after the other: 2 in a flat world, else 4; in two hops 2 more."""
        return 2 * self.inter_node.hops + (0 if self.intra_node is None else 2)

    def rows(self, x: Tensor) -> Tensor:
        """This rank's rows of a flat tensor of W·N elements, [H, N]. A view."""
        return x.view(self.local_size * self.nodes, -1)[self.own]

    def sum_intra_node(self, x: Tensor) -> Generator[Work, None, None]:
        """Own rows of x ← their sum over the ranks of this node, in rank order: the same bits over every transport.

        Yields one Work, none in a flat world. All ranks of the node. Sends (L-1)/L·4 bytes per element: half of what
        Gloo's own reduce-scatter does.

        Args:
            x: float32 [W·N]. Own rows are modified in place, the others stay as they are.
        """
        if self.intra_node is None:
            return
        sent = x.view(self.local_size, -1).view(torch.uint8)
        received = torch.empty_like(sent)  # not kept: few buckets are in this phase at a time
        yield self.intra_node.all_to_all(received, sent)
        first, *others = received.view(torch.float32)
        own = self.rows(x).view(-1)
        own.copy_(first)
        for share in others:
            own.add_(share)

    def gather_intra_node(self, frames_HB: Tensor) -> Generator[Work, None, Tensor]:
        """Collect the frames of all ranks of this node. All ranks of the node. Sends (L-1)·H·B bytes inside it.

        Yields one Work, none in a flat world.

        Args:
            frames_HB: This rank's frames, uint8 [H, B].

        Returns:
            uint8 [W, B], a row for each row of a bucket; in a flat world frames_HB itself.
        """
        if self.intra_node is None:
            return frames_HB
        gathered = torch.empty(self.local_size, frames_HB.numel(), dtype=torch.uint8, device=frames_HB.device)
        yield self.intra_node.all_gather(gathered, frames_HB.view(-1))
        return gathered.view(self.local_size * self.nodes, -1)


class HierarchicalTransport(Composite):
    """A transport over all ranks that knows which of them share a node. See `Transport` for the contract.

    Its operations are those of `world`. An optimizer, or `compressed_allreduce`, exchanges over the other two instead:
    in full precision inside a node, compressed between nodes. Ranks are numbered node by node.

    Args:
        world: Transport over all ranks.
        intra_node: Transport over the L ranks of this node.
        inter_node: Transport over the H ranks with this local rank, one per node, in order of nodes.

    Raises:
        ValueError: The rank numbers do not fit: expected rank = node·L + local rank.
    """

    def __init__(self, world: Transport, intra_node: Transport, inter_node: Transport):
        L, H = intra_node.world_size, inter_node.world_size
        if world.world_size != L * H or world.rank != inter_node.rank * L + intra_node.rank:
            raise ValueError(
                f"rank {world.rank} of {world.world_size} cannot be rank {intra_node.rank} of {L} on node "
                f"{inter_node.rank} of {H}: expected rank = node·{L} + local rank"
            )
        super().__init__(world, intra_node, inter_node)
        self._intra_node, self._inter_node = intra_node, inter_node
        self._sent_inter_node = 0

    @property
    def sent_bytes_inter_node(self) -> int:
        """The part of sent_bytes that went to other nodes, over the slow network."""
        return self._sent_inter_node + self.inter_node.sent_bytes

    @property
    def intra_node(self) -> Transport:
        return self._intra_node

    @property
    def inter_node(self) -> Transport:
        return self._inter_node

    def describe(self) -> str:
        nodes, ranks = self.inter_node.world_size, self.intra_node.world_size
        return f"{self.world.describe()}, two levels: {nodes} nodes of {ranks} ranks"

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        return self._counted(lambda: self.world.all_to_all(out_WB, in_WB))

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        return self._counted(lambda: self.world.all_gather(out_WB, in_B))

    def all_reduce(self, x: Tensor) -> Work:
        return self._counted(lambda: self.world.all_reduce(x), in_ring=self.world.reduces_in_ring)

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self._counted(lambda: self.world.broadcast(x, src))

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        before = self.world.sent_bytes
        work = self.world.shift(out_B, in_B, by)
        if (self.rank + by) % self.world_size // self.intra_node.world_size != self.inter_node.rank:
            self._sent_inter_node += self.world.sent_bytes - before
        return work

    def _counted(self, launch: Callable[[], Work], *, in_ring: bool = False) -> Work:
        """Launch, and count bytes that leave the node: each peer gets an equal share, in a ring the next rank all."""
        before = self.world.sent_bytes
        work = launch()
        peers, others = max(self.world_size - 1, 1), self.world_size - self.intra_node.world_size
        if in_ring:
            is_last = self.intra_node.rank == self.intra_node.world_size - 1
            peers, others = 1, int(is_last and self.inter_node.world_size > 1)
        self._sent_inter_node += (self.world.sent_bytes - before) * others // peers
        return work


def hierarchical(transport: Transport, local_size: int, hops: int | str = 1) -> Transport:
    """Put the ranks of a transport in two levels. All ranks call it.

    Args:
        transport: A flat transport over all ranks, numbered node by node.
        local_size: Ranks on each node. 1: one level.
        hops: Hops between nodes, see `hops.in_hops`. Default 1.

    Raises:
        ValueError: local_size does not divide the number of ranks, or hops do not fit.
    """
    check_transport(transport)
    W, L = transport.world_size, local_size
    if L < 1 or W % L:
        raise ValueError(f"rank {transport.rank}: {W} ranks cannot be {L} on each node; give a divisor of {W}")
    if L == 1:
        return in_hops(transport, hops)
    node, local_rank = divmod(transport.rank, L)
    inside = transport.split(range(node * L, (node + 1) * L))
    return HierarchicalTransport(transport, inside, in_hops(transport.split(range(local_rank, W, L)), hops))


class Seen(NamedTuple):
    """What one rank knows of its node.

    host: a digest of the host's name. local_size: ranks on it by the launcher's variables; None: they do not tell.
    """

    host: str
    local_size: int | None


def decide(seen: Sequence[Seen]) -> tuple[int, str]:
    """(L, why not more) from what all ranks know, in rank order. L = 1: flat; the reason is "" if it is obvious.

    Two levels need a launcher that tells how many ranks share a node, and host names that agree with it: the same
    number on every node, ranks numbered node by node, more than one node. On a single node there is no slow network.
    """
    W, sizes, hosts = len(seen), {rank.local_size for rank in seen}, [rank.host for rank in seen]
    if len(set(hosts)) in (1, W) and sizes <= {None, 1, W}:
        return 1, ""
    if None in sizes:
        return 1, "the launcher does not say how many ranks share a node"
    if len(sizes) > 1:
        return 1, f"nodes have different numbers of ranks: {', '.join(map(str, sorted(s for s in sizes if s)))}"
    L = seen[0].local_size
    assert L is not None
    nodes = [hosts[start : start + L] for start in range(0, W, L)]
    if W % L or any(len(set(node)) > 1 for node in nodes) or len({node[0] for node in nodes}) < len(nodes):
        per_host = [hosts.count(host) for host in dict.fromkeys(hosts)]
        return 1, (
            f"the launcher says {L} ranks share a node, but by their host names "
            f"{', '.join(map(str, per_host))} do, or they are not numbered node by node"
        )
    return L, ""
