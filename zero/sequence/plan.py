"""What a split sequence will cost, before any model is split: bytes between hosts, seconds, memory.

    onebit plan --params 8e9 --hosts 4 --ranks-per-host 2 --sequence 32x4096x32x8 --tokens 131072

A causal layer computes n·(n+1)/2 pairs of tokens, or n·w of a window, of 4·width operations each, and 2.5 times as many
in backward, which computes the scores again; parameters cost 6 operations per token. What travels follows from the
pieces (`sight.py`): keys and values forward and again backward, and their gradients in float32. Inside a host traffic
is not counted. Of memory only activations are, 34 bytes per token, feature and layer in two-byte dtypes (Korthikanti et
al., arXiv 2205.05198, without the scores, which flash attention does not keep).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...comm import codec_named
from ...comm.codecs.tensors import frame_bytes
from ..offload.plan import FLOPS
from .pieces import Pieces
from .sight import Sight

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_PAIR_FLOPS = 4 * 3.5
"""Operations per pair and feature, forward and backward."""
_ACTIVATION_BYTES = 34
CODECS = ("bf16", "int8", "int4")
"""Formats in which keys and values travel, beside that of the activations."""
_BLOCK = 64  # elements per scale, as by default
_PAYLOAD_OF_FRAME = 1448 / 1514  # Ethernet, IPv4 and TCP headers at an MTU of 1500


@dataclass(frozen=True)
class SequenceRun:
    """A step to estimate, of one sequence.

    Attributes:
        params: Parameters of the model.
        tokens: Of the sequence.
        layers: Layers with attention.
        width: Features, of all heads.
        heads: Query heads.
        groups: Key-value heads.
        hosts: Hosts that share the sequence.
        ranks_per_host: Ranks on each.
        window: Tokens that a token sees, if not all before it. Default None.
        dtype: Of activations. Default "bf16".
        codec: Format in which keys and values travel, "bf16", "int8" or "int4". Default None: dtype.
        link_bits_per_s: Of a host's link. Default 1e9.
        flops_per_s: Speed that a rank reaches. Default 1e14.

    Raises:
        ValueError: A number is not positive, dtype or codec is none of those, heads do not divide the width or groups
            the heads, or the sequence is too short for its ranks.
    """

    params: float
    tokens: int
    layers: int
    width: int
    heads: int
    groups: int
    hosts: int
    ranks_per_host: int
    window: int | None = None
    dtype: str = "bf16"
    codec: str | None = None
    link_bits_per_s: float = 1e9
    flops_per_s: float = 1e14

    def __post_init__(self) -> None:
        counts = self.tokens, self.layers, self.width, self.heads, self.groups, self.hosts, self.ranks_per_host
        if (
            min(*counts, 1 if self.window is None else self.window, self.params, self.link_bits_per_s, self.flops_per_s)
            <= 0
            or self.dtype not in _BYTES
        ):
            raise ValueError(f"expected numbers above 0 and dtype of {', '.join(_BYTES)}, got {self}")
        if self.codec not in (None, *CODECS):
            raise ValueError(f"expected a codec of {', '.join(CODECS)}, or None, got {self.codec!r}")
        if self.width % self.heads or self.heads % self.groups:
            raise ValueError(
                f"expected heads that divide the width, and key-value heads that divide them, got a width of "
                f"{self.width}, {self.heads} heads and {self.groups}"
            )
        if self.tokens < 2 * self.ranks:
            raise ValueError(f"expected two tokens for each of {self.ranks} ranks, got {self.tokens}")

    @property
    def ranks(self) -> int:
        """Ranks of the sequence."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class SequencePlan:
    """A layout of a sequence, and its cost.

    Attributes:
        ranks: Ranks that share it; 1: it is not split.
        ulysses_degree: How many of a host divide the heads.
        sent_bytes: What a host sends in a step, in the mean.
        compute_s: Seconds of a step without traffic.
        traffic_s: Seconds of the traffic alone.
        activation_bytes: Of a rank, if none are computed again.
    """

    ranks: int
    ulysses_degree: int
    sent_bytes: float
    compute_s: float
    traffic_s: float
    activation_bytes: float

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a step if all traffic hides under the computation, and if none does."""
        return max(self.compute_s, self.traffic_s), self.compute_s + self.traffic_s


def plans(run: SequenceRun) -> list[SequencePlan]:
    """Return the cost on one rank, and of each way to divide heads inside a host without repeating any."""
    degrees = [U for U in range(1, run.ranks_per_host + 1) if run.ranks_per_host % U == 0 and run.heads % U == 0]
    degrees = [U for U in degrees if run.groups % U == 0] if run.ranks > 1 else []
    return [_plan(run, 1, 1), *(_plan(run, run.ranks, U) for U in degrees)]


def chosen(made: Sequence[SequencePlan]) -> SequencePlan:
    """Return the plan with the shortest step, if no traffic hides; of several the one that divides fewer heads."""
    return min(made, key=lambda plan: (plan.seconds[1], plan.ulysses_degree))


def _plan(run: SequenceRun, ranks: int, degree: int) -> SequencePlan:
    n = run.tokens
    w = min(run.window or n, n)
    pairs = w * (w + 1) / 2 + (n - w) * w
    flops = FLOPS * run.params * n + _PAIR_FLOPS * pairs * run.width * run.layers
    sent = 0.0 if ranks == 1 else _bytes_between(run, degree) / run.hosts
    kept = _ACTIVATION_BYTES * _BYTES[run.dtype] / 2 * n * run.width * run.layers / ranks
    traffic_s = 8 * sent / (run.link_bits_per_s * _PAYLOAD_OF_FRAME)
    return SequencePlan(ranks, degree, sent, flops / ranks / run.flops_per_s, traffic_s, kept)


def _bytes_between(run: SequenceRun, degree: int) -> float:
    """What all hosts send to others in a step."""
    pieces = Pieces(run.tokens, run.ranks, degree)
    sight, nodes_per_host = Sight(pieces, window=run.window), run.ranks_per_host // degree
    tokens = sum(
        part.stop - part.start
        for node in range(pieces.nodes)
        for source in range(pieces.nodes)
        if node // nodes_per_host != source // nodes_per_host
        for part in sight.keys(node, source)
    )
    # A node's ranks send their heads each: together a block once.
    head_width = run.width // run.heads
    elements = tokens * 2 * run.groups * head_width * run.layers
    each = (
        _BYTES[run.dtype] if run.codec is None else frame_bytes(codec_named(run.codec, _BLOCK), _BLOCK**2) / _BLOCK**2
    )
    return float(elements * (2 * each + 4))  # keys and values twice, and gradients in float32
