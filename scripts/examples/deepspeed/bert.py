"""Pre-training of a small BERT as scripts for DeepSpeed do it; what was changed is the import.

    cd scripts/examples/deepspeed
    torchrun --nproc-per-node 2 bert.py --deepspeed --deepspeed_config bert.json --folder out

The configuration is a file that --deepspeed_config names. The script has its own loader and its own learning rates,
groups parameters by weight decay, and masks positions that no sequence reaches, whose momentum would take signs of
nothing. It saves each epoch under a tag, with a state of its own, and goes on from the latest one it finds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import onebit.zero as deepspeed
from onebit.zero.utils.logging import logger

VOCABULARY, WIDTH, LENGTH, POSITIONS = 32, 16, 12, 24
MASK = VOCABULARY - 1
NO_DECAY = ("bias", "norm.weight")


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Each counts on from its first token; a fifth of the tokens is hidden, and to be found."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = (torch.arange(LENGTH) + torch.randint(VOCABULARY - 1, (1,), generator=generator)) % (VOCABULARY - 1)
        is_hidden = torch.rand(LENGTH, generator=generator) < 0.2
        return tokens.masked_fill(is_hidden, MASK), tokens.masked_fill(~is_hidden, -100)


class Bert(nn.Module):
    """Gives the loss of a batch, as pre-training models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def grouped(model: nn.Module, kind: str) -> list[dict[str, object]]:
    """By weight decay; what a one-bit optimizer must not move has a mask."""
    is_masked = kind.lower().startswith(("onebit", "zeroone"))
    decayed, others, positions = [], [], []
    for name, p in model.named_parameters():
        if is_masked and name == "positions.weight":
            positions.append(p)
        else:
            (others if name.endswith(NO_DECAY) else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    if positions:
        mask = torch.zeros(POSITIONS, WIDTH)
        mask[:LENGTH] = 1
        groups.append({"params": positions, "weight_decay": 0.01, "exp_avg_mask": mask.flatten()})
    return groups


def rate(step: int, steps: int, most: float) -> float:
    """Warms up over a tenth of the steps, then falls in a straight line."""
    return most * min(step / (0.1 * steps), (steps - step) / (0.9 * steps))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a small BERT")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-after", type=int, help="epochs, as if the job were killed")
    parser.add_argument("--folder", type=Path, default=Path("bert"))
    parser.add_argument("--local_rank", type=int, default=-1, help="what some launchers pass")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(1)
    kind = json.loads(Path(args.deepspeed_config).read_text())["optimizer"]["type"]
    model = Bert()
    network, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=grouped(model, kind))
    data, most = Sentences(), network.get_lr()[0]
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data, seed=3)
    loader = DataLoader(data, network.train_micro_batch_size_per_gpu(), sampler=sampler)
    steps = args.epochs * len(loader) // network.gradient_accumulation_steps()

    first, global_step = 0, 0
    found, state = network.load_checkpoint(args.folder)
    if found is not None:
        first, global_step = state["epoch"] + 1, state["global_step"]
        logger.info("goes on from %s", found)

    network.train()
    for epoch in range(first, args.stop_after or args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch in loader:
            batch = tuple(t.to(network.device) for t in batch)
            loss = network(*batch)
            total += loss.item()
            network.backward(loss)
            if network.is_gradient_accumulation_boundary():
                for group in optimizer.param_groups:
                    group["lr"] = rate(global_step, steps, most)
                global_step += 1
            network.step()
        mean = torch.tensor(total / len(loader))
        dist.reduce(mean, 0)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {float(mean) / dist.get_world_size():.4f}")
        state = {"epoch": epoch, "global_step": global_step}
        if not network.save_checkpoint(args.folder, f"epoch{epoch}", state):
            logger.warning("epoch %d was not saved", epoch)


if __name__ == "__main__":
    main()
