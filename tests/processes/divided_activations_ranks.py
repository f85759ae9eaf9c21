"""What the ranks of test_divided_activations.py do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from onebit import zero
from onebit.comm import init
from onebit.zero.activations import Keep, checkpoint


def divided(folder: str) -> dict[str, Any]:
    """Gradients and kept bytes with shares, in each place; then what ranks with unlike inputs are told."""
    init("gloo", levels=1)
    group, facts = dist.new_group(), dict[str, Any]()
    layers = [nn.Linear(5, 5) for _ in range(3)]
    for layer in layers:
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), requires_grad=True)

    def train(keep: Keep | None, x: Tensor) -> list[Tensor]:
        h = x * 2
        for layer in layers:
            h = layer(h).tanh() if keep is None else checkpoint(lambda h, m=layer: m(h).tanh(), h, keep=keep)  # type: ignore[assignment]
            layer.zero_grad()
        h.square().sum().backward()
        return [layer.weight.grad.clone() for layer in layers]  # type: ignore[union-attr]

    whole = train(None, x)
    for place in ("device", "host", folder):
        again = train(Keep(group, place), x)
        facts["folder" if place == folder else place] = all(map(torch.equal, whole, again))
    keep, kept = Keep(group), []
    pack = keep._pack
    keep._pack = lambda tensor: kept.append(pack(tensor)) or kept[-1]  # type: ignore[method-assign, func-returns-value]
    train(keep, x)
    # With each input torch 2.6 saves an empty tensor.
    facts["bytes"] = [entry.piece.numel() for entry in kept if entry.shape.numel()]
    try:
        train(Keep(group), x + dist.get_rank())
    except RuntimeError as error:
        facts["unlike"] = f"{type(error).__name__}: {error}"
    return facts


def engine(folder: str) -> dict[str, Any]:
    """Losses of a Llama in two tensor slices, with gradient checkpointing: plain, and with each way to keep inputs."""
    init("gloo", levels=1)
    facts: dict[str, Any] = {}
    for name, block, own in [
        ("plain", {}, {}),
        ("shares", {"partition_activations": True}, {}),
        ("shares on the host", {"partition_activations": True, "cpu_checkpointing": True}, {}),
        ("shares in a file", {"partition_activations": True}, {"activation_folder": folder}),
    ]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=16,
            )
        )  # fmt: skip
        model.gradient_checkpointing_enable()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "activation_checkpointing": block,
            "onebit": {"tensor": 2} | own,
        }
        trained, *_ = zero.initialize(model=model, config=config, tensor_plan="auto")
        losses = []
        for step in range(3):
            ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = trained(input_ids=ids, labels=ids).loss
            trained.backward(loss)
            trained.step()
            losses.append(loss.item())
        facts[name] = losses, [type(each).__name__ for each in trained.active_features]
    return facts
