"""The engine: drives a model and its optimizer, micro-batch by micro-batch or a whole step at a time.

    for x, y in loader:
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()

`initializing.py` makes it of a configuration. What becomes of the model is its form's (`form.py`), which the engine
asks and does not know by name. The parts can be used without an engine. Everything here is called by all ranks, in the
same order.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..comm import Transport
from ..comm.messages import call_of_all, gather_bytes
from ..usage.buffers import averaged_buffers, persistent_buffers, sync_tensors
from ..usage.graphs import outside_graphs
from .checkpoint import engine_state, tags
from .checkpoint.exporting import export_weights
from .checkpoint.files import Checkpoints
from .data import Loader, forever
from .feature import F, Feature
from .form import Form
from .guards import Guard
from .monitor import WallClock, Writer
from .parallel import fsdp, turns
from .pipeline import run as pipeline
from .pipeline.layers import Loss
from .precision import LossScale, ScaleState, cast_floats, loss_scale

log = logging.getLogger(__name__)

E = TypeVar("E", bound="Engine")
P = ParamSpec("P")
R = TypeVar("R")


def every_rank(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Of a method that every rank must call: one that calls it alone is told so, by the method's name."""

    @wraps(method)
    def call(engine: E, *args: P.args, **named: P.kwargs) -> R:
        with call_of_all(engine.grid.world, f"engine.{method.__name__}()"), engine.guard.open():
            return method(engine, *args, **named)

    return call  # type: ignore[return-value]


class Engine:
    """Drives one model. micro_steps, global_steps, skipped_steps: since the run began, resumed ones included.

    global_samples: what all ranks have seen in these. micro_steps_of_step: how many of them the step under way has.
    has_gradients: whether a backward pass waits for its `step`. fp16_scale: the loss scale, 1 but in float16.
    form: what the model and its optimizer have become. active_features: those that the configuration asks for.
    guard: notices what a script does past the engine.

    A step has `config.gradient_accumulation_steps` micro-batches: call the engine, `backward`, and `step` for each; the
    last one's `step` updates. What is accumulated: the mean over the micro-batches. Gradients travel once per step,
    except inside the node at stages 2 and 3 (`parallel/fsdp.py`).
    """

    def __init__(
        self,
        form: Form,
        scheduler: LRScheduler | None,
        loader: Loader | None,
        monitors: Sequence[Writer] = (),
        loss_fn: Loss | None = None,
        features: Sequence[Feature] = (),
    ):
        self.form, self.module, self.config, self.grid = form, form.module, form.config, form.grid
        self.optimizer, self.stage, self.scheduler, self.loader = form.optimizer, form.stage, scheduler, loader
        self._loss_fn, self.active_features = loss_fn, features
        self._batches: Iterator[pipeline.Batch] | None = None
        self.pipeline: pipeline.Pipeline | None = None
        self.fp16_scale: LossScale = loss_scale(self.config.fp16)
        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self.micro_steps_of_step = 0
        self.has_gradients = False
        self._said_boundary: bool | None = None
        self._monitors, self._loss = monitors, torch.zeros((), dtype=torch.float32, device="cpu")
        self._clock = WallClock(self.config.wall_clock_breakdown)
        self._checkpoints: dict[Path, Checkpoints] = {}
        self._has_warned_of_no_graph = False
        for feature in features:
            feature.begin(self)
        self.guard = Guard(self)

    # ---------------------------------------------------------------- a step

    def __call__(self, *inputs: object, **named: object) -> Any:
        """The model's output. Floating-point inputs, also in lists and dicts, are cast to the dtype computed in."""
        self._refuse_in_pipeline("a forward pass")
        if self.module.training:
            self.guard.has_run = True
            if self.is_gradient_accumulation_boundary():
                self._begin_step()
            for feature in self.active_features:
                named = dict(feature.inputs(self, inputs, named))
        if self.stage is not None:
            is_last = self.is_gradient_accumulation_boundary() or not self.module.training
            fsdp.begin_micro_batch(self.module, self.stage, is_last=is_last)
        if self.config.dtype != torch.float32:
            inputs, named = cast_floats((inputs, named), self.config.dtype)
        with self._clock.measure("forward") if self.module.training else nullcontext(), self._naming_peers():
            return self.module(*inputs, **named)

    def _begin_step(self) -> None:
        """Before the step's gradients leave."""
        for feature in self.active_features:
            feature.begin_step(self)

    @outside_graphs
    def backward(self, loss: Tensor, *, retain_graph: bool = False, weight: float | None = None) -> Tensor:
        """Add the loss's gradients, over the micro-batches of a step and times the loss scale; the loss as it came.

        One that does not depend on the model (an empty batch's) counts as a zero gradient, with a warning.
        weight: of this micro-batch in the step; None: all of a step weigh as much.
        """
        self._refuse_in_pipeline("a backward pass")
        self.guard.before_backward()
        divisor = self.config.gradient_accumulation_steps if weight is None else 1 / weight
        if self._monitors:
            self._loss = self._loss.to(loss.device) + loss.detach().float() / divisor
        self.form.set_grad_scale(self.fp16_scale.value)
        passes = None if self.stage is None else turns.passes_of(self.module)
        with self._clock.measure("backward"), self._without_traffic(), self._naming_peers():
            if loss.requires_grad or self.grid.data[1] == 1:  # torch refuses the latter: nobody else has a gradient
                torch.autograd.backward(loss.float() * (self.fp16_scale.value / divisor), retain_graph=retain_graph)
            elif not self._has_warned_of_no_graph:
                self._has_warned_of_no_graph = True
                log.warning(
                    "rank %d: this loss does not depend on any parameter (an empty batch, or detach()): it counts as a "
                    "zero gradient among those of the other ranks",
                    self.grid.world.rank,
                )
            if passes is not None and passes == turns.passes_of(self.module):
                self._stand_in()
        self.has_gradients = True
        self.guard.after_backward()
        return loss

    def _stand_in(self) -> None:
        """A backward pass, in which no gradient comes: the ranks that share shards with this one have theirs."""
        self._begin_step()
        fsdp.begin_micro_batch(self.module, self.stage or 0, is_last=self.is_gradient_accumulation_boundary())
        turns.stand_in(self.module)

    def _naming_peers(self) -> AbstractContextManager[None]:
        """What FSDP2 sends inside a node fails with the error that an optimizer's exchange fails with."""
        return self.grid.transports["shard"].naming_peers("FSDP2's exchange", is_counted=False)

    def zero_grad(self) -> None:
        """Drop the gradients that have added up, for example to `continue` after a loss that makes no sense.

        Also those that FSDP2 has not reduced yet. The step's next micro-batches go on alone: it has fewer.
        """
        with self.guard.open():
            self.module.zero_grad()
            self.optimizer.zero_grad()
        self._loss, self.has_gradients = torch.zeros((), dtype=torch.float32, device="cpu"), False
        self.guard.forget()

    @outside_graphs
    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """After every backward. With the step's last micro-batch: average over ranks, update, drop the gradients.

        Where a gradient is not finite on any rank, all skip: nothing changes but the loss scale, and the schedule stays
        where it is. Under local steps those of one replica skip, which has its own loss scale, and the schedule
        goes on. lr_kwargs: for the schedule's step(). Raises OverflowError, on all ranks that share it, where the loss
        scale cannot fall any further; PeerError, ReplicaError and SkippedStepsError as the optimizer.
        """
        self._refuse_in_pipeline("step()")
        self.guard.before_step()
        is_boundary = self.is_gradient_accumulation_boundary()
        if not self.has_gradients and self.stage is not None:
            with self._without_traffic(), self._naming_peers():
                self._stand_in()
            self.guard.after_backward()
        self.has_gradients = False
        self.micro_steps += 1
        self.micro_steps_of_step += 1
        if is_boundary:
            self._update(lr_kwargs)
        else:
            self.guard.after_micro_batch()

    def _update(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        self.guard.before_update()
        rates = self.get_lr()
        self.micro_steps_of_step = 0
        with self._clock.measure("step"), self.guard.open():
            is_skipped = self.form.step(self.global_steps + 1, self.fp16_scale.value)
            self.optimizer.zero_grad()
        schedule_with = dict(lr_kwargs or {})
        for feature in self.active_features:
            schedule_with.update(feature.end_step(self))
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size
        self.skipped_steps += is_skipped
        self._write_scalars(rates[0])
        self.fp16_scale = self.fp16_scale.after(is_skipped)
        stays = is_skipped and not self.form.steps_apart  # replicas have one schedule, also if each skips alone
        if self.scheduler is not None and not stays:
            self.scheduler.step(**schedule_with)  # type: ignore[arg-type]
        self.guard.after_update()
        for feature in self.active_features:
            feature.after_step(self)
        every = self.config.steps_per_print
        if every and self.grid.world.rank == 0 and self.global_steps % every == 0:
            log.info(
                "step %d, skipped %d, lr %s, loss scale %g",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.fp16_scale.value,
            )
            self._clock.report()

    @outside_graphs
    def train_batch(self, data_iter: Iterator[pipeline.Batch] | None = None) -> Tensor:
        """A whole step of a `PipelineModule`; the mean loss over its micro-batches and all ranks, on every rank.

        Under local steps the mean over this replica: nothing travels between replicas for it.

        data_iter: gives (inputs, target) of a micro-batch, `config.gradient_accumulation_steps` times; every rank
        reads, and those of one pipeline read the same (`ShardedLoader` with `grid.data` does so). Default: the
        loader's, from epoch to epoch. Raises as `step`, and PeerError if a rank is lost.
        """
        batches = self._take_batches(data_iter)
        self.train()
        for feature in self.active_features:
            batches = feature.batches(self, batches)
        if self.pipeline is None:
            losses = []
            for inputs, target in batches:
                loss = cast(Loss, self._loss_fn)(self(*_several(inputs)), target)
                losses.append(loss.detach().float())
                self.backward(loss)
                self.step()
            return self._mean_loss(torch.stack(losses).mean(), self.form.peers)
        self.guard.before_backward()
        self.form.set_grad_scale(self.fp16_scale.value)
        self._begin_step()
        with self._clock.measure("pipeline"), self.form.no_sync():
            mine = self.pipeline.run(batches, self.fp16_scale.value)
        if self.form.ties is not None:
            self.form.ties.add_gradients()
        self.micro_steps += len(batches)
        loss = self._mean_loss(mine, self.form.peers)
        self._loss = loss
        self._update()
        return loss

    @every_rank
    def eval_batch(self, data_iter: Iterator[pipeline.Batch] | None = None) -> Tensor:
        """As `train_batch`, but nothing is trained: the mean loss over as many micro-batches as a step has."""
        batches, was_training = self._take_batches(data_iter), self.module.training
        self.eval()
        try:
            if self.pipeline is not None:
                mine = self.pipeline.evaluate(batches)
            else:
                with torch.no_grad():
                    losses = [cast(Loss, self._loss_fn)(self(*_several(inputs)), target) for inputs, target in batches]
                mine = torch.stack([loss.float() for loss in losses]).mean()
        finally:
            self.train(was_training)
        loss = self._mean_loss(mine, self.grid.world)
        if self.stage is not None:
            fsdp.reshard(self.module)
        return loss

    def _take_batches(self, data_iter: Iterator[pipeline.Batch] | None) -> list[pipeline.Batch]:
        if self._loss_fn is None:
            raise RuntimeError("train_batch() needs a model that knows its loss: a PipelineModule")
        source = data_iter if data_iter is not None else self._own_batches()
        count = self.config.gradient_accumulation_steps
        batches = list(islice(source, count))
        if len(batches) < count:
            raise ValueError(f"a step has {count} micro-batches, the iterator gave {len(batches)}")
        return batches

    def _own_batches(self) -> Iterator[pipeline.Batch]:
        """The loader's, from where it stands."""
        if self.loader is None:
            raise ValueError("train_batch() has nothing to read: pass data_iter, or training_data to initialize()")
        if self._batches is None:
            self._batches = forever(self.loader)
        return self._batches

    def _mean_loss(self, mine: Tensor | None, transport: Transport) -> Tensor:
        """Over the ranks that have one, in rank order: the same bits on all."""
        said = gather_bytes(transport, struct.pack("<?d", mine is not None, 0.0 if mine is None else float(mine)))
        losses = [loss for has_one, loss in (struct.unpack("<?d", row) for row in said) if has_one]
        return torch.tensor(sum(losses) / len(losses), dtype=torch.float32, device="cpu")

    def _refuse_in_pipeline(self, what: str) -> None:
        if self.pipeline is not None:
            raise RuntimeError(
                f"{what} alone is not to be had of a pipeline's stage; use train_batch() or eval_batch()"
            )

    def _write_scalars(self, rate: float) -> None:
        """For the monitors, against samples: of the step that was, this rank's mean loss, its rate and loss scale."""
        if not self._monitors:
            return
        values = {"train_loss": float(self._loss), "lr": rate, "skipped_steps": float(self.skipped_steps)}
        if self.config.fp16.enabled:
            values["loss_scale"] = self.fp16_scale.value
        for write in self._monitors:
            write(values, self.global_samples)
        self._loss = torch.zeros((), dtype=torch.float32, device="cpu")

    @property
    def comm_ms(self) -> float:
        """How long the last step waited for a dense optimizer's gradients; the others have it in their stats."""
        return self.form.comm_ms

    @property
    def counts_micro_batches(self) -> bool:
        """Whether step() finds the boundary itself, and nobody else has said where it is."""
        return self._said_boundary is None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        if self._said_boundary is not None:
            return self._said_boundary
        return self.micro_steps_of_step + 1 >= self.config.gradient_accumulation_steps

    def _without_traffic(self) -> AbstractContextManager[None]:
        if self.is_gradient_accumulation_boundary():
            return nullcontext()
        return self.form.no_sync()

    # ---------------------------------------------------------------- modes and sizes

    def train(self, mode: bool = True) -> Engine:
        """As the model's."""
        self.module.train(mode)
        return self

    @every_rank
    def eval(self) -> Engine:
        """As the model's. Replicas that differ (local steps, buffers) are made the same first."""
        self.synchronise()
        return self.train(False)

    @every_rank
    def synchronise(self) -> None:
        """Give every rank the same parameters, where local steps made them differ, and let go of gathered ones.

        Under local steps a round of all that replicas have moved: the parameters become the anchors.
        Buffers as well: statistics of what each rank has seen on average, others rank 0's; see `onebit.sync_buffers`.
        """
        self.let_go()
        self.form.synchronise()
        buffers, averaged = list(persistent_buffers(self.module)), averaged_buffers(self.module)
        whole = [(name, buffer) for name, buffer in buffers if not hasattr(buffer, "placements")]
        sync_tensors(whole, averaged, self.grid.transports["shard"])
        sync_tensors(buffers, averaged, self.grid.transports["replica"])

    def let_go(self) -> None:
        """Of parameters that are gathered now."""
        if self.stage is not None:
            fsdp.reshard(self.module)

    def agree_on_loss_scale(self) -> None:
        """One for all ranks of this replica, the least of theirs. All of them."""
        mine = self.fp16_scale
        states = self.form.model_parallel_group.gather(mine.value, mine.patience, mine.clean_steps)
        value, patience, clean_steps = min(states)
        least = ScaleState(value=value, patience=int(patience), clean_steps=int(clean_steps))
        self.fp16_scale = self.fp16_scale.with_state(least)

    def feature_of(self, kind: type[F]) -> F | None:
        """The feature of this class, if it is on."""
        return next((feature for feature in self.active_features if isinstance(feature, kind)), None)

    def get_lr(self) -> list[float]:
        """Of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step's mean gradient, before clipping: of those forms that clip, so that they know it.

        Exact with a dense optimizer and while gradients travel; where momentum does in their place, the estimate that
        clips (`onebit/step/clip.py`), in a local step of 0/1 Adam each rank's own; under local steps of this
        replica's own gradient. None without gradient_clipping, at stage 2 across nodes, after a step that was skipped,
        and before the first.
        """
        return self.form.grad_norm

    def train_batch_size(self) -> int:
        """Samples of a step, of all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch, of this rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.config.gradient_accumulation_steps

    # ---------------------------------------------------------------- checkpoints

    @every_rank
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: object = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        in_background: bool = False,
    ) -> str:
        """Write everything that a bit-identical continuation needs, to save_dir/step_...; its name. All ranks.

        It begins with `synchronise`: between the local steps of 0/1 Adam, an exchange that a run without checkpoints
        does not make. Under local steps it exchanges nothing: the weights in it are the anchors, and every rank's own
        state says how far it is from them. tag: a name of your own, whose checkpoint replaces the one of that name
        before. client_state: the caller's own, of each rank; see `tree.pack`. save_latest: whether `load_checkpoint`
        without a tag takes it.
        exclude_frozen_parameters: leave out those that require no gradients, and load over a model that has them.
        Where the configuration asks for gathered 16-bit weights, they are in save_dir/model.safetensors, those of the
        newest checkpoint. The configuration's onebit.keep_checkpoints says how many without a tag stay. Raises
        CheckpointError, on all ranks, between two micro-batches of one step, whose gradients a checkpoint does not
        hold, and as `Checkpoints.save`.
        """
        tag = tags.checked(tag, self.grid.world)
        checkpoints = self._in(Path(save_dir) / (tag or ""), keep=1 if tag else self.config.onebit.keep_checkpoints)
        point = tags.pointing(Path(save_dir), tag) if tag and save_latest else None
        contents = engine_state.Contents(frozen=not exclude_frozen_parameters)
        engine_state.save(
            self,
            checkpoints,
            client_state,
            contents,
            in_background=in_background,
            is_latest=save_latest or tag is not None,
            then=point,
        )
        if self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save:
            with self.form.shown():
                self._export(Path(save_dir) / "model.safetensors")
        return tag or f"step_{self.global_steps:08d}"

    @every_rank
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, object]:
        """Continue from load_dir/tag, or its latest: (the folder, this rank's client_state); (None, None) without one.

        Where load_dir/latest is lost, the newest checkpoint that is whole is taken, and rank 0 warns. Gradients of
        micro-batches under way are dropped.

        On the grid that wrote it, to the bit. On any other, and in a form with the same state (`Form.same_state`):
        moments to the bit, and of what was not yet sent every replica owes the mean, parameter by parameter
        (`checkpoint/reshard.py`); a form with a fixed cut takes other numbers of replicas alone. Leave the samples of a
        step as they were: then the loader goes on with the same steps.

        load_module_only: the weights alone, of any form and optimizer; all else is as it was. load_optimizer_states:
        False: the same, and the counts, schedule, data position and random numbers; the optimizer starts anew.
        load_lr_scheduler_states: False: the schedule stays as it is. load_module_strict: False: weights that either
        side lacks are left alone; only without the optimizer's state. Raises CheckpointError, on all ranks, where it is
        damaged, or of another model, form or optimizer.
        """
        contents = engine_state.Contents(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states,
            counts=not load_module_only,
            strict=load_module_strict,
        )
        self._batches = None  # what it has read ahead is not what follows
        folder, name = tags.find(Path(load_dir), tag, self.grid.world)
        if folder is None:
            return None, None
        return engine_state.load(self, self._in(folder), name, contents)

    def wait_for_checkpoint(self) -> None:
        """Until what is written in the background is on disk."""
        for checkpoints in self._checkpoints.values():
            checkpoints.wait()

    @every_rank
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        *,
        max_file_bytes: int | None = None,
    ) -> bool:
        """Write the whole weights, floating-point ones in the dtype computed in, to one safetensors file. All ranks.

        max_file_bytes: to several files in save_dir of at most so many bytes, with Hugging Face's index; no rank holds
        more than one of them at a time. True. Raises ValueError where the name is that of another format.
        """
        if Path(save_filename).suffix != ".safetensors":
            raise ValueError(
                f"weights are written as safetensors, and {save_filename!r} is named as another format; name it "
                "model.safetensors, and read it with safetensors.torch.load_file"
            )
        if exclude_frozen_parameters:
            raise ValueError(
                "exclude_frozen_parameters=True is for save_checkpoint; of engine.module_state_dict(True) write the "
                "weights with safetensors.torch.save_file"
            )
        self.synchronise()
        self._export(Path(save_dir) / save_filename if max_file_bytes is None else Path(save_dir), max_file_bytes)
        return True

    def _export(self, path: Path, max_file_bytes: int | None = None) -> None:
        options: dict[str, Any] = {"grid": self.grid, "max_file_bytes": max_file_bytes}
        export_weights(self.module, path, self.grid.world, self.config.dtype, **options)

    def _in(self, folder: Path, keep: int | None = None) -> Checkpoints:
        """One object for a folder, however it is spelled; it begins when what goes into others is on disk."""
        path = folder.resolve()
        for other, checkpoints in self._checkpoints.items():
            if other != path:
                checkpoints.wait()
        if path not in self._checkpoints:
            group = next((known.group for known in self._checkpoints.values()), None)
            self._checkpoints[path] = Checkpoints(path, self.grid.world, keep, group)
        self._checkpoints[path].keep = keep
        return self._checkpoints[path]

    def close(self) -> None:
        """Wait for checkpoints, then release the grid and offloaded state; parameters in files are lost. All ranks."""
        self.wait_for_checkpoint()
        self.form.close()
        self.grid.close()


def _several(inputs: object) -> tuple[object, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
