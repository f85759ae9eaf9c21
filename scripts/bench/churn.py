"""Members that are killed and come back: seconds until the others step again, until it counts again, goodput.

    python scripts/bench.py churn --every 15 --seconds 120 --record runs/churn.md
    python scripts/bench.py churn --ways onebit local torchft torchft-diloco torchrun --torchft PYTHON

Processes on this machine, with computing emulated by sleeping. Every so many seconds a random member is killed with
SIGKILL; its process is started again after a pause. All ways have the same schedule, whose pauses are drawn: regular
ones would always meet the same point of a round. Goodput: samples that count, over those of an undisturbed run of the
same way and length, and over what the living ones could have done (a member lives from its first step to its kill).
PYTHON is that of an environment with torchft; the ways are in `churn_ways.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from reports import publish, table

from bench import churn_ways
from bench.churn_ways import ROUND, SAMPLES, WAYS, WIDTH, command, lighthouse
from bench.record import here, parser_of

SPREAD = (0.8, 1.2)
"""Times between two kills, over their mean."""


@dataclass
class Life:
    """One process of a member. ended: when it was killed, or when the run ended."""

    name: str
    out: Path
    started: float
    process: subprocess.Popen[bytes]
    ended: float = 0.0

    def kill(self) -> None:
        """As a machine goes: at once, and with torchrun's rank, a child in another session."""
        pid = self.process.pid
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(pid, signal.SIGSTOP)
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for each in (*map(int, children), pid):
                os.kill(each, signal.SIGKILL)
        self.process.wait()

    def steps(self) -> list[tuple[float, int, int]]:
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


@dataclass
class Churn:
    """What happened from when all members had taken a step: kills as (when, name); lives of all members."""

    way: str
    began: float = 0.0
    ended: float = 0.0
    kills: list[tuple[float, str]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)

    def to_next_step(self) -> list[float]:
        """From each kill to the end of the first step that the others have taken without the killed member."""
        found = []
        for when, name in self.kills:
            members = next(life for life in self.lives if life.name == name and life.ended == when).steps()[-1][2]
            lives = [life for life in self.lives if life.started < when and not life.ended <= when]
            others = [step for life in lives for step in life.steps()]
            found += sorted(t - when for t, _, present in others if t > when and present < members)[:1]
        return found

    def to_count_again(self) -> list[float]:
        """From the start of each process that came back to its first step."""
        late = [life for life in self.lives if life.started > self.lives[0].started + 5 and life.steps()]
        return [life.steps()[0][0] - life.started for life in late]

    def samples(self) -> int:
        """Samples of all members; a step that was taken again counts as it was taken last."""
        steps = sorted(step for life in self.lives for step in life.steps() if step[0] > self.began)
        return sum({number: members for _, number, members in steps}.values()) * SAMPLES.get(self.way, 1)

    def per_second(self) -> float:
        return self.samples() / (self.ended - self.began)

    def alive_s(self) -> float:
        """Seconds that members lived, from their first step on."""
        return sum(life.ended - max(life.steps()[0][0], self.began) for life in self.lives if life.steps())


def run(args: argparse.Namespace, way: str, every: float, folder: Path, seed: int) -> Churn:
    """One run of the schedule; every: 0: nobody is killed."""
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    draw, draw_pause = random.Random(seed), random.Random(seed)
    churn, until = Churn(way), time.time() + args.seconds + 8.0
    port, light = store.port, None
    if way.startswith("torchft"):
        port = store.port + 1
        light = lighthouse(args.torchft, port)
        time.sleep(1.0)

    def start(name: str) -> None:
        life = f"{name}-{len(churn.lives)}"
        out = folder / f"{life}.jsonl"
        call = [way, f"127.0.0.1:{port}", life, args.members, args.compute, out, until, args.layers]
        python = args.torchft if light is not None else sys.executable  # its environment has no onebit
        script = [churn_ways.__file__, *map(str, call)]
        with (folder / f"{life}.log").open("w") as log:
            process = subprocess.Popen(
                command(way, python, script, f"127.0.0.1:{port}", args.members),
                stdout=log,
                stderr=log,
            )
        churn.lives.append(Life(name, out, time.time(), process))

    for k in range(args.members):
        start(f"member {k}")
    while not all(life.steps() for life in churn.lives):
        if time.time() > until:
            raise RuntimeError(f"{way}: not all members have begun; see the files in {folder}")
        time.sleep(0.1)
    churn.began, churn.ended = time.time(), until
    next_kill, back = churn.began + every * draw_pause.uniform(*SPREAD), []
    while (now := time.time()) < until - 1.0:
        for due, name in [each for each in back if each[0] <= now]:
            start(name)
            back.remove((due, name))
        living = [life for life in churn.lives if not life.ended and life.steps()]
        if every and now >= next_kill and len(living) > 1:
            victim = draw.choice(living)
            victim.kill()
            victim.ended = time.time()
            churn.kills.append((victim.ended, victim.name))
            back.append((now + args.back_after, victim.name))
            next_kill += every * draw_pause.uniform(*SPREAD)
        time.sleep(0.05)
    for life in churn.lives:
        life.ended = life.ended or until
        with suppress(subprocess.TimeoutExpired):
            life.process.wait(timeout=max(0.1, until + 10.0 - time.time()))
        life.kill()  # one that came too late waits for an epoch
    if light is not None:
        light.kill()
    return churn


HEADS = ("way", "killed every", "kills", "next step, s", "counts again, s", "samples / undisturbed", "/ of the living")


def rows_of(way: str, by_interval: dict[float, Churn]) -> Iterator[list[object]]:
    """A row for each interval between kills; the undisturbed run comes first."""
    calm = by_interval[0.0]
    rate = calm.samples() / calm.alive_s()
    yield [way, "never", 0, "-", "-", f"{calm.per_second():.1f} a second", 1]
    for every, churn in by_interval.items():
        if every:
            waits = [
                f"{statistics.median(each):.2f} ({max(each):.2f})" if each else "-"
                for each in (churn.to_next_step(), churn.to_count_again())
            ]
            of_all, of_living = churn.per_second() / calm.per_second(), churn.samples() / churn.alive_s() / rate
            yield [way, f"{every:g} s", len(churn.kills), *waits, f"{of_all:.2f}", f"{of_living:.2f}"]


def report(args: argparse.Namespace, runs: dict[str, dict[float, Churn]]) -> str:
    rows = [row for way, by_interval in runs.items() for row in rows_of(way, by_interval)]
    return f"""# Members that are killed and come back

{here()}

{args.members} members on one machine, {args.layers * (WIDTH + 1) * WIDTH / 1e6:.1f} M parameters, {args.compute:g} s of
emulated compute a step, {args.seconds:g} s a run; a killed member starts again after {args.back_after:g} s. Times
between kills are drawn, up to a fifth longer or shorter. Medians, and the largest.

{table(HEADS, rows, names=2)}

Next step: from SIGKILL to the end of the first step that counts without the killed member, compute included; of `local`
and `torchft-diloco`, of the first round of {ROUND} steps. Counts again: from the start of the new process, with
Python's and torch's imports, to its first step. Of the living: samples per second that a member lived, over the
undisturbed run's.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("churn", __doc__)
    add = parser.add_argument
    add("--ways", nargs="+", choices=WAYS, default=["onebit"], help="what trains (default: onebit)")
    add("--torchft", metavar="PYTHON", help="of an environment with torchft 0.2.0 and this torch")
    add("--members", type=int, default=4, help="how many there are (default: 4)")
    add("--layers", type=int, default=4, help=f"linear layers of {WIDTH} x {WIDTH} (default: 4)")
    add("--compute", type=float, default=0.2, metavar="SECONDS", help="of a step, emulated (default: 0.2)")
    add("--every", type=float, nargs="+", default=[60.0, 30.0, 15.0], metavar="SECONDS", help="between two kills")
    after = "until a killed one starts again (default: 10)"
    add("--back-after", type=float, default=10.0, metavar="SECONDS", help=after)
    add("--seconds", type=float, default=180.0, help="of one run, with the start (default: 180)")
    add("--seed", type=int, default=0, help="of the choice of victims (default: 0)")
    args = parser.parse_args(argv)
    if args.torchft is None and any(way.startswith("torchft") for way in args.ways):
        parser.error(
            "torchft needs another environment: python -m venv V; V/bin/pip install torchft==0.2.0 "
            "torch==2.13.0; --torchft V/bin/python"
        )
    kept: dict[str, dict[float, Churn]] = {way: {} for way in args.ways}
    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        for way in args.ways:
            for every in (0.0, *args.every):
                place = Path(folder, f"{way}-{every:g}")
                place.mkdir()
                kept[way][every] = run(args, way, every, place, args.seed)
        publish(args, report(args, kept))
