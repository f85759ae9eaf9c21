"""A run whose members come and go: docs/members.md, "Try it".

    onebit rendezvous --port 29400
    onebit run --join localhost:29400 --founders 2 -- python scripts/examples/members/train.py      (in two terminals)

Kill one of the two (its process number is in the lines that it prints): the other continues, and `onebit run` starts
the killed one again, which is let in. Both print the same checksum at the end.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import zlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onebit
from onebit import membership


def main() -> None:
    parser = argparse.ArgumentParser(description="A run whose members come and go.")
    parser.add_argument("--steps", type=int, default=600, help="of the whole run (default: 600)")
    parser.add_argument("--seconds", type=float, default=0.1, help="to sleep in each step (default: 0.1)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # who was lost, who joined
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    dataset = TensorDataset(x, x[:, :1] * x[:, 1:2])
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))

    members = membership.connect()
    optimizer = onebit.OnebitAdam(model.parameters(), lr=3e-3, transport=members, freeze_step=50)
    sampler = membership.MemberSampler(members, len(dataset), batch_size=32)
    membership.begin(optimizer, sampler=sampler)
    batches = sampler.batches(DataLoader(dataset, batch_sampler=sampler))

    while optimizer.steps_taken() < args.steps:
        inputs, targets = next(batches)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        time.sleep(args.seconds)  # as if the model were larger
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps_taken() % 20 == 0:
            of = f"{members.world_size} member{'s' * (members.world_size > 1)}"
            print(f"process {os.getpid()}: step {optimizer.steps_taken()} of {of}, loss {loss.item():.3f}", flush=True)

    membership.end(optimizer)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"process {os.getpid()}: parameters {zlib.crc32(parameters.numpy().tobytes()):08x}", flush=True)


if __name__ == "__main__":
    main()
