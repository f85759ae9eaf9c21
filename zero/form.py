"""The contract of a form: one way to shard a model, build its optimizer and take its steps on a grid of ranks.

A form is a file in `forms/` and a line in `forms/__init__.py`. Its class methods are called before it is made: they
decide whether it fits, check the model, list the options it ignores, and build it. The engine calls the object in a
step and for a checkpoint, and knows no form by name. Defaults are those of a form in which all ranks take the same
step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT, StateDict

from ..comm import Transport
from ..model_parallel import ModelParallelGroup, model_parallel_group_of
from .config.optimizers import OptimizerChoice, build_optimizer
from .config.schema import changed
from .config.whole import Config
from .grid import Grid, GridShape
from .parallel.dense import stepping
from .parallel.groups import Groups
from .parallel.sharding import Sharding
from .parallel.tensor import Plan
from .pipeline.run import Ties

_OF_ALL = {
    "sharding",
    "ranks_per_node",
    "tensor",
    "keep_checkpoints",
    "bucket_cap_mb",
    "max_consecutive_skips",
    "forward_methods",
    "activation_folder",
    "sequence",
}
"""Keys of the block "onebit" that every form or a feature acts on."""


@dataclass(frozen=True)
class Given:
    """The inputs from which a form is built.

    Attributes:
        config: The configuration.
        grid: The ranks.
        model: The model, or this rank's stages of a pipeline.
        groups: Returns the parameters to train, or groups of them, of the sharded model.
        make: Makes a dense optimizer of these. Default None: the configuration's optimizer.
        tensor_plan: See `tensor.parallelize`; needed if the tensor axis has several ranks. Default None.
        fill: Gives the sharded model its values, called as `materialize` with the grid's transport and a device.
            Default None: the model has them.
        ties: Parameters that this rank's pipeline stages share with others. Default None: there is no pipeline.
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
        """Return a function that makes the optimizer: `make`, or that of the configuration.

        Args:
            held: The ranks that hold this replica.
            **options: Further options of the configuration's optimizer.
        """
        if self.make is not None:
            return self.make
        whole = self.model if self.ties is None else None  # a stage does not know which layer makes the outputs
        options |= {"transport": self.grid.transport, "model_parallel_group": held, "model": whole}
        return lambda params: build_optimizer(choice_of(self.config), params, **options)


class Form(ABC):
    """One way to train a model on this grid. The engine drives it; `build` makes it.

    Args:
        given: The inputs from which it is built.
        optimizer: Takes the steps.
        sharding: What the ranks of this replica divide among them. Default None: nothing.
        held: The ranks that hold this replica. Default None: this rank alone.

    Attributes:
        config: The configuration.
        grid: The ranks.
        module: The model.
        sharding: What the ranks of this replica divide among them.
        ties: Parameters that pipeline stages share; None without a pipeline.
        optimizer: Takes the steps.
        model_parallel_group: The ranks that hold this replica.
        comm_ms: Milliseconds that the last step waited for gradients that the form averages. Optimizers that exchange
            by themselves have it in their stats.
    """

    name: ClassVar[str]
    """Name of the form in checkpoints and messages."""
    example: ClassVar[Mapping[str, object]]
    """Blocks of a configuration that has this form on any number of ranks; the tests of all forms run it."""
    block: ClassVar[str] = ""
    """Place of a block of the configuration, as "onebit.local_steps": `fits` is not asked while it is at its default.
    Empty: `fits` is always asked."""
    keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of the block "onebit" that this form acts on, in addition to those of all forms."""
    sends: ClassVar[str] = ""
    """For warnings: its substitute for communication_data_type. Empty: it follows that option."""
    sends_dtype: ClassVar[str | None] = None
    """The communication_data_type that matches `sends`, which is not worth a warning."""
    same_state: ClassVar[frozenset[str]] = frozenset()
    """Names of other forms with the same optimizer state, cut into other slices."""
    fixed_cut: ClassVar[str] = ""
    """For errors: why its state loads only into the same cut of the model, with another number of replicas."""
    steps_apart: ClassVar[bool] = False
    """Whether replicas take steps apart: gradients stay in a replica, which skips alone and has its own loss scale."""
    averages_gradients: ClassVar[bool] = False
    """Whether gradients are averaged before the optimizer's step, and the optimizer sends nothing."""
    has_plain_state: ClassVar[bool] = False
    """Whether the optimizer's state may be replaced, because no part of it depends on earlier messages."""
    trains: ClassVar[bool] = True
    """Whether it has an optimizer that takes steps."""
    divides_state: ClassVar[bool] = False
    """Whether masters and moments are divided over replicas."""

    def __init__(
        self,
        given: Given,
        optimizer: torch.optim.Optimizer,
        sharding: Sharding | None = None,
        held: ModelParallelGroup | None = None,
    ):
        self.config, self.grid, self.module, self.ties = given.config, given.grid, given.model, given.ties
        self.optimizer, self.sharding = optimizer, Sharding(given.model) if sharding is None else sharding
        self.model_parallel_group = model_parallel_group_of(None) if held is None else held
        self.comm_ms = 0.0

    def __str__(self) -> str:
        return self.name

    # ---------------------------------------------------------------- before it is made

    @classmethod
    @abstractmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        """Whether this configuration has this form on this grid, if no earlier form in `FORMS` fits. Pure.

        Args:
            config: The configuration.
            shape: Number of ranks along each axis.

        Raises:
            ValueError: The configuration asks for this form, but the grid or other options rule it out.
        """

    @classmethod
    def check(cls, given: Given) -> None:
        """Raise an error if the model or grid cannot have this form. No communication.

        Args:
            given: The inputs from which it would be built.

        Raises:
            ValueError: The model, grid or configuration does not fit.
            TypeError: A parameter has a dtype that does not fit.
        """
        config, shape = given.config, given.grid.shape
        if given.grid.transport.ranks_change and (why := cls.why_members_stay(given)):
            raise ValueError(
                f"the form {cls.name!r} cannot go on as its members come and go (onebit.membership): {why}; use stage "
                "0 in float32, or any stage over the grid of a node (zero.members.grid_of(members, "
                'node)), with onebit.sharding "intra_node" for a one-bit optimizer'
            )
        for name in config.onebit.forward_methods:
            if not callable(getattr(given.model, name, None)):
                raise ValueError(f"onebit.forward_methods: {type(given.model).__name__} has no method {name!r}")
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

    @classmethod
    def why_members_stay(cls, given: Given) -> str:
        """Return why members of a run in this form may not come and go; "" if they may.

        Args:
            given: The inputs from which it would be built.
        """
        return "ranks share its masters, shards or rounds, which a lost one would take along"

    @classmethod
    def without_effect(cls, config: Config, shape: GridShape) -> list[str]:
        """Return one line for each option that is set to another value than its default but has no effect here.

        Args:
            config: The configuration.
            shape: Number of ranks along each axis.
        """
        lines = [
            f"onebit.{name} has no effect in the form {cls.name!r}"
            for name in changed(config.onebit)
            if name not in cls.keys | _OF_ALL
        ]
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
        """Return the dtype in which gradients of micro-batches add up."""
        return torch.float32

    @classmethod
    @abstractmethod
    def build(cls, given: Given) -> Form:
        """Shard the model in place, fill it, and make its optimizer. All ranks, with messages in the same order.

        Args:
            given: The inputs from which it is built.
        """

    # ---------------------------------------------------------------- a step

    def set_grad_scale(self, scale: float) -> None:
        """Set the loss scale of the next backward pass, before it begins, as some gradients leave during the pass."""
        # The optimizers read it as GradScaler sets it.
        self.optimizer.grad_scale = torch.tensor(scale, dtype=torch.float32, device="cpu")  # type: ignore[attr-defined]

    def no_sync(self) -> AbstractContextManager[None]:
        """Wrap a backward pass that only accumulates; its gradients are sent between replicas with a later pass."""
        return cast(AbstractContextManager[None], self.optimizer.no_sync())  # type: ignore[attr-defined]

    def step(self, number: int, scale: float) -> bool:
        """Average over ranks, clip, and update the parameters, unless a gradient is not finite. All ranks.

        Args and result as `update`.
        """
        self.comm_ms = self.sharding.reduce(is_last=True)
        is_skipped = self.update(number, scale)
        self.sharding.gather()
        return is_skipped

    @abstractmethod
    def update(self, number: int, scale: float) -> bool:
        """Take the optimizer's step, with gradients that the ranks of a replica have averaged. All ranks.

        Args:
            number: Number of the step, from 1.
            scale: The loss scale.

        Returns:
            Whether the step was skipped.
        """

    @property
    @abstractmethod
    def grad_norm(self) -> float | None:
        """Gradient norm of the last step before clipping; None if it is not known."""

    @property
    def peers(self) -> Transport:
        """The ranks that take each step together."""
        return self.grid.world

    # ---------------------------------------------------------------- weights

    def synchronise(self) -> None:
        """Give all replicas the same parameters, if steps made them differ. All ranks."""
        if hasattr(self.optimizer, "sync"):  # only optimizers with replicas that may differ have it
            self.optimizer.sync()
            self.sharding.gather()

    def adopt_parameters(self) -> None:
        """Take over parameters that were written outside of a step, with equal values on all ranks. All ranks."""
        self.sharding.adopt()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights and buffers of a checkpoint, by name: this rank's shards, not rounded."""
        return {**self.sharding.held.state_dict(), **self.sharding.scalars}

    def weights_were_loaded(self) -> None:  # noqa: B027
        """Take over `weights`, which a checkpoint has filled; its optimizer state is loaded after that."""

    def shown(self) -> AbstractContextManager[None]:
        """Within this context the model has weights that are equal in all replicas."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027
        """Release resources that the grid does not own. All ranks."""

    # ---------------------------------------------------------------- checkpoints

    @property
    def shares_state(self) -> bool:
        """Whether the optimizer's state is written once, by name, like the weights; else each rank writes its own."""
        return False

    def optimizer_name(self) -> str:
        """Return the optimizer's name for a checkpoint's stamp."""
        return type(stepping(self.optimizer)).__name__

    def state(self) -> tuple[dict[str, Tensor], StateDict]:
        """Return the optimizer's state in two parts.

        Returns:
            Tensors by name, sharded as the parameters, which are written once; and the rest, which each rank writes.
        """
        return {}, self.optimizer.state_dict()

    def begun_state(self) -> AbstractContextManager[None]:
        """In this block every parameter has a state, to read a checkpoint into. An error undoes it. All ranks."""
        return nullcontext()

    def load_shared(self, tensors: dict[str, Tensor], rest: dict[str, object], begun: Set[str]) -> None:
        """Load a shared `state`.

        Args:
            tensors: Its tensors, which a checkpoint has filled.
            rest: The rest, of all ranks.
            begun: Names of the parameters with tensors in the checkpoint.
        """
        raise NotImplementedError(f"{type(self).__name__} shares no state")

    def load_own(self, states: Sequence[StateDict]) -> None:
        """Load the states of all replicas; exact to the bit if their number has not changed.

        Args:
            states: One of each replica, in order, for this rank's part of the model.
        """
        if len(states) == self.grid.shape.size("replica"):
            self.optimizer.load_state_dict(states[self.grid.coordinates["replica"]])
        else:
            self.optimizer.load_state_dicts(states)  # type: ignore[attr-defined]


def choice_of(config: Config) -> OptimizerChoice:
    """Return the configuration's optimizer. Raises ValueError if it has none."""
    if config.optimizer is None:
        raise ValueError('no optimizer: write a block "optimizer" into the configuration, or pass optimizer=')
    return config.optimizer


def is_plain(config: Config) -> bool:
    """Whether the model stays as it is: nothing is sharded, and the computing dtype is float32."""
    return config.zero_optimization.stage == 0 and config.dtype == torch.float32


def offloads(config: Config) -> bool:
    """Whether the configuration keeps optimizer state or parameters in host memory or files."""
    zero = config.zero_optimization
    return not zero.offload_optimizer.device == zero.offload_param.device == "none"


def pins(config: Config) -> bool:
    """Whether host memory is pinned, i.e. no block that offloads sets pin_memory to false."""
    zero = config.zero_optimization
    return all(block.pin_memory for block in (zero.offload_optimizer, zero.offload_param) if block.device != "none")
