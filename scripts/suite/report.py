"""What the suite's lines say: a table per network with ratios and physical limits, and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.record import machines
from reports import table
from train.model import SIZES, build_model

from onebit.cli.cluster import parse_rate

NAMES = {"none": "Unshaped link", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
BASELINE = {"collective": "all-reduce fp32", "step": "ddp-fp32"}
OURS = ("onebit", "sharded", "zero-one")


@dataclass(frozen=True)
class Setting:
    """What the lines of one report have in common. elements: of the collective; size, batch: of the training."""

    elements: int
    size: str
    batch: int

    def mark(self, line: dict) -> dict:
        return line | {"setting": asdict(self)}

    def holds(self, line: dict) -> bool:
        return line.get("setting") == asdict(self)


@dataclass(frozen=True)
class Row:
    """One contender on one network: medians in seconds, bytes per step of rank 0; None: not known."""

    what: str
    contender: str
    network: str
    hosts: int
    seconds: list[float]
    sent_bytes: float | None
    wire_bytes: float | None
    compute_s: float | None = None
    local_s: float | None = None
    memory_s: float | None = None

    @property
    def s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def is_ours(self) -> bool:
        return self.contender.startswith(OURS)

    @property
    def payload_s(self) -> float | None:
        """The payload over the rate, headers left out of both."""
        rate = parse_rate(self.network)
        return None if rate is None or self.sent_bytes is None else 8 * self.sent_bytes / rate

    @property
    def limit_s(self) -> float | None:
        """What no implementation with this payload passes, were all else hidden: the longer of wire and machine."""
        known = [s for s in (self.payload_s, self.memory_s, self._work_s) if s is not None]
        return max(known, default=None)

    @property
    def _work_s(self) -> float | None:
        return None if self.compute_s is None or self.what == "collective" else self.compute_s + (self.local_s or 0.0)

    @property
    def exposed_s(self) -> float | None:
        """What a step takes beyond its work: traffic that was not hidden."""
        return None if self._work_s is None else max(0.0, self.s - self._work_s)


def memory_bytes(contender: str, elements: int, hosts: int) -> float | None:
    """What one rank's exchange reads and writes in memory, at the least, with every tensor out of cache.

    One-bit: encode (tensor, error, residual: 12), error (8) and decode (4), and the owned chunk's 24. Dense: a ring
    adds each element (W-1)/W times (12), or 6 in bfloat16 with 12 for both casts. DeepSpeed's: 206, counted by a
    dispatcher. The kernel's copies of what is sent, two at each end: 8 bytes per byte of payload.
    """
    W = hosts
    sent = 2 * (W - 1) / W
    per_element = {
        "onebit over gloo": 24 + 24 / W + 8 * sent * 0.133,
        "onebit over mpi": 24 + 24 / W + 8 * sent * 0.133,
        "all-reduce fp32": 12 * (W - 1) / W + 8 * sent * 4,
        "all-reduce bf16": 6 * (W - 1) / W + 12 + 8 * sent * 2,
        "deepspeed compressed_allreduce": 206 + 8 * sent * 0.125,
    }
    return per_element[contender] * elements if contender in per_element else None


def rows_of(lines: Sequence[dict], setting: Setting) -> list[Row]:
    """The newest line of each contender, network and number of hosts that was measured in this setting."""
    rows: dict[tuple, Row] = {}
    memory_bytes_per_s = 0.0
    for line in lines:
        if line["what"] == "machine":
            memory_bytes_per_s = line["memory_bytes_per_s"]
        elif setting.holds(line) and "seconds" in line:
            key = (line["network"], line["what"], line["hosts"], line["contender"])
            rows.pop(key, None)
            rows[key] = _row(line, setting, memory_bytes_per_s)
    return list(rows.values())


def _row(line: dict, setting: Setting, memory_bytes_per_s: float) -> Row:
    in_memory = memory_bytes(line["contender"], setting.elements, line["hosts"])
    return Row(
        what=line["what"],
        contender=line["contender"],
        network=line["network"],
        hosts=line["hosts"],
        seconds=line["seconds"],
        sent_bytes=line["sent_bytes"],
        wire_bytes=line["wire_bytes"],
        compute_s=_median(line.get("compute_seconds")),
        local_s=_median(line.get("local_seconds")),
        memory_s=None if in_memory is None else line["hosts"] * in_memory / memory_bytes_per_s,
    )


def _median(seconds: list[float] | None) -> float | None:
    return statistics.median(seconds) if seconds else None


# ---------------------------------------------------------------- tables


def report(lines: Sequence[dict], setting: Setting) -> str:
    """The record, in Markdown."""
    return "\n".join(_report(lines, setting)) + "\n"


def _report(lines: Sequence[dict], setting: Setting) -> Iterator[str]:
    rows = rows_of(lines, setting)
    yield "# Benchmark suite: contenders on emulated Ethernet"
    yield ""
    yield from machines(lines)
    yield from _explanation(setting)
    yield from _absent(lines, setting, rows)
    for network in sorted({row.network for row in rows}, key=lambda network: parse_rate(network) or 10**12):
        yield f"## {NAMES.get(network, network)}"
        yield ""
        yield from _table([row for row in rows if row.network == network])


def _explanation(setting: Setting) -> Iterator[str]:
    size = SIZES[setting.size]
    parameters = sum(p.numel() for p in build_model(setting.size, 0).parameters())
    yield (
        "Hosts are network namespaces of this one machine with one rank each, and share its cores: only the network is "
        f"slow. Collective: {setting.elements:,} float32 numbers. Step: forward, backward and update of a GPT of "
        f"{parameters / 1e6:.1f} M parameters (`{setting.size}`), {setting.batch} x {size.context} bytes per rank, "
        "all ranks starting together. Medians of the slowest rank; ours in their compressed steps, PowerSGD with rank "
        "1 in one bucket, the rest of DDP in its own; fp16 and bf16 are hooks. Dense all-reduces travel over Gloo."
    )
    yield ""
    yield (
        "Sent: payload of one rank. Wire: the queue's own counter over the payload, headers and acknowledgements "
        "included. Limits: payload over the rate; for a collective also the memory traffic of all ranks over what the "
        "machine's memory passes, for a step also its own work without any traffic (forward and backward, then the "
        "update: compute + local). s / limit: over the longest of these. Not hidden: the step less compute and local; "
        "DeepSpeed's includes its local work, and of DDP's hooks the casts and PowerSGD's arithmetic."
    )
    yield ""


def _absent(lines: Sequence[dict], setting: Setting, rows: Sequence[Row]) -> Iterator[str]:
    """What the tables lack, and why."""
    last = next((line for line in reversed(lines) if line["what"] == "machine"), {})
    if last.get("deepspeed") and not any(row.contender.startswith("deepspeed") for row in rows):
        yield f"**DeepSpeed is left out:** {last['deepspeed']}."
        yield ""
    measured = {(row.what, row.contender, row.network, row.hosts) for row in rows}
    failed = {
        (line["what"], line["contender"], line["network"], line["hosts"]): line["error"]
        for line in lines
        if setting.holds(line) and "error" in line
    }
    for key, error in failed.items():
        if key not in measured:
            yield f"**Failed:** {key[0]} {key[1]}, {key[2]}, {key[3]} hosts: {error}."
            yield ""


_HEADINGS = (
    "hosts", "what", "contender", "sent MB", "wire", "s", "spread", "faster than fp32", "payload/bandwidth s",
    "memory s", "compute s", "local s", "s / limit", "not hidden s",
)  # fmt: skip


def _table(rows: Sequence[Row]) -> Iterator[str]:
    ordered = sorted(rows, key=lambda row: (row.what, -row.hosts, row.s))
    yield table(_HEADINGS, (_cells(row, _find(rows, row.what, BASELINE[row.what], row.hosts)) for row in ordered), 3)
    yield ""


def _find(rows: Sequence[Row], what: str, contender: str, hosts: int) -> Row | None:
    return next((r for r in rows if (r.what, r.contender, r.hosts) == (what, contender, hosts)), None)


def _cells(row: Row, baseline: Row | None) -> list[str]:
    return [
        str(row.hosts),
        row.what,
        f"**{row.contender}**" if row.is_ours else row.contender,
        _form(row.sent_bytes and row.sent_bytes / 1e6, ".2f"),
        _form(row.wire_bytes and row.sent_bytes and row.wire_bytes / row.sent_bytes, ".3f"),
        f"{row.s:.3f}",
        f"{min(row.seconds):.3f}-{max(row.seconds):.3f}, {len(row.seconds)}",
        _form(baseline and baseline.s / row.s, ".2f", " ×"),
        _form(row.payload_s, ".3f"),
        _form(row.memory_s, ".3f"),
        _form(None if row.what == "collective" else row.compute_s, ".3f"),
        _form(row.local_s, ".3f"),
        _form(row.limit_s and row.s / row.limit_s, ".2f"),
        _form(row.exposed_s, ".3f"),
    ]


def _form(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


# ---------------------------------------------------------------- figure


def draw(lines: Sequence[dict], setting: Setting, out: Path) -> None:
    """Write a PNG: a panel per network and number of hosts, seconds of a step by contender and by what they go into."""
    from matplotlib.figure import Figure

    rows = [row for row in rows_of(lines, setting) if row.what == "step"]
    networks = sorted({row.network for row in rows}, key=lambda network: parse_rate(network) or 10**12)
    hosts = sorted({row.hosts for row in rows}, reverse=True)
    figure = Figure(figsize=(6.5 * max(1, len(hosts)), 3.2 * max(1, len(networks))), layout="constrained")
    if rows:
        grid = figure.subplots(len(networks), len(hosts), squeeze=False)
        for network, panels in zip(networks, grid, strict=True):
            for W, axes in zip(hosts, panels, strict=True):
                _panel(axes, [row for row in rows if (row.network, row.hosts) == (network, W)])
                axes.set_title(f"{NAMES.get(network, network)}, {W} hosts", fontsize=10)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.savefig(out, dpi=100)


def _panel(axes, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: -row.s)
    names = [row.contender for row in rows]
    left = [0.0] * len(rows)
    parts = {
        "forward and backward": [row.compute_s or 0.0 for row in rows],
        "update": [row.local_s or 0.0 for row in rows],
        "traffic not hidden": [row.exposed_s or 0.0 for row in rows],
    }
    for (label, widths), color in zip(parts.items(), ("C0", "C2", "C3"), strict=True):
        axes.barh(names, widths, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.plot([row.payload_s or 0.0 for row in rows], names, "k|", label="payload/bandwidth", markersize=10)
    for row, end in zip(rows, left, strict=True):
        axes.annotate(f" {row.s:.2f} s", (end, row.contender), va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel("seconds per step")
    axes.grid(alpha=0.3, axis="x")
