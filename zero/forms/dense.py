"""The form "dense": Adam, AdamW, LaProp, Lamb, and the caller's optimizers, on shards or without them.

Gradients are averaged in float32, inside a replica by its sharding and between replicas by `onebit.dense`. This file
has the vote on overflow, clipping, and a state that loads into any other sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim.optimizer import StateDict

from ...agreement.skips import SkipLimit
from ...comm import torch_versions
from ...dense import DenseAverager
from ...layout.masters import NAME as MASTER
from ...layout.masters import is_low
from ...model_parallel import ModelParallelGroup, gathered, like, local
from ...moments import MomentOptimizer
from ..checkpoint.weights import plain
from ..config.whole import Config
from ..form import Form, Given, choice_of
from ..grid import GridShape
from ..offload.inner import at_step_0
from ..offload.optimizer import Offload
from ..parallel import dense
from ..parallel.sharding import Sharding
from .averaged import Averaged
from .in_node import InNode, uses_files

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _begin_state(held: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that have taken no step the state of step 0: all ranks and layouts then have the same names."""
    if isinstance(optimizer, Offload | MomentOptimizer):
        optimizer.begin_state()
        return
    known = next(((p, entry) for p, entry in optimizer.state.items() if entry), None)
    if known is None:
        get_optimizer_state_dict(held, optimizer)  # torch takes a step with zero gradients
        optimizer.state.update({p: at_step_0(entry) for p, entry in optimizer.state.items()})
        return
    its, entry = known
    for p in dense.parameters(optimizer):
        if p.requires_grad and not optimizer.state.get(p):
            optimizer.state[p] = {
                name: torch.zeros_like(p if x.shape == its.shape else x, dtype=x.dtype, device=x.device)
                for name, x in entry.items()
                if isinstance(x, Tensor)
            }


class Dense(InNode):
    """Averages gradients before the step of an optimizer that sends nothing itself."""

    name = "dense"
    example: ClassVar[Mapping[str, object]] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    sends = "averages gradients in float32"
    sends_dtype = "fp32"
    averages_gradients = True
    has_plain_state = True

    def __init__(
        self,
        given: Given,
        optimizer: torch.optim.Optimizer,
        sharding: Sharding | None = None,
        held: ModelParallelGroup | None = None,
    ):
        super().__init__(given, optimizer, sharding, held)
        self._averager = DenseAverager(self.averaged(), self.grid.transport, self.config.onebit.bucket_cap_mb)
        self._skips = SkipLimit(self.config.onebit.max_consecutive_skips)
        self._grad_norm: float | None = None

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        return config.optimizer is None or not config.optimizer.is_one_bit

    @classmethod
    def check(cls, given: Given) -> None:
        super().check(given)
        config = given.config
        if given.make is not None or config.dtype != torch.float32 or choice_of(config).type not in ("Adam", "AdamW"):
            return
        # torch's own optimizer would round each step into parameters of less than float32.
        if low := next((name for name, p in given.model.named_parameters() if p.requires_grad and is_low(p)), None):
            dtype, kind = given.model.get_parameter(low).dtype, choice_of(config).type
            raise ValueError(
                f"rank {given.grid.world.rank}: {low} is {dtype}, the configuration computes in float32, and "
                f"torch's {kind} keeps no float32 masters, so that small updates would be lost: enable "
                '"bf16" or "fp16", or cast the model with model.float()'
            )

    @classmethod
    def build(cls, given: Given) -> Form:
        return Averaged.build(given) if given.grid.transport.ranks_change else super().build(given)

    @classmethod
    def steps_in_two_memories(cls, config: Config) -> bool:
        return config.optimizer is None or config.optimizer.type != "Lamb"

    @classmethod
    def make_optimizer(cls, given: Given, held: ModelParallelGroup) -> torch.optim.Optimizer:
        make, params = given.optimizer(held), given.groups(given.model)
        if not uses_files(given.config):
            return make(params)
        # Each rank keeps the state of its own shards in files.
        block = given.config.zero_optimization.offload_optimizer
        return Offload(
            params,
            make,
            "state",
            block.nvme_path or "",
            buffer_count=block.buffer_count,
            pin_memory=block.pin_memory,
            rank=given.grid.world.rank,
        )

    def averaged(self) -> list[Tensor]:
        """Return the parameters with gradients that this form averages between replicas."""
        return dense.parameters(self.optimizer)

    # ---------------------------------------------------------------- a step

    def set_grad_scale(self, scale: float) -> None:
        """Do nothing: `step` divides by the scale, and the optimizer does not know it."""

    def no_sync(self) -> AbstractContextManager[None]:
        return self._averager.no_sync()

    def update(self, number: int, scale: float) -> bool:
        world = self.grid.world
        self.comm_ms += self._averager.finish()
        is_finite, self._grad_norm = dense.prepare(
            self.optimizer, world, self.model_parallel_group, number, scale, self.config.gradient_clipping
        )
        bad = []
        if is_finite:
            with dense.naming_shards(self.optimizer):
                self.optimizer.step()
        else:
            # Gradients were averaged before, so bad ones are bad on all ranks.
            bad = dense.bad_in(self.sharding.held)
            self._skips.tell(world.rank, number, bad if world.rank == 0 else [], "all ranks skip the step")
        self._skips.observe(not is_finite, bad, world)
        return not is_finite

    @property
    def grad_norm(self) -> float | None:
        return self._grad_norm

    def close(self) -> None:
        if isinstance(self.optimizer, Offload):
            self.optimizer.close(bring_back=False)

    # ---------------------------------------------------------------- checkpoints

    @property
    def shares_state(self) -> bool:
        return dense.has_sharded_state(self.optimizer)

    def state(self) -> tuple[dict[str, Tensor], StateDict]:
        if not self.shares_state:
            return super().state()
        held, begun = self.sharding.held, self._begun()
        if isinstance(self.optimizer, Offload):
            self.optimizer.begin_state()  # torch would take a step instead, with gradients as large as the model
        flat: dict[str, Any] = get_optimizer_state_dict(held, self.optimizer, options=_FLAT)
        self._forget(self.optimizer.state.keys() - begun)
        named = held.named_parameters(remove_duplicate=False)
        lacking = tuple(f"state.{plain(name)}." for name, p in named if p not in begun)
        flat = {name: x for name, x in flat.items() if not name.startswith(lacking)}
        flat = {name: x for name, x in flat.items() if name not in self._flat_masters()}
        for name in self._of_scalars(flat):
            flat[name] = gathered(flat[name]).reshape(())
        tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
        return tensors, {name: x for name, x in flat.items() if name not in tensors}

    @contextmanager
    def begun_state(self) -> Iterator[None]:
        before = self._begun()
        if self.shares_state:
            _begin_state(self.sharding.held, self.optimizer)
        try:
            yield
        except BaseException:
            self._forget(self.optimizer.state.keys() - before)
            raise

    def load_shared(self, tensors: dict[str, Tensor], rest: dict[str, object], begun: Set[str]) -> None:
        held = self.sharding.held
        flat: dict[str, Any] = {**rest, **tensors, **self._flat_masters()}
        for name, shard in self._of_scalars(flat).items():
            flat[name] = like(shard, flat[name].reshape(1)[: local(shard).numel()])
        torch_versions.load_flat_state(held, self.optimizer, flat)
        # A parameter without state there has none here, or its next step would not be its first.
        begun = begun | {name.removeprefix("state.").rpartition(".")[0] for name in rest}
        named = held.named_parameters(remove_duplicate=False)
        self._forget(self.optimizer.state.keys() - {p for name, p in named if plain(name) in begun})

    def _begun(self) -> set[Tensor]:
        return {p for p, entry in self.optimizer.state.items() if entry.keys() - {MASTER}}

    def _forget(self, params: Iterable[Tensor]) -> None:
        """Leave these parameters without state, as before their first step."""
        if isinstance(self.optimizer, Offload):
            self.optimizer.forget_state(params)
        else:
            for p in params:
                del self.optimizer.state[p]

    def _of_scalars(self, flat: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the shards of 0-dim parameters, by the names of their moments in torch's flat state dict."""
        shards: dict[str, Tensor] = {
            f"state.{name}.": self.sharding.held.get_parameter(name) for name in self.sharding.scalars
        }
        found: dict[str, Tensor] = {}
        for name in flat:
            prefix = name[: name.rindex(".") + 1]
            if prefix in shards and not name.endswith(".step"):
                found[name] = shards[prefix]
        return found

    def masters(self) -> dict[str, Tensor]:
        """Return float32 weights by all names of their parameters, if the optimizer's own state has them; else {}."""
        return {}

    def _flat_masters(self) -> dict[str, Tensor]:
        """Return the masters by their names in torch's flat state dict."""
        return {f"state.{name}.{MASTER}": x for name, x in self.masters().items()}

    def load_own(self, states: Sequence[StateDict]) -> None:
        is_same = len(states) == self.grid.shape.size("replica")
        # All replicas have the same state, so another number of them loads the first.
        self.optimizer.load_state_dict(states[self.grid.coordinates["replica"] if is_same else 0])
