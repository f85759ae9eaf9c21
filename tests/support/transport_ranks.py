"""What each rank of `test_transport.py` and `test_launch.py` does; started by `ranks.py`, results through JSON."""

from __future__ import annotations

import atexit
import datetime
import gc
import io
import logging
import os
import signal
import sys
import time
import unittest.mock
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transport_contract as contract
from ranks import report

import onebit
import onebit.comm
from onebit.comm import HierarchicalTransport, PeerError, Transport, Work, launch

VICTIM = 2
TIMEOUT_S = 1.0


def contract_over_gloo(worlds: list[int]) -> dict[str, object]:
    """The whole contract in sub-worlds of the first W ranks, so that one set of processes serves all sizes."""
    base = onebit.comm.init(timeout_s=30.0)
    outcome = {}
    for W in worlds:
        if transport := of_first(W):
            outcome[str(W)] = _all_of_it(transport)
    outcome["description"] = launch.describe(base)
    base.close()
    base.close()
    return outcome


def contract_over_mpi(worlds: list[int]) -> dict[str, object]:
    """As over Gloo; then the exchanges in small pieces; then Gloo bootstrapped from MPI."""
    from mpi4py import MPI

    base = onebit.comm.init(timeout_s=30.0)
    outcome: dict[str, object] = {}
    for W in worlds:
        if transport := of_first(W):
            outcome[str(W)] = _all_of_it(transport)
        base.all_reduce(torch.zeros(1)).wait()  # ranks that are done would spin in the next Split
    pieces = _on_mpi(MPI.COMM_WORLD, piece_bytes=64_000)
    outcome["pieces"] = contract.run_checks(pieces)
    outcome["description"] = launch.describe(base)
    base.close()
    base.close()

    gloo = onebit.comm.init("gloo", timeout_s=30.0)
    outcome["gloo"] = contract.run_checks(gloo, ("all_to_all_transposes", "all_reduce_sums"))
    again = onebit.comm.init()
    outcome["gloo descriptions"] = [launch.describe(gloo), launch.describe(again)]
    gloo.close()
    return outcome


def _all_of_it(transport: Transport) -> dict[str, str]:
    outcome = contract.run_checks(transport)
    if not any(outcome.values()):
        outcome["digest"] = contract.digest_of_compressed_rounds(transport)
        transport.close()
        transport.close()
    return outcome


def outlive_a_peer_on_gloo(fate: str) -> dict[str, object]:
    """Every operation, each on a group of its own, while rank VICTIM is killed or stopped: what the others see."""
    base = onebit.comm.init(timeout_s=30.0)
    names = DISAGREEMENTS if fate == "stopped" else ()
    disagreed = _disagree(base, lambda: _on_gloo(torch.distributed.new_group(), TIMEOUT_S), names)
    transports = {name: _on_gloo(torch.distributed.new_group(), TIMEOUT_S) for name in OPERATIONS}
    seen = disagreed | _meet(fate, base, transports)
    if base.rank == 0 and fate == "stopped":
        os.kill(seen["victim"], signal.SIGKILL)  # who started the ranks waits for all of them
    base.abandon()
    return seen


def outlive_a_peer_on_mpi(fate: str) -> None:
    """As on Gloo; then this rank ends on the PeerError, which must end the whole job though one rank hangs."""
    base = onebit.comm.init(timeout_s=30.0)
    disagreed = _disagree(base, lambda: _on_mpi(None, TIMEOUT_S), DISAGREEMENTS_OVER_MPI if fate == "stopped" else ())
    transports = {name: _on_mpi(None, TIMEOUT_S) for name in ("all_to_all", "all_reduce")}
    report(disagreed | _meet(fate, base, transports))
    base.timeout_s = TIMEOUT_S
    OPERATIONS["all_to_all"](base).wait()


def levels_of_inits(hosts: list[str], local_size: int) -> dict[str, str]:
    """What init() makes of these host names and this LOCAL_WORLD_SIZE, and of numbers."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % local_size), LOCAL_WORLD_SIZE=str(local_size))
    log = io.StringIO()
    logging.getLogger("onebit").addHandler(logging.StreamHandler(log))
    logging.getLogger("onebit").setLevel(logging.INFO)
    with unittest.mock.patch("socket.gethostname", lambda: hosts[rank]):
        with unittest.mock.patch("resource.getrlimit", lambda _: (50, 50)):
            transports = {"auto": onebit.comm.init(timeout_s=20.0)}
        transports |= {
            "again": onebit.comm.init(),
            "one": onebit.comm.init(levels=1),
            "two": onebit.comm.init(levels=2),
            "hops": onebit.comm.init(levels=1, hops=2),
        }
        outcome = {name: launch.describe(transport) for name, transport in transports.items()}
        for name, levels, hops in (("three", 3, 1), ("unlike", 2 if rank else 1, 1), ("unlike hops", 1, 1 + rank % 2)):
            try:
                onebit.comm.init(levels=levels, hops=hops)
            except ValueError as error:
                outcome[name] = str(error)
    for transport in transports.values():
        total = torch.full((3,), float(rank))
        transport.all_reduce(total).wait()
        assert torch.equal(total, torch.full((3,), 6.0))
        frames, whole = torch.full((5,), rank, dtype=torch.uint8), torch.empty(4, 5, dtype=torch.uint8)
        for work in transport.all_gather_in_hops(whole, frames):
            work.wait()
        assert whole[:, 0].tolist() == [0, 1, 2, 3]
        for work in transport.all_to_all_in_hops(
            whole, torch.arange(4, dtype=torch.uint8).repeat_interleave(5).view(4, 5)
        ):
            work.wait()
        assert torch.equal(whole, torch.full_like(whole, rank))
    for transport in reversed(transports.values()):
        transport.close()
    return outcome | {"log": log.getvalue()}


def form_groups_in_turn() -> list[float]:
    """Four, the last two in two levels. Rank 0 is slow to end a group: the others have begun with the next by then."""
    end = torch.distributed.destroy_process_group

    def end_slowly(group: torch.distributed.ProcessGroup) -> None:
        time.sleep(0.1 if int(os.environ["RANK"]) == 0 else 0.0)
        end(group)

    sums = []
    with unittest.mock.patch("torch.distributed.destroy_process_group", end_slowly):
        for number, levels in enumerate((1, 1, 2, 2)):
            transport = onebit.comm.init(timeout_s=20.0, levels=levels)
            x = torch.tensor([float(number)])
            transport.all_reduce(x).wait()
            sums.append(x.item())
            transport.close()
    return sums


def miss_a_peer_in_two_levels() -> None:
    """Rank 3 of two nodes of two ranks is silent: what its node and its peers across see. Then all end."""
    transport = onebit.comm.init(timeout_s=30.0, levels=2)  # all come, on a busy machine too
    assert isinstance(transport, HierarchicalTransport)
    transport.intra_node.timeout_s = transport.inter_node.timeout_s = TIMEOUT_S
    if with_3 := {1: transport.inter_node, 2: transport.intra_node}.get(transport.rank):
        seen, began = _what_happens(_all_to_all, with_3), time.monotonic()
        transport.close()
        report(seen | {"closing": time.monotonic() - began})
    else:
        reports, began = [Path(os.environ["ONEBIT_TEST_RESULTS"], f"{rank}.json") for rank in (1, 2)], time.monotonic()
        while not all(path.exists() for path in reports) and time.monotonic() < began + 20 * TIMEOUT_S:
            time.sleep(0.05)
    os._exit(0)


def end_unlike_the_others(ends: str) -> None:
    """Rank 0 dies, or waits in torch's own barrier, while the others exchange. Nobody catches what comes of it."""
    transport = onebit.comm.init(timeout_s=TIMEOUT_S)
    logging.basicConfig(format="%(message)s")
    if transport.rank == 0 and ends == "dies":
        os._exit(17)
    if transport.rank == 0:
        torch.distributed.barrier()
    _all_to_all(transport).wait()


def lose_a_peer(how: str) -> dict[str, object]:
    """Rank 0 hosts the store. The victim's fate, and what the others see in the exchange that it misses."""
    patience_s = 20.0 if how == "killed with workers" else TIMEOUT_S
    transport = onebit.comm.init(timeout_s=60.0, levels=1)  # all come, on a busy machine too
    transport.timeout_s = patience_s
    pids = torch.empty(transport.world_size, 8, dtype=torch.uint8)
    transport.all_gather(pids, torch.tensor([os.getpid()]).view(torch.uint8)).wait()
    victim = 1 if how in ("late", "raises") else 0
    if transport.rank == victim and how == "killed with workers":
        held = iter(torch.utils.data.DataLoader(_Slow(), num_workers=2))
        next(held)
        if os.fork() == 0:
            time.sleep(12)
            os._exit(0)
        os.system("sleep 12 &")
    if transport.rank == victim and how != "late":
        if how == "raises":
            raise FileNotFoundError("no shard_7.bin")
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    time.sleep(6 * TIMEOUT_S if transport.rank == victim else 0.0)
    seen = {"first": _what_happens(_all_to_all, transport), "second": _what_happens(_all_to_all, transport)}
    report(seen)
    if transport.rank == 2 and how == "stopped":
        os.kill(int(pids[0].view(torch.int64)), signal.SIGKILL)  # who started the ranks waits for all of them
    transport.close()
    return seen


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    """A worker that reads it looks seldom after its parent."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05 if index < 2 else 8.0)
        return torch.zeros(3)


def fork_a_child_that_exits() -> list[float]:
    """A child of rank 0 ends as a script does, on an exit and on an error; the sums before and after."""
    transport = onebit.comm.init(timeout_s=30.0)
    sums = []
    for end in (lambda: None, _fork_and_exit, _fork_and_fail):
        if transport.rank == 0:
            end()
        x = torch.ones(3)
        transport.all_reduce(x).wait()
        sums.append(x[0].item())
    transport.close()
    return sums


def _fork_and_exit() -> None:
    _in_child(atexit._run_exitfuncs)


def _fork_and_fail() -> None:
    error = ValueError("of the child")
    _in_child(lambda: sys.excepthook(ValueError, error, None))


def _in_child(act: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    deadline = time.monotonic() + 5.0
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the child waits for the ranks of its parent")
        time.sleep(0.02)


def gather_in_vain(ports: list[int]) -> dict[str, dict[str, object]]:
    """init() of three ranks, of which one does not come, or comes as somebody else: what each is told."""
    rank = int(os.environ["RANK"])
    own = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    wrong: dict[str, tuple[int, dict[str, str]]] = {
        "missing": (2, {}),
        "host missing": (0, {}),
        "twice": (2, {"RANK": "1"}),
        "host twice": (2, {"RANK": "0"}),
        "size": (1, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}),
        "dies": (2, {}),
    }
    seen = {}
    together = torch.distributed.TCPStore("127.0.0.1", ports[-1], 3, rank == 0)
    for (name, (odd, environment)), port in zip(wrong.items(), ports[:-1], strict=True):
        if together.add(name, 1) == 3:
            together.set(f"{name}: all are here", "")
        together.wait([f"{name}: all are here"], datetime.timedelta(seconds=30))
        os.environ.update(own | {"MASTER_PORT": str(port)} | (environment if rank == odd else {}))
        comes = rank != odd or environment
        started = time.monotonic()
        try:
            if name == "dies":
                _connect_without(odd)
            elif comes:
                onebit.comm.init(timeout_s=TIMEOUT_S)
            seen[name] = {"error": "none"}
        except (PeerError, ValueError) as error:
            seen[name] = {"error": type(error).__name__, "message": str(error), "ranks": getattr(error, "ranks", ())}
        seen[name]["seconds"] = time.monotonic() - started
    return seen | {"pid": os.getpid()}


def _connect_without(rank: int) -> None:
    """This rank comes to the rendezvous, and connects to nobody."""
    with unittest.mock.patch("onebit.comm.launch.DIAGNOSIS_S", 0.0):
        if int(os.environ["RANK"]) == rank:
            with unittest.mock.patch("torch.distributed.init_process_group", side_effect=ValueError("dies")):
                onebit.comm.init(timeout_s=TIMEOUT_S)
        onebit.comm.init(timeout_s=TIMEOUT_S)


def die_in_the_first_start() -> dict[str, object]:
    """Rank 1 does; what all ranks find in the second, which ends with status 0 though nobody calls close()."""
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    transport = onebit.comm.init(timeout_s=30.0)
    x = torch.full((3,), float(transport.rank + start))
    transport.all_reduce(x).wait()
    if start == 0 and transport.rank == 1:
        os._exit(3)
    if start == 0:
        _all_to_all(transport).wait()
    return {"start": start, "sum": x.tolist(), "launch": launch.describe(transport)}


def _all_to_all(transport: Transport, size: int = 1_000_000) -> Work:
    rows_WB = torch.zeros(transport.world_size, size, dtype=torch.uint8)
    return transport.all_to_all(torch.empty_like(rows_WB), rows_WB)


def _all_gather(transport: Transport, size: int = 1_000_000) -> Work:
    rows_WB = torch.zeros(transport.world_size, size, dtype=torch.uint8)
    return transport.all_gather(torch.empty_like(rows_WB), rows_WB[0])


def _come_late(transport: Transport) -> Work:
    time.sleep(TIMEOUT_S + 0.5)
    return _all_to_all(transport)


def _split(transport: Transport) -> None:
    transport.split(range(transport.world_size))


ODD = 1
DISAGREEMENTS: dict[str, tuple[Callable[[Transport], Work | None], Callable[[Transport], Work | None]]] = {
    "kinds": (_all_to_all, _all_gather),
    "larger": (_all_to_all, lambda transport: _all_to_all(transport, 1_000_001)),
    "smaller": (_all_gather, lambda transport: _all_gather(transport, 999_999)),
    "larger sum": (
        lambda transport: transport.all_reduce(torch.ones(9)),
        lambda transport: transport.all_reduce(torch.ones(90)),
    ),
    "sources": (
        lambda transport: transport.broadcast(torch.ones(9), 0),
        lambda transport: transport.broadcast(torch.ones(9), ODD),
    ),
    "larger news": (
        lambda transport: transport.broadcast(torch.ones(9), 0),
        lambda transport: transport.broadcast(torch.ones(8), 0),
    ),
    "closing": (_all_to_all, lambda transport: transport.close()),
    "splitting": (_split, _all_to_all),
    "late": (_all_to_all, _come_late),
}
"""What all ranks but ODD launch, and what ODD launches in its place."""
DISAGREEMENTS_OVER_MPI = ("kinds", "larger", "larger sum", "sources", "closing", "splitting")


def disagree(transport: Transport, name: str) -> dict[str, object]:
    """Launch, one rank another operation than the others; what comes of it here."""
    usual, odd = DISAGREEMENTS[name]
    return _what_happens(odd if transport.rank == ODD else usual, transport)


def _disagree(base: Transport, new_link: Callable[[], Transport], names: Iterable[str]) -> dict[str, dict[str, object]]:
    seen = {}
    for name in names:
        transport = new_link()
        seen[name] = disagree(transport, name)
        base.all_reduce(torch.zeros(1)).wait()
    return seen


OPERATIONS: dict[str, Callable[[Transport], Work]] = {
    "all_to_all": _all_to_all,
    "all_reduce": lambda transport: transport.all_reduce(torch.ones(1_000_000)),
    "broadcast": lambda transport: transport.broadcast(torch.ones(1_000_000), VICTIM),
}


def _meet(fate: str, base: Transport, transports: Mapping[str, Transport]) -> dict[str, dict | int]:
    pids = torch.empty(base.world_size, 8, dtype=torch.uint8)
    base.all_gather(pids, torch.tensor([os.getpid()]).view(torch.uint8)).wait()
    if base.rank == VICTIM:
        time.sleep(0.3)
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fate])
    seen = {name: _what_happens(OPERATIONS[name], transport) for name, transport in transports.items()}
    for name, transport in transports.items():
        seen[name]["again"] = _what_happens(OPERATIONS[name], transport)["message"]
    return seen | {"victim": int(pids[VICTIM].view(torch.int64))}


def _what_happens(operation: Callable[[Transport], Work | None], transport: Transport) -> dict[str, object]:
    started = time.monotonic()
    try:
        work = operation(transport)
        if work is not None:
            work.wait()
    except PeerError as error:
        return {"ranks": error.ranks, "message": str(error), "seconds": time.monotonic() - started}
    return {"ranks": [], "message": "no PeerError", "seconds": time.monotonic() - started}


def of_first(W: int) -> Transport | None:
    """The first W ranks on the transport that this process was started for; None on the others. All ranks."""
    if torch.distributed.is_initialized():
        group = torch.distributed.new_group(list(range(W)))
        return _on_gloo(group) if torch.distributed.get_rank() < W else None
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.Get_rank() < W else MPI.UNDEFINED)
    return None if comm == MPI.COMM_NULL else _on_mpi(comm)


def _on_gloo(group: torch.distributed.ProcessGroup, timeout_s: float = 20.0) -> Transport:
    from onebit.comm.transports.torch_distributed import TorchTransport

    transport = TorchTransport(group, 20.0)  # on a busy machine the store may need a while
    transport.timeout_s = timeout_s
    return transport


def _on_mpi(comm: object, timeout_s: float = 20.0, **options: int) -> Transport:
    from onebit.comm.transports.mpi import MpiTransport

    return MpiTransport(comm, timeout_s, **options)


def short_life(makes_group: bool, closes: bool) -> list[str]:
    """A script of a few steps; then the threads of Gloo that live on once its process group has been destroyed."""
    if makes_group:
        dist.init_process_group("gloo")
    optimizer = _trained(torch.nn.Linear(16, 16))
    if closes:
        optimizer.transport.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return _gloos_threads()


def _trained(net: torch.nn.Module, optimizer: onebit.OnebitAdam | None = None) -> onebit.OnebitAdam:
    """Its optimizer, after four steps more."""
    if optimizer is None:
        optimizer = onebit.OnebitAdam(net.parameters(), freeze_step=2, bucket_cap_mb=0.0002)
    for _ in range(4):
        net(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def lives_of_one_group(first_ends: bool, second_ends: str) -> list[bool]:
    """Two optimizers; the one that made the group is closed before the other's last steps.

    second_ends: "by close()", "with the process", or "on odd ranks": it is dropped there, and a third one follows.
    Whether the group, and threads of Gloo, are there after that.
    """
    nets = [torch.nn.Linear(16, 16) for _ in range(2)]
    optimizers = [_trained(net) for net in nets]
    rank = optimizers[0].transport.rank
    if second_ends == "on odd ranks" and rank % 2:
        optimizers.pop()
        gc.collect()
    if first_ends:
        optimizers[0].transport.close()
    if second_ends == "on odd ranks":
        _trained(nets[0])
    else:
        _trained(nets[1], optimizers[1])
    if second_ends == "by close()":
        optimizers[1].transport.close()
    return [dist.is_initialized(), bool(_gloos_threads())]


def group_kept_by_a_reference() -> bool:
    """Rank 0 keeps a reference to the process group until Python ends. Whether it ended with its transport."""
    optimizer = _trained(torch.nn.Linear(16, 16))
    if optimizer.transport.rank == 0:
        atexit.register(id, dist.group.WORLD)
    optimizer.transport.close()
    return not dist.is_initialized()


def lives_one_after_another(levels: int) -> dict[str, object]:
    """Six transports, each closed before the next: what is left of them, without a collection of cycles."""
    alive, opened = [], []
    gc.disable()
    for _ in range(6):
        transport = onebit.comm.init("gloo", timeout_s=20.0, levels=levels)
        transport.close()
        alive.append(weakref.ref(transport))
        del transport
        opened.append(len(os.listdir("/proc/self/fd")))
    gc.enable()
    left = sum(each() is not None for each in alive)
    hook = sys.excepthook.__module__  # torch leaves one with each group
    return {"left": left, "hook": hook, "more files": opened[-1] - opened[0]}


def engines_one_after_another() -> list[int]:
    """Open files after each of four engines that are closed, without a collection of cycles."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    opened = []
    gc.disable()
    for _ in range(4):
        engine = onebit.zero.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
        engine.backward(engine(torch.randn(2, 8)).mean())
        engine.step()
        engine.close()
        opened.append(len(os.listdir("/proc/self/fd")))
    gc.enable()
    return opened


def engines_after_others() -> None:
    """A pair of engines computes after a pair in other layouts, when both of that are closed."""

    def engine(stage: int) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}},
        }
        return onebit.zero.initialize(model=torch.nn.Linear(8, 8), config=config)[0]

    for stages in ((1, 1), (0, 1)):
        engines = [engine(stage) for stage in stages]
        for each in engines:
            each.backward(each(torch.randn(2, 8)).mean())
            each.step()
            each.module_state_dict()
        for each in engines:
            each.close()


def error_beside_a_closed_transport(closes: bool) -> float:
    """Rank 1 ends on an error with two optimizers, of which the first may be closed. Seconds until rank 0 knows."""
    nets = [torch.nn.Linear(16, 16) for _ in range(2)]
    optimizers = [_trained(net) for net in nets]
    if closes:
        optimizers[0].transport.close()
    if optimizers[0].transport.rank == 1:
        raise ArithmeticError("of rank 1")
    start = time.monotonic()
    with suppress(PeerError):
        _trained(nets[1], optimizers[1])
    return time.monotonic() - start


def closed_parts_of_a_scripts_group() -> list[int]:
    """Open files after each of four transports with two parts of the same ranks; both parts sum right.

    Rank 1 waits longer for the last ones.
    """
    dist.init_process_group("gloo")
    opened = []
    for life in range(4):
        transport = onebit.comm.init(timeout_s=20.0, levels=1)
        transport.timeout_s += transport.rank * (life == 3)
        parts = [transport.split(range(transport.world_size)) for _ in range(2)]
        for k, part in enumerate(parts):
            x = torch.full((5,), float(k))
            part.all_reduce(x).wait()
            assert x.tolist() == [float(k * part.world_size)] * 5
        for each in (*parts, transport):
            each.close()
        opened.append(len(os.listdir("/proc/self/fd")))
    dist.destroy_process_group()
    return opened


def _gloos_threads() -> list[str]:
    names = []
    for task in glob("/proc/self/task/*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            names.append(Path(task).read_text().strip())
    return [name for name in names if "gloo" in name]
