"""Hugging Face accelerate: its Accelerator, for a model that stays unwrapped.

    from onebit.integrations.accelerate import Accelerator      # instead of accelerate's

    accelerator = Accelerator()
    model = Net().to(accelerator.device)
    optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

`prepare` leaves out DistributedDataParallel and nothing else. `accumulate`, `backward`, `clip_grad_norm_`, `save_state`
and `load_state` are called as usual. `rank_files.py` describes the files of a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

try:
    import accelerate
except ImportError as error:
    raise ImportError("onebit.integrations.accelerate needs accelerate: pip install onebit[accelerate]") from error
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import OPTIMIZER_NAME, DistributedType

from ..optimizer import CompressedOptimizer
from ..step.stats import Stats
from ..usage.buffers import begin_equal, persistent_buffers, sync_buffers
from ..usage.contract import State
from . import rank_files

log = logging.getLogger(__name__)

# Each of these averages gradients itself, or shards the parameters.
_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that `Accelerator.prepare` returns. `optimizer.optimizer` is the one-bit optimizer itself.

    A step that all ranks skip counts as skipped: accelerate's schedulers then do not advance either. Constructed by all
    ranks.

    Args:
        optimizer: A one-bit optimizer.
        scaler: GradScaler of accelerate. Default None.
    """

    optimizer: CompressedOptimizer

    def __init__(self, optimizer: CompressedOptimizer, scaler: torch.amp.GradScaler | None = None):
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.checkpoint_file: Path | None = None
        """The framework's file from which the state in `load_state_dict` comes: set it around the call."""
        self._run = rank_files.new_run(optimizer.transport)
        self._constructed_norm = optimizer.max_grad_norm
        self._clips_to: float | None = None  # the norm that the last call of `clip_to` asked for
        self._is_asked = False  # whether it was asked for the step under way
        self._norm: Tensor | None = None

    @property
    def stats(self) -> Stats:
        """Counts of the last step."""
        return self.optimizer.stats

    def clip_to(self, max_norm: float) -> Tensor:
        """Clip the step under way to this norm of the mean gradient.

        Args:
            max_norm: Largest norm; infinite: no clipping.

        Returns:
            A tensor that becomes the norm once the step has been taken. Until then, and if it is skipped, it is NaN.

        Raises:
            ValueError: The optimizer was constructed with another max_grad_norm, or max_norm is not positive.
        """
        if self._constructed_norm not in (0.0, max_norm) and math.isfinite(max_norm):
            raise ValueError(
                f"rank {self.optimizer.transport.rank}: clipping to {max_norm}, but the optimizer was constructed with "
                f"max_grad_norm={self._constructed_norm}; give one of them, or both the same"
            )
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {max_norm}; to clip nothing, leave the call out")
        if math.isfinite(max_norm):
            self._clips_to = self.optimizer.max_grad_norm = float(max_norm)
            self._is_asked = True
        return self.norm()

    def norm(self) -> Tensor:
        """The norm of the step under way: NaN until it has been taken, after a skipped one, and without clipping."""
        if self._norm is None:
            self._norm = torch.tensor(math.nan, dtype=torch.float32, device="cpu")
        return self._norm

    def step(self, closure: Any = None) -> None:
        is_step, before = self.gradient_state.sync_gradients, self._steps_sent()
        # Not after the step for which it was asked: buckets of the next one leave during backward, by its clip factor.
        if is_step and not self._is_asked and self.optimizer.max_grad_norm == self._clips_to:
            self.optimizer.max_grad_norm = self._constructed_norm
        super().step(closure)
        if is_step:
            self._is_asked = False
            self._is_overflow = self._steps_sent() == before
            if self._norm is not None:
                self._norm.fill_(math.nan if self.stats.grad_norm is None else self.stats.grad_norm)
                self._norm = None

    def _steps_sent(self) -> int:
        """Steps taken, and the one under way (`delay=1`): the next step tells whether all skip that one."""
        return self.optimizer.steps_taken() + (self.optimizer.step_under_way is not None)

    def state_dict(self) -> State:
        """This rank's optimizer state, with the mark of this save."""
        return rank_files.marked(self.optimizer, self._run)

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from a checkpoint's state. All ranks. Outside of `load_state`, each rank from its own.

        Args:
            state_dict: Content of the framework's file, or this rank's state.
        """
        if self.checkpoint_file is None:
            self.optimizer.load_state_dict(state_dict)
        else:
            rank_files.load(self.checkpoint_file, state_dict, self.optimizer)

    def save_beside(self, file: Path) -> None:
        """Write this rank's state beside the framework's file, which contains rank 0's.

        Args:
            file: The framework's file.
        """
        rank_files.write(file, self.state_dict(), self.optimizer.transport.rank)

    @contextmanager
    def reading(self, file: Path) -> Iterator[None]:
        """States loaded in this block come from this file: every rank then takes its own from beside it.

        Args:
            file: The framework's file.
        """
        self.checkpoint_file = file
        try:
            yield
        finally:
            self.checkpoint_file = None


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator without DistributedDataParallel: one-bit optimizers average the gradients.

    Arguments as accelerate's. All optimizers must be onebit's. Move the model to `accelerator.device` before you
    construct the optimizer. clip_grad_norm_ clips the mean gradient in the optimizer's step, and changes no gradient;
    the tensor that it returns contains the norm once that step has been taken. All ranks call save_state and
    load_state.
    """

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        self.check_distribution()
        params = {p for model in args if isinstance(model, nn.Module) for p in model.parameters()}
        for optimizer in args if params else ():
            if isinstance(optimizer, CompressedOptimizer) and params.isdisjoint(optimizer.buckets.params):
                raise ValueError(
                    f"rank {self.process_index}: the optimizer trains no parameter of the model it is prepared with; "
                    "construct it from this model's parameters, after all code that replaces them"
                )
        prepared = super().prepare(*args, device_placement=device_placement)
        if any(isinstance(arg, CompressedOptimizer) for arg in args):
            for model in self._models:
                begin_equal(model, self._prepared()[0].optimizer.transport)
        return prepared

    def check_distribution(self, asked: str = "") -> None:
        """Raise ValueError if the launcher's configuration shards models, or averages gradients in another way.

        Args:
            asked: Such a configuration of a framework on top, e.g. "FSDP". Default "": none.

        Raises:
            ValueError: There is such a configuration.
        """
        parallelism = self.parallelism_config
        if parallelism is not None and parallelism.total_size > parallelism.dp_replicate_size:
            asked = asked or "a parallelism_config that shards"
        if self.distributed_type in _OTHERS:
            asked = asked or self.distributed_type.value
        if asked:
            raise ValueError(
                f"rank {self.process_index}: accelerate is configured for {asked}, but the optimizer exchanges "
                "gradients of whole models; start with torchrun or `accelerate launch --multi_gpu`, without that "
                "configuration, or shard with onebit.zero (for a DeepSpeed JSON call zero.stand_in(), and take "
                "accelerate's own class)"
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's, without DistributedDataParallel. Raises TypeError if the model is already wrapped in it."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"rank {self.process_index}: the model is wrapped in {type(model).__name__}, which averages gradients "
                "in 32 bits each; prepare the model itself (wrapped.module)"
            )
        return cast(nn.Module, super().prepare_model(model, device_placement, evaluation_mode=True))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepare a one-bit optimizer.

        Args:
            optimizer: One of onebit's.
            device_placement: Without effect. Default None.

        Raises:
            TypeError: It is another library's optimizer.
            ValueError: Its parameters have moved to another device, or accelerate numbers the ranks differently.
        """
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer not in self._optimizers:  # after free_memory()
                self._optimizers.append(optimizer)
            return optimizer
        if not isinstance(optimizer, CompressedOptimizer):
            raise TypeError(
                f"rank {self.process_index}: {type(optimizer).__name__} averages no gradients, and this Accelerator "
                "leaves that to the optimizer; use one of onebit's, or accelerate's own Accelerator"
            )
        rank, ranks = optimizer.transport.rank, optimizer.transport.world_size
        if (self.process_index, self.num_processes) != (rank, ranks):
            raise ValueError(
                f"rank {rank} of {ranks}: accelerate takes it for {self.process_index} of {self.num_processes}, so "
                "that ranks would read the same data; without GPUs say Accelerator(cpu=True), "
                "TrainingArguments(use_cpu=True) or ACCELERATE_USE_CPU=true"
            )
        for bucket in optimizer.buckets:
            for p, name in zip(bucket.params, bucket.names, strict=True):
                if p.device != bucket.device:
                    raise ValueError(
                        f"rank {self.process_index}: {name} is on {p.device}, its optimizer state on {bucket.device}; "
                        "call model.to(accelerator.device) before you construct the optimizer"
                    )
        prepared = PreparedOptimizer(optimizer, self.scaler)
        self._optimizers.append(prepared)
        return prepared

    # ---------------------------------------------------------------- gradients

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes in this block only accumulate, for the optimizers that train this model."""
        params = set(model.parameters())
        with ExitStack() as stack:
            for prepared in self._prepared():
                if not params.isdisjoint(prepared.optimizer.buckets.params):
                    stack.enter_context(prepared.optimizer.no_sync())
            yield

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the mean gradient of all ranks in the step that follows.

        Args:
            parameters: All parameters of one prepared optimizer.
            max_norm: Largest norm; infinite: no clipping, and the norm is NaN unless the optimizer clips itself.
            norm_type: Must be 2. Default 2.

        Returns:
            A tensor that becomes the norm in that step; NaN until then. See `PreparedOptimizer.clip_to`.

        Raises:
            ValueError: norm_type is not 2, or these are not all parameters of one optimizer.
        """
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        if norm_type != 2:
            raise ValueError(f"rank {self.process_index}: norm_type={norm_type}; the optimizer clips by the 2-norm")
        found = [one for one in self._prepared() if not given.isdisjoint(one.optimizer.buckets.params)]
        if len(found) != 1 or not given.issuperset(found[0].optimizer.buckets.params):
            trained = [len(one.optimizer.buckets.params) for one in self._prepared()]
            raise ValueError(
                f"rank {self.process_index}: clip_grad_norm_ got {len(given)} parameters, of {len(found)} prepared "
                f"optimizers; each clips all of its own together ({trained} parameters): pass all parameters of one, "
                "and clip others by themselves"
            )
        return found[0].clip_to(float(max_norm))

    def clip_grad_value_(self, parameters: object, clip_value: float) -> NoReturn:
        """Always raises ValueError: it would clip each rank's own gradient, not their mean."""
        raise ValueError(
            f"rank {self.process_index}: clip_grad_value_ would clip each rank's own gradient, before their mean is "
            "known; use clip_grad_norm_"
        )

    def join_uneven_inputs(self, joinables: object, even_batches: bool | None = None) -> NoReturn:
        """Always raises ValueError: use the optimizer's own `join`."""
        raise ValueError(
            f"rank {self.process_index}: join_uneven_inputs is for DistributedDataParallel; write `with "
            "optimizer.optimizer.join():` around the loop, with Accelerator(dataloader_config="
            "DataLoaderConfiguration(even_batches=False))"
        )

    # ---------------------------------------------------------------- replicas and checkpoints

    def sync_replicas(self) -> None:
        """Make all ranks' models bit-identical, before an evaluation. All ranks, between two steps.

        It synchronises 0/1 Adam's parameters, lands a step under way (`delay=1`), and averages BatchNorm's statistics;
        without these it changes nothing. `save_state` calls it.
        """
        for prepared in self._prepared():
            if hasattr(prepared.optimizer, "sync"):
                prepared.optimizer.sync()
        for model in self._models if self._prepared() else ():
            if any(persistent_buffers(model)):  # without any, nothing is sent
                sync_buffers(model, self._prepared()[0].optimizer.transport)

    def check_synchronised(self) -> None:
        """Raise RuntimeError if replicas differ between synchronisations, or look ahead of a step under way."""
        if any(not prepared.optimizer.rule.is_synchronised() for prepared in self._prepared()):
            raise RuntimeError(
                f"rank {self.process_index}: the replicas differ between two synchronisations of 0/1 Adam; call "
                "accelerator.sync_replicas() on all ranks before you save or evaluate the model"
            )
        if any(prepared.optimizer.step_under_way is not None for prepared in self._prepared()):
            raise RuntimeError(
                f"rank {self.process_index}: the parameters look ahead of a step under way (delay=1); call "
                "accelerator.sync_replicas() on all ranks before you save or evaluate the model"
            )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> State:
        """As accelerate's. Raises RuntimeError between synchronisations of 0/1 Adam, or if a step is under way."""
        self.check_synchronised()
        return cast(State, super().get_state_dict(model, unwrap))

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """As accelerate's, plus every rank's optimizer state. All ranks."""
        self.sync_replicas()
        hook = self.register_save_state_pre_hook(lambda models, weights, folder: self._save_beside(Path(folder)))
        try:
            return super().save_state(output_dir, safe_serialization, **options)
        finally:
            hook.remove()

    def load_state(self, input_dir: str | None = None, load_kwargs: State | None = None, **options: Any) -> None:
        """As accelerate's; each rank loads its own state, in a world of another size the mean of all. All ranks.

        Raises CheckpointError, on all ranks, if a rank's file is missing or comes from another save.
        """
        with ExitStack() as reading:

            def read_beside(models: object, folder: str) -> None:
                for file, prepared in self._files(Path(folder)):
                    reading.enter_context(prepared.reading(file))

            hook = self.register_load_state_pre_hook(read_beside)
            reading.callback(hook.remove)
            super().load_state(input_dir, load_kwargs, **options)

    def _save_beside(self, folder: Path) -> None:
        for file, prepared in self._files(folder):
            prepared.save_beside(file)

    def _files(self, folder: Path) -> Iterator[tuple[Path, PreparedOptimizer]]:
        """(accelerate's file, the optimizer) of each."""
        for k, prepared in enumerate(self._prepared()):
            yield folder / (f"{OPTIMIZER_NAME}_{k}.bin" if k else f"{OPTIMIZER_NAME}.bin"), prepared

    def _prepared(self) -> list[PreparedOptimizer]:
        return cast(list[PreparedOptimizer], self._optimizers)
