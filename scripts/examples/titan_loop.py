"""torchtitan-style loop: builders, schedulers over containers, torch.distributed.checkpoint.

```diff
+from onebit.integrations.torchtitan import build_optimizers
-    fully_shard(part, mesh=world_mesh["dp_replicate", "dp_shard"])
+    fully_shard(part, mesh=world_mesh["dp_shard"])
-optimizers = config.optimizer.build(model_parts=model_parts)
+mesh = world_mesh["dp_replicate", "dp_shard"]
+optimizers = build_optimizers(model_parts, config.optimizer, mesh=mesh, max_grad_norm=1.0)
-clip_grad_norm_([p for part in model_parts for p in part.parameters()], 1.0)
```

That is torchtitan 0.3; 0.2 and before have `build_optimizers` themselves, and another import is enough. torchtitan
itself is not needed: AdamW's run has torch's own optimizer.

    torchrun --nproc-per-node 4 scripts/examples/titan_loop.py --steps 300
"""

import time
from types import SimpleNamespace

import protocol
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from onebit.integrations.torchtitan import build_optimizers

CONFIG = SimpleNamespace(name="AdamW", lr=3e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, implementation="fused")


def main(argv: list[str] | None = None) -> None:
    args = protocol.parse(argv, "Train a classifier as torchtitan does.")
    mesh = init_device_mesh("cpu", (protocol.world_size() // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    over = mesh["dp_shard"] if args.is_onebit else mesh
    model_parts = [fully_shard(part, mesh=over) for part in (model[:2], model[2:])]
    parameters = [p for part in model_parts for p in part.parameters()]
    if args.is_onebit:
        options = {"compression": "always", "freeze_step": args.warmup}  # one bit even on loopback
        optimizers = build_optimizers(model_parts, CONFIG, mesh=mesh, max_grad_norm=1.0, **options)
    else:
        optimizers = [torch.optim.AdamW(parameters, CONFIG.lr, (CONFIG.beta1, CONFIG.beta2), weight_decay=0.1)]
    schedulers = [LambdaLR(each, lambda step: min(1.0, (step + 1) / 20)) for each in optimizers]

    state = {"model": model.state_dict(), "optimizer": optimizers, "scheduler": schedulers[0]}
    if args.resume:
        dcp.load(state, checkpoint_id=args.folder)  # in place
    losses, bits, began = [], [], time.perf_counter()
    for step in range(args.save_step if args.resume else 0, args.steps):
        x, y = protocol.samples(32, seed=1000 * dist.get_rank() + step + 8)
        loss = nn.functional.cross_entropy(model_parts[1](model_parts[0](x)), y)
        loss.backward()
        if not args.is_onebit:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        for each in (*optimizers, *schedulers):
            each.step()
        model.zero_grad()
        losses.append(loss.detach())
        bits += [each.stats.bits_per_parameter for each in optimizers if args.is_onebit]
        if step + 1 == args.save_step and args.folder and args.is_onebit:
            dcp.save(state, checkpoint_id=args.folder)
    seconds = time.perf_counter() - began

    means = torch.stack(losses)
    dist.all_reduce(means.div_(dist.get_world_size()))
    whole = nn.ParameterList(p.full_tensor().detach() for p in parameters)
    if dist.get_rank() == 0:
        protocol.write(args, whole, means.tolist(), bits, seconds)


if __name__ == "__main__":
    main()
