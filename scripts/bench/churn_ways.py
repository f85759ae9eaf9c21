"""The ways to train of `bench.py churn`: ours, torchft's, and torchrun with checkpoints. One member's loop each.

Each member appends a line of JSON whenever a step counts, [when, number of the step, members that took it]; steps of
`local` and `torchft-diloco` are rounds of `ROUND` local ones. All have the same model, data and emulated compute,
and torch's fused AdamW but for ours. Waits are as short as the peers' settings allow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, ROUND = 512, 8
CHECKPOINT_EVERY = 10  # steps, with torchrun: a tenth of a second for this model


@dataclass
class Member:
    """What a member's loop needs. compute_s: of one step, slept before backward. out: its file of steps."""

    address: str
    name: str
    founders: int
    compute_s: float
    out: Path
    until: float
    layers: int

    def model(self) -> nn.Sequential:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)))

    def losses(self, net: nn.Module) -> Iterator[Tensor]:
        """One loss after the other, until the run ends."""
        while time.time() < self.until:
            loss = net(torch.randn(8, WIDTH)).square().mean()
            time.sleep(self.compute_s)
            yield loss

    def count(self, step: int, members: int) -> None:
        with self.out.open("a") as file:
            file.write(json.dumps([time.time(), step, members]) + "\n")


def onebit(member: Member) -> None:
    import onebit
    from onebit import membership

    net = member.model()
    members = _members(member)
    optimizer = onebit.OnebitAdam(net.parameters(), lr=1e-4, transport=members, compression="always", freeze_step=5)
    membership.begin(optimizer)
    for loss in member.losses(net):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        member.count(optimizer.steps_taken(), members.world_size)
    members.abandon()


def local(member: Member) -> None:
    import onebit
    from onebit import membership

    net = member.model()
    members = _members(member)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    optimizer = onebit.LocalSteps(inner, every=ROUND, transport=members)
    membership.begin(optimizer)
    for loss in member.losses(net):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.is_at_anchor():
            member.count(optimizer.steps_taken() // ROUND, members.world_size)
    members.abandon()


def _members(member: Member):
    from onebit import membership

    patience = membership.Patience(wait_s=60.0)
    return membership.connect(
        member.address, name=member.name, founders=member.founders, timeout_s=10.0, patience=patience
    )


def torchft(member: Member) -> None:
    from torchft import Optimizer
    from torchft.ddp import PureDistributedDataParallel

    net = member.model()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    manager = _manager(member, net, inner, use_async_quorum=True)
    # Its DistributedDataParallel ends all survivors in an AssertionError (`assert fut._fut` in its hook, 0.2.0) if a
    # member is lost while a model has more than one bucket; only the killed one went on then, from its first step.
    model, optimizer = PureDistributedDataParallel(manager, net), Optimizer(manager, inner)
    losses = member.losses(model)
    while True:
        optimizer.zero_grad()  # begins the quorum
        loss, before = next(losses, None), manager.current_step()
        if loss is None:
            return
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            member.count(manager.current_step(), manager.num_participants())


def torchft_diloco(member: Member) -> None:
    from torchft.local_sgd import DiLoCo

    net = member.model()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = _manager(member, net, inner, use_async_quorum=False)
    with DiLoCo(manager, [net], inner, outer, sync_every=ROUND, pin_memory=False, use_bucketization=True):
        for loss in member.losses(net):
            before = manager.current_step()
            loss.backward()
            inner.step()
            inner.zero_grad()
            if manager.current_step() > before:
                member.count(manager.current_step(), manager.num_participants())


def _manager(member: Member, net: nn.Module, inner: torch.optim.Optimizer, *, use_async_quorum: bool):
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=use_async_quorum,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{member.address}",
        replica_id=member.name,
        init_sync=False,
    )
    manager.store = store  # it would end with this function
    return manager


def torchrun(member: Member) -> None:
    """One rank of a start; its agent starts it anew whenever a rank is lost or comes."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    net = member.model()
    file, step = member.out.parent / "checkpoint.pt", 0
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    if file.exists():
        saved = torch.load(file, weights_only=True)
        step = saved["step"]
        net.load_state_dict(saved["net"])
        inner.load_state_dict(saved["inner"])
    model = nn.parallel.DistributedDataParallel(net)
    for loss in member.losses(model):
        loss.backward()
        inner.step()
        inner.zero_grad()
        step += 1
        member.count(step, dist.get_world_size())
        if step % CHECKPOINT_EVERY == 0 and dist.get_rank() == 0:
            part = file.with_suffix(".part")
            torch.save({"step": step, "net": net.state_dict(), "inner": inner.state_dict()}, part)
            part.rename(file)
    os._exit(0)  # a rank that ends a step before the others


WAYS: dict[str, Callable[[Member], None]] = {
    "onebit": onebit,
    "local": local,
    "torchft": torchft,
    "torchft-diloco": torchft_diloco,
    "torchrun": torchrun,
}
SAMPLES = {"local": ROUND, "torchft-diloco": ROUND}  # of a member and a counted step; else 1


def command(way: str, python: str, script: list[str], address: str, founders: int) -> list[str]:
    """The command of one member. script: this file and the arguments of `main`."""
    if way != "torchrun":
        return [python, *script]
    # With --nnodes=1:4 the others may start again without the lost one. Tried with a kill every 12 s: with a last call
    # of 1 s, two groups of one rank each trained apart from each other; with one of 3 s, nobody did until the end.
    settings = "is_host=0,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=2"
    flags = [f"--nnodes={founders}", "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
    flags += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=churn", f"--rdzv-conf={settings}"]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *script]


def main(way: str, address: str, name: str, founders: str, compute_s: str, out: str, until: str, layers: str) -> None:
    """One member in its own process; torchft's have an environment without onebit."""
    member = Member(address, name, int(founders), float(compute_s), Path(out), float(until), int(layers))
    WAYS[way](member)


def lighthouse(python: str, port: int) -> subprocess.Popen[bytes]:
    """torchft's own rendezvous."""
    program = Path(python).with_name("torchft_lighthouse")
    waits = ["--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000", "--quorum_tick_ms", "50"]
    return subprocess.Popen([program, "--bind", f"[::]:{port}", "--min_replicas", "1", *waits])


if __name__ == "__main__":
    main(*sys.argv[1:])
