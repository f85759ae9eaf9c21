"""Hugging Face accelerate: a loop with accumulation, clipping, a scheduler and checkpoints.

```diff
-from accelerate import Accelerator
+import onebit
+from onebit.integrations.accelerate import Accelerator
@@
-optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
+optimizer = onebit.OnebitAdam(model.parameters(), lr=3e-3)
```

    torchrun --nproc-per-node 2 scripts/examples/accelerate_loop.py --steps 300
"""

import time

import accelerate
import protocol
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onebit
from onebit.integrations.accelerate import Accelerator


def main(argv: list[str] | None = None) -> None:
    args = protocol.parse(argv, "Train a small network in accelerate's loop.")
    accelerator = (Accelerator if args.is_onebit else accelerate.Accelerator)(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True),
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 64, generator=generator)
    y = (x @ torch.randn(64, 10, generator=generator)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(accelerator.device)
    if args.is_onebit:
        # One bit even on loopback, where it does not pay. Leave both options out, and the network is measured.
        optimizer = onebit.OnebitAdam(model.parameters(), lr=3e-3, compression="always", freeze_step=args.warmup)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # accelerate's schedulers take as many steps at a time as there are processes.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = 0
    if args.resume:
        accelerator.load_state(args.folder)
        step = args.save_step
    losses, bits, of_step, started = [], [], [], time.perf_counter()
    while step < args.steps:
        epoch, skipped = divmod(2 * step, len(loader))  # two batches of each rank are a step
        loader.set_epoch(epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, skipped):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            of_step.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                losses.append(sum(of_step) / 2)
                of_step, step = [], step + 1
                if args.is_onebit:
                    bits.append(optimizer.stats.bits_per_parameter)
                if args.folder and step == args.save_step and not args.resume:
                    accelerator.save_state(args.folder)
            if step == args.steps:
                break
    if accelerator.is_main_process:
        protocol.write(args, model, losses, bits, time.perf_counter() - started)


if __name__ == "__main__":
    main()
