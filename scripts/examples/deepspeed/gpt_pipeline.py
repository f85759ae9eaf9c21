"""A small GPT in pipeline stages as scripts for DeepSpeed train it; what was changed is the imports.

    torchrun --nproc-per-node 2 scripts/examples/deepspeed/gpt_pipeline.py --pipeline-parallel-size 2

The model is a list of layers, its embedding tied to its head. `train_batch` runs a whole step, of the engine's loader,
which checkpoints keep the place of; `eval_batch` one of the script's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import onebit.zero as deepspeed
from onebit.zero.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from onebit.zero.utils import RepeatingLoader

VOCABULARY, WIDTH, LENGTH, BLOCKS, BATCH = 24, 16, 12, 4, 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.positions


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        y, mask = self.norm(x), nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(x)


def logits(embedding: Embedding, x: Tensor) -> Tensor:
    return x @ embedding.words.weight.T


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def layers() -> list[LayerSpec]:
    return [
        TiedLayerSpec("embedding", Embedding),
        *(LayerSpec(Block, WIDTH) for _ in range(BLOCKS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", Embedding, forward_fn=logits, tied_weight_attr="words"),
    ]


def sequences() -> Dataset[object]:
    """Each counts on by a step of its own."""
    generator = torch.Generator().manual_seed(0)
    starts, steps = (torch.randint(high, (256, 1), generator=generator) for high in (VOCABULARY, 3))
    tokens = (starts + (steps + 1) * torch.arange(LENGTH + 1)) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a small GPT in stages")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--backend", default=None, help="of init_distributed")
    parser.add_argument("--optimizer", default="OneBitAdam", help="a type that the configuration knows")
    parser.add_argument("--folder", type=Path, help="to go on from, and to save to")
    parser.add_argument("--local_rank", type=int, default=-1, help="what some launchers pass")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = arguments()
    deepspeed.init_distributed(dist_backend=args.backend)
    deepspeed.runtime.utils.set_random_seed(1138)
    net = PipelineModule(
        layers=layers(),
        loss_fn=loss_fn,
        num_stages=args.pipeline_parallel_size,
        partition_method="type:Block",
        activation_checkpoint_interval=0,
    )
    ranks = deepspeed.comm.get_world_size() // args.pipeline_parallel_size
    params: dict[str, object] = {"lr": 0.01, "betas": [0.9, 0.95]}
    if args.optimizer == "OneBitAdam":
        params |= {"freeze_step": 10}
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=sequences(),
        config={
            "train_batch_size": 4 * BATCH * ranks,
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": args.optimizer, "params": params},
            "steps_per_print": 10,
            "onebit": {"compression": "always"},  # not DeepSpeed's: one host's network is too fast for one bit to pay
        },
    )
    if args.folder is not None:
        engine.load_checkpoint(args.folder)
    while engine.global_steps < args.steps:
        loss = engine.train_batch()
        if engine.global_rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps} loss {float(loss):.4f}")
    validation = engine.eval_batch(iter(RepeatingLoader(DataLoader(sequences(), BATCH))))
    if engine.global_rank == 0:
        print(f"validation {float(validation):.4f}")
    if args.folder is not None:
        engine.save_checkpoint(args.folder)


if __name__ == "__main__":
    main()
