"""Simulated members that come and go: a thousand changes in minutes, each at a random operation of a random member.

Members are threads over one store. Promised after each change: within `PATIENCE_S` all living members take steps
together again, none of them has ended, and in every step that two of them have taken they had the same bits. At the
end the loss is near that of a run without changes.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import onebit
from faults.case import AS_PROMISED, HUNG, REFUSED, SILENT, Case, Outcome, Tools
from faults.member_runs import Killed, PartialNetwork
from onebit.comm import PeerError, SimTransport, Transport, Work
from onebit.membership import Members, Patience, Rendezvous, Roster, begin, end
from onebit.membership.members import Connect

CHANGES, QUICK_CHANGES, FOUNDERS = 100, 5, 3
PATIENCE_S = 60.0
TIMEOUT_S = 1.0
_LEAST, _MOST, _BATCH, _WIDTH = 2, 5, 16, 16
_SYNC_EVERY = 4  # steps
_MOST_OPERATIONS = 60  # of a member until its fate: a few steps, or a change

KINDS = (
    "OnebitAdam", "OnebitAdam, delayed", "OnebitLamb", "OnebitMuon", "ZeroOneAdam", "LocalSteps",
    "LocalSteps, momentum", "LocalSteps, balanced", "LocalSteps, delayed", "AdamW", "Muon", "Lion",
)  # fmt: skip


# ---------------------------------------------------------------- a member, and what becomes of it


@dataclass
class Fate:
    """What happens to a member, at an operation or a look at the store.

    Attributes:
        kind: "kill", "stop" or "cut".
        operations: Number of them that it has left.
        seconds: How long it is stopped, or away from the store.
        runs: Not set while it is stopped, with all of its threads.
        away_until: Until when it does not reach the store.
    """

    kind: str = "kill"
    operations: float = float("inf")
    seconds: float = 0.0
    runs: threading.Event = field(default_factory=threading.Event)
    away_until: float = 0.0

    def meet(self, transport: FatedTransport | None = None) -> None:
        """Count an operation of the member's own thread, over this transport or in the store."""
        self.operations -= 1
        if self.operations > 0:
            return
        self.operations = float("inf")
        if self.kind == "stop":
            self.runs.clear()
            time.sleep(self.seconds)
            self.runs.set()
            return
        if transport is not None:
            transport.network.leave(transport.rank)
        if self.kind == "kill":
            raise Killed
        self.away_until = time.monotonic() + self.seconds


class FatedTransport(SimTransport):
    """Of a member with a fate. fate: met when an operation is launched, and when it is waited for."""

    network: PartialNetwork
    fate: Fate

    def _launch(self, name: str, nbytes: int, data: Tensor, *rest: Any) -> Work:
        self.fate.meet(self)
        work = super()._launch(name, nbytes, data, *rest)
        wait = work.wait

        def fated_wait() -> None:
            self.fate.meet(self)
            wait()

        work.wait = fated_wait  # type: ignore[method-assign]
        return work


@dataclass
class Door:
    """A member's connection to the store, which may be away, or be another one after it came back."""

    hub: Hub
    fate: Fate
    thread: threading.Thread

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        self.fate.runs.wait()
        if threading.current_thread() is self.thread:
            self.fate.meet()
        if self.hub.is_away.is_set() or time.monotonic() < self.fate.away_until:
            raise RuntimeError("connection refused")
        return getattr(self.hub.store, name)(*args)


@dataclass
class Hub:
    """Where members meet. networks: by epoch, and by the first member's name, as a store may forget."""

    store: HashStore = field(default_factory=lambda: new_store())
    is_away: threading.Event = field(default_factory=threading.Event)
    networks: dict[Roster, PartialNetwork] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def members(self, name: str, fate: Fate, digests: dict[int, int]) -> RememberingMembers:
        patience = Patience(
            beat_s=0.03, suspect_s=0.5, silent_s=1.0, busy_s=PATIENCE_S, wait_s=PATIENCE_S, look_s=0.03, away_s=30.0
        )
        thread = threading.current_thread()
        rendezvous = Rendezvous(
            lambda: Door(self, fate, thread), name, token="secret", founders=FOUNDERS, patience=patience
        )

        def connect(roster: Roster, rank: int) -> FatedTransport:
            rendezvous.confirm(roster, "present")
            with self.lock:
                network = self.networks.setdefault(roster, PartialNetwork(len(roster.names), TIMEOUT_S))
            transport = FatedTransport(network, rank)
            transport.fate = fate
            return transport

        return RememberingMembers(rendezvous, connect, digests)


class RememberingMembers(Members):
    """Drops this member's last digest as it learns that the others have gone on without it.

    It may have taken that step alone: stopped before its last message, it found those of the others as it woke, while
    they took the step without it. Until it has entered their epoch they take no step with it, so that digests are not
    compared meanwhile; after its next step would be too late, as theirs may end before its own does.

    Args:
        digests: `Life.digests` of this member.
    """

    def __init__(self, rendezvous: Rendezvous, connect: Connect, digests: dict[int, int]):
        super().__init__(rendezvous, connect)
        self._digests = digests

    def enter_next(self, why: PeerError | None) -> None:
        had_state = self.has_state
        try:
            super().enter_next(why)
        finally:
            if had_state and not self.has_state:
                self._digests.pop(max(self._digests, default=0), None)


def new_store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


@dataclass
class Life:
    """A member. digests: by step, of the bits that all members have then."""

    thread: threading.Thread
    fate: Fate
    steps: int = 0
    size: int = 0
    digests: dict[int, int] = field(default_factory=dict)
    loss: float = float("nan")
    error: BaseException | None = None


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))


def make(kind: str, model: nn.Sequential, transport: Transport) -> Any:
    name, _, form = kind.partition(", ")
    common: dict[str, Any] = {"lr": 3e-3, "transport": transport, "bucket_cap_mb": 0.002}
    if name == "LocalSteps":
        options: dict[str, Any] = {"balanced": form == "balanced"}
        options |= {"outer_lr": 0.7, "outer_momentum": 0.9} if form == "momentum" else {}
        options |= {"fragments": 2, "delay": 2} if form == "delayed" else {}
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return onebit.LocalSteps(inner, every=4, transport=transport, bucket_cap_mb=0.002, **options)
    groups = onebit.muon_groups(model, head=model[2]) if "Muon" in name else model.parameters()
    if name in ("AdamW", "Muon", "Lion"):
        inner = getattr(torch.optim if name == "AdamW" else onebit, name)(groups, lr=3e-3)
        return onebit.AveragedSteps(inner, transport=transport, bucket_cap_mb=0.002)
    options = {"freeze_step": 6} if name in ("OnebitAdam", "OnebitLamb") else {}
    options |= {"delay": 1} if form == "delayed" else {}
    return getattr(onebit, name)(groups, compression="always", **common, **options)


def loss_of(model: nn.Module) -> float:
    x = torch.randn(256, _WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((model(x) - x).square().mean())


# ---------------------------------------------------------------- a run and its changes


@dataclass
class Run:
    """A run of simulated members. lives: by name, the living ones. end: the step after which all stop."""

    kind: str
    random: Random
    hub: Hub = field(default_factory=Hub)
    lives: dict[str, Life] = field(default_factory=dict)
    everyone: dict[str, Life] = field(default_factory=dict)
    end: float = float("inf")

    def start(self) -> str:
        name, fate = f"m{len(self.everyone)}", Fate()
        fate.runs.set()
        life = Life(threading.Thread(target=lambda: self._live(name), daemon=True, name=name), fate)
        self.lives[name] = self.everyone[name] = life
        life.thread.start()
        return name

    def _live(self, name: str) -> None:
        life, members = self.everyone[name], None
        try:
            members = self.hub.members(name, life.fate, life.digests)
            self._train(members, life, torch.Generator().manual_seed(zlib.crc32(name.encode())))
        except BaseException as error:
            life.error = error
            if members is not None:
                members.abandon()

    def _train(self, members: RememberingMembers, life: Life, draw: torch.Generator) -> None:
        model = net()
        optimizer = make(self.kind, model, members)
        begin(optimizer)
        while optimizer.steps_taken() < self.end:
            x = torch.randn(_BATCH, _WIDTH, generator=draw)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(optimizer, onebit.OnebitAdam) and optimizer.progress()[0] % _SYNC_EVERY == 0:
                optimizer.sync()
            life.steps, life.size = optimizer.steps_taken(), members.world_size
            if isinstance(optimizer, onebit.LocalSteps):
                is_same = optimizer.is_at_anchor()
            else:  # with a delay parameters look ahead in between: by the last bits not the same on all
                is_same = getattr(optimizer, "step_under_way", None) is None
            if is_same:
                life.digests[life.steps] = digest(model)
        if isinstance(optimizer, (onebit.LocalSteps, onebit.OnebitAdam)):
            optimizer.sync()
        end(optimizer)
        life.digests[0], life.loss = digest(model), loss_of(model)

    def doom(self, kind: str, count: int = 1, seconds: float = 0.0) -> list[Life]:
        """Let some members meet a fate within their next operations; those that are killed leave `lives`."""
        most = len(self.lives) - (_LEAST if kind == "kill" else 0)
        names = self.random.sample(sorted(self.lives), max(0, min(count, most)))
        for name in names:
            fate = self.lives[name].fate
            fate.kind, fate.seconds = kind, seconds
            fate.operations = self.random.randrange(1, _MOST_OPERATIONS)
        return [self.lives.pop(name) if kind == "kill" else self.lives[name] for name in names]

    def settled(self) -> Outcome | None:
        """Wait until all living members step together. What is wrong; None: nothing."""
        began = time.monotonic()
        met = [life for life in self.everyone.values() if life.thread.is_alive()]
        while any(life.fate.operations < float("inf") and life.thread.is_alive() for life in met):
            if time.monotonic() - began > PATIENCE_S:
                return Outcome("", HUNG, "a member takes no operations")
            time.sleep(0.005)
        before = {name: life.steps for name, life in self.lives.items()}
        while True:
            for name, life in self.lives.items():
                if life.error is not None:
                    return Outcome("", REFUSED, f"{name} ended: {type(life.error).__name__}: {life.error}"[:300])
            lives = self.lives.items()
            if all(life.steps > before[name] and life.size == len(self.lives) for name, life in lives):
                return Outcome("", SILENT, wrong) if (wrong := self.differing()) else None
            if time.monotonic() - began > PATIENCE_S:
                told = {name: (life.steps, life.size) for name, life in lives}
                return Outcome("", HUNG, f"after {PATIENCE_S:g} s: {told} of {len(self.lives)}")
            time.sleep(0.005)

    def differing(self) -> str:
        """The members whose bits differ in a step that both have taken."""
        seen: dict[int, tuple[str, int]] = {}
        for name, life in self.lives.items():
            for step, bits in list(life.digests.items()):
                first, expected = seen.setdefault(step, (name, bits))
                if bits != expected:
                    return f"{first} and {name} have different bits after step {step}"
        return ""

    def finish(self) -> Outcome | None:
        """Let all end at one step. What is wrong; None: nothing."""
        self.end = max(life.steps for life in self.lives.values()) + 40
        for name, life in self.lives.items():
            life.thread.join(PATIENCE_S)
            if life.thread.is_alive() or life.error is not None:
                return Outcome("", HUNG if life.error is None else REFUSED, f"{name} at the end: {life.error}"[:300])
        return Outcome("", SILENT, wrong) if (wrong := self.differing()) else None


def digest(model: nn.Module) -> int:
    return zlib.crc32(torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes())


def _join(run: Run) -> str:
    return f"{run.start()} joins" if len(run.lives) < _MOST else _kill(run)


def _kill(run: Run) -> str:
    return "one is killed" if run.doom("kill") else _join(run)


def _kill_two(run: Run) -> str:
    return "two are killed at once" if len(run.lives) >= _LEAST + 2 and run.doom("kill", 2) else _join(run)


def _stop(run: Run) -> str:
    seconds = run.random.choice([0.2, 0.6, 1.2, 2.0])
    run.doom("stop", seconds=seconds)
    return f"one is stopped for {seconds} s"


def _cut(run: Run) -> str:
    seconds = run.random.choice([0.0, 0.3, 1.0, 1.8])
    run.doom("cut", seconds=seconds)
    return f"one is cut off for {seconds} s"


def _fault_amid_a_join(run: Run) -> str:
    name = run.start()
    time.sleep(run.random.uniform(0.0, 0.2))
    if run.random.random() < 0.5 or len(run.lives) <= _LEAST + 1:
        fate = run.lives.pop(name).fate
        fate.operations = run.random.randrange(1, _MOST_OPERATIONS)
        return "one joins, and is killed meanwhile"
    run.doom("kill")
    return "one joins, and another is killed meanwhile"


def _fault_amid_a_change(run: Run) -> str:
    if len(run.lives) < _LEAST + 2:
        return _join(run)
    (first,) = run.doom("kill")
    first.thread.join(PATIENCE_S)
    kind = run.random.choice(["kill", "stop", "cut"])
    run.doom(kind, seconds=0.8)
    return f"one is killed, and amid the change one meets: {kind}"


def _rendezvous_away(run: Run) -> str:
    run.hub.is_away.set()
    victims = run.doom("kill", run.random.randrange(2))
    time.sleep(run.random.uniform(0.0, 1.0))
    is_empty = run.random.random() < 0.5
    if is_empty:
        run.hub.store = new_store()
    run.hub.is_away.clear()
    killed = ", one is killed meanwhile" if victims else ""
    return f"the rendezvous is killed, and comes back {'empty' if is_empty else 'as it was'}{killed}"


_CHANGES: dict[Callable[[Run], str], int] = {
    _join: 4, _kill: 3, _kill_two: 2, _stop: 3, _cut: 3, _fault_amid_a_join: 3, _fault_amid_a_change: 3,
    _rendezvous_away: 2,
}  # fmt: skip


def _undisturbed(kind: str, steps: int) -> float:
    """The loss of as many steps of as many founders without a change."""
    run = Run(kind, Random(0), end=steps)
    for _ in range(FOUNDERS):
        run.start()
    for life in run.lives.values():
        life.thread.join(PATIENCE_S)
    return next(iter(run.lives.values())).loss


def changes(kind: str, tools: Tools, count: int | None = None) -> Iterator[Outcome]:
    """A run of this optimizer with this many changes; an outcome for each. count: default `CHANGES`."""
    torch.set_num_threads(1)
    run = Run(kind, tools.random)
    count = count or (QUICK_CHANGES if tools.quick else CHANGES)
    for _ in range(FOUNDERS):
        run.start()
    wrong, what = run.settled(), "founders begin"
    for _ in range(count):
        if wrong is not None:
            break
        time.sleep(tools.random.uniform(0.0, 0.05))
        (change,) = tools.random.choices(list(_CHANGES), _CHANGES.values())
        began, what = time.monotonic(), change(run)
        wrong = run.settled()
        if wrong is None:
            yield Outcome(what, AS_PROMISED, seconds=time.monotonic() - began)
    wrong = wrong or run.finish()
    if wrong is None:
        its = next(iter(run.lives.values()))
        alone, loss = _undisturbed(kind, min(its.steps, 400)), its.loss
        verdict = AS_PROMISED if loss < 1.5 * alone else SILENT
        wrong = Outcome("the end of the run", verdict, f"loss {loss:.4f}, undisturbed {alone:.4f}")
    with suppress(Exception):
        run.end = 0  # a member that still lives ends with its step
    yield Outcome(what if wrong.fault == "" else wrong.fault, wrong.verdict, wrong.detail)


def cases() -> Iterator[Case]:
    for kind in KINDS:
        yield Case(
            f"simulated, {kind}",
            f"all living members step together again within {PATIENCE_S:g} s; the same bits in each step; the loss",
            f"{CHANGES} random changes: kills, stops, cuts, joins, two at once, amid a join or a change, no rendezvous",
            "the steps and the bits of each member",
            partial(changes, kind),
            is_quick=kind == "OnebitAdam",
            cost_s=100.0,
        )
