"""What the templates of scripts/clusters start in a test: a few steps, and a line for each rank."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import onebit

torch.set_num_threads(1)
transport = onebit.comm.init(timeout_s=30)
torch.manual_seed(0)
net = nn.Linear(64, 8)
optimizer = onebit.OnebitAdam(net.parameters(), lr=1e-2, freeze_step=3, compression="always", transport=transport)
for step in range(8):
    if "--die" in sys.argv and step == 5 and transport.rank == 1:
        os._exit(7)  # as a killed one; after sys.exit() it would say goodbye to the other, and either could end first
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + transport.rank))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
bits = net.weight.detach().double().sum().item().hex()
sys.stdout.write(f"rank {transport.rank} of {transport.world_size} over {transport.describe()}: {bits}\n")
