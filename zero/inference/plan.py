"""What a token will cost, before any model is split: bytes read, bytes sent, seconds.

    onebit plan --params 124m --hosts 2 --link 1gbit --serve 12x768

A decode step reads every weight once, and per layer sends two sums of its features, one after the other, with nothing
to overlap them. So a token costs, on W ranks that each read M bytes per second:

    overhead_s, and
    reading = bytes of weights / (W · M)
    sending = sums · ((W-1) · latency + (W-1) · 4·rows·width / bandwidth)

if all ranks send their parts of a sum to all others, as they do for few bytes; for more, an all-reduce sends twice as
many messages of a W-th each. By layers (`pipeline.py`) a token passes all ranks in turn, and rows are divided into
G = min(W, rows) groups, whose passes are under way at the same time:

    reading = bytes of weights / M
    sending = W · latency + (W-1) · bytes of an element · rows/G·width / bandwidth

so in that time each rank reads its part once for every group. If products take longer than reading (2 operations for
each weight and row), they stand in its place, and divide among the ranks both ways. Splitting pays if sending takes
less than it saves, or if the weights do not fit into one host. Each token of a prompt sends as much.
overhead_s (for example Python's own time) is the same on any number of ranks. The cache and the embeddings are not
counted. The latency is that of `zero/plan.py`, which was fitted to exchanges of buckets; `scripts/bench/inference.py`
compares the estimate with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.01, "int4": 0.53}
ACTIVATION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 4, "int4": 4}
"""Of what a pipeline's stages send each other. Packed models compute in their own dtype: at most float32."""
LATENCY_S = 1.9e-4
"""Of one message over TCP, with its processor time; from the record that `comm/cost.py` names."""
GATHERED_BYTES = 65536
"""How many more bytes than an all-reduce the sending of all parts to all ranks may take.

It needs half as many messages in sequence, which is worth this many bytes at 1 Gbit/s.
"""
_PAYLOAD_OF_FRAME = 1448 / 1514  # Ethernet, IPv4 and TCP headers at an MTU of 1500


@dataclass(frozen=True)
class ServeRun:
    """A run to estimate. rows: prompts answered at once. memory_bytes_per_s, flops_per_s: of each rank.

    Raises:
        ValueError: A number is not positive, or the dtype is unknown.
    """

    params: float
    layers: int
    width: int
    dtype: str = "fp32"
    rows: int = 1
    link_bits_per_s: float = 1e9
    memory_bytes_per_s: float = 2e10
    latency_s: float = LATENCY_S
    overhead_s: float = 0.0
    flops_per_s: float = math.inf

    def __post_init__(self) -> None:
        speeds = self.link_bits_per_s, self.memory_bytes_per_s, self.flops_per_s
        if (
            min(self.params, self.layers, self.width, self.rows, *speeds) <= 0
            or min(self.latency_s, self.overhead_s) < 0
            or self.dtype not in WEIGHT_BYTES
        ):
            raise ValueError(f"expected numbers above 0 and dtype of {', '.join(WEIGHT_BYTES)}, got {self}")


@dataclass(frozen=True)
class TokenPlan:
    """One decode step on `ranks` ranks: bytes that a rank holds and sends, messages in sequence, and seconds.

    by: "rows" of each layer are divided among the ranks, or "layers". sums: exchanges in sequence: sums over the ranks,
    or messages to the next one. reading_s: also what products take longer.
    """

    by: str
    ranks: int
    held_bytes: float
    sent_bytes: float
    sums: int
    reading_s: float
    sending_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        return self.reading_s + self.sending_s + self.overhead_s


def is_gathered(part_bytes: float, ranks: int) -> bool:
    """Whether ranks send their parts of a sum to all ranks instead of running an all-reduce."""
    return (ranks - 1) * (ranks - 2) / ranks * part_bytes <= GATHERED_BYTES


def token_plan(run: ServeRun, ranks: int) -> TokenPlan:
    """The estimate for `ranks` ranks with one link each."""
    if ranks < 1:
        raise ValueError(f"expected at least 1 rank, got {ranks}")
    held = run.params * WEIGHT_BYTES[run.dtype] / ranks
    sums = 2 * run.layers if ranks > 1 else 0
    part = 4 * run.rows * run.width
    turns = (ranks - 1) if is_gathered(part, ranks) else 2 * (ranks - 1)
    each = turns * part if is_gathered(part, ranks) else turns * part / ranks
    wire = each / (run.link_bits_per_s / 8 * _PAYLOAD_OF_FRAME)
    sending = sums * (turns * run.latency_s + wire)
    return TokenPlan("rows", ranks, held, sums * each, sums, _reading_s(run, held, run.rows), sending, run.overhead_s)


def stage_plan(run: ServeRun, ranks: int) -> TokenPlan:
    """The estimate for a pipeline of `ranks` stages.

    Raises:
        ValueError: There are more stages than layers.
    """
    if not 1 <= ranks <= run.layers:
        raise ValueError(f"expected stages from 1 to the {run.layers} layers, got {ranks}")
    held, rows = run.params * WEIGHT_BYTES[run.dtype] / ranks, run.rows / min(ranks, run.rows)
    hops = ranks if ranks > 1 else 0
    part = ACTIVATION_BYTES[run.dtype] * rows * run.width
    sending = hops * run.latency_s + (ranks - 1) * part / (run.link_bits_per_s / 8 * _PAYLOAD_OF_FRAME)
    sent = ACTIVATION_BYTES[run.dtype] * run.rows * run.width * (ranks > 1)
    return TokenPlan("layers", ranks, held, sent, hops, ranks * _reading_s(run, held, rows), sending, run.overhead_s)


def _reading_s(run: ServeRun, held_bytes: float, rows: float) -> float:
    """Seconds for a rank's part of the weights in a pass of these rows: to read them, or to multiply by them."""
    products = 2 * held_bytes / WEIGHT_BYTES[run.dtype] * rows
    return max(held_bytes / run.memory_bytes_per_s, products / run.flops_per_s)
