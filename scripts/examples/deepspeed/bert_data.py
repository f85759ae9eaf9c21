"""Hugging Face's BERT by DeepSpeed's data efficiency: short sentences first, layers that drop tokens, a padding mask.

    torchrun --nproc-per-node 2 scripts/examples/deepspeed/bert_data.py --folder out

The model is built from a configuration and finds hidden tokens of sentences of many lengths, padded to one. Their
effective lengths are measured before training; layers keep real tokens before padding. Learning rates follow consumed
tokens times layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM

import onebit.zero as deepspeed
from onebit.zero.data_efficiency import EffectiveLength, measure

VOCABULARY, LENGTH, LAYERS, PADDING, MASK = 10, 24, 4, 0, 1


class Sentences(Dataset[dict[str, Tensor]]):
    """Each repeats two tokens in turn, 6 to 24 in all; a fifth of them is hidden."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(LENGTH - 5, (), generator=generator))
        tokens = torch.randint(2, VOCABULARY, (2,), generator=generator).repeat(LENGTH // 2)
        is_real = torch.arange(LENGTH) < length + 6
        is_hidden = (torch.rand(LENGTH, generator=generator) < 0.2) & is_real
        is_hidden[0] = True  # so that each has one
        return {
            "input_ids": tokens.masked_fill(is_hidden, MASK).masked_fill(~is_real, PADDING),
            "attention_mask": is_real.long(),
            "labels": tokens.masked_fill(~is_hidden, -100),
        }


def config_of(folder: Path, optimizer: str, steps: int) -> dict:
    """As it stands in a file; difficulties rise over the first half of the run."""
    metric = {
        "index_to_metric_path": str(folder / "length.npy"),
        "difficulty_type": "value",
        "min_difficulty": 10,
        "max_difficulty": LENGTH,
        "schedule_config": {"total_curriculum_step": steps // 2, "difficulty_step": 2},
    }
    kept = {
        "min_value": 16,
        "max_value": LENGTH,
        "schedule_config": {"require_steps": steps // 2, "seq_per_step": 4},
    }
    whole = 16 * steps * LENGTH * LAYERS
    ltd = {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_id": [1, 2],
        "model_type": "encoder",
        "model_mask_name": "attention_mask",
        "random_ltd_schedule": kept,
        "layer_token_lr_schedule": {
            "enabled": True,
            "total_layer_tokens": whole,
            "warmup_layer_tokens": whole // 20,
        },
    }
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2}},
        "steps_per_print": None,
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {"length": metric}},
            },
            "data_routing": {"enabled": True, "random_ltd": ltd},
        },
    }


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of each micro-batch of this rank."""
    parser = argparse.ArgumentParser(description="BERT with a curriculum and dropped tokens")
    parser.add_argument("--optimizer", default="OneBitAdam")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="as if the job were killed")
    parser.add_argument("--folder", type=Path, default=Path("bert"))
    args = parser.parse_args(argv)
    deepspeed.init_distributed()
    data = Sentences()
    if dist.get_rank() == 0:
        measure(data, {"length": EffectiveLength(PADDING)}, args.folder)
    dist.barrier()
    torch.manual_seed(1)
    shape = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    config = config_of(args.folder, args.optimizer, args.steps)
    engine, _, loader, _ = deepspeed.initialize(model=BertForMaskedLM(shape), config=config, training_data=data)
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
