"""Lightning: a LightningModule with configure_optimizers, gradient clipping and ModelCheckpoint.

```diff
+import onebit
+from onebit.integrations.lightning import OnebitStrategy
     def configure_optimizers(self):
-        return torch.optim.AdamW(self.parameters(), lr=1e-2)
+        return onebit.OnebitAdam(self.parameters(), lr=1e-2)
-trainer = Trainer(strategy="ddp", gradient_clip_val=1.0)
+trainer = Trainer(strategy=OnebitStrategy(), gradient_clip_val=1.0)
```

    torchrun --nproc-per-node 2 scripts/examples/lightning_module.py --steps 300
"""

import time

import protocol
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onebit
from onebit.integrations.lightning import OnebitStrategy


class Classifier(LightningModule):
    def __init__(self, args):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        self.args, self.losses, self.bits = args, [], []

    def configure_optimizers(self):
        if not self.args.is_onebit:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        # One bit even on loopback, where it does not pay. Leave this out, and the network is measured.
        options = {"compression": "always", "freeze_step": self.args.warmup}
        return onebit.OnebitAdam(self.parameters(), lr=1e-2, **options)

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()))
        return loss

    def on_train_batch_end(self, *_):
        if self.args.is_onebit:
            self.bits.append(self.optimizers().stats.bits_per_parameter)


def main(argv: list[str] | None = None) -> None:
    args = protocol.parse(argv, "Train a classifier with Lightning's Trainer.")
    seed_everything(args.seed, verbose=False)
    model = Classifier(args)
    saving = ModelCheckpoint(args.folder, "half", every_n_train_steps=args.save_step, enable_version_counter=False)
    trainer = Trainer(
        strategy=OnebitStrategy() if args.is_onebit else "ddp",
        devices=torch.cuda.device_count() or protocol.world_size(),
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[saving] if args.folder else [],
        enable_checkpointing=bool(args.folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # As many batches as there are steps to the checkpoint: Lightning goes on with the data where an epoch has ended.
    data = TensorDataset(*protocol.samples(args.save_step * 32 * protocol.world_size()))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    began = time.perf_counter()
    trainer.fit(model, loader, ckpt_path=args.folder / "half.ckpt" if args.resume else None)

    if trainer.is_global_zero:
        protocol.write(args, model, [*map(float, model.losses)], model.bits, time.perf_counter() - began)


if __name__ == "__main__":
    main()
