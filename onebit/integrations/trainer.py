"""Hugging Face Trainer: change one import, and its optimizer exchanges one bit per parameter.

    from onebit.integrations.trainer import Trainer             # instead of transformers'

The optimizer is `OnebitAdam` with the hyperparameters of TrainingArguments; another of the family is
`optimizer_cls_and_kwargs=(onebit.ZeroOneAdam, {})`. A trainer of another library mixes it in:

    class OnebitSFTTrainer(OnebitTrainerMixin, SFTTrainer): ...

Checkpoints are in Trainer's own folders, with every rank's state (`rank_files.py`). Rests on `accelerate.py`.
"""

from __future__ import annotations

import logging
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

try:
    import transformers
    from transformers.trainer import OPTIMIZER_NAME
except ImportError as error:
    raise ImportError("onebit.integrations.trainer needs transformers: pip install onebit[transformers]") from error
from transformers.trainer_utils import PredictionOutput

from ..checkpoint.files import CheckpointError
from ..comm.messages import gather_texts
from ..onebit_adam import OnebitAdam
from ..optimizer import CompressedOptimizer
from . import rank_files
from .accelerate import Accelerator, PreparedOptimizer

log = logging.getLogger(__name__)

# Trainer's defaults: for these, TrainingArguments has the hyperparameters of AdamW.
_ADAMW = ("adamw_torch", "adamw_torch_fused")


class _Events(transformers.TrainerCallback):
    """Calls the mixin at Trainer's events."""

    def __init__(self, trainer: OnebitTrainerMixin):
        self._trainer = trainer

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        self._trainer._note_step()

    def on_epoch_end(self, *_: object, **__: object) -> None:
        # Every training ends with the end of an epoch: a model that is saved or loaded after it is synchronised.
        self._trainer.accelerator.sync_replicas()


if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class OnebitTrainerMixin(_Base):
    """Makes a Trainer use a one-bit optimizer. List it before `transformers.Trainer`, or a class derived from it.

    - The model is not wrapped. `max_grad_norm` of TrainingArguments goes to the optimizer; with 0, one-bit steps also
      send during backward.
    - Learning rate, betas and eps come from TrainingArguments unless `optimizer_cls_and_kwargs` has them.
    - Logs contain `bits_per_parameter`, the mean over the steps since the last log, and `grad_norm` if gradients are
      clipped.
    - Replicas are bit-identical in evaluations, predictions, checkpoints and at the end of an epoch (0/1 Adam's
      parameters between two synchronisations differ, and so do BatchNorm's statistics).
    - All ranks write checkpoints; training resumes from them in a world of another size, too.

    Raises:
        TypeError: The optimizer is another library's.
        ValueError: DeepSpeed or FSDP is configured.
    """

    accelerator: Accelerator

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._bits: list[float] = []
        self.add_callback(_Events(self))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Trainer names the class itself. Ours adds methods alone, so an instance of accelerate's can become one.
        self.accelerator.__class__ = Accelerator
        is_sharded = self.args.fsdp or self.is_fsdp_enabled
        self.accelerator.check_distribution("FSDP" if is_sharded else "DeepSpeed" if self.is_deepspeed_enabled else "")

    # ---------------------------------------------------------------- the optimizer

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        given = self.optimizer_cls_and_kwargs
        if given is not None and issubclass(given[0], CompressedOptimizer):
            self.optimizer_cls_and_kwargs = given[0], _hyperparameters(self.args, given[1])
        try:
            return super().create_optimizer(*args)
        finally:
            self.optimizer_cls_and_kwargs = given

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: transformers.TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """OnebitAdam, with the hyperparameters of args. Raises ValueError if args ask for another optimizer."""
        if args.optim not in _ADAMW or args.optim_args:
            asked = f"optim={getattr(args.optim, 'value', args.optim)!r}, optim_args={args.optim_args!r}"
            raise ValueError(
                f"{asked} are for Trainer's own optimizers; leave them out, and choose one of onebit's with "
                "optimizer_cls_and_kwargs=(onebit.ZeroOneAdam, {...})"
            )
        return OnebitAdam, _hyperparameters(args, {})

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        # Trainer's method would call clip_grad_norm_ with an infinite norm, for the norm of one rank's own gradients.
        prepared = cast(PreparedOptimizer, self.optimizer)
        return prepared.norm() if grad_norm is None and prepared.optimizer.max_grad_norm > 0 else grad_norm

    # ---------------------------------------------------------------- logs

    def _note_step(self) -> None:
        self._bits.append(cast(PreparedOptimizer, self.optimizer).stats.bits_per_parameter)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if math.isnan(logs.get("grad_norm", 0.0)):  # all ranks have skipped the step
            del logs["grad_norm"]
        if "loss" in logs and self._bits:
            logs["bits_per_parameter"] = statistics.fmean(self._bits)
            self._bits.clear()
        super().log(logs, *args, **kwargs)

    # ---------------------------------------------------------------- replicas

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.accelerator.sync_replicas()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        self.accelerator.sync_replicas()
        return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.accelerator.check_synchronised()  # not sync_replicas(): scripts call this on rank 0 alone
        super().save_model(*args, **kwargs)

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.accelerator.sync_replicas()
        super()._save_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        prepared, file = cast(PreparedOptimizer, self.optimizer), Path(output_dir) / OPTIMIZER_NAME

        def save() -> None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            super(OnebitTrainerMixin, self)._save_optimizer_and_scheduler(output_dir)
            prepared.save_beside(file)

        # All ranks together: Trainer deletes an older checkpoint afterwards, so none may have failed.
        rank_files.together(prepared.optimizer.transport, save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        prepared, file = cast(PreparedOptimizer, self.optimizer), Path(checkpoint) / OPTIMIZER_NAME
        _check_all_see(file, prepared.optimizer)
        with prepared.reading(file):
            super()._load_optimizer_and_scheduler(checkpoint)


class Trainer(OnebitTrainerMixin, transformers.Trainer):
    """transformers' Trainer, with an optimizer that does all data-parallel traffic. See `OnebitTrainerMixin`."""


def _hyperparameters(args: transformers.TrainingArguments, given: dict[str, Any]) -> dict[str, Any]:
    """The given arguments, completed from TrainingArguments. Raises ValueError if both have a norm, and they differ."""
    norm = given.get("max_grad_norm", args.max_grad_norm)
    if norm != args.max_grad_norm:
        raise ValueError(
            f"max_grad_norm is {norm} in optimizer_cls_and_kwargs and {args.max_grad_norm} in TrainingArguments; set "
            "it in TrainingArguments alone"
        )
    betas = (args.adam_beta1, args.adam_beta2)
    return {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "max_grad_norm": norm, **given}


def _check_all_see(file: Path, optimizer: CompressedOptimizer) -> None:
    """Raise CheckpointError, on all ranks, if some see the optimizer's file and others do not. All ranks."""
    missing = gather_texts(optimizer.transport, "" if file.is_file() else str(file))
    blind = [rank for rank, path in enumerate(missing) if path]
    if 0 < len(blind) < len(missing):
        raise CheckpointError(
            f"rank {blind[0]} does not see {missing[blind[0]]}, others see theirs; give all ranks one folder, or copy "
            "it to each host"
        )
    if blind and optimizer.transport.rank == 0:
        log.warning("%s is missing (save_only_model?): the optimizer starts from scratch", file)
