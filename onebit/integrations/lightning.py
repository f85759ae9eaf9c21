"""Lightning: a strategy under which a LightningModule trains with an optimizer of the family.

    from onebit.integrations.lightning import OnebitStrategy

    trainer = Trainer(strategy=OnebitStrategy())      # the module's configure_optimizers returns onebit.OnebitAdam(...)

Like `DDPStrategy` it starts or finds the ranks, gives each its part of the data and reduces logged values. The model is
not wrapped: the optimizer exchanges gradients. Rests on `lightning` 2.5 or newer (extra `lightning`); `Trainer` takes
the name "onebit" as well once this module is imported.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch import Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("onebit.integrations.lightning needs Lightning: pip install onebit[lightning]") from error

from ..checkpoint.files import CheckpointError
from ..comm import Transport
from ..comm.messages import raise_on_all_ranks
from ..optimizer import CompressedOptimizer
from ..usage.buffers import sync_buffers

_RECORD = "onebit"


class OnebitStrategy(DDPStrategy):
    """Data parallelism without DistributedDataParallel: the one-bit optimizer does all traffic of the training.

    1. Before training, rank 0's parameters and buffers go to all ranks; the optimizer sends the rest.
    2. `Trainer(gradient_clip_val=...)` and `clip_gradients` set the optimizer's max_grad_norm for a step. Accumulating
       backward passes send nothing. Under "16-mixed", buckets are sent in step(), when the loss scale is known.
    3. Before a validation, before a checkpoint and at the end, buffers become their mean over the ranks, and 0/1 Adam
       synchronises its replicas.
    4. A checkpoint is Lightning's file, written by rank 0, which `load_from_checkpoint` reads; the other ranks' states
       are in the folder `ranks/` beside it, and are written first. All ranks save and load together. They resume to the
       bit; another number of ranks takes all states over, as `load_state_dicts`.

    Args:
        process_group_backend: Backend of the process group, as in `DDPStrategy`. Default None: by the device.
        timeout: Timeout of the process group, as in `DDPStrategy`.
        **lightnings: accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, as in
            `DDPStrategy`.

    Raises:
        TypeError: An argument is DistributedDataParallel's or unknown; or, in setup, configure_optimizers returns an
            optimizer that averages nothing.
        ValueError: In setup, the trainer and the optimizer clip to different norms.
        CheckpointError: On load, a rank's file is missing.
    """

    strategy_name = "onebit"

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **lightnings: Any,
    ):
        known = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
        if unknown := [name for name in lightnings if name not in known]:
            raise TypeError(
                f"OnebitStrategy() got {unknown[0]!r}, which is DistributedDataParallel's or unknown; the model is not "
                "wrapped here: leave it out, or give the optimizer its own options (bucket_cap_mb, overlap, ...)"
            )
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **lightnings)
        self._loaded_from: str | Path = ""
        self._constructed_norm: dict[torch.optim.Optimizer, float] = {}
        self._clips_to: dict[torch.optim.Optimizer, float] = {}  # the norms that `clip_gradients` asked for last
        self._is_asked = set[torch.optim.Optimizer]()  # those that are asked to clip in the step under way

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("onebit", cls, description="one-bit optimizers: no wrapper, their own traffic")

    # ---------------------------------------------------------------- ranks and data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        # On the CPU "auto" means one device, however many ranks torchrun has started. Lightning's own environment
        # starts the devices that are named; it does not know their number yet, and answers 1.
        environment, devices = self.cluster_environment, self.parallel_devices or []
        if environment is not None and all(device.type == "cpu" for device in devices):
            ranks_here = environment.world_size() // self.num_nodes
            self.parallel_devices = [torch.device("cpu")] * max(ranks_here, len(devices))
        super().set_world_ranks()

    # ---------------------------------------------------------------- model and optimizers

    @property
    def onebit_optimizers(self) -> Sequence[CompressedOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, CompressedOptimizer)]

    def configure_ddp(self) -> None:
        """Instead of wrapping, send rank 0's values to all, also those that no optimizer trains, as DDP does once."""
        assert self.model is not None
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                held = tensor.detach().contiguous()
                torch.distributed.broadcast(held, 0)
                tensor.copy_(held)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, CompressedOptimizer):
                raise TypeError(
                    f"rank {self.global_rank}: configure_optimizers returned {type(optimizer).__name__}, which leaves "
                    "gradients as they are, and OnebitStrategy wraps no model that would average them: return "
                    'onebit.OnebitAdam(...) or another of onebit\'s, or use Trainer(strategy="ddp")'
                )
            if getattr(self.precision_plugin, "scaler", None) is not None:
                optimizer.overlap.is_on = False  # gradients that left in backward would all be sent once more
            clip_val = trainer.gradient_clip_val or 0.0
            if clip_val and optimizer.max_grad_norm not in (0.0, clip_val):
                raise ValueError(
                    f"Trainer(gradient_clip_val={clip_val}), but {type(optimizer).__name__}(max_grad_norm="
                    f"{optimizer.max_grad_norm}); give one of them, or both the same"
                )
            self._constructed_norm[optimizer] = optimizer.max_grad_norm
            self._clip_gradients(optimizer, clip_val, trainer.gradient_clip_algorithm or "norm")
        self._is_asked.clear()
        # Replace the method of this one plugin: Lightning has no hook for it, and would clip by each rank's own norm.
        self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]

    def _clip_gradients(
        self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: object = "norm"
    ) -> None:
        """Called by `LightningModule.clip_gradients`: the optimizer clips this step, by the mean gradient's norm."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        assert isinstance(optimizer, CompressedOptimizer)
        if clip_val > 0:
            algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)).lower()
            if algorithm != "norm":
                raise ValueError(
                    f"rank {self.global_rank}: gradient_clip_algorithm={algorithm!r} needs the mean gradient, which no "
                    'rank has once momentum travels; use "norm"'
                )
            self._clips_to[optimizer] = optimizer.max_grad_norm = float(clip_val)
            self._is_asked.add(optimizer)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **named: Any
    ) -> Any:
        assert isinstance(optimizer, CompressedOptimizer)

        def without_clip() -> Any:
            loss = closure()
            # Automatic optimization asks after this, manual has asked before.
            if optimizer not in self._is_asked and optimizer.max_grad_norm == self._clips_to.get(optimizer):
                optimizer.max_grad_norm = self._constructed_norm[optimizer]
            return loss

        stepped = super().optimizer_step(optimizer, without_clip, *args, **named)
        self._is_asked.discard(optimizer)
        return stepped

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.onebit_optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def teardown(self) -> None:
        vars(self.precision_plugin).pop("clip_gradients", None)
        super().teardown()

    # ---------------------------------------------------------------- equal replicas before they are read

    def on_validation_start(self) -> None:
        self._synchronise()

    def on_train_end(self) -> None:
        self._synchronise()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._synchronise()
        states: dict[str, Any] = super().lightning_module_state_dict()
        return states

    def _synchronise(self) -> None:
        module = self.lightning_module
        # Not in inference mode, in which validations run: tensors allocated there cannot be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for optimizer in self.onebit_optimizers:
                if hasattr(optimizer, "sync"):
                    optimizer.sync()
            if module is not None and self.onebit_optimizers:
                sync_buffers(module, self._transport)

    @property
    def _transport(self) -> Transport:
        return self.onebit_optimizers[0].transport

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object | None = None
    ) -> None:
        """All ranks. Other ranks' files are written first; rank 0's names them by a token, so that saves never mix."""
        if "optimizer_states" not in checkpoint or not self.onebit_optimizers:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        token = self.broadcast(secrets.token_hex(4))
        record = {"world_size": self.world_size, "token": token}
        problem = None
        if not self.is_global_zero:
            mine = {key: checkpoint[key] for key in self._own_keys(checkpoint)}
            path = rank_file(filepath, token, self.global_rank)
            try:
                self.checkpoint_io.save_checkpoint({**mine, _RECORD: record}, path, storage_options)
            except Exception as error:
                problem = f"rank {self.global_rank} cannot write {path}: {type(error).__name__}: {error}"
        raise_on_all_ranks(self._transport, problem, CheckpointError)
        super().save_checkpoint({**checkpoint, _RECORD: record}, filepath, storage_options)
        if self.is_global_zero:
            remove_rank_files(filepath, but=token)

    def _own_keys(self, checkpoint: Mapping[str, Any]) -> list[str]:
        """Keys of state that differs between ranks: the optimizers' states, and the loss scale."""
        keys = ("optimizer_states", type(self.precision_plugin).__qualname__)
        return [key for key in keys if key in checkpoint]

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Rank 0's file, with this rank's own states in it if training continues. All ranks."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._loaded_from = os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path
        assert self.lightning_module is not None
        is_training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if is_training and self._fits_by_rank(checkpoint) and not self.is_global_zero:
            checkpoint.update(self._load_rank(checkpoint[_RECORD], self.global_rank, weights_only))
        return checkpoint

    def _fits_by_rank(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether it contains the states of the same number of ranks."""
        return _RECORD in checkpoint and checkpoint[_RECORD]["world_size"] == self.world_size

    def _load_rank(self, record: Mapping[str, Any], rank: int, weights_only: bool | None = None) -> dict[str, Any]:
        path = rank_file(self._loaded_from, record["token"], rank)
        if not get_filesystem(path).exists(path):
            raise CheckpointError(
                f"rank {self.global_rank}: {self._loaded_from} was written by {record['world_size']} ranks, and {path} "
                "is missing: keep the folder ranks/ beside a checkpoint, or load the weights alone "
                "(load_from_checkpoint)"
            )
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        del loaded[_RECORD]
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states, record = checkpoint["optimizer_states"], checkpoint.get(_RECORD)
        if record is None or self._fits_by_rank(checkpoint):
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
            return
        others = [self._load_rank(record, rank)["optimizer_states"] for rank in range(1, record["world_size"])]
        for k, optimizer in enumerate(self.onebit_optimizers):
            optimizer.load_state_dicts([states[k], *(other[k] for other in others)])

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_rank_files(filepath)


def rank_file(checkpoint: str | Path, token: str, rank: int) -> str:
    """Path of a rank's file of a checkpoint: in the folder ranks/ beside it."""
    folder, _, name = str(checkpoint).rpartition("/")
    return "/".join([*([folder] if folder else []), "ranks", name, f"{token}-{rank:05}.ckpt"])


def remove_rank_files(checkpoint: str | Path, but: str = "-") -> None:
    """Remove the ranks' files of a checkpoint, except those of the token `but`."""
    files = get_filesystem(checkpoint)
    folder = rank_file(checkpoint, but, 0).rpartition("/")[0]
    if not files.exists(folder):
        return
    left = []
    for path in files.ls(folder, detail=False):
        if path.rpartition("/")[2].startswith(but):
            left.append(path)
        else:
            files.rm(path)
    if not left:
        files.rm(folder, recursive=True)


if "onebit" not in StrategyRegistry:
    OnebitStrategy.register_strategies(StrategyRegistry)
