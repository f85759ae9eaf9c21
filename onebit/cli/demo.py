"""`onebit demo`: a small model trained with AdamW and with OnebitAdam, on ranks that are threads of this process.

It shows loss and traffic in a quarter of a minute. For seconds on a network, see the repository's `make demo` and
`onebit doctor`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..comm import SimTransport, run_ranks
from ..dense import DenseAverager
from ..onebit_adam import OnebitAdam
from .numbers import rate
from .output import Screen, Table, write_json

CONTEXT, WIDTH, BYTES = 16, 96, 256
PAYLOAD_OF_FRAME = 1448 / 1514
LAST = 20  # steps at the end whose mean is the loss


@dataclass(frozen=True)
class Run:
    """One training. losses: of rank 0, by step. last_bytes, all_bytes: sent by a rank, in the last step and in all."""

    losses: list[float]
    last_bytes: int
    all_bytes: int
    parameters: int

    @property
    def loss(self) -> float:
        """Nats per byte, the mean of the last steps."""
        return statistics.fmean(self.losses[-LAST:])


class ByteModel(nn.Module):
    """Predicts the next byte from the bytes before it: embeddings, and two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, 24)
        self.layers = nn.Sequential(
            nn.Linear(24 * CONTEXT, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, BYTES)
        )

    def forward(self, windows: Tensor) -> Tensor:
        """The loss of windows of CONTEXT + 1 bytes, [B, CONTEXT + 1]."""
        logits = self.layers(self.embedding(windows[:, :-1]).flatten(1))
        return nn.functional.cross_entropy(logits, windows[:, -1])


def text() -> Tensor:
    """A megabyte of source code of this Python's standard library, as bytes."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= 1 << 20:
            break
    return torch.frombuffer(found, dtype=torch.uint8).long()


def train(transport: SimTransport, first: ByteModel, name: str, steps: int, data: Tensor) -> Run:
    """Train on one rank, from a copy of the first model, on this rank's own windows of the text."""
    model, averager = copy.deepcopy(first), None
    if name == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        averager = DenseAverager(model.parameters(), transport)
    else:
        optimizer = OnebitAdam(
            model.parameters(), lr=3e-3, betas=(0.9, 0.95), transport=transport, compression="always",
            freeze_step=max(1, steps // 5),
        )  # fmt: skip
    generator = torch.Generator().manual_seed(transport.rank)
    losses, sent, began = [], 0, transport.sent_bytes
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1.0 - step / steps)
        starts = torch.randint(len(data) - CONTEXT - 1, (32, 1), generator=generator, device="cpu")
        loss = model(data[starts + torch.arange(CONTEXT + 1, device="cpu")])
        optimizer.zero_grad()
        before = transport.sent_bytes
        loss.backward()
        if averager is not None:
            averager.finish()
        optimizer.step()
        sent = transport.sent_bytes - before
        losses.append(loss.item())
    return Run(losses, sent, transport.sent_bytes - began, sum(p.numel() for p in model.parameters()))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="onebit demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="number of simulated ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each optimizer (default: 300)")
    parser.add_argument("--rate", type=rate, default=1e8, help="rate of the network for which seconds are computed "
                        "(default: 100mbit)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the losses to FILE; - is standard output")
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.steps < 10:
        parser.error(f"--ranks {args.ranks} --steps {args.steps}: expected at least 1 rank and 10 steps")
    screen, data, runs = Screen(), text(), {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = ByteModel()
    for name in ("AdamW", "OnebitAdam"):
        screen.status(f"{name}: {args.steps} steps on {args.ranks} simulated ranks")
        runs[name] = run_ranks(args.ranks, partial(train, first=first, name=name, steps=args.steps, data=data))[0]
    screen.status("")
    screen.table(table(runs, args.ranks, args.steps, args.rate))
    screen.line(
        "Loss and bytes are measured; seconds on the wire are bytes over the rate. To measure on a network, beside "
        "your own computing: onebit emulate --hosts 4 --rate 100mbit -- onebit doctor --params 25m --compute 0.5"
    )
    write_json(args.json, {name: asdict(run) for name, run in runs.items()})
    return 0


def table(runs: dict[str, Run], ranks: int, steps: int, bits_per_s: float) -> Table:
    def wire_s(sent: int) -> str:
        return f"{8 * sent / (bits_per_s * PAYLOAD_OF_FRAME):.3g}"

    rows = [
        [name, f"{run.losses[0]:.3f}", f"{run.loss:.3f}", f"{8 * run.last_bytes / run.parameters:.3g}",
         wire_s(run.last_bytes), wire_s(run.all_bytes)]
        for name, run in runs.items()
    ]  # fmt: skip
    parameters = next(iter(runs.values())).parameters
    title = f"{parameters:,} parameters, {ranks} simulated ranks, {steps} steps, {bits_per_s / 1e6:g} Mbit/s"
    heads = ("optimizer", "first loss", "last loss", "bits/param, last step", "s on the wire, last step", "all steps")
    return Table(title, heads, rows)
