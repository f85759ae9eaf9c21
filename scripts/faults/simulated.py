"""Simulated members that come and go: a thousand changes in minutes, each at a random operation of a random member.

Members are threads over one store, or two threads as a node whose ranks hold a model together; then one of both has
the member's fate. Promised after each change: within `PATIENCE_S` all living members take steps
together again, none of them has ended, and in every step that two of them have taken they had the same bits. At the
end the loss is near that of a run without changes.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import onebit
from faults.case import AS_PROMISED, HUNG, REFUSED, SILENT, Case, Outcome, Tools
from faults.member_runs import Killed, PartialNetwork
from onebit.comm import PeerError, SimTransport, Work
from onebit.comm.transports.notes import Operation
from onebit.comm.transports.simulated import SimNetwork
from onebit.membership import Members, Patience, Rendezvous, Roster, begin, end
from onebit.membership.members import Connect
from onebit.membership.node import Node, NodeRendezvous
from onebit.model_parallel import ModelParallelGroup

CHANGES, QUICK_CHANGES, FOUNDERS, NODE = 100, 5, 3, 2
PATIENCE_S = 60.0
TIMEOUT_S = 1.0
_LEAST, _MOST, _BATCH, _WIDTH = 2, 5, 16, 16
_EVERY = _SYNC_EVERY = 4  # steps
_SEVERAL_RANKS = ("nodes", "stages")  # how the ranks of a member hold its model
_MOST_OPERATIONS = 60  # of a member until its fate: a few steps, or a change

KINDS = (
    "OnebitAdam", "OnebitAdam, delayed", "OnebitAdam, nodes", "OnebitAdam, delayed, nodes", "OnebitAdam, stages",
    "OnebitLamb", "OnebitLamb, nodes", "OnebitMuon", "ZeroOneAdam", "LocalSteps", "LocalSteps, momentum",
    "LocalSteps, balanced", "LocalSteps, delayed", "LocalSteps, nodes", "LocalSteps, delayed, nodes", "AdamW",
    "AdamW, nodes", "Muon", "Lion",
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
        is_killed: Whether it has been killed: its other threads end with it.
    """

    kind: str = "kill"
    operations: float = float("inf")
    seconds: float = 0.0
    runs: threading.Event = field(default_factory=threading.Event)
    away_until: float = 0.0
    is_killed: bool = False

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
            self.is_killed = True
            raise Killed
        self.away_until = time.monotonic() + self.seconds


class FatedTransport(SimTransport):
    """Of a member with a fate.

    fate: met when an operation is launched, and when it is waited for. thread: the member's own; others, which copy its
    state or a newcomer's, share its fate.
    """

    network: PartialNetwork
    fate: Fate
    thread: threading.Thread

    def _meet(self) -> None:
        if threading.current_thread() is self.thread:
            self.fate.meet(self)
            return
        self.fate.runs.wait()
        if self.fate.is_killed:
            self.network.leave(self.rank)
            raise PeerError("its process was killed")

    def _launch(self, name: str, nbytes: int, data: Tensor, *rest: Any) -> Work:
        self._meet()
        work = super()._launch(name, nbytes, data, *rest)
        wait = work.wait

        def fated_wait() -> None:
            self._meet()
            wait()

        work.wait = fated_wait  # type: ignore[method-assign]
        return work


class StrictNetwork(PartialNetwork):
    """Remembers if members that all live meet in different operations. Gloo would leave them waiting for a timeout."""

    apart = ""

    def collect(self, operation: Operation, rank: int) -> list[Tensor]:
        try:
            return super().collect(operation, rank)
        except PeerError as error:
            if "different operations" in str(error) and not self._dead:
                self.apart = str(error)
            raise


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
    """Where members meet. networks: by epoch and the members' names, as a store may forget, and by rank of a node."""

    store: HashStore = field(default_factory=lambda: new_store())
    is_away: threading.Event = field(default_factory=threading.Event)
    networks: dict[tuple[Roster, int], StrictNetwork] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def members(self, name: str, fate: Fate, digests: dict[int, int], local: SimTransport) -> RememberingMembers:
        """The transport of a rank. local: between the ranks of its member."""
        patience = Patience(
            beat_s=0.03, suspect_s=0.5, silent_s=1.0, busy_s=PATIENCE_S, wait_s=PATIENCE_S, look_s=0.03, away_s=30.0
        )
        thread, place, ranks, first = threading.current_thread(), local.rank, local.world_size, None
        if place == 0:
            first = Rendezvous(
                lambda: Door(self, fate, thread),
                name,
                token="secret",
                founders=FOUNDERS,
                patience=patience,
                ranks=ranks,
            )
        node = None if ranks == 1 else Node(local.split(range(ranks)))
        rendezvous = first if node is None else NodeRendezvous(node, first, name, 1, patience)
        assert rendezvous is not None

        def connect(roster: Roster, rank: int) -> FatedTransport:
            if roster.epoch > 0:
                rendezvous.confirm(roster, "present")
            with self.lock:
                new = StrictNetwork(len(roster.names), TIMEOUT_S)
                network = self.networks.setdefault((roster, place), new)
            transport = FatedTransport(network, rank)
            transport.fate, transport.thread = fate, thread
            return transport

        return RememberingMembers(rendezvous, connect, node, digests)


class RememberingMembers(Members):
    """Drops this member's last digest as it learns that the others have gone on without it.

    It may have taken that step alone: stopped before its last message, it found those of the others as it woke, while
    they took the step without it. Until it has entered their epoch they take no step with it, so that digests are not
    compared meanwhile; after its next step would be too late, as theirs may end before its own does.

    Args:
        digests: `Life.digests` of this rank.
    """

    def __init__(
        self, rendezvous: Rendezvous | NodeRendezvous, connect: Connect, node: Node | None, digests: dict[int, int]
    ):
        super().__init__(rendezvous, connect, node)
        self._digests = digests

    def enter_next(self, why: PeerError | None, **options: bool) -> None:
        had_state = self.has_state
        try:
            super().enter_next(why, **options)
        finally:
            if had_state and not self.has_state:
                self._digests.pop(max(self._digests, default=0), None)


def new_store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


@dataclass
class Life:
    """A member. digests: of each rank, by step, of the bits that its counterparts in all members have then."""

    fate: Fate
    digests: list[dict[int, int]]
    threads: list[threading.Thread] = field(default_factory=list)
    steps: int = 0
    size: int = 0
    loss: float = float("nan")
    error: BaseException | None = None

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def join(self, seconds: float) -> None:
        for thread in self.threads:
            thread.join(seconds)


def net(rank: int) -> nn.Sequential:
    torch.manual_seed(3 + rank)
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))


class Shard:
    """The placement of a part of a model that the ranks of a node hold together."""

    def is_replicate(self) -> bool:
        return False


_SHARDS = (Shard(),)


def place(tensors: Iterable[Tensor | None]) -> None:
    """Mark these as parts of which each rank of a node has another, as FSDP2 does."""
    for tensor in tensors:
        if tensor is not None:
            tensor.device_mesh = SimpleNamespace(shape=(NODE,), mesh_dim_names=("shard",))  # type: ignore[attr-defined]
            tensor.placements = _SHARDS  # type: ignore[attr-defined]


def make(kind: str, model: nn.Sequential, transport: RememberingMembers, local: SimTransport) -> Any:
    name, *forms = kind.split(", ")
    common: dict[str, Any] = {"transport": transport, "bucket_cap_mb": 0.002}
    if kind.endswith(_SEVERAL_RANKS):
        ranks = local.split(range(local.world_size))
        group = ModelParallelGroup(ranks) if "nodes" in forms else ModelParallelGroup(SimTransport(), ranks)
        common["model_parallel_group"] = transport.parts(group)
    if name == "LocalSteps":
        options: dict[str, Any] = {"balanced": "balanced" in forms}
        options |= {"outer_lr": 0.7, "outer_momentum": 0.9} if "momentum" in forms else {}
        options |= {"fragments": 2, "delay": 2} if "delayed" in forms else {}
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return onebit.LocalSteps(inner, every=_EVERY, **common, **options)
    groups = onebit.muon_groups(model, head=model[2]) if "Muon" in name else model.parameters()
    if name in ("AdamW", "Muon", "Lion"):
        inner = getattr(torch.optim if name == "AdamW" else onebit, name)(groups, lr=3e-3)
        return onebit.AveragedSteps(inner, **common)
    options = {"freeze_step": 6} if name in ("OnebitAdam", "OnebitLamb") else {}
    options |= {"delay": 1} if "delayed" in forms else {}
    options |= {"overlap": False} if kind.endswith(_SEVERAL_RANKS) else {}
    return getattr(onebit, name)(groups, lr=3e-3, compression="always", **common, **options)


def loss_of(model: nn.Module, local: SimTransport) -> float:
    x = torch.randn(256, _WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float(backward(model(x), x, local))


def backward(out: Tensor, x: Tensor, local: SimTransport) -> Tensor:
    """The loss of a model whose output is the sum over the ranks of a node, and its gradients if it has any."""
    whole = out.detach().clone()
    local.all_reduce(whole).wait()  # a rank that is a step ahead of another would hang here
    if out.requires_grad:
        out.backward(2.0 / x.numel() * (whole - x))
    return (whole - x).square().mean()


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
        name, fate, ranks = f"m{len(self.everyone)}", Fate(), NODE if self.kind.endswith(_SEVERAL_RANKS) else 1
        fate.runs.set()
        life = Life(fate, [{} for _ in range(ranks)])
        self.lives[name] = self.everyone[name] = life
        network, fated = SimNetwork(ranks, 2 * PATIENCE_S), self.random.randrange(ranks)
        for rank in range(ranks):
            live = partial(self._live, name, SimTransport(network, rank), is_fated=rank == fated)
            life.threads.append(threading.Thread(target=live, daemon=True, name=f"{name}.{rank}"))
        for thread in life.threads:
            thread.start()
        return name

    def _live(self, name: str, local: SimTransport, *, is_fated: bool) -> None:
        life, members, fate = self.everyone[name], None, Fate()
        fate.runs.set()
        try:
            members = self.hub.members(name, life.fate if is_fated else fate, life.digests[local.rank], local)
            self._train(members, life, local, torch.Generator().manual_seed(zlib.crc32(name.encode())))
        except BaseException as error:
            life.error = error
            if members is not None:
                members.abandon()
            local.abandon()

    def _train(self, members: RememberingMembers, life: Life, local: SimTransport, draw: torch.Generator) -> None:
        model, digests = net(local.rank), life.digests[local.rank]
        has_shards = self.kind.endswith("nodes")
        if has_shards:
            place(model.parameters())
        optimizer = make(self.kind, model, members, local)
        begin(optimizer)
        while optimizer.steps_taken() < self.end:
            x = torch.randn(_BATCH, _WIDTH, generator=draw)
            backward(model(x), x, local)
            if has_shards:
                place(p.grad for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(optimizer, onebit.OnebitAdam) and optimizer.progress()[0] % _SYNC_EVERY == 0:
                optimizer.sync()
            if local.rank == 0:
                life.steps, life.size = optimizer.steps_taken(), members.world_size
            if isinstance(optimizer, onebit.LocalSteps):
                is_same = optimizer.is_at_anchor()
            else:  # with a delay parameters look ahead in between: by the last bits not the same on all
                is_same = getattr(optimizer, "step_under_way", None) is None
            if is_same:
                digests[optimizer.steps_taken()] = digest(model)
        if isinstance(optimizer, (onebit.LocalSteps, onebit.OnebitAdam)):
            optimizer.sync()
        end(optimizer)
        digests[0], life.loss = digest(model), loss_of(model, local)

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
        met = [life for life in self.everyone.values() if life.is_alive()]
        while any(life.fate.operations < float("inf") and life.is_alive() for life in met):
            if time.monotonic() - began > PATIENCE_S:
                return Outcome("", HUNG, "a member takes no operations")
            time.sleep(0.005)
        # Local steps notice a cut in the next round: a whole one must follow.
        rounds = 2 * _EVERY if self.kind.startswith("LocalSteps") else 0
        before = {name: life.steps + rounds for name, life in self.lives.items()}
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
        """The members whose bits differ in a step that both have taken, or who would wait for each other."""
        with self.hub.lock:
            apart = [network.apart for network in self.hub.networks.values() if network.apart]
        if apart:
            return apart[0]
        seen: dict[tuple[int, int], tuple[str, int]] = {}
        for name, life in self.lives.items():
            its = [
                (step, rank, bits) for rank, of_rank in enumerate(life.digests) for step, bits in of_rank.copy().items()
            ]
            for step, rank, bits in its:
                first, expected = seen.setdefault((step, rank), (name, bits))
                if bits != expected:
                    return f"{first} and {name} have different bits after step {step}"
        return ""

    def finish(self) -> Outcome | None:
        """Let all end at one step. What is wrong; None: nothing."""
        self.end = max(life.steps for life in self.lives.values()) + 40
        for name, life in self.lives.items():
            life.join(PATIENCE_S)
            if life.is_alive() or life.error is not None:
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
    first.join(PATIENCE_S)
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
        life.join(PATIENCE_S)
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
            f"all living members step together again within {PATIENCE_S:g} s; the same bits in each step; the loss; "
            "no two wait for each other",
            f"{CHANGES} random changes: kills, stops, cuts, joins, two at once, amid a join or a change, no rendezvous",
            "the steps and the bits of each member",
            partial(changes, kind),
            is_quick=kind == "OnebitAdam",
            cost_s=100.0,
        )
