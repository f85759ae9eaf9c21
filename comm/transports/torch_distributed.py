"""The transport over torch.distributed: any process group, Gloo and NCCL from the same class.

On Gloo both exchanges are posted isend/irecv pairs: half the wire bytes of its all-to-all, and a pair that fails names
its peer. Elsewhere they are the library's collectives. Rests on `networked.py`, `edge.py` and `notes.py`; `launch.py`
makes the process group.

Shape legend: W ranks, B bytes of one frame.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .. import torch_versions
from .base import PeerError, Work
from .edge import ANSWER_S, DIAGNOSIS_S, NOTES_S, ROLL_CALL_S, as_bytes, failed_before, peer_error, reason
from .forks import release_in_children
from .hanging import call_within, connections, have_ended, sockets
from .networked import NetworkedTransport
from .notes import Conclusion, Note, Numbering, Operation, conclude, names_of

_log = logging.getLogger(__name__)

# Above the tags that scripts give their own isend/irecv on the same group.
_TAG = _TAGS = 1 << 30
_ROLL_CALL_TAG, _BREAK_OFF_TAG = _TAG - 1, _TAG - 2

_POLL_S, _LINGER_S = 0.02, 0.5

_STORE_ENDED = "the process of the store has ended"

_HINT = "check the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"


@dataclass
class _Past:
    """The history shared by all transports of a process group and those split from them.

    held: tensors to which operations may still write that failed, or that nobody waits for: they stay as long as the
    group, .27 bytes per parameter of each optimizer that is dropped with a step under way. failure: the first operation
    that failed. missing: the ranks to blame for it. late_s: seconds without a launch before the operations in flight,
    if longer than the timeout of the others. is_ours: `init` made the group, and it has not ended: the last of its open
    transports to be closed destroys it. open: how many these are; one that is dropped counts until the process ends, as
    ranks may drop it at different times. on_release: called when the group ends. spare: groups of closed parts by their
    global ranks, to be used again: torch gives the next group of the same ranks the name of a destroyed one, and finds
    old addresses by it.
    """

    held: list[object] = field(default_factory=list)
    failure: Operation | None = None
    missing: tuple[int, ...] = ()
    late_s: float = 0.0
    is_ours: bool = False
    open: int = 0
    on_release: list[Callable[[], None]] = field(default_factory=list)
    spare: collections.defaultdict[tuple[int, ...], list[weakref.ref[dist.ProcessGroup]]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    _last: float = field(default_factory=time.monotonic)

    def launches(self, timeout_s: float) -> None:
        now = time.monotonic()
        if now - self._last > timeout_s:
            self.late_s = now - self._last
        self._last = now

    def completes(self) -> None:
        self._last, self.late_s = time.monotonic(), 0.0


_pasts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Past] = weakref.WeakKeyDictionary()
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()

_UNWRITTEN = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
"""Random bytes with which no message ends: written to the end of a row to receive, they show whether it has come."""


class TorchTransport(NetworkedTransport):
    """Ranks of a torch.distributed process group. See `Transport` for the contract. Constructed by all ranks.

    1. Host tensors on a Gloo group: all_to_all and all_gather post an irecv and an isend per peer, all in flight, peers
       r-k and r+k for k = 1…W-1. The tag is a digest of the operation's name, number and size: Gloo aborts the process
       at a message longer than expected, and takes a shorter one for whole. all_reduce is two such phases: each rank
       sums the chunk that it owns, then gives it to all. A broadcast is Gloo's, and we cannot choose its tags: ranks
       meet first, in pairs without bytes.
    2. Tensors on a device that the group serves natively (NCCL): the library's collectives. `wait()` orders the
       current stream after them and returns; NCCL's watchdog finds a missing peer after the *group's* timeout.
    3. Device tensors on a Gloo group: through host memory.
    4. A rank whose operation fails closes its connections, so that all ranks that wait for it fail too, and leaves a
       note in the group's store. From the notes each rank concludes which ranks are missing and which are out of step.

    After a PeerError the transport is unusable.

    Args:
        group: Process group. Default None: the default group.
        timeout_s: Seconds to wait for other ranks in every operation. Default 300.
        owns_group: Whether the group is destroyed when the last of its transports is closed. Default False.
        whole: Transport from which this one is split. Default None.
        store_host: Rank in whose process the group's store lives. Default None: in no rank's, or not known.
        finds_cause: Whether an operation that fails asks the other ranks who is missing, which takes up to
            `edge.DIAGNOSIS_S` seconds. Default True. Else it names the ranks that broke off or are silent.
        store: Where the ranks of a group from `torch_versions.gloo_group` met: torch does not know the group, which
            lives as long as this object. Default None: torch knows it.

    Raises:
        ValueError: There is no default group.
        PeerError: The group's store does not answer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        *,
        owns_group: bool = False,
        whole: TorchTransport | None = None,
        store_host: int | None = None,
        finds_cause: bool = True,
        store: dist.Store | None = None,
    ):
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed has no default process group; call onebit.comm.init() instead")
        # A weak reference: torch holds a group until it is destroyed. If this object held it longer, the group's
        # threads would live on, which sometimes abort Python's exit, and so would its store, which blocks the port.
        self._group = weakref.ref(group)
        self._store, self._own_group = store, None if store is None else group
        super().__init__(group.rank(), group.size(), timeout_s)
        self._finds_cause = finds_cause
        self._is_part = whole is not None
        self._spare: list[weakref.ref[dist.ProcessGroup]] | None = None
        self._store_host = None if store_host == self.rank else store_host
        self._backends = _backends_by_device(self.group) if store is None else {"cpu": "gloo"}
        self._numbering = Numbering(_channels.setdefault(self.group, itertools.count(1)))
        # If one transport of a group fails, all fail, split ones too: then none waits for a barrier.
        self._past: _Past = _pasts.setdefault(self.group, _Past()) if whole is None else whole._past
        self._on_release = self._past.on_release
        self._board: _Board | None = None
        if whole is None:
            self._past.is_ours |= owns_group
            self._past.open += 1
        if whole is not None:
            self._board, self._store_host = whole._board, whole._store_host
        elif self._backends.get("cpu") == "gloo" and finds_cause:
            self._board = _Board(self.group, self.rank, timeout_s)
        if self._board is not None:
            release_in_children(self._board.port)
            # A group that we own has a fresh prefix in the store, and a part uses the board of the whole: only other
            # groups can have notes of an earlier start.
            if not (owns_group or whole or self.has_failed):
                self._board.clear()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError once it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"rank {self._names[self.rank]}: the process group has been destroyed, by the script or with the last "
                "optimizer or engine that was closed; construct them anew after that"
            )
        return group

    @property
    def has_failed(self) -> bool:
        """Whether a PeerError was raised."""
        return self._past.failure is not None

    @property
    def device(self) -> torch.device:
        """Device of the buffers of small messages: the host, if the group serves it; else the group's CUDA device."""
        if "cpu" in self._backends:
            return torch.device("cpu")
        bound = getattr(self.group, "bound_device_id", None)
        return bound or torch.device("cuda", torch.cuda.current_device())

    @property
    def reduces_in_ring(self) -> bool:
        return True

    def describe(self) -> str:
        """The backend of each device, for a log line."""
        if len(set(self._backends.values())) == 1:
            return f"torch.distributed ({next(iter(self._backends.values()))})"
        return f"torch.distributed ({', '.join(f'{d}: {b}' for d, b in sorted(self._backends.items()))})"

    def _all_to_all(self, operation: Operation, out_WB: Tensor, in_WB: Tensor) -> Work:
        if self._is_gloo(in_WB):
            return self._exchange(operation, out_WB, list(in_WB))
        return self._collective(
            operation, (out_WB, in_WB), lambda: dist.all_to_all_single(out_WB, in_WB, group=self.group, async_op=True)
        )

    def _all_gather(self, operation: Operation, out_WB: Tensor, in_B: Tensor) -> Work:
        if self._is_gloo(in_B):
            return self._exchange(operation, out_WB, [in_B] * self.world_size)
        return self._collective(
            operation, (out_WB, in_B), lambda: torch_versions.all_gather_single(out_WB.view(-1), in_B, self.group)
        )

    def _all_reduce(self, operation: Operation, x: Tensor) -> Work:
        if self._is_gloo(x):
            return _SumWork(self, operation, x.detach().view(-1))
        return self._collective(operation, (x,), lambda: dist.all_reduce(x.detach(), group=self.group, async_op=True))

    def _broadcast(self, operation: Operation, x: Tensor, src: int) -> Work:
        return self._collective(operation, (x,), lambda: torch_versions.broadcast(as_bytes(x), src, self.group))

    def _shift(self, operation: Operation, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        W = self.world_size
        src, dst = (self.rank - by) % W, (self.rank + by) % W
        if self._is_gloo(in_B):
            sends, receives = (_TAG + operation._replace(nbytes=x.nbytes).tag(_TAGS) for x in (in_B, out_B))
            outs, rows = {src: out_B}, {dst: in_B}
            return _PairsWork(self, operation, outs, rows, sends, self.timeout_s, distances=(by,), receives=receives)
        sizes_out, sizes_in = (
            [len(x) * (rank == peer) for rank in range(W)] for x, peer in ((out_B, src), (in_B, dst))
        )
        return self._collective(
            operation,
            (out_B, in_B),
            lambda: dist.all_to_all_single(out_B, in_B, sizes_out, sizes_in, group=self.group, async_op=True),
        )

    @contextmanager
    def naming_peers(self, what: str, *, is_counted: bool = True) -> Iterator[None]:
        """Wrap operations that others send over this group (pipelining, FSDP2): network errors become PeerErrors.

        All ranks of the group, in the same order as its operations. With is_counted=False the order may differ, and
        errors tell less about which ranks are out of step. Errors of other kinds pass unchanged.
        """
        operation = self._count(what, 0) if is_counted else Operation(what, 0)
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            cause = _network_error(error)
            if cause is None:
                raise
            raise self._collective_error(operation, (), cause) from error

    def split(self, ranks: Sequence[int]) -> TorchTransport:
        names, operation = self._begin_split(ranks)
        if self._backends.get("cpu") == "gloo":
            self._meet(operation, ranks)
        timeout, store, spare = timedelta(seconds=self.timeout_s + DIAGNOSIS_S), None, None
        try:
            if self._store is not None:
                store = dist.PrefixStore(operation.name, self._store)
                group = torch_versions.gloo_group(store, ranks.index(self.rank), len(ranks), timeout)
            else:
                everywhere = dist.get_process_group_ranks(self.group)
                members = tuple(everywhere[rank] for rank in ranks)
                spare = self._past.spare[members]
                group = (spare.pop()() if spare else None) or dist.new_group(
                    list(members),
                    timeout=timeout,
                    backend=dist.get_backend(self.group),
                    use_local_synchronization=True,  # others of the default group need not call
                )
                dist.distributed_c10d._set_pg_timeout(timeout, group)  # of one that is used again
        except RuntimeError as error:
            raise self._collective_error(operation, (), error) from error
        part = TorchTransport(group, self.timeout_s, whole=self, finds_cause=self._finds_cause, store=store)
        part._names, part._spare = names, spare
        return part

    def abandon(self, why: str = "") -> None:
        """See `Transport`."""
        if self._is_closed and not self._ends_group:
            return
        self._is_closed, self._past.open = True, 1
        if why and self._board is not None and not (self._is_part or self.has_failed):
            last = self._launched[-1] if self._launched else Operation("start", 0)
            self._board.leave(Note(self.group.group_name, last, tuple(self._launched), ended=why))
            self._break_off()
            self._board.linger()
        self._release()

    @property
    def _ends_group(self) -> bool:
        """Whether the group that `init` made is there, and this is no part of it. It outlives the first ones closed."""
        return self._past.is_ours and not self._is_part

    def end(self) -> None:
        """Close it, and with it the group that `init` made, although other transports of it are open. At exit."""
        self._past.open = 1
        self._is_closed &= not self._ends_group  # the group of a closed one waits for the others
        self.close()

    def _release(self) -> None:
        # Destroying without a barrier, or not at all, ended in SIGABRT in 3 of 14 and 2 of 5 runs (Gloo, torch 2.13).
        # A broken NCCL communicator may block in destroy; the process ends without it.
        can_end = not self.has_failed or "gloo" in self._backends.values()
        self._past.open -= not self._is_part
        if self._ends_group and not self._past.open:
            self._past.is_ours = False
            # A reference to a group that the script has destroyed may have kept it in memory.
            if can_end and self._group() is dist.group.WORLD is not None:
                dist.destroy_process_group(self.group)
            self._is_released()
        if self._spare is not None and not self.has_failed:
            self._spare.append(self._group)
        if not self._ends_group:  # else an error that ends this rank would be told to no other
            self._board = None
        self._own_group = None

    def _barrier(self, operation: Operation) -> None:
        if self._group() is None:  # the script has destroyed it
            return
        if self._backends.get("cpu") == "gloo":
            self._meet(operation)
        else:
            self._collective(operation, (), lambda: dist.barrier(group=self.group, async_op=True)).wait()

    def reaches(self, device: torch.device) -> bool:
        """Gloo sends from host memory only, and NCCL from a GPU's."""
        return self._backends.get(device.type, "gloo") != "gloo" or (device.type == "cpu" and "cpu" in self._backends)

    def _is_gloo(self, x: Tensor) -> bool:
        return self._backends.get(x.device.type) == "gloo"

    def _exchange(self, operation: Operation, outs: Sequence[Tensor] | Tensor, rows: Sequence[Tensor]) -> _PairsWork:
        work = _PairsWork(self, operation, outs, rows, _TAG + operation.tag(_TAGS), self.timeout_s)
        outs[self.rank].copy_(rows[self.rank])
        return work

    def _meet(self, operation: Operation, ranks: Sequence[int] | None = None) -> None:
        """Wait until all ranks, or these, have launched the operation: empty messages to and from each."""
        nothing = torch.empty(self.world_size, 0, dtype=torch.uint8, device="cpu")
        tag = _TAG + operation.tag(_TAGS)
        _PairsWork(self, operation, nothing, list(nothing), tag, self.timeout_s, ranks).wait()

    def _collective(self, operation: Operation, tensors: tuple[Tensor, ...], launch: Callable[[], dist.Work]) -> Work:
        if any(self._is_gloo(x) for x in tensors):
            self._meet(operation)
        try:
            return _CollectiveWork(self, operation, tensors, launch())
        except RuntimeError as error:
            raise self._collective_error(operation, tensors, error) from error

    def _collective_error(self, operation: Operation, held: object, error: RuntimeError) -> PeerError:
        what = f"{reason(error)} (timeout_s={self.timeout_s:g})"
        if self._backends.get("cpu") != "gloo":
            self._past.held.append(held)
            self._past.failure = operation
            return peer_error(self._names[self.rank], operation, what, Conclusion(), _HINT)
        suspects = set() if self.has_failed or not self._finds_cause else self._roll_call(operation)
        return self._fail(operation, held, what, suspects, gave_up=_is_timeout(error))

    def _fail(self, operation: Operation, held: object, what: str, suspects: set[int], *, gave_up: bool) -> PeerError:
        """Break off, compare notes with the others, and return the error that names the ranks to blame.

        suspects: by their numbers in this transport.
        """
        past = self._past
        past.held.append(held)
        if past.failure is not None:
            return self._failed_before(operation)
        past.failure = operation
        self._break_off()
        misses = tuple(sorted(self._names[rank] for rank in suspects))
        mine = Note(self.group.group_name, operation, tuple(self._launched), misses, gave_up)
        me = self._names[self.rank]
        if not self._finds_cause:
            past.missing = misses
            return peer_error(me, operation, what, Conclusion(misses, f"Lost: {names_of(misses)}", False), _HINT)
        assert self._board is not None  # only Gloo's operations come here
        notes = self._board.compare(mine)
        if not notes and past.late_s and not gave_up:
            reason = (
                f"This rank may have come too late: it launched nothing for {past.late_s:.1f} s, longer than "
                f"timeout_s={self.timeout_s:g}. Ended meanwhile: rank {', '.join(map(str, misses))}; look there for why"
            )
            conclusion = Conclusion(misses, reason, is_silence=False)
        else:
            if notes is None and self._store_host is not None:  # it is gone or hangs: no rank could leave a note
                mine = replace(mine, misses=(self._store_host,))
            conclusion = conclude(me, mine, notes or {})
        past.missing = conclusion.ranks
        return peer_error(me, operation, what, conclusion, _HINT)

    def _failed_before(self, operation: Operation) -> PeerError:
        assert self._past.failure is not None
        return failed_before(self._names[self.rank], operation, self._past.failure, self._past.missing)

    def _roll_call(self, failed: Operation) -> set[int]:
        """The ranks that do not answer, or all if all do. A rank that failed calls it: one byte to every peer.

        A rank that is merely late by more than `ROLL_CALL_S` is suspected, too.
        """
        presence_W1 = torch.zeros(self.world_size, 1, dtype=torch.uint8, device="cpu")
        mine = [torch.zeros(1, dtype=torch.uint8, device="cpu")] * self.world_size
        call = _PairsWork(self, failed, presence_W1, mine, _ROLL_CALL_TAG, ROLL_CALL_S)
        self._past.held.append(call)
        return call.suspects() or set(range(self.world_size)) - {self.rank}

    def _break_off(self) -> None:
        """Close all connections, so that every rank that waits for this one learns at once that it has failed.

        A wait that times out makes Gloo close them.
        """
        for peer in range(self.world_size):
            if peer != self.rank:
                try:
                    nothing = [torch.empty(1, dtype=torch.float32, device="cpu")]
                    self.group.recv(nothing, peer, _BREAK_OFF_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if _is_timeout(error):
                        return


class _Board:
    """Where ranks that fail leave notes and read those of others: the group's store, a key for each rank.

    It uses a separate connection, because the group's is locked while another thread waits. It connects at
    construction, because torch's store looks up the name of each client that connects and serves no other meanwhile:
    5 s if the resolver does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, timeout_s: float):
        self._rank = rank
        store = _innermost(group)
        self.port = store.port if isinstance(store, dist.TCPStore) else None
        before = sockets()
        try:
            self._store: dist.Store = call_within(
                timeout_s,
                lambda: torch_versions.own_connection(group),
                self.port,
            )
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(f"rank {rank}: the group's store has ended or hangs: {reason(error)}") from error
        self._connected = connections(self.port, before)

    def clear(self) -> None:
        """Delete the note of an earlier process of this rank: torchrun restarts processes, but keeps its store."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._ask(
                "look for notes of an earlier start", ANSWER_S, lambda: self._store.delete_key(_key_of(self._rank))
            )

    def leave(self, mine: Note) -> None:
        self._ask("tell the others", ANSWER_S, lambda: self._store.set(_key_of(self._rank), mine.encode().decode()))

    def linger(self) -> None:
        """Give the others time to read: the store may end with this rank."""
        if self._rank == 0:
            time.sleep(_LINGER_S)

    def compare(self, mine: Note) -> dict[int, Note] | None:
        """Leave my note; return those of the ranks that I miss, and that these miss, if they come within `NOTES_S`.

        A rank that waits for a failed one fails at once, as its connections are closed, and leaves a note. None if the
        process that hosts the store has died or hangs.
        """
        notes: dict[int, Note] = {}
        has_all = self._ask("ask the others what they know", NOTES_S + ANSWER_S, lambda: self._compare(mine, notes))
        if has_all:
            self.linger()
        return dict(notes) if has_all or notes else None

    def _compare(self, mine: Note, notes: dict[int, Note]) -> None:
        self._store.set(_key_of(self._rank), mine.encode().decode())
        deadline = time.monotonic() + NOTES_S
        wanted = set(mine.misses)
        while (missing := wanted - notes.keys() - {self._rank}) and time.monotonic() < deadline:
            if have_ended(self._connected):
                raise RuntimeError(_STORE_ENDED)
            for peer in missing:
                if self._store.check([_key_of(peer)]):
                    notes[peer] = Note.decode(self._store.get(_key_of(peer)))
                    wanted |= set(notes[peer].misses)
            time.sleep(_POLL_S)

    def _ask(self, what: str, seconds: float, question: Callable[[], object]) -> bool:
        """Whether the store has answered in time. The process that hosts it may have ended, or may hang."""
        why = _STORE_ENDED if have_ended(self._connected) else ""  # torch would print a C++ stack
        try:
            if not why:
                call_within(seconds, question, self.port, self._connected)
                return True
        except (RuntimeError, TimeoutError) as error:  # ranks that fail later find that out, too
            why = reason(error)
        _log.info("rank %d: cannot %s: %s", self._rank, what, why)
        return False


def _key_of(rank: int) -> str:
    return f"onebit/notes/{rank}"


def _innermost(group: dist.ProcessGroup) -> dist.Store:
    """The group's store without its prefixes."""
    store = torch_versions.group_store(group)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


class _PairsWork:
    """A send and a receive per peer: outs[j] ← the row of rank j for me; rows[j] goes to rank j. Skips my own row.

    ranks: peers to exchange with; None: all. distances: only with the ranks r-k and r+k for these k; None: all k.
    receives: tag of what comes; None: that of what goes.
    """

    def __init__(
        self,
        transport: TorchTransport,
        operation: Operation,
        outs: Sequence[Tensor] | Mapping[int, Tensor] | Tensor,
        rows: Sequence[Tensor] | Mapping[int, Tensor],
        tag: int,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        distances: Iterable[int] | None = None,
        receives: int | None = None,
    ):
        self._transport = transport
        self._operation = operation
        self._timeout_s = timeout_s
        self._tensors = (outs, rows)  # keep alive: tensors staged in host memory have no other owner
        self._posted: collections.deque[tuple[int, dist.Work]] = collections.deque()
        self._ends: list[Tensor] = []  # last bytes of the rows to receive, for is_ready(); in a channel only
        self._broken: dict[int, str] = {}
        self._silent: set[int] = set()
        if transport.has_failed:
            raise transport._failed_before(operation)
        transport._past.launches(timeout_s)
        rank, W, group = transport.rank, transport.world_size, transport.group
        for k in range(1, W) if distances is None else distances:
            src, dst = (rank - k) % W, (rank + k) % W
            if ranks is None or src in ranks:
                if operation.channel:
                    self._ends.append(_marked_end(outs[src]))
                self._post(src, group.recv, outs[src], tag if receives is None else receives)
            if ranks is None or dst in ranks:
                self._post(dst, group.send, rows[dst], tag)

    def _post(self, peer: int, launch: Callable[[list[Tensor], int, int], dist.Work], row: Tensor, tag: int) -> None:
        try:
            self._posted.append((peer, launch([row], peer, tag)))
        except RuntimeError as error:  # the connection is known to be broken; wait() reports it with the others
            self._broken[peer] = reason(error)

    def __del__(self) -> None:
        # As of a step under way whose optimizer is dropped: Gloo reads no further than a message without its tensor.
        if self._posted:
            self._transport._past.held.append((self._posted, self._tensors))

    def wait(self) -> None:
        suspects = self.suspects()
        if suspects:
            what = next(iter(self._broken.values()), f"not complete within {self._timeout_s:g} s")
            raise self._transport._fail(self._operation, self, what, suspects, gave_up=not self._broken)
        self._transport._past.completes()

    def is_ready(self) -> bool:
        """Whether all rows have come; outside of a channel False while any is under way.

        Gloo has no test without waiting, so we look whether the marked ends are overwritten. A peer that has sent has
        also posted its receives, so my sends to it wait for the network only.
        """
        if self._broken or not self._posted:
            return True
        return bool(self._ends) and not any(torch.equal(end, _UNWRITTEN[: len(end)]) for end in self._ends)

    def suspects(self) -> set[int]:
        """Wait; then the peers with broken connections, or if there are none, those that did not complete in time.

        After a broken connection we do not wait for the others: a wait that times out makes Gloo close all of them.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._posted and not self._broken:
            peer, work = self._posted[0]
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                # After the first timeout all connections are closed. Messages that came before still count.
                if _is_timeout(error):
                    self._silent.add(peer)
                else:
                    self._broken[peer] = reason(error)
            self._posted.popleft()
        return set(self._broken) or self._silent


def _marked_end(row: Tensor) -> Tensor:
    """Mark the last bytes of a row to receive with `_UNWRITTEN`, and return a view of them."""
    end = as_bytes(row)[-len(_UNWRITTEN) :]
    return end.copy_(_UNWRITTEN[: len(end)])


class _SumWork:
    """An all_reduce over Gloo, [n]: ranks send chunks to their owners; owners send the sums, in rank order, to all.

    Gloo's all_reduce would have to be launched at the same time on all ranks, in one order with everything else on the
    group. A rank that sends during its backward pass cannot wait for that.
    """

    def __init__(self, transport: TorchTransport, operation: Operation, x: Tensor):
        W, rank, step = transport.world_size, transport.rank, -(-len(x) // transport.world_size)
        self._transport, self._operation = transport, operation
        self._chunks = [x[min(k * step, len(x)) : min((k + 1) * step, len(x))] for k in range(W)]
        self._received_WN = torch.empty(W, len(self._chunks[rank]), dtype=x.dtype, device=x.device)
        self._pairs = transport._exchange(operation, self._received_WN, self._chunks)
        self._is_summed = False

    def _give_sums(self) -> None:
        """The second phase, once the parts of my chunk have come from all ranks."""
        self._pairs.wait()
        transport, mine = self._transport, self._chunks[self._transport.rank]
        torch.sum(self._received_WN, 0, out=mine)
        given = self._operation._replace(name=f"{self._operation.name}, the sums")
        self._pairs = transport._exchange(given, self._chunks, [mine] * transport.world_size)
        self._is_summed = True

    def is_ready(self) -> bool:
        if not self._is_summed and self._pairs.is_ready():
            self._give_sums()
        return self._is_summed and self._pairs.is_ready()

    def wait(self) -> None:
        if not self._is_summed:
            self._give_sums()
        self._pairs.wait()


class _CollectiveWork:
    """A collective of the library. It keeps the tensors alive until it is complete."""

    def __init__(self, transport: TorchTransport, operation: Operation, tensors: tuple[Tensor, ...], work: dist.Work):
        self._transport = transport
        self._operation = operation
        self._tensors = tensors
        self._work: dist.Work | None = work

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            if self._transport._backends.get("cpu") == "gloo" and all(not x.is_cuda for x in self._tensors):
                self._work.wait(timedelta(seconds=self._transport.timeout_s))
            else:
                self._work.wait()  # with a timeout, NCCL's wait blocks the host until the operation is complete
        except RuntimeError as error:
            raise self._transport._collective_error(self._operation, self, error) from error
        self._transport._past.completes()
        self._work, self._tensors = None, ()

    def is_ready(self) -> bool:
        if self._work is None or self._transport._backends.get("cpu") != "gloo":
            return True
        return self._work.is_completed()


def _backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """{"cpu": "gloo", "cuda": "nccl"} and the like."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))


def _network_error(error: BaseException | None) -> RuntimeError | None:
    """The error of Gloo or NCCL among this error and its causes, if there is one."""
    while error is not None:
        text = str(error)
        # Not by type alone: Gloo raises plain RuntimeErrors, and pipelining wraps what happens in a stage.
        is_of_network = isinstance(error, dist.DistError) or "gloo/transport" in text or "Timed out waiting" in text
        if isinstance(error, RuntimeError) and is_of_network and error.__cause__ is None:
            return error
        error = error.__cause__
    return None


def _is_timeout(error: RuntimeError) -> bool:
    return any(text in str(error) for text in ("Timed out", "timed out", "Application timeout"))
