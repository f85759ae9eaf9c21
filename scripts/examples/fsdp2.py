"""FSDP2 by hand: shards inside a node, replicas across nodes, one bit between them.

```diff
+import onebit
 mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
 for layer in model:
-    fully_shard(layer, mesh=mesh)
-fully_shard(model, mesh=mesh)
+    fully_shard(layer, mesh=mesh["shard"])
+fully_shard(model, mesh=mesh["shard"])
-optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
+optimizer = onebit.OnebitAdam(model.parameters(), lr=3e-3, **onebit.transports_of(mesh))
```

    torchrun --nproc-per-node 4 scripts/examples/fsdp2.py --steps 300
"""

import time

import protocol
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onebit


def main(argv: list[str] | None = None) -> None:
    args = protocol.parse(argv, "Train a classifier with FSDP2, replicated and sharded.")
    mesh = init_device_mesh("cpu", (protocol.world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    over = mesh["shard"] if args.is_onebit else mesh
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    if args.is_onebit:
        options = {"compression": "always", "freeze_step": args.warmup}  # one bit even on loopback
        optimizer = onebit.OnebitAdam(model.parameters(), lr=3e-3, **onebit.transports_of(mesh), **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    path = args.folder / f"rank{rank}.pt" if args.folder else None  # a shard, and what this rank owes
    if args.resume:
        saved = torch.load(path, weights_only=True)
        for p, shard in zip(model.parameters(), saved["shards"], strict=True):
            p.detach().to_local().copy_(shard)
        optimizer.load_state_dict(saved["optimizer"])
    losses, bits, began = [], [], time.perf_counter()
    for step in range(args.save_step if args.resume else 0, args.steps):
        x, y = protocol.samples(32, seed=1000 * rank + step + 8)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        bits += [optimizer.stats.bits_per_parameter] if args.is_onebit else []
        if step + 1 == args.save_step and path and args.is_onebit:
            args.folder.mkdir(parents=True, exist_ok=True)
            shards = [p.detach().to_local() for p in model.parameters()]
            torch.save({"shards": shards, "optimizer": optimizer.state_dict()}, path)
    seconds = time.perf_counter() - began

    means = torch.stack(losses)
    dist.all_reduce(means.div_(dist.get_world_size()))
    whole = nn.ParameterList(p.full_tensor().detach() for p in model.parameters())
    if rank == 0:
        protocol.write(args, whole, means.tolist(), bits, seconds)


if __name__ == "__main__":
    main()
