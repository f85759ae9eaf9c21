"""`train.py --local-steps`: a dense optimizer on each rank, and a round of differences every so many steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

import onebit
from onebit import comm
from onebit.zero.config.optimizers import build_optimizer
from train.methods import Exchange, Replica, choice_of, schedule_of
from train.model import GPT, decay_groups

_BLOCK = 256


class Local(Replica):
    """A `Method`. Validates the anchor, on which all ranks agree, and sends nothing for it; the last step is a round.

    The norm is clipped on each rank.
    """

    def __init__(self, model: GPT, transport: comm.Transport, args: argparse.Namespace) -> None:
        if choice_of(args).is_one_bit:
            raise ValueError(
                "--local-steps is for optimizers that do not exchange by themselves, got --optimizer "
                f"{args.optimizer}; take adamw"
            )
        super().__init__(model, transport, args)
        self._local = onebit.LocalSteps(
            build_optimizer(choice_of(args), decay_groups(model, args.weight_decay)),
            args.local_steps,
            outer_lr=args.outer_lr,
            outer_momentum=args.outer_momentum,
            correction_steps=args.correction_steps,
            codec=comm.codec_named(args.differences, _BLOCK),
            transport=transport,
        )
        self.optimizer, self.no_sync = self._local, self._local.no_sync
        self.schedule = schedule_of(self._local, args)

    def step(self) -> Exchange:
        if self._args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._args.max_grad_norm)
        self._local.step()
        self._local.zero_grad()
        self.schedule.step()
        stats = self._local.stats
        return Exchange(stats.phase, stats.comm_ms, stats.skipped_steps)

    def evaluate(self, windows: Tensor) -> float:
        with self._local.anchors():
            return super().evaluate(windows)

    def synchronise(self) -> None:
        if self._local.steps == self._args.steps:
            self._local.sync()

    def load(self, states: Sequence[dict]) -> None:
        """Go on from this rank's own state, [state], or from those of all ranks of another world."""
        if len(states) == 1 and states[0]["onebit"]["world_size"] == self._transport.world_size:
            self._local.load_state_dict(states[0])
        else:
            self._local.load_state_dicts(states)
