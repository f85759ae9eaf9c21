"""The ways to train of `train.py`: an optimizer with its traffic, its schedule and its checkpoints, behind one face.

`Dense` and `Onebit` train a whole model on each rank, over the launcher's transport; `zero_method.py` has the third,
with sharded state, `layout_method.py` the fourth, in stages, `local_method.py` the fifth, whose ranks seldom exchange.
`train.py` knows a `Method` only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from onebit import comm
from onebit.checkpoint.folder import is_empty
from onebit.dense import DenseAverager, broadcast_parameters
from onebit.optimizer import CompressedOptimizer
from onebit.zero.config.optimizers import OptimizerChoice, build_optimizer, optimizer_flags
from onebit.zero.data_efficiency import Root, TokenDropping, drop_tokens
from onebit.zero.sparse_attention import replace_attention
from train.checkpoint import CheckpointFolder
from train.model import GPT, SIZES, ModelSize, build_model, decay_groups
from train.schedule import lr_fraction

SHARDED_ONLY = "sharded-onebit-adam"
_SHARDED = {SHARDED_ONLY: "onebit-adam"}
_BLOCK = 256


@dataclass(frozen=True)
class Exchange:
    """What one optimizer step did. skipped_steps: since the run began."""

    phase: str
    comm_ms: float
    skipped_steps: int


class RunCheckpoints(Protocol):
    """The checkpoints of one run. Every method is called by all ranks, and raises CheckpointError on all of them."""

    folder: Path

    def is_empty(self) -> bool:
        """Whether there is no checkpoint yet."""

    def save(self, step: int, about: dict) -> None:
        """Write all that the run goes on from, after this step. about: what a resumed run has to have in common."""

    def load(self, check: Callable[[dict], None]) -> int | None:
        """Go on from the newest; the steps done, or None without one. check(about) refuses what does not belong."""


class HasSent(Protocol):
    """Whatever counts its payload."""

    @property
    def sent_bytes(self) -> int: ...


class Method(Protocol):
    """An optimizer together with its traffic.

    transports: whose `sent_bytes` add up to what this rank sends. parameters: of the whole model. share: of them, those
    that this rank exchanges with other replicas. data: (which share of the data this rank reads, of how many).
    dropping: the layers that skip tokens in training, if any.
    """

    optimizer: Optimizer
    schedule: LambdaLR
    dropping: TokenDropping | None
    transports: Sequence[HasSent]
    parameters: int
    share: float
    data: tuple[int, int]

    def train(self, parts: Sequence[Tensor]) -> float:
        """Add the gradients of a step's parts, windows [B, T+1]; their mean loss, in nats per byte. All ranks."""

    def evaluate(self, windows: Tensor) -> float:
        """The mean loss of all ranks' windows, the same on every rank; as many windows on each."""

    def step(self) -> Exchange:
        """Average over ranks, move the parameters, drop the gradients, advance the schedule."""

    def synchronise(self) -> None:
        """Make the replicas the same, where they are not."""

    def error_norm_ratio(self) -> float | None:
        """What compression still owes, relative to the momentum; None where there is no compression."""

    def checkpoints(self, folder: Path) -> RunCheckpoints:
        """Those of this run, in a folder that is made if it is not there."""

    def close(self) -> None:
        """Release what was opened. All ranks."""


class ByParts:
    """The parts of a step one by one: for methods whose ranks compute a loss and its gradients by themselves."""

    transports: Sequence[HasSent]

    def loss(self, windows: Tensor) -> Tensor:
        """Mean loss of windows [B, T+1], in nats per byte."""
        raise NotImplementedError

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradients of one part. is_last: of the step."""
        raise NotImplementedError

    def train(self, parts: Sequence[Tensor]) -> float:
        total = 0.0
        for k, windows in enumerate(parts):
            loss = self.loss(windows)
            self.backward(loss, is_last=k == len(parts) - 1)
            total += (loss.detach() / len(parts)).item()
        return total

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> float:
        total = torch.zeros(2, device=windows.device)
        for part in windows.split(16):  # equally often on all ranks: with --zero 3 each gathers the others' shards
            count = torch.tensor(float(len(part)), device=windows.device)
            total += torch.stack([self.loss(part) * count, count])
        cast(comm.Transport, self.transports[0]).all_reduce(total).wait()
        return (total[0] / total[1]).item()


class Replica(ByParts):
    """A whole model on each rank. A subclass makes `optimizer` and `schedule`, steps and loads an optimizer state."""

    share = 1.0
    optimizer: Optimizer
    schedule: LambdaLR

    def __init__(self, model: GPT, transport: comm.Transport, args: argparse.Namespace) -> None:
        self._model, self._args, self._transport, self.transports = model, args, transport, [transport]
        self._parameters = list(model.parameters())
        self.parameters, self.data = sum(p.numel() for p in self._parameters), (transport.rank, transport.world_size)
        self.dropping = dropped(model, args, transport.rank)

    def no_sync(self) -> AbstractContextManager[None]:
        """What every part of a step but the last runs in."""
        raise NotImplementedError

    def loss(self, windows: Tensor) -> Tensor:
        return self._model.loss(windows)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        with nullcontext() if is_last else self.no_sync():
            (loss / self._args.accumulate).backward()

    def synchronise(self) -> None:
        """Make the replicas the same, if they are not."""

    def error_norm_ratio(self) -> float | None:
        return None

    def checkpoints(self, folder: Path) -> RunCheckpoints:
        return ReplicaCheckpoints(folder, self._model, self, self._transport, self._args.keep_checkpoints)

    def close(self) -> None:
        """Nothing was opened."""


class Dense(Replica):
    """A baseline: gradients averaged in float32, then an ordinary optimizer."""

    def __init__(self, model: GPT, transport: comm.Transport, args: argparse.Namespace) -> None:
        super().__init__(model, transport, args)
        broadcast_parameters(self._parameters, transport)
        self._averager = DenseAverager(self._parameters, transport)
        self.no_sync = self._averager.no_sync
        self.optimizer = build_optimizer(choice_of(args), decay_groups(model, args.weight_decay))
        self.schedule = schedule_of(self.optimizer, args)

    def step(self) -> Exchange:
        comm_ms = self._averager.finish()
        if self._args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return Exchange("dense", comm_ms, 0)

    def load(self, states: Sequence[dict]) -> None:
        """Go on from this rank's own state, [state], or from those of all ranks of another world."""
        self.optimizer.load_state_dict(states[0])


class Onebit(Replica):
    """An optimizer of the one-bit family, which does the traffic of the data-parallel ranks itself."""

    def __init__(self, model: GPT, transport: comm.Transport, args: argparse.Namespace) -> None:
        super().__init__(model, transport, args)
        self.optimizer = build_optimizer(
            choice_of(args),
            decay_groups(model, args.weight_decay),
            gradient_codec=None if args.warmup_codec is None else comm.codec_named(args.warmup_codec, _BLOCK),
            max_grad_norm=args.max_grad_norm,
            compression=args.compression,
            delay=args.delay,
            codec=cast(comm.FusedCodec, comm.codec_named(args.codec, _BLOCK)),
            transport=transport,
            model=model,
        )
        self._onebit = cast(CompressedOptimizer, self.optimizer)
        self.no_sync = self._onebit.no_sync
        self.schedule = schedule_of(self.optimizer, args)

    def step(self) -> Exchange:
        self._onebit.step()
        self._onebit.zero_grad()
        self.schedule.step()
        stats = self._onebit.stats
        return Exchange(stats.phase, stats.comm_ms, stats.skipped_steps)

    def synchronise(self) -> None:
        if hasattr(self._onebit, "sync"):
            self._onebit.sync()

    def load(self, states: Sequence[dict]) -> None:
        """Go on from this rank's own state, [state], or from those of all ranks of another world."""
        if states[0]["onebit"]["world_size"] == self._onebit.transport.world_size:
            self._onebit.load_state_dict(states[0])
        else:
            self._onebit.load_state_dicts(states)

    def error_norm_ratio(self) -> float | None:
        return self._onebit.error_norm_ratio() if self._onebit.stats.phase == "compressed" else None


class Loads(Protocol):
    """A method whose replicas are whole."""

    optimizer: Optimizer
    schedule: LambdaLR

    def load(self, states: Sequence[dict]) -> None:
        """Go on from this rank's own state, [state], or from those of all ranks of another world."""


class ReplicaCheckpoints:
    """Of a model that is whole on every rank, in `checkpoint.py`'s form."""

    def __init__(self, folder: Path, model: GPT, method: Loads, transport: comm.Transport, keep: int | None) -> None:
        self.folder = folder
        self._model, self._method, self._transport = model, method, transport
        self._device = next(model.parameters()).device
        self._files = CheckpointFolder(folder, transport, self._device, keep)

    def is_empty(self) -> bool:
        return is_empty(self.folder, self._transport, self._device)

    def save(self, step: int, about: dict) -> None:
        shared = {"model": self._model.state_dict(), "schedule": self._method.schedule.state_dict(), **about}
        self._files.save(step, shared, {"optimizer": self._method.optimizer.state_dict(), "rng": torch.get_rng_state()})

    def load(self, check: Callable[[dict], None]) -> int | None:
        loaded = self._files.load()
        if loaded is None:
            return None
        shared, owns = loaded
        check(shared)
        self._files.together(self._take_over, shared, owns)
        return int(shared["step"])

    def _take_over(self, shared: dict, owns: Sequence[dict]) -> None:
        self._model.load_state_dict(shared["model"])
        self._method.load([own["optimizer"] for own in owns])
        self._method.schedule.load_state_dict(shared["schedule"])
        torch.set_rng_state(owns[self._transport.rank % len(owns)]["rng"])


def schedule_of(optimizer: Optimizer, args: argparse.Namespace) -> LambdaLR:
    """`lr_fraction` of --steps, with a warm-up of --warmup-lr-fraction."""
    warmup = max(1, round(args.warmup_lr_fraction * args.steps))
    return LambdaLR(optimizer, partial(lr_fraction, steps=args.steps, warmup=warmup))


def size_of(args: argparse.Namespace) -> ModelSize:
    """The model of --size, for sequences of --context bytes."""
    size = SIZES[args.size]
    return size if args.context is None else replace(size, context=args.context)


def choice_of(args: argparse.Namespace) -> OptimizerChoice:
    """The optimizer of --optimizer, with what the flags say of it; where nothing is said, the registry's defaults."""
    entry = optimizer_flags()[_SHARDED.get(args.optimizer, args.optimizer)]
    return OptimizerChoice(entry.name, entry.params(lr=args.lr, **{key: getattr(args, key) for key in entry.flag_keys}))


def rising(args: argparse.Namespace, first: int) -> Root:
    """Tokens in step t, from 1: from `first` to the model's context, over --easy-until of the steps."""
    return Root(first, size_of(args).context, max(1, round(args.easy_until * args.steps)), multiple=8)


def dropped(model: GPT, args: argparse.Namespace, rank: int) -> TokenDropping | None:
    if args.drop_tokens is None:
        return None
    return drop_tokens(model, "blocks.*", rising(args, args.drop_tokens), seed=args.seed, data_rank=rank)


def build_method(args: argparse.Namespace, transport: comm.Transport, device: torch.device) -> Method:
    """What --optimizer, --zero and --pipe ask for. All ranks. Raises ValueError where they do not go together."""
    if args.pipe is not None:
        from train.layout_method import Layout

        return Layout(transport, args)
    model = build_model(size_of(args), args.seed).to(device)
    if args.zero is None and args.sparse_attention is not None:  # with --zero the engine does it
        replace_attention(model, args.sparse_attention)
    if args.local_steps is not None:
        from train.local_method import Local

        return Local(model, transport, args)
    if args.zero is None:
        return (Onebit if choice_of(args).is_one_bit else Dense)(model, transport, args)
    from train.zero_method import Zero  # imports torch.distributed.checkpoint: 2 s that other runs need not wait

    return Zero(model, transport, args)
