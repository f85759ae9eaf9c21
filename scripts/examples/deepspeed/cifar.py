"""A classifier of pictures as scripts for DeepSpeed train it; what was changed is the import.

    torchrun --nproc-per-node 2 scripts/examples/deepspeed/cifar.py --dtype bf16 --stage 2

The configuration is a dict of the script's own, the engine makes the loader. Pictures are drawn at random, each class
around a picture of its own: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import onebit.zero as deepspeed
from onebit.zero.accelerator import get_accelerator

CLASSES = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CIFAR-like pictures, classified")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1, help="what some launchers pass")
    parser.add_argument("--log-interval", type=int, default=8, help="steps between two lines")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="fp32")
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=0)
    parser.add_argument("--optimizer", default="OneBitAdam", help="a type that the configuration knows")
    return deepspeed.add_config_arguments(parser).parse_args()


def configuration(args: argparse.Namespace) -> dict[str, object]:
    rate = {"lr": 0.003, "betas": [0.8, 0.99], "eps": 1e-8, "weight_decay": 3e-7}
    if args.optimizer == "OneBitAdam":
        rate |= {"freeze_step": 16}
    return {
        "onebit": {"compression": "always"},  # not DeepSpeed's: one host's network is too fast for one bit to pay
        "train_batch_size": 32,
        "steps_per_print": 2000,
        "optimizer": {"type": args.optimizer, "params": rate},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 8}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 5e7,
            "reduce_bucket_size": 5e7,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 5), nn.ReLU())
        self.head = nn.Linear(8 * 2 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


def pictures(count: int, seed: int) -> Dataset[object]:
    classes = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(classes[labels] + torch.randn(count, 3, 16, 16, generator=generator), labels)


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(1)
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=filter(lambda p: p.requires_grad, net.parameters()),
        training_data=pictures(512, seed=2),
        config=configuration(args),
    )
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else None
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        running = 0.0
        for i, data in enumerate(loader):
            inputs, labels = data[0].to(device, dtype), data[1].to(device)
            loss = criterion(engine(inputs).float(), labels)
            engine.backward(loss)
            engine.step()
            running += loss.item()
            if i % args.log_interval == args.log_interval - 1:
                mean = running / args.log_interval
                deepspeed.log_dist(f"epoch {epoch + 1}, batch {i + 1}: loss {mean:.3f}", ranks=[0])
                running = 0.0

    engine.eval()
    correct = seen = 0
    with torch.no_grad():
        for images, labels in DataLoader(pictures(256, seed=3), batch_size=32):
            predicted = engine(images.to(device, dtype)).argmax(1)
            seen += len(labels)
            correct += int((predicted == labels.to(device)).sum())
    if engine.local_rank == 0:
        stage = engine.zero_optimization_stage()
        print(f"accuracy {correct / seen:.3f} of {seen}, {engine.optimizer_name()}, stage {stage}")


if __name__ == "__main__":
    main()
