"""The engine: drives a model and its optimizer, micro-batch by micro-batch or a whole step at a time.

    for x, y in loader:
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()

`initializing.py` makes it from a configuration. The form (`form.py`) determines how the model is sharded and trained;
the engine knows no form by name. The parts can be used without an engine. All ranks call everything here, in the same
order.
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
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map

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
from .pipeline import run as pipeline
from .pipeline.huggingface import own_loss, pair_of
from .pipeline.layers import Loss, Stage, parts_of
from .precision import LossScale, ScaleState, cast_floats, cast_tables, loss_scale, widen_batch_norms

log = logging.getLogger(__name__)

E = TypeVar("E", bound="Engine")
P = ParamSpec("P")
R = TypeVar("R")


def every_rank(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Decorate a method that every rank must call: if some do not, the error names the method."""

    @wraps(method)
    def call(engine: E, *args: P.args, **named: P.kwargs) -> R:
        with call_of_all(engine.grid.world, f"engine.{method.__name__}()"), engine.guard.open():
            return method(engine, *args, **named)

    return call  # type: ignore[return-value]


class Engine:
    """Drives one model and its optimizer. `initialize` makes it.

    A step has `config.gradient_accumulation_steps` micro-batches: call the engine, `backward`, and `step` for each; the
    `step` of the last one updates. Gradients are averaged over the micro-batches. They are sent once per step, except
    inside the node at stages 2 and 3 (`parallel/sharding.py`).

    Args:
        form: The model and its optimizer, as the configuration asks for them.
        scheduler: Sets the learning rates; None for constant ones.
        loader: This rank's training data; None without it.
        monitors: Each writes the scalars of a step. Default: none.
        loss_fn: The loss of a `PipelineModule`, for `train_batch`. Default None.
        features: The features that the configuration asks for. Default: none.

    Attributes:
        form: The same.
        module: The model.
        config: The configuration.
        grid: The ranks.
        optimizer: Takes the steps.
        sharding: What the ranks of a replica divide among them.
        scheduler: The same.
        loader: The same.
        active_features: The features.
        pipeline: Runs the stages of a pipeline; None without one.
        fp16_scale: The loss scale; 1 except in float16.
        micro_steps: Micro-batches since the run began, those before a resume included.
        global_steps: Steps, likewise.
        skipped_steps: Steps that were skipped, likewise.
        global_samples: Samples that all ranks have processed, likewise.
        micro_steps_of_step: Micro-batches that the step under way has had.
        has_gradients: Whether a backward pass waits for its `step`.
        guard: Notices calls that bypass the engine.
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
        self.optimizer, self.sharding, self.scheduler, self.loader = form.optimizer, form.sharding, scheduler, loader
        self._loss_fn, self.active_features = loss_fn, features
        self._batches: Iterator[pipeline.Batch] | None = None  # the loader's, from epoch to epoch
        self._given_batches: Iterator[pipeline.Batch] | None = None  # which come before the loader's
        self.pipeline: pipeline.Pipeline | None = None
        self.fp16_scale: LossScale = loss_scale(self.config.fp16)
        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self.micro_steps_of_step = 0
        self.has_gradients = False
        self._said_boundary: bool | None = None
        self._monitors, self._loss = monitors, torch.zeros((), dtype=torch.float32, device="cpu")
        self._clock = WallClock() if self.config.wall_clock_breakdown else None
        self._checkpoints: dict[Path, Checkpoints] = {}
        self._has_warned_of_no_graph = self._has_warned_of_monitor = False
        self._low_dtype = None if self.config.dtype == torch.float32 else self.config.dtype
        if self._low_dtype is not None:
            widen_batch_norms(self.module)
            cast_tables(self.module, self._low_dtype)
        for feature in features:
            feature.begin(self)
        self.guard = Guard(self)

    # ---------------------------------------------------------------- a step

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Return the model's output. Casts floating-point inputs, also in lists and dicts, to the computing dtype."""
        self._refuse_in_pipeline("a forward pass")
        if self.module.training:
            self.guard.has_run = True
            if self.is_gradient_accumulation_boundary():
                self._begin_step()
            for feature in self.active_features:
                named = dict(feature.inputs(self, inputs, named))
        self.sharding.begin_forward(is_last=self.is_gradient_accumulation_boundary() or not self.module.training)
        if self._low_dtype is not None:
            inputs, named = cast_floats((inputs, named), self._low_dtype)
        clock = self._timed("forward") if self.module.training else nullcontext()
        is_cast = self.config.torch_autocast.enabled
        autocast = torch.autocast(self.grid.device.type, torch.bfloat16) if is_cast else nullcontext()
        with clock, self._naming_peers(), autocast:
            return self.module(*inputs, **named)

    def _begin_step(self) -> None:
        """Tell the features that a step begins, before its gradients leave."""
        for feature in self.active_features:
            feature.begin_step(self)

    @outside_graphs
    def backward(self, loss: Tensor, *, retain_graph: bool = False, weight: float | None = None) -> Tensor:
        """Add the gradients of a micro-batch's loss to those of its step, and return the loss unchanged.

        The loss is divided by the number of micro-batches and multiplied by the loss scale. Among several ranks a loss
        that does not depend on the model (`detach()`) counts as a zero gradient, with a warning.

        Args:
            loss: Scalar loss of this rank's micro-batch.
            retain_graph: Whether to keep the graph for another pass. Default False.
            weight: Weight of this micro-batch in the step. Default None: the same for all of a step.
        """
        self._refuse_in_pipeline("a backward pass")
        self.guard.before_backward()
        divisor = self.config.gradient_accumulation_steps if weight is None else 1 / weight
        if self._monitors:
            self._loss = self._loss.to(loss.device) + loss.detach().float() / divisor
        # Before the pass: with overlap, gradients are unscaled and sent while it is running.
        self.form.set_grad_scale(self.fp16_scale.value)
        passes, is_last = self.sharding.passes, self.is_gradient_accumulation_boundary()
        within = self.sharding.backward(is_last=is_last)
        with self._timed("backward"), self._without_traffic(), within, self._naming_peers():
            if loss.requires_grad or self.grid.shape.data_ranks == 1:  # a rank without others gets torch's error
                # In float32: a loss in float16 would overflow at once, times a scale of 65,536.
                torch.autograd.backward(loss.float() * (self.fp16_scale.value / divisor), retain_graph=retain_graph)
            elif not self._has_warned_of_no_graph:
                self._has_warned_of_no_graph = True
                log.warning(
                    "rank %d: this loss does not depend on any parameter (an empty batch, or detach()): it counts as a "
                    "zero gradient among those of the other ranks",
                    self.grid.world.rank,
                )
            # No gradient came to the shards: other ranks of the replica may have some, and wait for this one. A model
            # that is whole counts no passes, and does nothing here.
            if passes == self.sharding.passes:
                self._stand_in()
        self.has_gradients = True
        self.guard.after_backward()
        return loss

    def _stand_in(self) -> None:
        """Take part in the reduction without gradients: ranks that share shards with this one may have some."""
        if self.sharding.divides_parameters:
            self._begin_step()
        self.sharding.stand_in(is_last=self.is_gradient_accumulation_boundary())

    def _timed(self, part: str) -> AbstractContextManager[None]:
        """Add the time of this block to a part of the step, if the configuration asks for the times."""
        return nullcontext() if self._clock is None else self._clock.measure(part)

    def _naming_peers(self) -> AbstractContextManager[None]:
        """Turn network errors of FSDP2's traffic into the error that an optimizer's exchange raises."""
        return self.grid.transports["shard"].naming_peers("FSDP2's exchange", is_counted=False)

    def zero_grad(self) -> None:
        """Drop the gradients accumulated so far, for example to `continue` after a bad loss.

        Also drops those that FSDP2 has not reduced yet. The step goes on with its next micro-batches, so it has fewer.
        """
        with self.guard.open():
            self.module.zero_grad()
            self.optimizer.zero_grad()
        self._loss, self.has_gradients = torch.zeros((), dtype=torch.float32, device="cpu"), False
        self.guard.forget()

    @outside_graphs
    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """End a micro-batch; at the last one of a step average over ranks, update, and drop the gradients.

        Call it after every backward. If a gradient is not finite on any rank, all ranks skip: only the loss scale
        changes, and the schedule does not move. Under local steps only the ranks of that replica skip; the replica has
        its own loss scale, and the schedule moves.

        Args:
            lr_kwargs: Arguments of the schedule's step(). Default None.

        Raises:
            OverflowError: The loss scale cannot fall any further. Raised on all ranks that share it.
            PeerError: A rank is lost.
            ReplicaError: The optimizer found replicas that differ.
            SkippedStepsError: The optimizer skipped too many steps in a row.
            TypeError: The schedule is ReduceLROnPlateau, and there is no lr_kwargs for it.
        """
        self._refuse_in_pipeline("step()")
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:
            self._check_schedule(lr_kwargs)
        self.guard.before_step()
        if not self.has_gradients and self.sharding.divides_parameters:
            with self._without_traffic(), self._naming_peers():
                self._stand_in()
            self.guard.after_backward()
        self.has_gradients = False
        self.micro_steps += 1
        self.micro_steps_of_step += 1
        if is_boundary:
            self._update(lr_kwargs)
        else:
            self.sharding.reduce(is_last=False)
            self.guard.after_micro_batch()

    def _check_schedule(self, lr_kwargs: Mapping[str, object] | None) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau) and not lr_kwargs:
            raise TypeError(
                "ReduceLROnPlateau steps by a number that is the same on all ranks: engine.step(lr_kwargs={'metrics': "
                "mean_loss}); or leave it out of initialize(), and call its step() after a validation"
            )

    def _update(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        self.guard.before_update()
        rates = self.get_lr()  # of this step: features and the schedule change them below
        try:
            with self._timed("step"), self.guard.open():
                is_skipped = self.form.step(self.global_steps + 1, self.fp16_scale.value)
                self.optimizer.zero_grad()
        finally:  # not before: among members that come and go the step gives the counts of its beginning to newcomers
            self.micro_steps_of_step = 0
        # Before the schedule, which goes on from its own rates: a feature may have scaled them for this step alone.
        schedule_with = dict(lr_kwargs or {})
        for feature in self.active_features:
            schedule_with.update(feature.end_step(self))
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size
        self.skipped_steps += is_skipped
        if self._monitors:
            self._write_scalars(rates[0])
        if self.config.fp16.enabled:
            self.fp16_scale = self.fp16_scale.after(is_skipped)
        stays = is_skipped and not self.form.steps_apart  # replicas share one schedule, even if each skips alone
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
            if self._clock is not None:
                self._clock.report()

    @outside_graphs
    def train_batch(self, data_iter: Iterator[pipeline.Batch] | None = None) -> Tensor:
        """Take a whole step of a `PipelineModule`, or of a causal language model of transformers'.

        Args:
            data_iter: Gives (inputs, target) of a micro-batch, `config.gradient_accumulation_steps` times; for a
                decoder dicts with input_ids and labels, see `pair_of`. Every rank reads; the ranks of one pipeline read
                the same (`ShardedLoader` with `grid.data` does so). Default: the loader, from epoch to epoch.

        Returns:
            The mean loss over micro-batches and ranks, on every rank. Under local steps the mean over this replica, so
            that nothing is sent between replicas.

        Raises:
            RuntimeError: The model has no loss.
            ValueError: There is no data, or too few micro-batches.
            PeerError: A rank is lost. Other errors as `step`.
        """
        self._check_schedule(None)
        batches = self._take_batches(data_iter)
        self.train()
        for feature in self.active_features:
            batches = feature.batches(self, batches)
        batches = self._pieces(batches)
        if self.pipeline is None:
            losses = []
            for inputs, target in batches:
                loss = cast(Loss, self._loss_fn)(self._outputs(inputs, target), target)
                losses.append(loss.detach().float())
                self.backward(loss)
                self.step()
            return self._mean_loss(torch.stack(losses).mean(), self.form.peers)
        self.guard.before_backward()
        self.form.set_grad_scale(self.fp16_scale.value)
        self._begin_step()
        with self._timed("pipeline"), self.form.no_sync():
            mine = self.pipeline.run(batches, self.fp16_scale.value)
        if self.form.ties is not None:
            self.form.ties.add_gradients()
        self.micro_steps += len(batches)
        loss = self._mean_loss(mine, self.form.peers)
        self._loss = loss
        self._update()
        return loss

    @every_rank
    def eval_batch(
        self,
        data_iter: Iterator[pipeline.Batch] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss over as many micro-batches as a step has, without training. All ranks.

        With compute_loss=False, reduce_output=None it is inference: the outputs of all micro-batches.

        Args:
            data_iter: As in `train_batch`.
            return_logits: Return a pair; its second element is the output of the last micro-batch. Default False.
            compute_loss: False: outputs take the place of losses, and need no targets. Default True.
            reduce_output: "avg" for the mean over micro-batches and ranks, None for a list, of this rank's
                micro-batches. Default "avg".
            bcast_loss: Whether the mean loss goes to all stages; outputs and lists do not. Default True.
            num_micro_batches: Number of micro-batches. Default None: that of a step.

        Returns:
            The mean or the list, or a pair. What only the last stage knows is None on the ranks of other stages.

        Raises:
            ValueError: A list of losses is to go to all stages; reduce_output is unknown; or as `train_batch`.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f'reduce_output must be "avg" or None, got {reduce_output!r}')
        if reduce_output is None and compute_loss and bcast_loss:
            raise ValueError(
                "reduce_output=None gives a list of losses, which stays on the last stage: pass bcast_loss=False"
            )
        if not compute_loss and reduce_output == "avg" and self.grid.shape.sequence > 1:
            raise ValueError(
                f"rank {self.grid.world.rank}: outputs of split sequences are pieces, which have no mean; pass "
                "reduce_output=None, and put them together by Pieces.join"
            )
        batches, was_training = self._take_batches(data_iter, num_micro_batches), self.module.training
        batches = self._pieces(batches)
        last: object = None

        def judge(output: object, target: object) -> object:
            nonlocal last
            last = output if return_logits else None
            return cast(Loss, self._loss_fn)(output, target).float() if compute_loss else output

        self.eval()
        try:
            if self.pipeline is not None:
                found = self.pipeline.evaluate(batches, judge)
            else:
                with torch.no_grad():
                    found = [judge(self._outputs(inputs, target), target) for inputs, target in batches]
        finally:
            self.train(was_training)
        result: object = found
        if reduce_output == "avg":
            mean = None if found is None else tree_map(lambda *each: sum(each) / len(each), *found)
            if compute_loss:
                loss = self._mean_loss(mean, self.grid.world)
                result = None if found is None and not bcast_loss else loss
            else:
                result = tree_map(self._mean_of_replicas, mean)
        self.sharding.release()
        return (result, last) if return_logits else result

    def _mean_of_replicas(self, x: Tensor | None) -> Tensor | None:
        """Return the mean over the data ranks."""
        if x is None:
            return None
        mean = x.float().contiguous().clone()
        for axis in ("replica", "shard"):
            self.grid.transports[axis].all_reduce(mean).wait()
        return (mean / self.grid.shape.data_ranks).to(x.dtype)

    def _take_batches(
        self, data_iter: Iterator[pipeline.Batch] | None, count: int | None = None
    ) -> list[pipeline.Batch]:
        """Read micro-batches onto this rank's device, their inputs in the computing dtype."""
        if self._loss_fn is None:
            raise RuntimeError(
                "train_batch() needs a model that knows its loss: a PipelineModule, or a Hugging Face decoder"
            )
        source = data_iter if data_iter is not None else self._own_batches()
        count = self.config.gradient_accumulation_steps if count is None else count
        batches = [pair_of(batch) for batch in islice(source, max(count, 0))]
        if not 0 < count == len(batches):
            raise ValueError(f"a step has {count} micro-batches, the iterator gave {len(batches)}")
        return [self._placed(inputs, target) for inputs, target in batches]

    def _placed(self, inputs: object, target: object) -> pipeline.Batch:
        inputs, target = tree_map(lambda x: x.to(self.grid.device) if isinstance(x, Tensor) else x, (inputs, target))
        return inputs if self._low_dtype is None else cast_floats(inputs, self._low_dtype), target

    def _pieces(self, batches: list[pipeline.Batch]) -> list[pipeline.Batch]:
        """Return this rank's pieces if layers or stages split sequences; other models cut their own."""
        stage = parts_of(self.module)[0]
        return stage.cut(batches) if isinstance(stage, Stage) else batches

    def _outputs(self, inputs: object, target: object) -> object:
        """Call the module of a rank without a pipeline; a decoder of transformers computes its loss itself."""
        if self._loss_fn is not own_loss:
            return self(*_several(inputs))
        named = {"labels": target, "use_cache": False}  # with a cache, packed documents would see each other
        return self(**inputs, **named) if isinstance(inputs, Mapping) else self(*_several(inputs), **named)

    def _own_batches(self) -> Iterator[pipeline.Batch]:
        """Return the given iterator, or else the loader's batches, from its current position."""
        if self._given_batches is not None:
            return self._given_batches
        if self._batches is None:
            if self.loader is None:
                raise ValueError("there is nothing to read: pass data_iter, or training_data to initialize()")
            self._batches = forever(self.loader)
        return self._batches

    def _mean_loss(self, mine: Tensor | None, transport: Transport) -> Tensor:
        """Return the mean over the ranks that have a loss, in rank order: equal bits on all. All ranks."""
        said = gather_bytes(transport, struct.pack("<?d", mine is not None, 0.0 if mine is None else float(mine)))
        losses = [loss for has_one, loss in (struct.unpack("<?d", row) for row in said) if has_one]
        return torch.tensor(sum(losses) / len(losses), dtype=torch.float32, device="cpu")

    def _refuse_in_pipeline(self, what: str) -> None:
        if self.pipeline is not None:
            raise RuntimeError(
                f"{what} alone is not to be had of a pipeline's stage; use train_batch() or eval_batch()"
            )

    def _write_scalars(self, rate: float) -> None:
        """Write the last step's scalars to the monitors, against samples: this rank's mean loss, lr and loss scale."""
        values = {"train_loss": float(self._loss), "lr": rate, "skipped_steps": float(self.skipped_steps)}
        if self.config.fp16.enabled:
            values["loss_scale"] = self.fp16_scale.value
        for write in self._monitors:
            try:
                write(values, self.global_samples)
            except OSError as error:  # a full disk under a log must not end a step in its middle
                if not self._has_warned_of_monitor:
                    self._has_warned_of_monitor = True
                    log.warning("step %d: a monitor cannot write its scalars: %s", self.global_steps, error)
        self._loss = torch.zeros((), dtype=torch.float32, device="cpu")

    @property
    def comm_ms(self) -> float:
        """Milliseconds that the last step waited for gradients, with dense optimizers; others have it in stats."""
        return self.form.comm_ms

    @property
    def counts_micro_batches(self) -> bool:
        """Whether step() finds the boundary itself, because the script has not set it."""
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
        """Set the model's mode, as `torch.nn.Module.train`.

        Args:
            mode: Whether to train. Default True.
        """
        self.module.train(mode)
        return self

    @every_rank
    def eval(self) -> Engine:
        """Set the model to evaluation. Replicas that differ (local steps, buffers) are made equal first. All ranks."""
        self.synchronise()
        return self.train(False)

    @every_rank
    def synchronise(self, *, lands: bool = True) -> None:
        """Give every rank the same parameters, if local steps made them differ, and free gathered ones. All ranks.

        Under local steps this is a round over all moves of the replicas: the parameters become the anchors. Buffers
        are made equal as well: running statistics are averaged, others take rank 0's values (`onebit.sync_buffers`).

        Args:
            lands: Whether a step under way (`onebit.delay`) lands: parameters look ahead until it does. Default True.
        """
        self.sharding.release()
        if lands:
            self.form.synchronise()
        buffers, averaged = list(persistent_buffers(self.module)), averaged_buffers(self.module)
        whole = [(name, buffer) for name, buffer in buffers if not hasattr(buffer, "placements")]
        sync_tensors(whole, averaged, self.grid.transports["shard"])
        sync_tensors(buffers, averaged, self.grid.transports["replica"])

    def agree_on_loss_scale(self) -> None:
        """Set the loss scale of all ranks of this replica to the least of theirs. All of them call it."""
        mine = self.fp16_scale
        states = self.form.model_parallel_group.gather(mine.value, mine.patience, mine.clean_steps)
        value, patience, clean_steps = min(states)
        least = ScaleState(value=value, patience=int(patience), clean_steps=int(clean_steps))
        self.fp16_scale = self.fp16_scale.with_state(least)

    def feature_of(self, kind: type[F]) -> F | None:
        """Return the active feature of this class, or None.

        Args:
            kind: Class of the feature.
        """
        return next((feature for feature in self.active_features if isinstance(feature, kind)), None)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's mean gradient before clipping, if it is known.

        | case | norm |
        | --- | --- |
        | dense optimizer, or a step that sends gradients | exact |
        | a step that sends momentum | the estimate that clips (`onebit/step/clip.py`) |
        | a local step of 0/1 Adam | each rank's own estimate |
        | local steps | of this replica's gradient |
        | no gradient_clipping, stage 2 across nodes, after a skipped step, before the first step | None |
        """
        return self.form.grad_norm

    def train_batch_size(self) -> int:
        """Return the number of samples of a step, over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples of a micro-batch on this rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of a step."""
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
        """Write everything that a bit-identical continuation needs, and return the checkpoint's name. All ranks.

        It begins with `synchronise`: between the local steps of 0/1 Adam this is an exchange that a run without
        checkpoints does not make. Among members that come and go a step under way stays so. Under local steps nothing
        is exchanged: the checkpoint contains the anchors as weights, and each rank's state contains its distance from
        them. The newest `onebit.keep_checkpoints` checkpoints without a tag are kept. If the configuration asks for
        gathered 16-bit weights, those of the newest checkpoint are in save_dir/model.safetensors.

        Args:
            save_dir: Folder of the checkpoints.
            tag: A name. A checkpoint of that name is replaced if this run wrote it or it is of an earlier step, and
                always after `stand_in`, as DeepSpeed does. Default None: step_ and the step's number.
            client_state: The caller's values, of each rank; see `tree.pack`. Default None.
            save_latest: Whether `load_checkpoint` without a tag takes this one. Default True.
            exclude_frozen_parameters: Leave out parameters that require no gradients; the model to load into must have
                their values. Default False.
            in_background: Whether to write while training goes on; see `wait_for_checkpoint`. Default False.

        Raises:
            CheckpointError: Called between two micro-batches of a step (a checkpoint contains no gradients), or as
                `Checkpoints.save`. Raised on all ranks.
        """
        tag = tags.checked(self._default_tag() if tag is None else tag, self.grid.world)
        folder = _folder(save_dir)
        checkpoints = self._in(folder / (tag or ""), keep=1 if tag else self.config.onebit.keep_checkpoints)
        checkpoints.may_replace |= tag is not None and self._replaces_tags()
        point = tags.pointing(folder, tag) if tag and save_latest else None
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
                self._export(folder / "model.safetensors")
        if self.grid.world.rank == 0:
            self._add_beside_checkpoints(folder)
        return tag or f"step_{self.global_steps:08d}"

    def _add_beside_checkpoints(self, folder: Path) -> None:
        """Write what else belongs in the folder of checkpoints. Rank 0 only."""

    def _replaces_tags(self) -> bool:
        """Whether a checkpoint with a tag may replace another run's of that tag."""
        return False

    def _default_tag(self) -> str | None:
        """The tag of a checkpoint that is saved without one; None: it is named by its step."""
        return None

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
        """Continue from a checkpoint. All ranks.

        If load_dir/latest is lost, the newest complete checkpoint is taken, and rank 0 warns. Accumulated gradients of
        an unfinished step are dropped.

        On the grid that wrote it the continuation is exact to the bit. On another grid, and in a form with the same
        state (`Form.same_state`), moments are exact and every replica takes the mean of the residuals, parameter by
        parameter (`checkpoint/reshard.py`); a form with a fixed cut loads only if just the number of replicas changes.
        Keep the global batch size and the data order resumes.

        Args:
            load_dir: Folder of the checkpoints.
            tag: Name of the checkpoint. Default None: the latest.
            load_module_strict: False: ignore weights that the model or the checkpoint lacks; with the optimizer's state
                only frozen weights of the model. Default True.
            load_optimizer_states: False: load weights, counts, schedule, data position and random numbers; the
                optimizer starts anew. Default True.
            load_lr_scheduler_states: False: leave the schedule as it is. Default True.
            load_module_only: Load only the weights, from any form and optimizer. Default False.

        Returns:
            The folder and this rank's client_state; (None, None) if there is no checkpoint.

        Raises:
            CheckpointError: It is damaged, or of another model, form or optimizer. Raised on all ranks.
        """
        contents = engine_state.Contents(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states,
            counts=not load_module_only,
            strict=load_module_strict,
        )
        self._batches = None  # batches read ahead belong to the old position
        folder, name = tags.find(_folder(load_dir), tag, self.grid.world)
        if folder is None:
            return None, None
        return engine_state.load(self, self._in(folder), name, contents)

    def wait_for_checkpoint(self) -> None:
        """Wait until checkpoints that are written in the background are on disk."""
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
        """Write the whole weights to a safetensors file, floating-point ones in the computing dtype. All ranks.

        Args:
            save_dir: Folder of the file.
            save_filename: Name of the file, ending in .safetensors. Default "model.safetensors".
            exclude_frozen_parameters: Must be False; see `save_checkpoint`.
            max_file_bytes: Write several files in save_dir of at most this many bytes, with Hugging Face's index; no
                rank holds more than one of them at a time. Default None: one file.

        Returns:
            True.

        Raises:
            ValueError: The name is that of another format, or exclude_frozen_parameters is True.
        """
        if Path(save_filename).suffix != ".safetensors":
            raise ValueError(
                f"weights are written as safetensors, and {save_filename!r} is named as another format; name it "
                "model.safetensors, and read it with safetensors.torch.load_file"
            )
        if exclude_frozen_parameters:
            raise ValueError(
                "exclude_frozen_parameters=True is for save_checkpoint; write the weights of engine.module_state_dict("
                "exclude_frozen_parameters=True) with safetensors.torch.save_file"
            )
        self.synchronise()
        folder = _folder(save_dir)
        self._export(folder / save_filename if max_file_bytes is None else folder, max_file_bytes)
        return True

    def _export(self, path: Path, max_file_bytes: int | None = None) -> None:
        options: dict[str, Any] = {"grid": self.grid, "max_file_bytes": max_file_bytes}
        export_weights(self.module, path, self.grid.world, self.config.dtype, **options)

    def _in(self, folder: Path, keep: int | None = None) -> Checkpoints:
        """Return the one `Checkpoints` of a folder, after waiting for writes to other folders."""
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
        """Wait for checkpoints, release the grid and offloaded state; parameters in files are lost. All ranks."""
        self.wait_for_checkpoint()
        self._silence = self.form.no_sync()  # kept, for it ends as it is dropped
        self._silence.__enter__()  # hooks stay with the parameters, which another engine may train
        self.form.close()
        self.grid.close()


def _folder(given: str | os.PathLike[str]) -> Path:
    if not given:  # as the default of an option; Path("") is the working directory
        raise ValueError(f'expected a folder, got {given!r}; the working directory is "."')
    return Path(given)


def _several(inputs: object) -> tuple[object, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
