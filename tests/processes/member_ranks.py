"""One member of a run, in its own process: `python member_ranks.py ADDRESS NAME FOUNDERS END [SECONDS [KIND]]`.

KIND is the optimizer: see `OPTIMIZERS`. With ADDRESS, NAME and FOUNDERS empty they come from the environment, as
`onebit run --join` sets it.

END is a file that will contain the number of the last step: it must be written before any member comes to that step.
It prints a line for each step, "step K of N members", and at its end "done", a digest of its parameters, how many
members it has seen go and come, and the longest time between two steps.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import onebit
from onebit import membership


def adam(net: nn.Module, members: membership.Members, delay: int = 0) -> onebit.OnebitAdam:
    options = {"lr": 1e-3, "compression": "always", "freeze_step": 10}
    return onebit.OnebitAdam(net.parameters(), transport=members, delay=delay, **options)


def local(net: nn.Module, members: membership.Members) -> onebit.LocalSteps:
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return onebit.LocalSteps(inner, every=8, fragments=2, delay=3, transport=members, bucket_cap_mb=0.04)


OPTIMIZERS = {"adam": adam, "delayed": partial(adam, delay=1), "local": local}


def main(address: str, name: str, founders: str, end: str, seconds: str = "0.02", kind: str = "adam") -> None:
    logging.basicConfig(level=logging.INFO)
    patience = membership.Patience(suspect_s=1.0, silent_s=2.0, look_s=0.2, wait_s=60.0)
    given = {"address": address, "founders": int(founders), "token": "test", "name": name} if address else {}
    members = membership.connect(**given, timeout_s=3.0, patience=patience)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = OPTIMIZERS[kind](net, members)
    schedule = torch.optim.lr_scheduler.ExponentialLR(getattr(optimizer, "inner", optimizer), 0.99)
    membership.begin(optimizer, schedule=schedule)
    draw, last, longest = torch.Generator().manual_seed(sum(name.encode())), time.monotonic(), 0.0
    while not Path(end).exists() or optimizer.steps_taken() < int(Path(end).read_text()):
        x = torch.randn(8, 64, generator=draw)
        (net(x) - x).square().mean().backward()
        time.sleep(float(seconds))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
        print(f"step {optimizer.steps_taken()} of {members.world_size} members", flush=True)
    optimizer.sync()
    optimizer.check_replicas()
    flat = torch.cat([p.detach().view(-1) for p in net.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
    print(f"done {digest} {members.lost} {members.joined} {longest:.2f}", flush=True)
    members.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
