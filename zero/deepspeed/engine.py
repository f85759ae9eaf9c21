"""DeepSpeedEngine: the engine with the further names of DeepSpeed's engine. `initialize` returns one.

`zero/engine.py` drives steps; here are settings, ranks, the gradient-accumulation boundary, complete weights, and
attributes of the module. A name of DeepSpeed's that does not exist here raises AttributeError with the alternative
(`names.py`). `docs/deepspeed.md` lists all of them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ...comm.messages import gather_texts
from ...model_parallel import gathered
from ..checkpoint.weights import plain
from ..compression.scheduler import CompressionScheduler
from ..config.reader import nearest, write_block
from ..config.sections import OffloadOptimizer, OffloadParam
from ..data import Loader, ShardedLoader
from ..data_efficiency import configured
from ..data_efficiency.efficiency import Efficiency
from ..data_efficiency.loader import CurriculumLoader
from ..data_efficiency.pacing import Pacing
from ..data_efficiency.sampler import CurriculumSampler
from ..data_efficiency.token_dropping import TokenDropping
from ..engine import Engine, every_rank
from ..features.compression import Compression
from ..features.data_efficiency import DataEfficiency
from ..features.progressive_layer_drop import ProgressiveLayerDrop
from ..pipeline.run import Batch
from . import stand_in, zero_to_fp32
from .comm import get_local_rank
from .names import ENGINE, REFUSED, SWITCHED_OFF, why_not
from .utils import RepeatingLoader

log = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="DeepSpeedEngine")


class Epochs:
    """`engine.tput_timer`, for scripts that report the end of an epoch to it. Throughput is not measured here."""

    epoch_count = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1


class DeepSpeedEngine(Engine):
    """An `Engine` with DeepSpeed's names. `initialize` makes it.

    Names that neither this class nor `Engine` has come from the module: engine.generate is engine.module.generate.

    Attributes:
        mpu: The `mpu` of `initialize`; with a `PipelineModule` and without one, a `PipelineParallelGrid`.
    """

    mpu: object = None
    _was_applied = False
    _passes = 0  # backward passes since the last step()

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.tput_timer = Epochs()
        self.optimizer.set_lr = self._set_lr  # type: ignore[attr-defined]
        self.optimizer.check_overflow = _refuse_check  # type: ignore[attr-defined]
        self._show(is_skipped=False)

    def _set_lr(self, lr: float) -> None:
        """Set the learning rate of each group, until a schedule sets it."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _show(self, *, is_skipped: bool) -> None:
        """Set the attributes that DeepSpeed's optimizers have, and that scripts read of ours."""
        self.optimizer.overflow, self.optimizer.cur_scale = is_skipped, self.fp16_scale.value  # type: ignore[attr-defined]

    def _update(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        skipped = self.skipped_steps
        super()._update(lr_kwargs)
        self._show(is_skipped=self.skipped_steps > skipped)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module, and answers for DeepSpeed's names that do not exist here."""
        if name in REFUSED:
            return partial(_refuse, name)
        module = self.__dict__.get("module")
        if module is not None and not name.startswith("__") and hasattr(module, name):
            found = getattr(module, name)
            is_sharded = "sharding" in self.__dict__ and self.zero_optimization_partition_weights()
            return _naming_the_option(name, found) if is_sharded and inspect.ismethod(found) else found
        if name in SWITCHED_OFF:
            return _says_false
        if (why := why_not(name, ENGINE)) is not None:
            raise AttributeError(f"DeepSpeed's engine.{name} is not here: {why}")
        found = nearest(name, [known for known in dir(self) if not known.startswith("_")])
        advice = f"; did you mean {found!r}?" if found else ""
        raise AttributeError(f"neither the engine nor its {type(module).__name__} has an attribute {name!r}{advice}")

    @property
    def compression_scheduler(self) -> CompressionScheduler | None:
        """The scheduler of a model from `init_compression`, else None. It counts every step, also skipped ones."""
        feature = self.feature_of(Compression)
        return None if feature is None else feature.scheduler

    # ---------------------------------------------------------------- a step

    def forward(self, *inputs: object, **named: object) -> object:
        """The same as calling the engine.

        Args:
            *inputs: Inputs of the module.
            **named: Named inputs of the module.
        """
        return self(*inputs, **named)

    def backward(  # type: ignore[override]
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
    ) -> Tensor:
        """Add the loss's gradients, times the loss scale, and return the loss over the micro-batches of a step.

        Args:
            loss: A tensor of one element.
            retain_graph: As in torch. Default False.
            scale_wrt_gas: Whether to divide by the micro-batches of a step, what is returned, too. Default True.
            allreduce_gradients: Must be True; accumulate in `no_sync()` instead. Default True.
            release_loss: Without effect, as in older releases of DeepSpeed. Default False.

        Raises:
            TypeError: loss is not a tensor of one element.
            ValueError: allreduce_gradients is False.
        """
        if not allreduce_gradients:
            raise ValueError(
                f"allreduce_gradients=False: {ENGINE['allreduce_gradients']}, which sends nothing, and leave it out"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"expected a loss, a tensor of one element, got {got}; reduce it, e.g. by loss.mean()")
        self._passes += 1
        if self._passes == 2 + 2 * self.config.gradient_accumulation_steps and self._said_boundary is None:
            log.warning(
                "rank %d: backward() has run %d times and step() never; call engine.step() after every micro-batch, "
                "also if is_gradient_accumulation_boundary() is False: it counts them",
                self.global_rank,
                self._passes,
            )
        super().backward(loss, retain_graph=retain_graph, weight=None if scale_wrt_gas else 1.0)
        return loss / self.config.gradient_accumulation_steps if scale_wrt_gas else loss

    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """As `Engine.step`.

        Args:
            lr_kwargs: Arguments of the schedule's step(). Default None.

        Raises:
            RuntimeError: It is called within `no_sync()`.
        """
        if self._is_paused:
            raise RuntimeError("step() within no_sync(): nothing was averaged; leave the block before the last pass")
        taken = self.global_steps - self.skipped_steps
        super().step(lr_kwargs)
        self._passes = 0
        self._was_applied = self.global_steps - self.skipped_steps > taken

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the weights: False within a step, and if gradients were not finite."""
        return self._was_applied

    _is_paused = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block only accumulate, as in DDP; stages 2 and 3 still reduce them inside a node."""
        before, self._said_boundary, self._is_paused = self._said_boundary, False, True
        try:
            yield
        finally:
            self._said_boundary, self._is_paused = before, False

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch is the step's last, from now on instead of the configured count.

        Args:
            is_boundary: Whether it is the last.
        """
        self._refuse_in_pipeline("set_gradient_accumulation_boundary()")
        self._said_boundary = bool(is_boundary)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches in a step, from the next step on; their size stays.

        Args:
            train_batch_size: Samples of a step, of all ranks.

        Raises:
            ValueError: It is not a whole number of micro-batches.
            RuntimeError: It is called within a step, in a pipeline, or with a curriculum.
        """
        self._refuse_in_pipeline("set_train_batch_size()")
        if self.micro_steps_of_step or self.has_gradients:
            raise RuntimeError("set_train_batch_size() within a step; call it after engine.step() has updated")
        if isinstance(self.loader, CurriculumLoader):
            raise RuntimeError(
                "set_train_batch_size() with a curriculum, whose global batches have train_batch_size samples; write "
                "it into the configuration"
            )
        samples = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < samples or train_batch_size % samples:
            raise ValueError(
                f"a step of {train_batch_size} samples is not made of whole micro-batches: {self.dp_world_size} ranks "
                f"read {self.train_micro_batch_size_per_gpu()} each, {samples} together; give a multiple of {samples}"
            )
        steps = train_batch_size // samples
        self.config = replace(self.config, train_batch_size=train_batch_size, gradient_accumulation_steps=steps)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    # ---------------------------------------------------------------- pipelines

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether the model is divided into pipeline stages."""
        return self.pipeline is not None

    @property
    def num_stages(self) -> int:
        """Number of ranks of a pipeline."""
        return self.grid.shape.size("pipe")

    @property
    def stage_id(self) -> int:
        """This rank's place in its pipeline."""
        return self.grid.coordinates["pipe"]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch, of this rank."""
        return self.train_micro_batch_size_per_gpu()

    def get_pipeline_parallel_rank(self) -> int:
        """As stage_id."""
        return self.stage_id

    def is_first_stage(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.pipeline is None or self.pipeline.is_first

    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline is None or self.pipeline.is_last

    def set_dataiterator(self, iterator: Iterator[Batch] | None) -> None:
        """Set the iterator that train_batch() and eval_batch() read if they get none, also after load_checkpoint().

        Args:
            iterator: Iterator of batches; None: the loader of initialize() again.
        """
        self._given_batches = iterator

    def set_dataloader(self, loader: Iterable[Batch]) -> None:
        """Set a loader that train_batch() and eval_batch() read if they get no iterator, epoch after epoch.

        Args:
            loader: An iterable of batches.
        """
        self._given_batches = iter(RepeatingLoader(loader))

    def reset_activation_shape(self) -> None:
        """Does nothing: shapes may change with each step."""

    # ---------------------------------------------------------------- ranks

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.grid.device

    @property
    def global_rank(self) -> int:
        """This rank among all ranks."""
        return self.grid.world.rank

    @property
    def local_rank(self) -> int:
        """This rank on its host."""
        return get_local_rank()

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.grid.world.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that read different data."""
        return self.grid.data[1]

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that compute each layer together."""
        return self.grid.shape.size("tensor")

    def get_data_parallel_rank(self) -> int:
        """The share of the data that this rank reads, from 0."""
        return self.grid.data[0]

    def get_tensor_parallel_rank(self) -> int:
        """This rank's place among those that compute each layer together."""
        return self.grid.coordinates["tensor"]

    get_model_parallel_rank = get_tensor_parallel_rank

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that share each sequence."""
        return self.grid.shape.sequence

    @property
    def seq_parallel_group(self) -> torch.distributed.ProcessGroup:
        """The process group of the ranks that share sequences with this one."""
        return self.grid.sequence.group  # type: ignore[attr-defined,no-any-return]

    def get_sequence_parallel_group(self) -> torch.distributed.ProcessGroup:
        """The process group of the ranks that share sequences with this one."""
        return self.seq_parallel_group

    @property
    def seq_dp_world_size(self) -> int:
        """Number of ranks over which gradients are averaged: of all sequences and all shares of the data."""
        return self.grid.shape.data_ranks

    @property
    def data_parallel_group(self) -> torch.distributed.ProcessGroup:
        """The process group of the ranks that read different data and hold this stage.

        Raises RuntimeError if they have no single group: replicas of shards in a pipeline or of tensor slices, or
        sequences that are split.
        """
        if self.grid.shape.sequence > 1:
            raise RuntimeError(
                f"no process group has ranks of different sequences of a grid of {self.grid.shape}; gradients are "
                "averaged over engine.seq_data_parallel_group, whose ranks read engine.dp_world_size shares of the data"
            )
        return self.seq_data_parallel_group

    @property
    def seq_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        """The process group of the ranks over which the gradients of this stage are averaged.

        Raises RuntimeError if they have no single group: replicas of shards in a pipeline or of tensor slices.
        """
        shape = self.grid.shape
        if shape.size("pipe") * shape.size("tensor") == 1:
            return self.grid.world.group  # type: ignore[attr-defined,no-any-return]
        for axis, other in (("replica", "shard"), ("shard", "replica")):
            if shape.size(other) == 1:
                return self.grid.transports[axis].group  # type: ignore[attr-defined,no-any-return]
        raise RuntimeError(
            f"no process group has the data-parallel ranks of a grid of {shape}; make one with torch.distributed."
            "new_group, or use those of engine.grid.transports along each axis"
        )

    @property
    def dist_backend(self) -> str:
        """The backend of torch.distributed."""
        return torch.distributed.get_backend()

    # ---------------------------------------------------------------- settings

    def train(self: _Self, mode: bool = True) -> _Self:
        """Set the module's training mode.

        Args:
            mode: Training, not evaluation. Default True.
        """
        super().train(mode)
        return self

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The learning-rate scheduler, which advances after every step that was taken; None: there is none.

        A caller that advances it sets None, as Lightning does. Checkpoints then do not have it.
        """
        return self.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler | None) -> None:
        self.scheduler = scheduler

    @property
    def training_dataloader(self) -> Loader | None:
        """The loader of initialize(training_data=...); None: there is none."""
        return self.loader

    def deepspeed_io(
        self,
        dataset: Dataset[object],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool | None = None,
        data_sampler: None = None,
        collate_fn: object = None,
        num_local_io_workers: int | None = None,
        **options: object,
    ) -> Loader:
        """A loader of this rank's share of a dataset. With the route "train" it is shuffled, or follows the curriculum.

        Args:
            dataset: The dataset.
            batch_size: Samples of a micro-batch. Default None: the configuration's, which a curriculum requires.
            route: "train", or another name for evaluation data. Default "train".
            pin_memory: As in DataLoader. Default None: True on CUDA.
            data_sampler: Must be None; a loader with a sampler is torch's DataLoader.
            collate_fn: As in DataLoader. Default None.
            num_local_io_workers: DataLoader's num_workers. Default None: 0.
            **options: Further options of DataLoader.

        Raises:
            ValueError: There is a data_sampler, or a batch_size that a curriculum does not have.
        """
        if data_sampler is not None:
            raise ValueError("data_sampler= is not supported: this loader divides the data; make a DataLoader with it")
        given: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_local_io_workers,
            "pin_memory": self.device.type == "cuda" if pin_memory is None else pin_memory,
        }
        given = {name: value for name, value in given.items() if value is not None} | options
        if route == "train" and configured.has_sampler(self.config):
            if batch_size not in (None, self.train_micro_batch_size_per_gpu()):
                raise ValueError(
                    f"batch_size={batch_size}: a curriculum's micro-batches have the configuration's "
                    f"{self.train_micro_batch_size_per_gpu()} samples; leave it out"
                )
            given = {"collate_fn": None, **given}
            return configured.loader_of(self.config, self.grid, dataset, seed=0, **given)
        rank, world_size = self.grid.data
        return ShardedLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            rank=rank,
            world_size=world_size,
            shuffle=route == "train",
            drop_last=self.dataloader_drop_last(),
            **given,
        )

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, of a micro-batch of this rank, and micro-batches of a step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_mom(self) -> list[object]:
        """Betas, or momentum, of each group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_type(self) -> list[object]:
        """The "type" of each group; None if it has none."""
        return [group.get("type") for group in self.optimizer.param_groups]

    def optimizer_name(self) -> str:
        """The configuration's name in lower case; for an optimizer that was passed in, its class."""
        choice = self.config.optimizer
        return type(self.optimizer).__name__ if choice is None else choice.type.lower()

    def optimizer_params(self) -> dict[str, object] | None:
        """Parameters of the configuration, with defaults; None: an optimizer was passed in."""
        return None if self.config.optimizer is None else write_block(self.config.optimizer.params)

    def scheduler_name(self) -> str | None:
        """As in the configuration."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def scheduler_params(self) -> dict[str, object] | None:
        """As in the configuration, with defaults."""
        return None if self.config.scheduler is None else write_block(self.config.scheduler.params)

    def fp16_enabled(self) -> bool:
        """Whether float16 is computed in."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the engine computes in bfloat16."""
        return self.config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Whether forward passes run under torch.autocast."""
        return self.config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype:
        """The dtype of torch.autocast, bfloat16."""
        return torch.bfloat16

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """dtypes of computing, and of sums of gradients."""
        return self.config.dtype, self.form.sum_dtype(self.config)

    def loss_scale(self) -> float:
        """The configured loss scale; 0: dynamic, with its current value in engine.fp16_scale.value."""
        return self.config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.fp16_enabled() and self.config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """First value of a dynamic loss scale."""
        return 2.0**self.config.fp16.initial_scale_power

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_overlap_comm(self) -> bool:
        """Whether buckets are sent during the backward pass."""
        return self.config.zero_optimization.overlap_comm

    def zero_offload_optimizer(self) -> OffloadOptimizer:
        """The block "offload_optimizer"."""
        return self.config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> OffloadParam:
        """The block "offload_param"."""
        return self.config.zero_optimization.offload_param

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self.zero_offload_optimizer().device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's state is in files."""
        return self.zero_offload_optimizer().device == "nvme"

    def zero_partial_offload(self) -> float:
        """The configured share of the optimizer's state that is offloaded."""
        return self.zero_offload_optimizer().ratio

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether complete weights are written with each checkpoint."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def zero_hpz_partition_size(self) -> int:
        """The configured size of a shard group."""
        return self.config.zero_optimization.zero_hpz_partition_size

    def gradient_clipping(self) -> float:
        """Largest norm of the gradient; 0: no clipping."""
        return self.config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """Steps between log lines of rank 0; None: no lines."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the time of a step's parts is logged."""
        return self.config.wall_clock_breakdown

    def elasticity_enabled(self) -> bool:
        """Whether the block "elasticity" chose the batch sizes."""
        return self.config.elasticity.enabled

    def flops_profiler_enabled(self) -> bool:
        """Whether a forward pass is counted."""
        return self.config.flops_profiler.enabled

    def dump_state(self) -> bool:
        """Whether the configuration was logged."""
        return self.config.dump_state

    def dataloader_drop_last(self) -> bool:
        """Whether a last incomplete batch is dropped."""
        return self.config.dataloader_drop_last

    # ---------------------------------------------------------------- data efficiency

    def data_efficiency_enabled(self) -> bool:
        """Whether the block is enabled."""
        return self.config.data_efficiency.enabled

    def data_efficiency_config(self) -> dict[str, object]:
        """The block, with defaults."""
        return write_block(self.config.data_efficiency)

    def data_sampling_enabled(self) -> bool:
        """Whether the configuration chooses samples."""
        return self.config.data_efficiency.data_sampling.enabled

    def data_sampling_config(self) -> dict[str, object]:
        """The block, with defaults."""
        return write_block(self.config.data_efficiency.data_sampling)

    def curriculum_learning_enabled(self) -> bool:
        """Whether samples are ordered by difficulty."""
        return self.config.data_efficiency.curriculum is not None

    def curriculum_learning_config(self) -> dict[str, object]:
        """The block, with defaults."""
        return write_block(self.config.data_efficiency.data_sampling.curriculum_learning)

    def curriculum_enabled_legacy(self) -> bool:
        """Whether the older block is enabled."""
        return self.config.curriculum_learning.enabled

    def curriculum_params_legacy(self) -> dict[str, object]:
        """The older block, with defaults."""
        return write_block(self.config.curriculum_learning)

    @property
    def efficiency(self) -> Efficiency:
        """The data-efficiency methods of a step; empty without the block."""
        feature = self.feature_of(DataEfficiency)
        return Efficiency() if feature is None else feature.efficiency

    @property
    def curriculum_scheduler_legacy(self) -> Pacing | None:
        """The lengths of the older block as a function of the step, from 1; None: it is off."""
        return self.efficiency.lengths

    def curriculum_seqlen(self) -> int | None:
        """Tokens of a sequence in the current step, by the older block; None: all."""
        return self.efficiency.seqlen(self.global_steps)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: object) -> None:
        """Set the schedules of type "custom".

        Args:
            schedule_func_dict: Functions of the step, by metric; one function for the older block.
        """
        sampler = getattr(self.loader, "sampler", None)
        self.efficiency.set_custom(
            schedule_func_dict, sampler.pacings if isinstance(sampler, CurriculumSampler) else ()
        )

    def set_data_post_process_func(self, post_process_func: Callable[[Any, Mapping[str, Any]], Any]) -> None:
        """Set a function that changes the loader's batches.

        Args:
            post_process_func: Called with a batch and {"current_difficulties": by metric}; returns the batch.

        Raises:
            RuntimeError: The loader is not that of a curriculum.
        """
        if not isinstance(self.loader, CurriculumLoader):
            raise RuntimeError(
                "set_data_post_process_func() needs the loader of a curriculum: pass initialize(training_data=...) and "
                "a configuration with data_sampling; with another loader, map over its batches"
            )
        self.loader.process = post_process_func

    def random_ltd_enabled(self) -> bool:
        """Whether layers drop tokens."""
        return self.config.data_efficiency.random_ltd is not None

    def random_ltd_config(self) -> dict[str, object]:
        """The block, with defaults."""
        return write_block(self.config.data_efficiency.data_routing.random_ltd)

    @property
    def random_ltd_scheduler(self) -> TokenDropping | None:
        """The layers that drop tokens; its `kept` is the number that each keeps. None: no layer does."""
        return self.efficiency.dropping

    def pld_enabled(self) -> bool:
        """Whether the model is told to drop layers."""
        return self.config.progressive_layer_drop.enabled

    def get_pld_theta(self) -> float | None:
        """Share of layers to keep in the current step; None: all."""
        feature = self.feature_of(ProgressiveLayerDrop)
        return None if feature is None else feature.theta(self.global_steps)

    # ---------------------------------------------------------------- weights, checkpoints

    def _add_beside_checkpoints(self, folder: Path) -> None:
        if stand_in.is_installed():
            zero_to_fp32.write_script(folder)

    def _replaces_tags(self) -> bool:
        return stand_in.is_installed()

    def _default_tag(self) -> str | None:
        return f"global_step{self.global_steps}" if stand_in.is_installed() else None

    @every_rank
    def module_state_dict(
        self,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The module's complete weights and buffers, on the CPU, on every rank. All ranks.

        Args:
            destination: A dict to add them to. Default None: a new one.
            prefix: What their names begin with. Default "".
            keep_vars: Must be False: complete weights are copies.
            exclude_frozen_parameters: Whether to leave out parameters without gradients. Default False.

        Raises:
            ValueError: keep_vars is True.
        """
        if keep_vars:
            raise ValueError("keep_vars=True: complete weights are copies; use engine.module.named_parameters()")
        self.synchronise()
        params = dict(self.module.named_parameters(remove_duplicate=False))
        whole, copies = {} if destination is None else destination, dict[Tensor, Tensor]()
        for name, x in self.form.weights().items():
            p = params.get(name, x)
            if exclude_frozen_parameters and name in params and not p.requires_grad:
                continue
            if p not in copies:  # tied weights stay one tensor, which transformers writes once
                copies[p] = gathered(x).detach().to("cpu", copy=True)
            whole[prefix + plain(name)] = copies[p]
        return whole

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """As `module_state_dict`, in the dtype computed in, on rank 0; None elsewhere. transformers calls it.

        Args:
            exclude_frozen_parameters: Whether to leave out parameters without gradients. Default False.
        """
        whole, dtype = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters), self.config.dtype
        if self.global_rank:
            return None
        for x in whole.values():
            if x.is_floating_point():
                x.data = x.data.to(dtype)
        return whole

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    @every_rank
    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: object = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: object = None,
    ) -> None:
        """Load complete weights into the module, with any sharding. All ranks, with the same weights.

        Args:
            checkpoint: From `module_state_dict`, or {"module": such a dict}.
            strict: Whether names must match exactly. Default True.
            custom_load_fn: Must be None.
            fetch_z3_params: Without effect: sharded parameters are always loaded. Default False.
            z3_params_to_fetch: Without effect. Default None.

        Raises:
            ValueError: The ranks' names differ, or custom_load_fn is given. On all ranks.
            RuntimeError: Names or shapes are not the module's.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn= is not supported: change the state dict before you load it")
        inner = checkpoint.get("module")
        given: dict[str, Any] = dict(inner if isinstance(inner, Mapping) else checkpoint)
        if len(set(gather_texts(self.grid.world, "\n".join(sorted(given))))) > 1:
            raise ValueError(
                f"rank {self.global_rank}: the ranks load weights of different names; read the same file on all of them"
            )
        self.synchronise()
        held, scalars = self.sharding.held, self.sharding.scalars
        for name in scalars.keys() & given.keys():
            given[name] = given[name].reshape(1)
        set_model_state_dict(held, given, options=StateDictOptions(full_state_dict=True, strict=strict))
        self.sharding.gather()
        self.adopt_weights()

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """As `load_module_state_dict`.

        Args:
            state_dict: Complete weights.
            strict: Whether names must match exactly. Default True.
        """
        self.load_module_state_dict(state_dict, strict)

    def adopt_weights(self) -> None:
        """Take over weights that were changed outside of step(), in the same way on all ranks. All ranks.

        Under local steps call `synchronise` before the change: between rounds the ranks' weights differ.

        Raises:
            ReplicaError: Weights differ between the replicas of local steps.
        """
        self.form.adopt_parameters()

    def save_fp16_model(self, save_dir: str, save_filename: str = "model.safetensors") -> bool:
        """As `save_16bit_model`.

        Args:
            save_dir: Folder.
            save_filename: Name of the file. Default "model.safetensors".
        """
        return self.save_16bit_model(save_dir, save_filename)

    def empty_partition_cache(self) -> None:
        """Free gathered parameters."""
        self.sharding.release()

    def to(self: _Self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None) -> _Self:
        """Return the engine if it computes there, in this dtype. Raises RuntimeError for another device or dtype.

        Args:
            device: The device. Default None: the engine's.
            dtype: The dtype that the configuration has chosen. Default None: that.
        """
        if dtype not in (None, self.config.dtype):
            raise RuntimeError(f"the engine computes in {self.config.dtype}, asked for {dtype}: {REFUSED['type']}")
        wanted = self.device if device is None else torch.device(device)
        if wanted.type != self.device.type or wanted.index not in (None, self.device.index or 0):
            raise RuntimeError(
                f"the engine computes on {self.device} and stays there, asked for {wanted}; leave it out"
            )
        return self

    def cuda(self: _Self, device: int | None = None) -> _Self:
        """As `to`.

        Args:
            device: Number of the CUDA device. Default None: any.
        """
        return self.to(torch.device("cuda") if device is None else torch.device("cuda", device))

    def cpu(self: _Self) -> _Self:
        """As `to`."""
        return self.to("cpu")

    def destroy(self) -> None:
        """As `close`."""
        self.close()


def _refuse(name: str, *args: object, **named: object) -> NoReturn:
    raise RuntimeError(f"engine.{name}() is not here: {REFUSED[name]}")


def _refuse_check(*args: object, **named: object) -> NoReturn:
    raise RuntimeError(
        "optimizer.check_overflow() is not here: engine.step() asks all ranks for gradients that are not finite and "
        "skips the step; engine.was_step_applied() tells afterwards"
    )


def _naming_the_option(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The module's method, with an error of its own if it meets parameters that stage 3 has not gathered."""

    @wraps(method)
    def called(*args: Any, **named: Any) -> Any:
        try:
            return method(*args, **named)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RuntimeError(
                f"engine.{name}() computes with parameters that are sharded at stage 3; write "
                f'"onebit": {{"forward_methods": ["{name}"]}} into the configuration, and they are gathered for it'
            ) from error

    return called


def _says_false() -> bool:
    """The answer for a feature that does not exist here."""
    return False
