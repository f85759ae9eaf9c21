"""The cost model's numbers from measured points: least squares on the relative error, and its test on left-out points.

The model is `onebit/comm/cost.py`. Bandwidth is not fitted: it is the emulated rate, less the headers of full frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from bench.collective import FP32, ONE_BIT

from onebit.cli.cluster import parse_rate
from onebit.comm import SignCodec
from onebit.comm.cost import PIECE, CodecCost, LinkCost, exchange_s

PAYLOAD_OF_FRAME = 1448 / 1514  # Ethernet, IPv4 and TCP headers with timestamps, at an MTU of 1500
BYTES_PER_ELEMENT = {ONE_BIT: SignCodec().frame_bytes(PIECE) / PIECE, FP32: 4.0}
PIECES = {ONE_BIT: PIECE, FP32: None}
_START = (3e-5, 3e-9, 1e-3, 0.3)


@dataclass(frozen=True)
class Point:
    """One measured collective. rate: as tc writes it; seconds: the median."""

    side: str
    hosts: int
    rate: str
    elements: int
    cores: int
    seconds: float
    sent_bytes: int = 0
    low_s: float = 0.0
    high_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What is fitted, for one side."""

    side: str
    latency_s: float
    s_per_element: float
    start_s: float
    unhidden: float

    def codec(self) -> CodecCost:
        return CodecCost(BYTES_PER_ELEMENT[self.side], self.s_per_element, self.unhidden)

    def link(self, rate: str) -> LinkCost:
        return LinkCost(self.latency_s, bytes_per_s(rate), self.start_s)

    def predict(self, hosts: int, rate: str, elements: int, ranks_per_core: float, piece: int | None = None) -> float:
        piece = PIECES[self.side] if piece is None else piece
        return exchange_s(
            elements, hosts, self.codec(), self.link(rate), piece=piece, ranks_per_core=max(1.0, ranks_per_core)
        )


def bytes_per_s(rate: str) -> float:
    """Payload that passes a link of this rate; inf where it has none."""
    bits_per_s = parse_rate(rate)
    return float("inf") if bits_per_s is None else bits_per_s / 8 * PAYLOAD_OF_FRAME


def error(costs: Costs, point: Point) -> float:
    """Predicted over measured, less 1. One rank per emulated host, all on the point's cores."""
    return costs.predict(point.hosts, point.rate, point.elements, point.hosts / point.cores) / point.seconds - 1


def fit(points: Sequence[Point], start: Sequence[float] = _START, rounds: int = 100) -> Costs:
    """The costs with the least sum of squared relative errors over points of one side (Levenberg-Marquardt).

    In logarithms (unhidden: in log-odds), so that none leaves its range; steps are damped least-squares solutions.
    """
    side = points[0].side
    *positive, share = start
    at = np.array([*np.log(positive), np.log(share / (1 - share))])
    damping, errors = 1e-2, _errors(at, side, points)
    for _ in range(rounds):
        slopes = np.stack([(_errors(at + 1e-4 * way, side, points) - errors) / 1e-4 for way in np.eye(len(at))], axis=1)
        padded = np.concatenate([slopes, np.sqrt(damping) * np.eye(len(at))])
        step = np.linalg.lstsq(padded, np.concatenate([-errors, np.zeros(len(at))]), rcond=None)[0]
        tried = _errors(at + np.clip(step, -2, 2), side, points)
        if tried @ tried < errors @ errors:
            is_over = tried @ tried > (1 - 1e-9) * (errors @ errors)
            at, errors, damping = at + np.clip(step, -2, 2), tried, damping / 3
        else:
            is_over = damping > 1e9
            damping *= 4
        if is_over:
            break
    return _costs(at, side)


def _costs(at: np.ndarray, side: str) -> Costs:
    latency, work, began = np.exp(np.clip(at[:3], -40, 0))
    return Costs(side, float(latency), float(work), float(began), float(1 / (1 + np.exp(-np.clip(at[3], -12, 12)))))


def _errors(at: np.ndarray, side: str, points: Sequence[Point]) -> np.ndarray:
    costs = _costs(at, side)
    return np.array([error(costs, point) for point in points])


def leave_one_out(points: Sequence[Point]) -> list[float]:
    """For each point the error of the costs that were fitted without it."""
    whole = fit(points)
    odds = min(max(whole.unhidden, 1e-4), 1 - 1e-4)
    start = (whole.latency_s, whole.s_per_element, whole.start_s, odds)
    return [error(fit([p for p in points if p is not left_out], start, 30), left_out) for left_out in points]
