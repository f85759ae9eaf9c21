"""`train.py --pipe --tensor`: the same training in stages and slices, by the engine's `train_batch`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from torch import Tensor

from onebit import comm
from train.layouts import layers_plan
from train.methods import Exchange, size_of
from train.model_layers import build_layers, count_parameters
from train.zero_method import Zero, config_of


def layout_config(args: argparse.Namespace) -> dict:
    """`config_of`, and the pipeline's block."""
    config = config_of(args)
    config["pipeline"] = {
        "stages": args.pipe,
        "schedule": args.schedule,
        "activations": args.activations,
        "activation_gradients": args.activation_gradients,
        "activation_checkpoint_interval": args.recompute,
    }
    return config


class Layout(Zero):
    """A `Method`: stages, tensor-parallel slices and ZeRO shards; a step's forward and backward are one call."""

    def __init__(self, transport: comm.Transport, args: argparse.Namespace) -> None:
        model = build_layers(size_of(args), args.seed)
        self.parameters = count_parameters(model)
        self._start(model, transport, args, layout_config(args), layers_plan(size_of(args), args.tensor))
        if self._engine.pipeline is not None:
            self.transports = [*self.transports, self._engine.pipeline]

    def train(self, parts: Sequence[Tensor]) -> float:
        return float(self._engine.train_batch(_pairs(parts)))

    def step(self) -> Exchange:
        """What the step was that `train` has taken."""
        return self._exchange()

    def evaluate(self, windows: Tensor) -> float:
        return float(self._engine.eval_batch(_pairs(windows.chunk(self._engine.gradient_accumulation_steps()))))


def _pairs(parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return iter([(windows[:, :-1], windows[:, 1:]) for windows in parts])
