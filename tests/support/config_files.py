"""DeepSpeed's configurations: the files in deepspeed_configs/, read as a trainer would, and small ones."""

from __future__ import annotations

from pathlib import Path

from onebit.zero.config.whole import Config, read_config

FILES = sorted(Path(__file__).with_name("deepspeed_configs").glob("*.json"))

# What a trainer would know. Only the files written for Hugging Face's trainer leave these to it.
FILLS = {"lr": 2e-4, "warmup_num_steps": 20, "total_num_steps": 200, "weight_decay": 0.05, "betas": (0.9, 0.98)}

AUTO_FILES = {
    "hf_zero2_auto.json": FILLS | {"train_micro_batch_size_per_gpu": 2, "fp16": True, "bf16": False},
    "hf_zero3_offload_auto.json": FILLS | {"train_batch_size": 32, "gradient_accumulation_steps": 2},
    "onebit_adam_sharded.json": FILLS | {"bf16": True},
}

SMALL = {"train_micro_batch_size_per_gpu": 1}


def read(name: str, world_size: int = 4) -> Config:
    path = Path(__file__).with_name("deepspeed_configs") / name
    return read_config(path, world_size=world_size, **AUTO_FILES.get(name, {}))


def small(**blocks: object) -> Config:
    return read_config({**SMALL, **blocks}, world_size=1)


def optimizer(name: str, **params: object) -> Config:
    return small(optimizer={"type": name, "params": params})
