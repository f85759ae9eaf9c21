"""A LightningModule, trained by Lightning's Trainer:

```diff
+import onebit
+from onebit.integrations.lightning import OnebitStrategy
     def configure_optimizers(self):
-        return torch.optim.AdamW(self.parameters(), lr=1e-2)
+        return onebit.OnebitAdam(self.parameters(), lr=1e-2)
-trainer = Trainer(strategy="ddp", gradient_clip_val=1.0)
+trainer = Trainer(strategy=OnebitStrategy(), gradient_clip_val=1.0)
```

torchrun --nproc-per-node 2 scripts/examples/lightning_module.py --steps 200 --folder runs/lightning
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onebit
from onebit.integrations.lightning import OnebitStrategy


class Classifier(LightningModule):
    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        self.args, self.losses, self.bits = args, [], []

    def configure_optimizers(self):
        if self.args.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return onebit.OnebitAdam(self.parameters(), lr=1e-2, freeze_step=self.args.warmup, compression="always")

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).mean())
        return loss

    def on_train_batch_end(self, *_):
        if self.args.optimizer == "onebit":
            self.bits.append(self.optimizers().stats.bits_per_parameter)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    teacher, x = torch.randn(32, 8, generator=generator), torch.randn(samples, 32, generator=generator)
    return TensorDataset(x, (x.tanh() @ teacher).argmax(1))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=("adamw", "onebit"), default="onebit")
    for name, number in {"--steps": 200, "--warmup": 100, "--seed": 0}.items():
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    seed_everything(args.seed, verbose=False)
    model = Classifier(args)
    half = args.steps // 2 + 1  # and an epoch: Lightning goes on with the data only where one ends
    saving = ModelCheckpoint(args.folder, "half", every_n_train_steps=half, enable_version_counter=False)
    trainer = Trainer(
        strategy="ddp" if args.optimizer == "adamw" else OnebitStrategy(),
        accelerator="cpu", devices=2, max_steps=args.steps, gradient_clip_val=1.0,
        callbacks=[saving] if args.folder else [], enable_checkpointing=bool(args.folder),
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    began = time.perf_counter()
    loader = DataLoader(data(half * 2 * 32), batch_size=32, shuffle=True)
    trainer.fit(model, loader, ckpt_path=args.folder / "half.ckpt" if args.resume else None)
    bits = sum(model.bits) / len(model.bits) if model.bits else None
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    record = {"losses": [float(loss) for loss in model.losses], "bits_per_parameter": bits, "sha256": digest}
    if args.out and trainer.is_global_zero:
        args.out.write_text(json.dumps(record | {"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
