"""Hugging Face's GPT-2 by DeepSpeed's data efficiency: rare tokens late, short sequences first, dropped tokens.

    torchrun --nproc-per-node 2 scripts/examples/deepspeed/gpt2_data.py --folder out

The model is built from a configuration and learns to count; samples with larger numbers are rarer, and come later. Rank
0 measures how rare before training begins. The run saves a checkpoint within an epoch, and goes on from it if there is
one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import onebit.zero as deepspeed
from onebit.zero.data_efficiency import VocabularyRarity, count_vocabulary, measure

VOCABULARY, LENGTH, LAYERS = 64, 32, 4


class Counting(Dataset[dict[str, Tensor]]):
    """Sample k counts from a number that is small for most k."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = int(VOCABULARY * (index / len(self)) ** 3)
        tokens = (first + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def config_of(folder: Path, optimizer: str, steps: int) -> dict:
    """As it stands in a file; difficulties rise over the first half of the run."""
    rising = {"total_curriculum_step": steps // 2, "difficulty_step": 4}
    metrics = {
        "rarity": {
            "index_to_metric_path": str(folder / "rarity.npy"),
            "difficulty_type": "percentile",
            "min_difficulty": 20,
            "max_difficulty": 100,
            "schedule_type": "fixed_root",
            "schedule_config": rising | {"root_degree": 2},
        },
        "seqlen_truncate": {
            "clustering_type": "single_cluster",
            "min_difficulty": 8,
            "max_difficulty": LENGTH,
            "schedule_config": rising,
        },
    }
    kept = {
        "min_value": 16,
        "max_value": LENGTH,
        "schedule_config": {"require_steps": steps // 2, "seq_per_step": 4},
    }
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": optimizer, "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": None,
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics},
            },
            "data_routing": {
                "enabled": True,
                "random_ltd": {"enabled": True, "total_layer_num": LAYERS, "random_ltd_schedule": kept},
            },
        },
    }


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of each step, of rank 0's micro-batches."""
    parser = argparse.ArgumentParser(description="GPT-2 with a curriculum and dropped tokens")
    parser.add_argument("--optimizer", default="OneBitAdam")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="as if the job were killed")
    parser.add_argument("--folder", type=Path, default=Path("gpt2"))
    args = parser.parse_args(argv)
    deepspeed.init_distributed()
    data = Counting()
    if dist.get_rank() == 0:
        counts = count_vocabulary(data, VOCABULARY)
        measure(data, {"rarity": VocabularyRarity(counts)}, args.folder)
    dist.barrier()
    torch.manual_seed(1)
    shape = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=LAYERS, n_head=2, use_cache=False)
    config = config_of(args.folder, args.optimizer, args.steps)
    engine, _, loader, _ = deepspeed.initialize(model=GPT2LMHeadModel(shape), config=config, training_data=data)
    engine.load_checkpoint(args.folder / "checkpoints")
    losses: list[float] = []
    batches, last = deepspeed.data.forever(loader), args.stop_after or args.steps
    engine.train()
    while engine.global_steps < last:
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.save_checkpoint(args.folder / "checkpoints")
    if dist.get_rank() == 0 and losses:
        print(f"{engine.global_steps} steps, first {losses[0]:.4f} last {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
