"""What ranks under torchrun do with Lightning's Trainer and `OnebitStrategy`, and with plain loops in its place."""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from errors import error_of
from example_ranks import run_example
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import onebit
from onebit.integrations.lightning import OnebitStrategy

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.simplefilter("ignore")

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))


def rows(n: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 12, generator=generator), torch.randn(n, 3, generator=generator))


def loader(**options: Any) -> DataLoader:
    return DataLoader(rows(), batch_size=4, **options)


def one_bit(params: Any, **options: Any) -> torch.optim.Optimizer:
    return onebit.OnebitAdam(params, lr=1e-2, freeze_step=4, compression="always", **options)


def zero_one(params: Any) -> torch.optim.Optimizer:
    options = {"var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4, "var_freeze_step": 4}
    return onebit.ZeroOneAdam(params, lr=1e-2, compression="always", **options)


class Regression(LightningModule):
    """make: of the optimizer. spoil: a loss that is not finite on rank 1, in this batch."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = one_bit, spoil: int = -1, **options: Any):
        super().__init__()
        self.net, self.make, self.spoil, self.options = net(), make, spoil, options
        self.seen: list[float] = []
        self.validated: list[str] = []
        self.weights: list[str] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters(), **self.options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(float(batch[0][0, 0]))
        self.weights.append(digest(self.net[0]))
        loss = (self.net(batch[0]).float() - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss * float("inf") if batch_idx == self.spoil and self.global_rank == 1 else loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated.append(digest(self))
        self.log("score", self.net(batch[0]).square().mean(), sync_dist=True)


class FirstClipped(Regression):
    """Clips four steps of ten, by Lightning's hook."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.global_step < 4:
            self.clip_gradients(optimizer, 0.05, "norm")


class Manual(Regression):
    """Manual optimization, in two micro-batches. clips: how many steps."""

    def __init__(self, clip: float = 0.0, by: str = "norm", clips: int = 10, **options: Any):
        super().__init__(**options)
        self.automatic_optimization, self.clip, self.by, self.clips = False, clip, by, clips

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            if self.clip and self.global_step < self.clips:
                self.clip_gradients(optimizer, self.clip, self.by)
            optimizer.step()
            optimizer.zero_grad()


def digest(module: nn.Module) -> str:
    """Of all values that a checkpoint of the model holds."""
    held = b"".join(t.detach().float().numpy().tobytes() for t in module.state_dict().values())
    return hashlib.sha256(held).hexdigest()


def fit(module: Regression, ckpt_path: Path | None = None, half: bool = False, **options: Any) -> Regression:
    """half: "16-mixed", which Lightning replaces on the CPU unless its plugin is given."""
    if half:
        options["plugins"] = [MixedPrecision("16-mixed", "cpu")]
    options = {"strategy": OnebitStrategy(), "max_steps": 10, "enable_checkpointing": False} | QUIET | options
    trainer = Trainer(**options)
    validation = loader() if "val_check_interval" in options else None
    trainer.fit(module, loader(shuffle=True), validation, ckpt_path=ckpt_path)
    return module


def by_hand(
    make: Callable[..., torch.optim.Optimizer] = one_bit,
    passes: int = 1,
    dtype: torch.dtype | None = None,
    spoil: int = -1,
    clips: int = 10,
    **options: Any,
) -> tuple[nn.Module, list[float]]:
    """The plain loop that `fit` stands for: (the trained model, the first number of every batch).

    clips: how many steps clip, if any do.
    """
    model, seen = net(), []
    optimizer = make(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    sampler: DistributedSampler = DistributedSampler(rows(), shuffle=True, seed=0)
    batches, step = loader(sampler=sampler), 0
    for epoch in range(99):
        sampler.set_epoch(epoch)
        for k, (x, y) in enumerate(batches):
            seen.append(float(x[0, 0]))
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=False):
                loss = (model(x).float() - y).square().mean() / passes
            loss = loss * float("inf") if k == spoil and dist.get_rank() == 1 else loss
            scaler.scale(loss).backward()
            if k % passes == passes - 1:
                if step == clips:
                    optimizer.max_grad_norm = 0.0  # type: ignore[attr-defined]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                step += 1
            if step == 10:
                onebit.sync_buffers(model, optimizer.transport)
                return model, seen
    raise AssertionError("no end")


def agrees(module: Regression, **options: Any) -> dict[str, object]:
    """What the trainer and the plain loop come to."""
    model, seen = by_hand(**options)
    return {"here": digest(module.net), "by hand": digest(model), "same data": module.seen == seen, "seen": seen}


def trained() -> dict[str, dict[str, object]]:
    half: dict[str, Any] = {"dtype": torch.float16, "overlap": False}
    return {
        "plain": agrees(fit(Regression())),
        "clipped": agrees(fit(Regression(), gradient_clip_val=0.05), max_grad_norm=0.05),
        "clipped by both": agrees(fit(Regression(max_grad_norm=0.05), gradient_clip_val=0.05), max_grad_norm=0.05),
        "first clipped": agrees(fit(FirstClipped()), max_grad_norm=0.05, clips=4),
        "accumulated": agrees(fit(Regression(), accumulate_grad_batches=2), passes=2),
        "manual": agrees(fit(Manual(clip=0.05)), passes=2, max_grad_norm=0.05),
        "manual, first clipped": agrees(fit(Manual(clip=0.05, clips=4)), passes=2, max_grad_norm=0.05, clips=4),
        "bf16-mixed": agrees(fit(Regression(), precision="bf16-mixed"), dtype=torch.bfloat16),
        "16-mixed": agrees(fit(Regression(), half=True), **half),
        "16-mixed, clipped": agrees(fit(Regression(), half=True, gradient_clip_val=0.05), **half, max_grad_norm=0.05),
        "16-mixed, overflow": agrees(fit(Regression(spoil=3), half=True), **half, spoil=3),
    }


def validated() -> dict[str, list[str]]:
    """The bits that this rank validated, and of a layer before each step, with and without validations."""
    module = fit(Regression(zero_one), val_check_interval=4, limit_val_batches=1, max_steps=9)
    without = fit(Regression(zero_one), max_steps=9)
    return {
        "validated": [*module.validated, digest(module)],
        "weights": module.weights,
        "without": without.weights,
    }


def interrupted(folder: str) -> dict[str, object]:
    """Digests of trainings that went on from checkpoints, beside those of trainings that never stopped."""
    found: dict[str, object] = {}
    cases: dict[str, tuple[Callable[[], Regression], dict[str, Any]]] = {
        "1-bit Adam": (Regression, {}),
        "0/1 Adam": (lambda: Regression(zero_one), {}),
        "16-mixed": (lambda: Regression(spoil=3), {"half": True}),
    }
    for name, (make, options) in cases.items():
        path = Path(folder) / name

        def train(again: str = "", path: Path = path, make: Callable = make, options: dict = options) -> str:
            to = path / "again" if again else path  # a save is a synchronisation: all of them save as often
            saving = ModelCheckpoint(to, "{step}", every_n_train_steps=12, save_top_k=-1, save_last="link")
            options = {"enable_checkpointing": True, "max_steps": 26, **options}
            return digest(fit(make(), path / again if again else None, callbacks=[saving], **options))

        found[name] = [train(), train("step=12.ckpt"), train("last.ckpt")]
    alone = Regression.load_from_checkpoint(Path(folder) / "1-bit Adam" / "step=24.ckpt")
    found["load_from_checkpoint"] = len(list(alone.parameters()))
    return found


def kept_files(folder: str) -> list[str]:
    """What is left where only the newest checkpoint stays, and is written three times."""
    newest = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=1, monitor="step", mode="max")
    again = ModelCheckpoint(folder, "same", every_n_train_steps=3, enable_version_counter=False)
    fit(Regression(), callbacks=[newest, again], enable_checkpointing=True, max_steps=9)
    dist.barrier()
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def resumed_here(path: str, steps: int) -> str:
    """Go on in this world from a checkpoint."""
    return digest(fit(Regression(), Path(path), max_steps=steps))


def unusable(path: str) -> None:
    if dist.get_rank() == 1:
        for file in Path(path).parent.glob("ranks/*/*"):
            file.unlink()
    dist.barrier()
    fit(Regression(), Path(path), max_steps=30)


def errors(path: str) -> dict[str, str]:
    """What each wrong use ends with on this rank. path: of a checkpoint, which loses its ranks' files."""
    cases: dict[str, Callable[[], object]] = {
        "auto": lambda: fit(Regression(), strategy="auto", devices=1),
        "ddp": lambda: fit(Regression(), strategy="ddp", devices=2),
        "AdamW": lambda: fit(Regression(torch.optim.AdamW)),
        "two norms": lambda: fit(Regression(max_grad_norm=1.0), gradient_clip_val=0.5),
        "by value": lambda: fit(Regression(), gradient_clip_val=0.5, gradient_clip_algorithm="value"),
        "by value, by hand": lambda: fit(Manual(clip=0.5, by="value")),
        "DDP's argument": lambda: OnebitStrategy(find_unused_parameters=True),
        "ranks missing": lambda: unusable(path),
    }
    found = {}
    for name, case in cases.items():
        found[name] = error_of(Exception, case)
        if name not in ("DDP's argument", "ranks missing"):
            dist.barrier()
    return found


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "trained": trained(),
        "validated": validated(),
        "interrupted": interrupted(folder),
        "kept": kept_files(f"{folder}/kept"),
        "by name": digest(fit(Regression(), strategy="onebit")),
    }
    found["errors"] = errors(f"{folder}/16-mixed/step=12.ckpt")
    return found


def example(folder: str) -> dict[str, Any]:
    return run_example("lightning_module", Path(folder), "--steps", "60", "--warmup", "20")


if __name__ == "__main__":  # without torchrun: Lightning starts this file once more, as rank 1
    sys.stdout.write(f"{digest(fit(Regression(), devices=2).net)}\n")
