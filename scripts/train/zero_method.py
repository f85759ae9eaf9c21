"""`train.py --zero`: the same training through the engine of `onebit.zero`, with its sharding, dtypes and checkpoints.

`config_of` says what a run's arguments are as a DeepSpeed configuration; `Zero` drives the engine that it makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from onebit import comm, zero
from onebit.checkpoint.files import CheckpointError
from onebit.checkpoint.folder import is_empty
from onebit.comm.messages import raise_on_all_ranks
from onebit.model_parallel import local
from onebit.optimizer import CompressedOptimizer
from onebit.zero.sharded.optimizer import ShardedOnebitOptimizer
from train.layouts import tensor_plan
from train.methods import (
    SHARDED_ONLY,
    ByParts,
    Exchange,
    HasSent,
    RunCheckpoints,
    choice_of,
    rising,
    schedule_of,
    size_of,
)
from train.model import GPT, SIZES, decay_groups, next_byte_loss


def config_of(args: argparse.Namespace) -> dict:
    """The configuration of a run, but for what is given to the engine as it is: parameter groups and schedule."""
    choice = choice_of(args)
    params = {key: getattr(choice.params, key) for key in ("lr", *choice.entry.flag_keys)}
    ours: dict[str, object] = {"compression": args.compression, "ranks_per_node": args.ranks_per_node}
    ours |= {"tensor": args.tensor, "keep_checkpoints": args.keep_checkpoints}
    ours |= {"codec": args.codec, "warmup_codec": args.warmup_codec, "delay": args.delay}
    if args.optimizer == SHARDED_ONLY:
        ours["sharding"] = "inter_node"
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.max_grad_norm,
        "steps_per_print": None,
        "optimizer": {"type": choice.type, "params": params},
        "zero_optimization": {"stage": args.zero},
        "onebit": ours,
    }
    if args.sparse_attention is not None:
        config["sparse_attention"] = args.sparse_attention
    if args.drop_tokens is not None:
        config["data_efficiency"] = {"enabled": True, "seed": args.seed, "data_routing": _dropping(args)}
    if args.sequence > 1:
        config["sequence_parallel_size"] = args.sequence
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    return config


def _dropping(args: argparse.Namespace) -> dict:
    """The block "data_routing"."""
    kept = rising(args, args.drop_tokens)
    schedule = {"require_steps": kept.total_steps, "seq_per_step": kept.multiple}
    ltd = {"random_ltd_schedule": {"min_value": kept.first, "max_value": kept.last, "schedule_config": schedule}}
    return {"enabled": True, "random_ltd": {"enabled": True, "total_layer_num": SIZES[args.size].layers, **ltd}}


class Zero(ByParts):
    """A `Method`: any optimizer at any stage. The model is sharded in place; the schedule waits in skipped steps.

    transports: what shards and tensor-parallel layers move inside a node goes through none of them, and is not counted.
    """

    def __init__(self, model: GPT, transport: comm.Transport, args: argparse.Namespace) -> None:
        self.parameters = sum(p.numel() for p in model.parameters())
        # A rank's piece is cut once: with --sequence tensor ranks hold all of it, by the model's own plan.
        plan = "auto" if args.sequence > 1 else tensor_plan(size_of(args).heads, args.tensor)
        self._start(model, transport, args, config_of(args), plan)

    def _start(
        self,
        model: GPT | zero.PipelineModule,
        transport: comm.Transport,
        args: argparse.Namespace,
        config: dict,
        plan: zero.tensor.Plan | Literal["auto"],
    ) -> None:
        self._engine, self.optimizer, _, schedule = zero.initialize(
            model=model,
            config=config,
            model_parameters=lambda module: decay_groups(module, args.weight_decay),
            lr_scheduler=lambda optimizer: schedule_of(optimizer, args),
            tensor_plan=plan,
        )
        self.schedule = cast(LambdaLR, schedule)
        self.dropping = self._engine.efficiency.dropping
        grid = self._engine.grid
        between = [each for axis, each in grid.transports.items() if axis != "shard"]
        self.transports: list[HasSent] = [transport, grid.world, grid.sequence, *between]
        self.data = grid.data
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.share = sum(local(p).numel() for p in held) / self.parameters

    def loss(self, windows: Tensor) -> Tensor:
        model = cast(GPT, self._engine.module)
        return next_byte_loss(cast(Tensor, self._engine(windows[:, :-1])), windows, model.split)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.backward(loss)
        if not is_last:
            self._engine.step()

    def step(self) -> Exchange:
        self._engine.step()
        return self._exchange()

    def _exchange(self) -> Exchange:
        optimizer, skipped = self.optimizer, self._engine.skipped_steps
        if isinstance(optimizer, CompressedOptimizer):
            return Exchange(optimizer.stats.phase, optimizer.stats.comm_ms, skipped)
        if isinstance(optimizer, ShardedOnebitOptimizer):
            return Exchange(optimizer.stats.phase, optimizer.stats.comm_ms, skipped)
        return Exchange("dense", self._engine.comm_ms, skipped)

    def synchronise(self) -> None:
        self._engine.synchronise()

    def error_norm_ratio(self) -> float | None:
        optimizer = self.optimizer
        if not isinstance(optimizer, CompressedOptimizer) or optimizer.stats.phase != "compressed":
            return None
        return optimizer.error_norm_ratio()

    def checkpoints(self, folder: Path) -> RunCheckpoints:
        return EngineCheckpoints(folder, self._engine)

    def close(self) -> None:
        self._engine.close()


class EngineCheckpoints:
    """The engine's own, in one folder that all ranks see."""

    def __init__(self, folder: Path, engine: zero.Engine) -> None:
        self.folder, self._engine = folder, engine

    def is_empty(self) -> bool:
        return is_empty(self.folder, self._engine.grid.world)

    def save(self, step: int, about: dict) -> None:
        self._engine.save_checkpoint(self.folder, client_state=about)

    def load(self, check: Callable[[dict], None]) -> int | None:
        problem = None
        if next(self.folder.glob("step_*/shared.pt"), None) is not None:
            problem = f"{self.folder} holds a run without --zero: resume without it, or name another folder"
        raise_on_all_ranks(self._engine.grid.world, problem, CheckpointError)
        found, about = self._engine.load_checkpoint(self.folder)
        if found is None:
            return None
        check(cast(dict, about))
        return self._engine.global_steps
