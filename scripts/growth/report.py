"""What growth.py's lines say: points and model beside each other, left-out points, estimates, a figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.collective import FP32, ONE_BIT
from bench.record import machines

from growth.fit import Costs, Point, bytes_per_s, error, fit, leave_one_out
from onebit.comm.cost import PIECE, payload_bytes

GOAL = 0.15
ESTIMATED_HOSTS = (64, 1024)
ESTIMATED_ELEMENTS = (25_000_000, 100_000_000, 1_000_000_000)
ESTIMATED_RATES = ("100mbit", "1gbit", "10gbit")
NAMES = {"none": "unshaped"}


def points_of(lines: Sequence[dict]) -> list[Point]:
    """A point per side, hosts, network and size; the newest where there are several."""
    newest = {
        (line["side"], line["hosts"], line["network"], line["elements"]): Point(
            line["side"],
            line["hosts"],
            line["network"],
            line["elements"],
            line["cores"],
            statistics.median(line["seconds"]),
            line["sent_bytes"],
            min(line["seconds"]),
            max(line["seconds"]),
        )
        for line in lines
        if line["what"] == "growth"
    }
    return list(newest.values())


def report(lines: Sequence[dict]) -> str:
    return "\n".join(_report(lines)) + "\n"


def _report(lines: Sequence[dict]) -> Iterator[str]:
    points = points_of(lines)
    yield "# Growth of the collective, and what it costs elsewhere"
    yield ""
    yield from machines(lines)
    yield (
        "One rank per emulated host over Gloo, caches cold. Medians, the slowest rank of each repetition. Hosts share "
        "the cores: c = hosts / cores, at least 1. Model: `onebit/comm/cost.py`, fitted to the relative error; left "
        "out: what the model says of a point after a fit without it. Limit: payload over the rate less headers. fp32 "
        "all-reduces of many seconds are not measured."
    )
    yield ""
    left_out = {(line["hosts"], line["elements"]) for line in lines if line["what"] == "left out"}
    for hosts, elements in sorted(left_out):
        yield f"Not measured, for want of memory: {hosts} hosts with {elements:,} parameters."
        yield ""
    for side in (ONE_BIT, FP32):
        mine = [point for point in points if point.side == side]
        if len(mine) > 3:
            yield from _side(side, mine)
    costs = {side: fit(mine) for side in (ONE_BIT, FP32) if len(mine := [p for p in points if p.side == side]) > 3}
    if len(costs) == 2:
        yield from _estimates(costs)


def _side(side: str, points: Sequence[Point]) -> Iterator[str]:
    costs, without = fit(points), leave_one_out(points)
    good = sum(abs(e) <= GOAL for e in without)
    yield f"## {side}"
    yield ""
    yield (
        f"{1e9 * costs.s_per_element:.2f} ns per element, {1e6 * costs.latency_s:.0f} µs per message and "
        f"{1e3 * costs.start_s:.1f} ms per exchange of a rank's own processor; {costs.unhidden:.0%} of the shorter of "
        f"wire and work shows. Left-out points: {good} of {len(points)} within {GOAL:.0%}, mean "
        f"{statistics.fmean(map(abs, without)):.1%}, worst {max(without, key=abs):+.1%}."
    )
    yield ""
    yield "| network | hosts | M parameters | sent MB | s | spread | limit s | s / limit | model | left out |"
    yield "| --- |" + " --- |" * 9
    order = sorted(zip(points, without, strict=True), key=lambda pair: _order(pair[0]))
    for point, left_out in order:
        yield _row(point, error(costs, point), left_out)
    yield ""


def _order(point: Point) -> tuple:
    return bytes_per_s(point.rate), point.hosts, point.elements


def _row(point: Point, fitted: float, left_out: float) -> str:
    limit = point.sent_bytes / bytes_per_s(point.rate)
    cells = [
        NAMES.get(point.rate, point.rate),
        str(point.hosts),
        f"{point.elements / 1e6:g}",
        f"{point.sent_bytes / 1e6:.2f}",
        f"{point.seconds:.4f}",
        f"{point.low_s:.4f}-{point.high_s:.4f}",
        f"{limit:.4f}" if limit else "",
        f"{point.seconds / limit:.2f}" if limit else "",
        f"{fitted:+.0%}",
        f"{left_out:+.0%}" + ("" if abs(left_out) <= GOAL else " !"),
    ]
    return f"| {' | '.join(cells)} |"


def _estimates(costs: dict[str, Costs]) -> Iterator[str]:
    yield "## Estimates: nobody measured these"
    yield ""
    yield (
        "By the same costs, one rank per host on processors of its own like these (c = 1), every link at its full rate "
        f"at once. One-bit in pieces of {PIECE:,} elements as here, and in the best of larger ones: with many hosts it "
        "is the messages that cost. fp32: a ring."
    )
    yield ""
    yield "| hosts | M parameters | network | one-bit s | best piece, M | one-bit s | fp32 s | ratio |"
    yield "| --- |" + " --- |" * 7
    for hosts in ESTIMATED_HOSTS:
        for elements in ESTIMATED_ELEMENTS:
            for rate in ESTIMATED_RATES:
                yield _estimate(costs, hosts, elements, rate)
    yield ""


def _estimate(costs: dict[str, Costs], hosts: int, elements: int, rate: str) -> str:
    def one_bit(piece: int) -> float:
        return costs[ONE_BIT].predict(hosts, rate, elements, 1.0, piece)

    # At least eight pieces: the model's overlap is that of many.
    best = min((PIECE << k for k in range(11) if k == 0 or PIECE << k <= elements // 8), key=one_bit)
    dense = costs[FP32].predict(hosts, rate, elements, 1.0)
    cells = [
        str(hosts),
        f"{elements / 1e6:g}",
        rate,
        f"~{one_bit(PIECE):.2f}",
        f"{best / 1e6:.0f}",
        f"~{one_bit(best):.2f}",
        f"~{dense:.1f}",
        f"~{dense / one_bit(best):.0f} ×",
    ]
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- figure


def draw(points: Sequence[Point], out: Path) -> None:
    """Write a PNG: a panel per network, seconds against parameters; lines: the model. Last: bytes against hosts."""
    from matplotlib.figure import Figure

    rates = sorted({point.rate for point in points}, key=bytes_per_s)
    figure = Figure(figsize=(4 * (len(rates) + 1), 4.2), layout="constrained")
    *panels, bytes_panel = figure.subplots(1, len(rates) + 1)
    for side, marker in ((ONE_BIT, "o"), (FP32, "s")):
        mine = [point for point in points if point.side == side]
        if len(mine) > 3:
            costs = fit(mine)
            for rate, axes in zip(rates, panels, strict=True):
                _draw_rate(axes, [point for point in mine if point.rate == rate], costs, marker)
            _draw_bytes(bytes_panel, mine, costs, marker)
    for rate, axes in zip(rates, panels, strict=True):
        axes.set(title=NAMES.get(rate, rate), xlabel="million parameters", ylabel="s per exchange")
    bytes_panel.set(title="payload", xlabel="hosts", ylabel="bytes sent per parameter and host")
    for axes in (*panels, bytes_panel):
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(out, dpi=110)


def _draw_rate(axes, points: Sequence[Point], costs: Costs, marker: str) -> None:
    for k, hosts in enumerate(sorted({point.hosts for point in points})):
        mine = sorted((point for point in points if point.hosts == hosts), key=lambda point: point.elements)
        sizes = [point.elements for point in mine]
        model = [costs.predict(hosts, point.rate, point.elements, hosts / point.cores) for point in mine]
        millions, style = [n / 1e6 for n in sizes], "-" if costs.side == ONE_BIT else "--"
        axes.plot(millions, model, style, color=f"C{k}", linewidth=1)
        label = f"{costs.side}, {hosts} hosts"
        axes.plot(millions, [point.seconds for point in mine], marker, color=f"C{k}", label=label, markersize=4)


def _draw_bytes(axes, points: Sequence[Point], costs: Costs, marker: str) -> None:
    worlds = [2, 4, 8, 16, 32, *ESTIMATED_HOSTS]
    axes.plot(worlds, [payload_bytes(1, W, costs.codec()) for W in worlds], "k-", linewidth=1)
    largest = {point.hosts: point for point in sorted(points, key=lambda point: point.elements)}
    axes.plot(
        list(largest), [p.sent_bytes / p.elements for p in largest.values()], marker, label=f"{costs.side}, measured"
    )
