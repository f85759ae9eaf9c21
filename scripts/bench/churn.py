"""Members that are killed and come back: seconds until the others step again, until it counts again, goodput.

    python scripts/bench.py churn --every 15 --seconds 120 --record runs/churn.md

Processes on this machine, with computing emulated by sleeping. Every so many seconds a random member is killed with
SIGKILL; its process is started again after a pause. Goodput: samples of all members over those of an undisturbed run of
the same length with all of them, and over what the living ones could have done (a member lives from its first step to
its kill).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from provenance import record_path, write_record
from torch import nn

import onebit
from bench.command import words
from bench.record import describe_machine, machines
from onebit import membership
from onebit.membership.network import serve

WIDTH = 512


def worker(address: str, name: str, founders: int, compute_s: float, out: str, until: float, layers: int) -> None:
    """One member: a line of JSON for each step, with when it ended and how many members took it."""
    torch.set_num_threads(1)
    patience = membership.Patience(wait_s=60.0)
    members = membership.connect(address, name=name, founders=founders, timeout_s=10.0, patience=patience)
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = onebit.OnebitAdam(net.parameters(), lr=1e-4, transport=members, compression="always", freeze_step=5)
    membership.begin(optimizer)
    with Path(out).open("w", buffering=1) as file:
        while time.time() < until:
            net(torch.randn(8, WIDTH)).square().mean().backward()
            time.sleep(compute_s)
            optimizer.step()
            optimizer.zero_grad()
            file.write(json.dumps([time.time(), optimizer.steps_taken(), members.world_size]) + "\n")
    members.abandon()


@dataclass
class Life:
    """One process of a member. ended: when it was killed, or when the run ended."""

    name: str
    out: Path
    started: float
    process: subprocess.Popen[bytes]
    ended: float = 0.0

    def steps(self) -> list[tuple[float, int, int]]:
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


@dataclass
class Churn:
    """What happened: kills as (when, name); lives of all members."""

    compute_s: float
    seconds: float
    kills: list[tuple[float, str]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)

    def to_next_step(self) -> list[float]:
        """From each kill to the end of the first step that the others have taken without the killed member."""
        found = []
        for when, name in self.kills:
            members = next(life for life in self.lives if life.name == name and life.ended == when).steps()[-1][2]
            others = [step for life in self.lives if life.name != name for step in life.steps()]
            found += sorted(t - when for t, _, present in others if t > when and present < members)[:1]
        return found

    def to_count_again(self) -> list[float]:
        """From the start of each process that came back to its first step."""
        late = [life for life in self.lives if life.started > self.lives[0].started + 5 and life.steps()]
        return [life.steps()[0][0] - life.started for life in late]

    def samples(self) -> int:
        """Steps of all members, each counted where its process ended it."""
        return sum(len(life.steps()) for life in self.lives)

    def alive_s(self) -> float:
        """Seconds that members lived, from their first step on."""
        return sum(life.ended - life.steps()[0][0] for life in self.lives if life.steps())


def run(args: argparse.Namespace, every: float, folder: Path, seed: int) -> Churn:
    """One run of the schedule; every: 0: nobody is killed."""
    store, draw = serve(0), random.Random(seed)
    churn, until = Churn(args.compute, args.seconds), time.time() + args.seconds + 8.0

    def start(name: str) -> None:
        life = f"{name}-{len(churn.lives)}"
        out = folder / f"{life}.jsonl"
        call = ["worker", f"127.0.0.1:{store.port}", life, args.members, args.compute, out, until, args.layers]
        process = subprocess.Popen(words("churn", *map(str, call)))
        churn.lives.append(Life(name, out, time.time(), process))

    for k in range(args.members):
        start(f"member {k}")
    while not all(life.steps() for life in churn.lives):
        time.sleep(0.1)
    next_kill, back = time.time() + every, []
    while (now := time.time()) < until - 1.0:
        for due, name in [each for each in back if each[0] <= now]:
            start(name)
            back.remove((due, name))
        living = [life for life in churn.lives if not life.ended and life.steps()]
        if every and now >= next_kill and len(living) > 1:
            victim = draw.choice(living)
            victim.process.kill()
            victim.ended = time.time()
            churn.kills.append((victim.ended, victim.name))
            back.append((now + args.back_after, victim.name))
            next_kill += every
        time.sleep(0.05)
    for life in churn.lives:
        life.ended = life.ended or until
        with suppress(subprocess.TimeoutExpired):
            life.process.wait(timeout=max(0.1, until + 10.0 - time.time()))
        life.process.kill()  # one that came too late waits for an epoch
    return churn


def report(args: argparse.Namespace, calm: Churn, runs: dict[float, Churn]) -> str:
    lines = [
        "# Members that are killed and come back",
        "",
        f"{args.members} members on one machine, {args.layers * (WIDTH + 1) * WIDTH / 1e6:.1f} M parameters, "
        f"{args.compute:g} s of emulated compute a step, {args.seconds:g} s a run; a killed member starts again after "
        f"{args.back_after:g} s. Medians, and the largest.",
        "",
        *machines([describe_machine()]),
        "| killed every | kills | next step, s | counts again, s | samples / undisturbed | / of the living |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    rate = calm.samples() / calm.alive_s()
    for every, churn in runs.items():
        step, back = churn.to_next_step(), churn.to_count_again()
        of_all = churn.samples() / calm.samples()
        of_living = churn.samples() / churn.alive_s() / rate
        cells = [f"{statistics.median(each):.2f} ({max(each):.2f})" if each else "-" for each in (step, back)]
        lines.append(f"| {every:g} s | {len(churn.kills)} | {' | '.join(cells)} | {of_all:.2f} | {of_living:.2f} |")
    lines += [
        "",
        "Next step: from SIGKILL to the end of the first step without the killed member, one step of compute included. "
        "Counts again: from the start of the new process, with Python's and torch's imports, to its first step. Of the "
        "living: samples per second that a member lived, over the undisturbed run's.",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["worker"]:
        address, name, founders, compute, out, until, layers = given[1:]
        return worker(address, name, int(founders), float(compute), out, float(until), int(layers))
    parser = argparse.ArgumentParser(prog="bench.py churn", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--members", type=int, default=4, help="how many there are (default: 4)")
    add("--layers", type=int, default=4, help=f"linear layers of {WIDTH} x {WIDTH} (default: 4)")
    add("--compute", type=float, default=0.2, metavar="SECONDS", help="of a step, emulated (default: 0.2)")
    add("--every", type=float, nargs="+", default=[60.0, 30.0, 15.0], metavar="SECONDS", help="between two kills")
    add(
        "--back-after",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="until a killed one starts again (default: 10)",
    )
    add("--seconds", type=float, default=180.0, help="of one run (default: 180)")
    add("--seed", type=int, default=0, help="of the choice of victims (default: 0)")
    add("--record", type=record_path, metavar="FILE", help="write the table there")
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        kept = {}
        for every in (0.0, *args.every):
            place = Path(folder, f"{every:g}")
            place.mkdir()
            kept[every] = run(args, every, place, args.seed)
        calm = kept.pop(0.0)
        text = report(args, calm, kept)
    print(text)
    if args.record is not None:
        write_record(args.record, text)


if __name__ == "__main__":
    main()
