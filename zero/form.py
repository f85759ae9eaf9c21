"""The contract of a form: what a configuration makes of a model and its optimizer on this grid.

A form is a file in `forms/` and a line in `forms/__init__.py`. Its class methods are asked before anything is made:
whether it fits, whether this model can have it, what it ignores, and how it is built. The object is what the engine
asks in a step and for a checkpoint; the engine knows no form by name. Defaults are of a form in which all ranks take
the same step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT, StateDict

from ..comm import Transport
from ..model_parallel import ModelParallelGroup, model_parallel_group_of
from .config.optimizers import OptimizerChoice, build_optimizer
from .config.sections import Onebit
from .config.whole import Config
from .grid import Grid, GridShape
from .parallel.dense import stepping
from .parallel.groups import Groups
from .parallel.tensor import Plan
from .pipeline.run import Ties

_OF_ALL = {"sharding", "ranks_per_node", "tensor", "keep_checkpoints", "bucket_cap_mb", "max_consecutive_skips"}
"""Keys of the block "onebit" that every form acts on."""


@dataclass(frozen=True)
class Given:
    """What a form is built of.

    groups: the parameters to train, or groups of them, of the sharded model.
    make: makes a dense optimizer of these, in place of the configuration's.
    tensor_plan: see `tensor.parallelize`; needed if the tensor axis has several ranks.
    fill: gives the sharded model its values, called as `materialize` with the grid's transport and a device.
    ties: what this rank's pipeline stages share with others; None without a pipeline.
    """

    config: Config
    grid: Grid
    model: nn.Module
    groups: Groups
    make: Callable[[ParamsT], torch.optim.Optimizer] | None = None
    tensor_plan: Plan | None = None
    fill: Callable[..., object] | None = None
    ties: Ties | None = None

    def optimizer(self, held: ModelParallelGroup, **options: Any) -> Callable[[ParamsT], torch.optim.Optimizer]:
        """What makes the optimizer: `make`, or the configuration's with these options more.

        held: the ranks that hold this replica.
        """
        if self.make is not None:
            return self.make
        whole = self.model if self.ties is None else None  # a stage's layers do not say which of them makes the outputs
        options |= {"transport": self.grid.transport, "model_parallel_group": held, "model": whole}
        return lambda params: build_optimizer(choice_of(self.config), params, **options)


class Form(ABC):
    """What the engine drives, beside its model.

    optimizer: takes the steps.
    stage: of `fsdp.begin_micro_batch`; None if the model did not go through FSDP2.
    model_parallel_group: the ranks that hold this replica.
    comm_ms: how long the last step waited for gradients that the form averages; optimizers that exchange have it in
        their stats.
    """

    name: ClassVar[str]
    """In checkpoints and messages."""
    example: ClassVar[Mapping[str, object]]
    """Blocks of a configuration that take this form on any number of ranks; the tests of all forms run it."""
    keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of the block "onebit" that this form acts on, beside those of all forms."""
    sends: ClassVar[str] = ""
    """What it does in place of communication_data_type; empty: as that says."""
    sends_dtype: ClassVar[str | None] = None
    """The communication_data_type that is what it does."""
    same_state: ClassVar[frozenset[str]] = frozenset()
    """Names of other forms whose optimizers keep the same state, of other slices."""
    fixed_cut: ClassVar[str] = ""
    """For errors: what keeps its state from another cut of the model, so that just the replicas' number may change."""
    steps_apart: ClassVar[bool] = False
    """Whether replicas take steps by themselves: gradients stay in a replica, which skips alone, with its own scale."""
    averages_gradients: ClassVar[bool] = False
    """Whether gradients are averaged in front of the optimizer, which does not exchange."""
    has_plain_state: ClassVar[bool] = False
    """Whether the optimizer's state may be set: none of it is bound up with what was sent."""
    divides_state: ClassVar[bool] = False
    """Whether masters and moments are divided over replicas."""

    def __init__(
        self,
        given: Given,
        optimizer: torch.optim.Optimizer,
        stage: int | None = None,
        held: ModelParallelGroup | None = None,
    ):
        self.config, self.grid, self.module, self.ties = given.config, given.grid, given.model, given.ties
        self.optimizer, self.stage = optimizer, stage
        self.model_parallel_group = model_parallel_group_of(None) if held is None else held
        self.comm_ms = 0.0

    def __str__(self) -> str:
        return self.name

    # ---------------------------------------------------------------- before it is made

    @classmethod
    @abstractmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        """Whether this configuration takes this form on this grid, if no form before it in the list does. Pure.

        Raises ValueError if it must, and cannot.
        """

    @classmethod
    def check(cls, given: Given) -> None:
        """Raise ValueError or TypeError if the model or grid cannot have this form. No communication."""
        config, shape = given.config, given.grid.shape
        if is_plain(config) and shape.size("shard") > 1:
            raise ValueError(
                f"stage 0 shards nothing, and the grid has {shape.size('shard')} ranks along its shard axis, which "
                "would train apart; make it with shard=1, or use stage 1"
            )
        if shape.size("tensor") > 1 and given.tensor_plan is None:
            raise ValueError(
                f"{shape.size('tensor')} ranks compute each layer together: pass initialize(tensor_plan=...), which "
                "says how"
            )
        served = getattr(given.grid.world, "device", torch.device("cpu"))
        if offloads(config) and served.type != "cpu":
            raise ValueError(
                f"rank {given.grid.world.rank}: offloaded gradients are averaged in host memory, and the process group "
                f"serves {served.type} alone; call torch.distributed.init_process_group('cpu:gloo,cuda:nccl') before "
                "initialize()"
            )

    @classmethod
    def without_effect(cls, config: Config, shape: GridShape) -> list[str]:
        """What a configuration asks for, other than the default, that this form does not do; one line each."""
        ours, lines = config.onebit, []
        for name in (f.name for f in fields(ours) if f.name not in cls.keys | _OF_ALL):
            if getattr(ours, name) != getattr(Onebit(), name):
                lines.append(f"onebit.{name} has no effect in the form {cls.name!r}")
        if cls.sends and config.communication_data_type not in (None, cls.sends_dtype):
            lines.append(f"communication_data_type has no effect in the form {cls.name!r}, which {cls.sends}")
        if (cls.averages_gradients or cls.steps_apart) and not config.zero_optimization.overlap_comm:
            lines.append(f"zero_optimization.overlap_comm: false has no effect in the form {cls.name!r}")
        summed = str(cls.sum_dtype(config)).removeprefix("torch.")
        wanted = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: summed}
        if wanted[config.data_types.grad_accum_dtype] != summed and config.gradient_accumulation_steps > 1:
            lines.append(f"data_types.grad_accum_dtype has no effect: micro-batches add up in {summed} in this form")
        return lines

    @classmethod
    def sum_dtype(cls, config: Config) -> torch.dtype:
        """In which the gradients of micro-batches add up."""
        return torch.float32

    @classmethod
    @abstractmethod
    def build(cls, given: Given) -> Form:
        """Shard the model in place, fill it, and make its optimizer. All ranks; the order of messages is the same."""

    # ---------------------------------------------------------------- a step

    def set_grad_scale(self, scale: float) -> None:
        """Before a backward pass: the loss scale that its gradients have. Some leave during the pass."""
        # The optimizers read it as GradScaler sets it.
        self.optimizer.grad_scale = torch.tensor(scale, dtype=torch.float32, device="cpu")  # type: ignore[attr-defined]

    def no_sync(self) -> AbstractContextManager[None]:
        """Around a backward pass whose gradients only add up, and travel between replicas with a later one."""
        return cast(AbstractContextManager[None], self.optimizer.no_sync())  # type: ignore[attr-defined]

    @abstractmethod
    def step(self, number: int, scale: float) -> bool:
        """Average over ranks, clip, and update the parameters, unless a gradient is not finite: whether it is skipped.

        number: of the step, from 1. scale: the loss scale. All ranks.
        """

    @property
    @abstractmethod
    def grad_norm(self) -> float | None:
        """The norm before clipping, of the last step; None if it is not known."""

    @property
    def peers(self) -> Transport:
        """The ranks that take each step together."""
        return self.grid.world

    # ---------------------------------------------------------------- weights

    def synchronise(self) -> None:
        """Give all replicas the same parameters, if steps made them differ. All ranks."""
        if hasattr(self.optimizer, "sync"):  # of those whose replicas may differ
            self.optimizer.sync()

    def adopt_parameters(self) -> None:  # noqa: B027
        """Parameters were written outside of a step, the same ones on all ranks. All ranks."""

    def weights_were_loaded(self) -> None:  # noqa: B027
        """As a checkpoint begins to be taken over, whose weights are in the model."""

    def shown(self) -> AbstractContextManager[None]:
        """In here the model has weights on which all replicas agree."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027
        """Release what the grid does not. All ranks."""

    # ---------------------------------------------------------------- checkpoints

    @property
    def shares_state(self) -> bool:
        """Whether the optimizer's state is written once, by name, as the weights are; else each rank's own is."""
        return False

    def optimizer_name(self) -> str:
        """In a checkpoint's stamp."""
        return type(stepping(self.optimizer)).__name__

    def masters(self) -> dict[str, Tensor]:
        """Weights in float32 by all names of their parameters, if the model has rounded ones."""
        return {}

    def state(self) -> tuple[dict[str, Tensor], StateDict]:
        """The optimizer's: (tensors by name, written once, sharded as the parameters; the rest, each rank's own)."""
        return {}, self.optimizer.state_dict()

    def load_shared(self, tensors: dict[str, Tensor], rest: dict[str, object]) -> None:
        """Take back a shared `state`: tensors that a checkpoint has filled, and the rest of all ranks."""
        raise NotImplementedError(f"{type(self).__name__} shares no state")

    def load_own(self, states: Sequence[StateDict]) -> None:
        """Take over the states of all replicas with this rank's part of the model, in order. Of as many: to the bit."""
        if len(states) == self.grid.shape.size("replica"):
            self.optimizer.load_state_dict(states[self.grid.coordinates["replica"]])
        else:
            self.optimizer.load_state_dicts(states)  # type: ignore[attr-defined]


def choice_of(config: Config) -> OptimizerChoice:
    """The configuration's optimizer. Raises ValueError without one."""
    if config.optimizer is None:
        raise ValueError('no optimizer: write a block "optimizer" into the configuration, or pass optimizer=')
    return config.optimizer


def is_plain(config: Config) -> bool:
    """Whether nothing is sharded and nothing computed in another dtype: the model stays as it is."""
    return config.zero_optimization.stage == 0 and config.dtype == torch.float32


def offloads(config: Config) -> bool:
    """Whether optimizer state or parameters are asked for in host memory or files."""
    zero = config.zero_optimization
    return not zero.offload_optimizer.device == zero.offload_param.device == "none"


def pins(config: Config) -> bool:
    """Whether host memory is pinned: unless a block that offloads says otherwise."""
    zero = config.zero_optimization
    return all(block.pin_memory for block in (zero.offload_optimizer, zero.offload_param) if block.device != "none")
