"""DDP with a hook: the wrapper stays, its gradients travel in one bit, and any optimizer follows.

```diff
+import onebit
 model = DistributedDataParallel(model)
+state = onebit.DDPHookState(model)
+model.register_comm_hook(state, onebit.ddp_hook)
 optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
```

Where the wrapper can go, `onebit.OnebitAdam` loses less: see docs/frameworks.md.

    torchrun --nproc-per-node 2 scripts/examples/ddp_hook.py --steps 300
"""

import time

import protocol
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit


def main(argv: list[str] | None = None) -> None:
    args = protocol.parse(argv, "Train a classifier in DistributedDataParallel.")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    model = DistributedDataParallel(model)
    state = onebit.DDPHookState(model, start_step=args.warmup)
    if args.is_onebit:
        model.register_comm_hook(state, onebit.ddp_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    parts = {"model": model, "optimizer": optimizer, "hook": state}
    path = args.folder / f"rank{rank}.pt" if args.folder else None  # what is owed is each rank's own
    if args.resume:
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    losses, bits, began = [], [], time.perf_counter()
    for step in range(args.save_step if args.resume else 0, args.steps):
        x, y = protocol.samples(32, seed=1000 * rank + step + 8)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        bits += [state.bits_per_parameter] * args.is_onebit
        if step + 1 == args.save_step and path:
            args.folder.mkdir(parents=True, exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    seconds = time.perf_counter() - began

    means = torch.stack(losses)
    dist.all_reduce(means.div_(dist.get_world_size()))
    if rank == 0:
        protocol.write(args, model, means.tolist(), bits, seconds)


if __name__ == "__main__":
    main()
