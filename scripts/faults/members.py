"""Members that come and go: killed, stopped, two at once, amid a change, amid a join, with the rendezvous away.

A run is a few processes over Gloo and a rendezvous; a change is one fault. Promised after each: within `PATIENCE_S` all
living members take steps together again, none of them has ended, and the replicas hold the same bits (members compare
them every few steps, and at the end of the run).
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import nn

from faults.case import AS_PROMISED, CRASH, HUNG, REFUSED, SILENT, Case, Outcome, Tools

FOUNDERS, CHANGES, QUICK_CHANGES = 3, 25, 3
PATIENCE_S = 45.0
_LEAST, _MOST = 2, 5
_ENV = os.environ | {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),  # a member runs this file, which imports `faults`
}


# ---------------------------------------------------------------- one member, in its own process


def member(kind: str, address: str, name: str, end: str) -> None:
    """Trains until the step that the file `end` holds; prints each step, and at last a digest of the parameters."""
    import onebit
    from onebit import membership

    torch.set_num_threads(1)
    torch.manual_seed(3)
    patience = membership.Patience(suspect_s=1.0, silent_s=2.0, look_s=0.2, wait_s=PATIENCE_S)
    members = membership.connect(address, founders=FOUNDERS, name=name, timeout_s=3.0, patience=patience)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    if kind == "LocalSteps":
        inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
        optimizer = onebit.LocalSteps(inner, every=5, transport=members, check_replicas_every=1)
    else:
        make = getattr(onebit, kind)
        groups = onebit.muon_groups(net, head=net[2]) if kind == "OnebitMuon" else net.parameters()
        optimizer = make(groups, lr=1e-3, transport=members, compression="always", check_replicas_every=5)
    membership.begin(optimizer)
    draw = torch.Generator().manual_seed(sum(name.encode()))
    while not Path(end).exists() or optimizer.steps_taken() < int(Path(end).read_text()):
        x = torch.randn(8, 64, generator=draw)
        (net(x) - x).square().mean().backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {optimizer.steps_taken()} of {members.world_size}", flush=True)
    optimizer.check_replicas()
    flat = torch.cat([p.detach().view(-1) for p in net.parameters()])
    print(f"done {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}", flush=True)
    members.close()


# ---------------------------------------------------------------- a run and its changes


@dataclass
class Run:
    """The processes of a run. lives: by name, the living members."""

    kind: str
    folder: Path
    random: Random
    rendezvous: subprocess.Popen[bytes] = field(init=False)
    port: int = 0
    lives: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: int = 0

    def __post_init__(self) -> None:
        self.serve()

    def serve(self) -> None:
        command = [sys.executable, "-m", "onebit", "rendezvous", "--port", str(self.port)]
        self.rendezvous = subprocess.Popen(command, stdout=subprocess.PIPE, env=_ENV)
        assert self.rendezvous.stdout is not None
        self.port = int(self.rendezvous.stdout.readline().rpartition(b":")[2])

    def start(self) -> str:
        name, self.started = f"m{self.started}", self.started + 1
        words = [sys.executable, __file__, self.kind, f"127.0.0.1:{self.port}", name, str(self.folder / "end")]
        with self.text_of(name).open("w") as file:
            self.lives[name] = subprocess.Popen(words, stdout=file, stderr=file, env=_ENV)
        return name

    def text_of(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def last(self, name: str) -> tuple[int, int]:
        """The last step of a member, and how many took it; 0, 0 before its first."""
        found = re.findall(r"step (\d+) of (\d+)\n", self.text_of(name).read_text())
        return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)

    def kill(self, names: list[str]) -> None:
        for name in names:
            self.lives.pop(name).kill()

    def victims(self, count: int) -> list[str]:
        return self.random.sample(sorted(self.lives), min(count, max(len(self.lives) - _LEAST, 0)))

    def settled(self) -> Outcome | None:
        """Wait until all living members step together. What is wrong; None: nothing."""
        began, before = time.monotonic(), {name: self.last(name)[0] for name in self.lives}
        while True:
            for name, process in self.lives.items():
                if process.poll() is not None:
                    text = self.text_of(name).read_text().strip().splitlines()[-1:] or [""]
                    verdict = CRASH if process.returncode < 0 else SILENT if "ReplicaError" in text[0] else REFUSED
                    return Outcome("", verdict, f"{name} ended with {process.returncode}: {text[0][:300]}")
            now = {name: self.last(name) for name in self.lives}
            if all(step > before[name] and size == len(self.lives) for name, (step, size) in now.items()):
                return None
            if time.monotonic() - began > PATIENCE_S:
                return Outcome("", HUNG, f"after {PATIENCE_S:g} s: {now} of {len(self.lives)}")
            time.sleep(0.05)

    def end(self) -> Outcome | None:
        """Let all end at one step, and compare their parameters. What is wrong; None: nothing."""
        step = max(self.last(name)[0] for name in self.lives) + 50
        (self.folder / "next").write_text(str(step - step % 5))  # a round of LocalSteps
        (self.folder / "next").rename(self.folder / "end")
        digests = {}
        for name, process in self.lives.items():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                return Outcome("", HUNG, f"{name} does not end")
            digests[name] = re.findall(r"done (\w+)", self.text_of(name).read_text())
        if len({tuple(each) for each in digests.values()}) != 1 or not all(digests.values()):
            return Outcome("", SILENT, f"parameters differ at the end: {digests}")
        return None

    def clear(self) -> None:
        for process in (*self.lives.values(), self.rendezvous):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _join(run: Run) -> str:
    if len(run.lives) < _MOST:
        return f"{run.start()} joins"
    return _kill(run)


def _kill(run: Run) -> str:
    victims = run.victims(1)
    run.kill(victims)
    return f"{', '.join(victims)} is killed" if victims else _join(run)


def _kill_two(run: Run) -> str:
    victims = run.victims(2)
    run.kill(victims)
    return f"{' and '.join(victims)} are killed" if len(victims) == 2 else _join(run)


def _stop(run: Run) -> str:
    name, seconds = run.random.choice(sorted(run.lives)), run.random.choice([0.3, 1.1, 2.2, 3.5, 6.0])
    run.lives[name].send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    run.lives[name].send_signal(signal.SIGCONT)
    return f"{name} is stopped for {seconds} s"


def _kill_amid_a_join(run: Run) -> str:
    victims = run.victims(1)
    name, seconds = run.start(), run.random.uniform(1.5, 3.5)  # it has imported torch by then, or is about to enter
    time.sleep(seconds)
    if run.random.random() < 0.5 or not victims:
        run.kill([name])
        return f"{name} joins, and is killed {seconds:.1f} s later"
    run.kill(victims)
    return f"{name} joins, and {victims[0]} is killed {seconds:.1f} s later"


def _kill_amid_a_change(run: Run) -> str:
    victims, seconds = run.victims(2), run.random.uniform(0.0, 1.5)
    if len(victims) < 2:
        return _join(run)
    run.kill(victims[:1])
    time.sleep(seconds)
    run.kill(victims[1:])
    return f"{victims[0]} is killed, and {victims[1]} {seconds:.1f} s later"


def _rendezvous_away(run: Run) -> str:
    run.rendezvous.kill()
    run.rendezvous.wait()
    victims = run.victims(run.random.randrange(2))
    run.kill(victims)
    seconds = run.random.uniform(0.0, 5.0)
    time.sleep(seconds)
    run.serve()
    killed = f", {victims[0]} is killed meanwhile" if victims else ""
    return f"the rendezvous is killed, and back after {seconds:.1f} s{killed}"


_CHANGES: dict[Callable[[Run], str], int] = {
    _join: 4, _kill: 4, _kill_two: 2, _stop: 4, _kill_amid_a_join: 2, _kill_amid_a_change: 2, _rendezvous_away: 2,
}  # fmt: skip


def _changes(kind: str, tools: Tools) -> Iterator[Outcome]:
    run = Run(kind, tools.folder, tools.random)
    try:
        for _ in range(FOUNDERS):
            run.start()
        wrong, what = run.settled(), "founders begin"
        for _ in range(QUICK_CHANGES if tools.quick else CHANGES):
            if wrong is not None:
                break
            time.sleep(tools.random.uniform(0.0, 1.0))
            (change,) = tools.random.choices(list(_CHANGES), _CHANGES.values())
            began, what = time.monotonic(), change(run)
            wrong = run.settled()
            if wrong is None:
                yield Outcome(what, AS_PROMISED, seconds=time.monotonic() - began)
        wrong = wrong or run.end()
        if wrong is not None:
            yield Outcome(what, wrong.verdict, wrong.detail)
    finally:
        run.clear()


def cases() -> Iterator[Case]:
    for kind in ("OnebitAdam", "LocalSteps", "OnebitMuon", "ZeroOneAdam"):
        for number in range(2):
            yield Case(
                f"{kind}, run {number}",
                f"all living members step together again within {PATIENCE_S:g} s, with the same bits",
                f"{CHANGES} random changes: kills, stops, joins, two at once, amid a change, the rendezvous away",
                "the steps that each member prints, its exit status, a digest at the end",
                partial(_changes, kind),
                is_quick=kind == "OnebitAdam" and number == 0,
                cost_s=150.0,
            )


if __name__ == "__main__":
    member(*sys.argv[1:])
