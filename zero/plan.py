"""Estimates of a run before it starts: memory and traffic of every stage and optimizer, and seconds per step.

    onebit plan --params 1.5e9 --hosts 4 --ranks-per-host 2 --link 1gbit --dtype bf16 --compute 2

Memory and traffic are counted from the layouts, not measured: parameters, gradients, optimizer state, and the bits sent
in a steady step, in a step of the warm-up, and on average over a run of `--steps`, by the optimizers' own schedules.
Activations, the buckets of the exchange (a few times `bucket_cap_mb`) and the allocator's reserve come on top. Padding
to blocks is left out; it is below 1 % for parameters of thousands of elements. "sharded" is across nodes of one rank:
the same for all three optimizers, except that ZeroOneAdam's skipped steps send nothing. "local steps" is AdamW inside a
replica, and between replicas a one-bit round every `--local-steps` steps.

With several ranks on each host a one-bit optimizer and local steps at stage 0 exchange in two levels, each rank its
share of the elements, as over the transport of `onebit.comm.init()`. The engine's stage 0 has one level, and sends more
by a factor of the ranks per host; its other stages have two. Dense traffic goes round a ring of all ranks, node by
node, as in Gloo and NCCL: a host sends as much as one rank.

Seconds are computed by `comm/cost.py`, with costs fitted on one machine (the record is named there); for others they
are an estimate. They range from full overlap with two thirds of the computing to no overlap at all, as for ranks
without a spare processor. For local steps they range from a round that lands later, under `delay`, to one that the step
waits for. Recorded steps of ours and of DDP (tests/golden/recorded_steps.json) are inside the range, within 15 %, which
a test checks. The formulas are in `docs/memory.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..comm import CODECS, Int4Codec, SignCodec, codec_named
from ..comm.cost import CodecCost, LinkCost, exchange_s, payload_bytes
from ..comm.hops import hops_of
from ..layout.flat import least_elements
from .config.entries.base import Footprint
from .config.optimizers import OPTIMIZERS
from .sharded.optimizer import WARMUP_STEPS

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SHARDED, LOCAL = ("sharded int4", "sharded sign"), "local steps"
_FLOAT32, _MOMENTS = 4.0, 8.0
_ELEMENTS, _BLOCK = 1 << 20, 256

# Costs of a rank with its own processor, 2 cores, November 2026: from the record that `comm/cost.py` names.
_ONE_BIT_S, _DENSE_S = 3.48e-9, 5.67e-9
_LATENCY_S, _START_S = 1.9e-4, 1.3e-3
_UNHIDDEN = 0.1
_PAYLOAD_OF_FRAME = 1448 / 1514  # Ethernet, IPv4 and TCP headers at an MTU of 1500
_HIDDEN_BY_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Run:
    """A run to estimate.

    Attributes:
        params: Parameters of the model.
        hosts: Number of hosts.
        ranks_per_host: Ranks on each host. Default 1.
        dtype: The computing dtype, "fp32", "bf16" (default) or "fp16".
        error_bytes: Bytes per element of worker and server errors, 4 (default) or 2.
        link_bits_per_s: Bandwidth of a host, shared by its ranks, in bits per second. Default 1e9.
        compute_s: Seconds of a step without its traffic. Default 0.
        codec: Format of the momentum, unless it is sharded across hosts. Default "sign".
        warmup_codec: Format of the gradients. Default None: each optimizer's own.
        steps: Steps of the run. Default 1000.
        local_steps: Steps between two rounds of `LocalSteps`. Default 32.

    Raises:
        ValueError: A number is out of range, or a name unknown.
    """

    params: float
    hosts: int
    ranks_per_host: int = 1
    dtype: str = "bf16"
    error_bytes: int = 4
    link_bits_per_s: float = 1e9
    compute_s: float = 0.0
    codec: str = "sign"
    warmup_codec: str | None = None
    steps: int = 1000
    local_steps: int = 32

    def __post_init__(self) -> None:
        if self.params < 1 or self.hosts < 1 or self.ranks_per_host < 1 or self.link_bits_per_s <= 0:
            raise ValueError(
                f"expected at least one parameter, host and rank, and a link, got {self.params:g} parameters, "
                f"{self.hosts} hosts of {self.ranks_per_host} ranks and {self.link_bits_per_s:g} bit/s"
            )
        if self.warmup_codec not in (None, *CODECS) or self.steps < 1 or self.local_steps < 1:
            raise ValueError(f"expected warmup_codec of {', '.join(CODECS)}, steps and local_steps >= 1, got {self}")
        if self.dtype not in DTYPE_BYTES or self.error_bytes not in (2, 4) or self.compute_s < 0:
            raise ValueError(f"expected dtype of {', '.join(DTYPE_BYTES)}, error_bytes 2 or 4, compute_s >= 0: {self}")

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Plan:
    """Memory of one rank, in bytes per parameter of the model, and its traffic, in bits per parameter and step.

    Attributes:
        optimizer: Name of the row, one of `optimizers`.
        stage: Stage, 0 to 3.
        parameters: Bytes of the parameters; with the float32 masters, except in the sharded forms.
        gradients: Bytes of the gradients.
        state: Bytes of optimizer state, residuals and anchors; in the sharded forms with the float32 masters.
        bits: Bits sent to other hosts in a steady step; the mean over the ranks of a host.
        warmup_bits: The same, in a step that sends gradients.
        run_bits: The same, the mean over the run.
        seconds: Seconds of a steady step, least and most.
    """

    optimizer: str
    stage: int
    parameters: float
    gradients: float
    state: float
    bits: float
    warmup_bits: float
    run_bits: float
    seconds: tuple[float, float]

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of parameters, gradients and state together."""
        return self.parameters + self.gradients + self.state


def optimizers() -> list[str]:
    """Return the rows of a plan: one-bit optimizers of the registry, sharded forms, local steps, dense optimizers."""
    known = [entry for entry in OPTIMIZERS.values() if entry.footprint is not None]
    one_bit = [entry.name for entry in known if entry.is_one_bit]
    return [*one_bit, *SHARDED, LOCAL, *(entry.name for entry in known if not entry.is_one_bit)]


def plans(run: Run) -> Iterator[Plan]:
    """Yield a plan for every combination of optimizer and stage that exists for this run."""
    for optimizer in optimizers():
        for stage in (0, 1, 2, 3):
            if (made := plan(run, optimizer, stage)) is not None:
                yield made


def plan(run: Run, optimizer: str, stage: int) -> Plan | None:
    """Estimate one optimizer at one stage.

    Args:
        run: The run.
        optimizer: One of `optimizers`.
        stage: 0 to 3.

    Returns:
        The plan; None if there is no such form, for the reason that `forms.choose` gives.

    Raises:
        ValueError: There is no such row.
    """
    if optimizer in SHARDED:
        return _across(run, optimizer, stage) if stage in (1, 2) and run.ranks_per_host == 1 else None
    if optimizer == LOCAL:
        return _local(run, stage) if stage == 0 or run.ranks_per_host > 1 else None
    entry = OPTIMIZERS[optimizer]
    if entry.footprint is None:
        raise ValueError(f"{optimizer} has no row of its own; there are {', '.join(optimizers())}")
    if not entry.is_one_bit:
        return _dense(run, optimizer, entry.footprint, stage)
    if stage > 0 and run.ranks_per_host == 1:
        return None
    S, (share, ranks) = run.ranks_per_host if stage else 1, _two_levels(run, stage)
    frame, in_warmup = _frame_bytes(run.codec), _frame_bytes(run.warmup_codec or entry.footprint.gradients)
    sent = entry.footprint.sent(frame)
    state = entry.footprint.moments(frame) / S + run.error_bytes * (1 + 1 / ranks) / share
    parameters, gradients = _parameters_and_gradients(run, stage, S)
    exchange = _exchange_s(run, share, ranks, sent, _ONE_BIT_S, hops_of(ranks))
    bits, warmup_bits = (_bits(run, run.hosts, each, hops_of(ranks)) for each in (sent, in_warmup))
    run_bits = _mean(run, warmup_bits, bits, entry.footprint.dense_steps(run.steps))
    return Plan(optimizer, stage, parameters, gradients, state, bits, warmup_bits, run_bits, _step_s(run, exchange))


def _frame_bytes(codec: str) -> float:
    """Bytes per element of a frame."""
    return codec_named(codec, _BLOCK).frame_bytes(_ELEMENTS) / _ELEMENTS


def _mean(run: Run, warmup_bits: float, bits: float, dense_steps: int) -> float:
    """Mean bits over the run's steps, dense_steps of which send gradients."""
    share = dense_steps / run.steps
    return share * warmup_bits + (1.0 - share) * bits


def _across(run: Run, optimizer: str, stage: int) -> Plan:
    W, b = run.world_size, DTYPE_BYTES[run.dtype]
    up = SignCodec().frame_bytes(_ELEMENTS) / _ELEMENTS
    down = up if optimizer.endswith("sign") else Int4Codec().frame_bytes(_ELEMENTS) / _ELEMENTS
    state = 2.0 + _MOMENTS / W
    gradients = float(b) if stage == 1 else 0.0
    # Phase 2 needs the results of phase 1, and at stage 1 nothing is sent before the vote. So only phase 1 of stage 2
    # can overlap with backward.
    phase_up, phase_down = (_exchange_s(run, 1, W, frame, _ONE_BIT_S, hops_of(W)) / 2 for frame in (up, down))
    seconds = _step_s(run, phase_up if stage == 2 else 0.0, phase_down if stage == 2 else phase_up + phase_down)
    forwarded = payload_bytes(1, W, CodecCost(1.0, 0.0), hops_of(W)) - 2 * (W - 1) / W  # frames sent on in a second hop
    bits, warmup_bits = (
        8 * ((W - 1) / W * (each + down) + forwarded * each) for each in (up, _frame_bytes(run.warmup_codec or "int8"))
    )
    run_bits = _mean(run, warmup_bits, bits, min(WARMUP_STEPS, run.steps))
    return Plan(optimizer, stage, float(b), gradients, state, bits, warmup_bits, run_bits, seconds)


def _local(run: Run, stage: int) -> Plan:
    """AdamW in a replica, i.e. on the ranks of a host. The state has an anchor, worker error and both server errors."""
    S, (share, ranks) = run.ranks_per_host if stage else 1, _two_levels(run, stage)
    frame, every = _frame_bytes("sign"), run.local_steps
    state = (_MOMENTS + _FLOAT32) / S + run.error_bytes * (1 + 2 / ranks) / share
    parameters, gradients = _parameters_and_gradients(run, stage, S)
    exchange = _exchange_s(run, share, ranks, frame, _ONE_BIT_S, hops_of(ranks))
    bits = _bits(run, run.hosts, frame, hops_of(ranks)) / every
    hidden, waited = max(0.0, exchange / every - run.compute_s), exchange / every
    seconds = run.compute_s + hidden, run.compute_s + waited
    return Plan(LOCAL, stage, parameters, gradients, state, bits, bits, bits, seconds)


def _dense(run: Run, optimizer: str, footprint: Footprint, stage: int) -> Plan:
    """The engine's dense form: an all-reduce in float32 at stage 0, else shards over all ranks, as DeepSpeed's.

    Parameters are gathered in dtype, twice at stage 3; gradients are reduced in float32. A ring of all ranks leaves
    each host once. Gloo's reduce-scatter is an all-reduce: with it the gradients of stage 3 are sent twice.
    """
    W = run.world_size
    S, gathers = (1, 0) if stage == 0 else (W, 2 if stage == 3 else 1)
    parameters, gradients = _parameters_and_gradients(run, stage, S)
    gradient, moments = footprint.sent(_FLOAT32), footprint.moments(_FLOAT32)
    each_way = gradient if stage == 0 else (gathers * DTYPE_BYTES[run.dtype] + gradient) / 2
    exchange, bits = _exchange_s(run, 1, W, each_way, _DENSE_S), _bits(run, W, each_way)
    return Plan(optimizer, stage, parameters, gradients, moments / S, bits, bits, bits, _step_s(run, exchange))


def _parameters_and_gradients(run: Run, stage: int, shards: int) -> tuple[float, float]:
    """Bytes per parameter of parameters with float32 masters, and of gradients.

    Whole parameters in dtype, except at stage 3, and whole gradients at stages 0 and 1; masters, and the gradients that
    the optimizer has, of this rank's shards. Shards of whole float32 parameters are views of them.
    """
    b, shard = DTYPE_BYTES[run.dtype], _FLOAT32 / shards
    is_view = run.dtype == "fp32" and stage < 3
    parameters = (0.0 if is_view else shard) + (0.0 if stage == 3 else float(b))
    if stage == 0 and is_view:
        return parameters, float(b)
    return parameters, shard + (float(b) if stage < 2 else 0.0)


def _two_levels(run: Run, stage: int) -> tuple[int, int]:
    """(number of ranks on a host that divide the elements, number of ranks that exchange each share)."""
    return (1, run.world_size) if stage == 0 and run.hosts == 1 else (run.ranks_per_host, run.hosts)


def _bits(run: Run, ranks: int, bytes_per_element: float, hops: int = 1) -> float:
    """Bits per parameter and rank that an exchange between this many ranks sends to other hosts."""
    sent = payload_bytes(1, ranks, CodecCost(bytes_per_element, 0.0), hops)
    return 8 * sent / run.ranks_per_host if run.hosts > 1 else 0.0


def _exchange_s(run: Run, share: int, ranks: int, bytes_per_element: float, work_s: float, hops: int = 1) -> float:
    """Seconds of one exchange between these ranks; `share` ranks on a host each exchange a part at the same time."""
    rate = run.link_bits_per_s / 8 * _PAYLOAD_OF_FRAME / share if run.hosts > 1 else math.inf
    link = LinkCost(_LATENCY_S, rate, _START_S)
    codec = CodecCost(bytes_per_element, work_s, _UNHIDDEN)
    elements = round(run.params / share)
    piece = max(_ELEMENTS, min(4 * _ELEMENTS, elements // 12), least_elements(ranks))  # as `layout.flat.partition` cuts
    return exchange_s(elements, ranks, codec, link, piece=piece, hops=hops) if ranks > 1 else 0.0


def _step_s(run: Run, during: float, behind: float = 0.0) -> tuple[float, float]:
    """Least and most seconds of a step. during: traffic that backward can hide; behind: traffic after it."""
    least = run.compute_s + max(0.0, during - _HIDDEN_BY_BACKWARD * run.compute_s) + behind
    return least, run.compute_s + during + behind
