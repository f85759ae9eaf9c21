"""A rank of a member of several ranks, with the engine: `member_node_ranks.py ADDRESS NAME FOUNDERS END STAGE FORM`.

RANK and so on are those of the node alone, as torchrun sets them on each machine by itself. END as in
`member_ranks.py`; FORM is "one bit", "delayed", "local" or "dense", with " pipeline" after it if the ranks are two
stages, or " on host" if the optimizer's state is there. Rank 0 of the node prints the same lines as there, and every
rank a digest of what it has: of a stage, or of the whole model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from onebit import membership, zero
from onebit.zero import members as member_engines


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def main(address: str, name: str, founders: str, end: str, stage: str, form: str) -> None:
    patience = membership.Patience(suspect_s=1.0, silent_s=2.0, look_s=0.2, wait_s=60.0)
    logging.basicConfig(level=logging.INFO)
    is_pipeline, is_on_host = form.endswith("pipeline"), form.endswith("on host")
    node = zero.grid.start(**({"pipe": 2, "shard": int(os.environ["WORLD_SIZE"]) // 2} if is_pipeline else {}))
    members = membership.connect(
        address, founders=int(founders), token="test", name=name, timeout_s=3.0, patience=patience, node=node.world
    )
    torch.manual_seed(3)
    net: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    if is_pipeline:
        layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Identity()]
        net = zero.PipelineModule(layers, loss_fn=loss)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": int(stage), "offload_optimizer": {"device": "cpu" if is_on_host else "none"}},
        "bf16": {"enabled": stage == "2"},
        "onebit": {"check_replicas_every": 5},
    }
    if form.startswith(("one bit", "delayed")):
        config["optimizer"] = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}}
        config["onebit"] |= {"compression": "always", "delay": int(form.startswith("delayed"))}
    if form.startswith("local"):
        config["onebit"]["local_steps"] = {"every": 4}
    engine, *_ = zero.initialize(model=net, config=config, grid=member_engines.grid_of(members, node))
    member_engines.begin(engine)
    draw = torch.Generator().manual_seed(sum(name.encode()) + node.data[0])
    while not Path(end).exists() or engine.global_steps < int(Path(end).read_text()):
        if is_pipeline:
            engine.train_batch((x, x) for x in torch.randn(2, 8, 64, generator=draw))
        for _ in range(0 if is_pipeline else 2):
            x = torch.randn(8, 64, generator=draw).to(next(net.parameters()).dtype)
            engine.backward((engine(x) - x).float().square().mean())
            engine.step()
        time.sleep(0.05)
        if node.world.rank == 0:
            print(f"step {engine.global_steps} of {members.world_size} members", flush=True)
    engine.synchronise()
    engine.optimizer.check_replicas()
    membership.end(engine.optimizer)
    state = engine.module_state_dict()
    flat = torch.cat([p.float().view(-1) for p in state.values()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
    print(f"done {digest} {members.lost} {members.joined} {engine.global_steps} {engine.get_lr()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
