"""ShardedOptimizer: a sharded optimizer at rest. Its parameters in buckets, its state, its checkpoints.

Parameters stay where they are; what belongs to them lies flat in buckets, in the order in which backward produces
gradients. What happens in a step is in `optimizer.py`; the form of checkpoints in `state.py`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import comm
from ...agreement import replicas
from ...comm import Transport
from ...layout.buckets import Buckets, elements_of
from ...layout.flat import lay_out
from ...model_parallel import model_parallel_group_of
from ...step.clip import Clipper
from ...step.stats import Traffic
from ...usage.contract import check_group, check_saved_groups, load_checked, refuse_copy
from ...usage.marks import is_inspected
from . import state as shard_state
from . import vote as shard_vote
from .bucket import ShardedBucket
from .exchange import ShardedConfig

log = logging.getLogger(__name__)


class ShardedOptimizer(torch.optim.Optimizer, ABC):
    """Parameters in buckets whose chunks the ranks own. Arguments: see `ShardedOptions`.

    All ranks construct, load and add groups together. kind: what its states are called.
    """

    kind = "sharded"

    def __init__(
        self,
        params: object,
        defaults: dict[str, object],
        *,
        config: ShardedConfig,
        max_grad_norm: float,
        transport: Transport | None,
        momentum_dtype: torch.dtype,
        bucket_cap_mb: float,
    ):
        if momentum_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"momentum_dtype must be torch.float32 or torch.bfloat16, got {momentum_dtype}")
        if not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm must be at least 0 (0: off), got {max_grad_norm}")
        elements = elements_of(bucket_cap_mb)
        self.transport = comm.init() if transport is None else transport
        comm.check_transport(self.transport)
        self._config, self.momentum_dtype = config, momentum_dtype
        self._clip = Clipper(max_grad_norm)
        self._grad_stats, self._health, self._skipped_steps = shard_vote.GradStats(), shard_vote.Health(), 0
        whole = model_parallel_group_of(None)
        self.buckets: Buckets[ShardedBucket] = Buckets(self, self.transport, whole, elements, hooks=config.stage == 2)
        self._traffic = Traffic(self.transport)
        self._has_masters = self._is_warned_of_edits = False
        self._versions: list[int] | None = None
        self._bits: Tensor | None = None
        self._steps_here = 0  # of this object, whatever was loaded
        super().__init__(params, defaults)  # type: ignore[arg-type]
        self._build()

    @abstractmethod
    def on_gradient(self, p: Tensor) -> None:
        """p's gradient has just been accumulated. Called at stage 2 alone, by its hook."""

    # ---------------------------------------------------------------- construction

    def add_param_group(self, param_group: dict) -> None:
        """Add a group; all ranks, between the same two steps.

        Raises ValueError/TypeError as the constructor, and is then as it was.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
            if self.buckets.built_groups:
                self._build()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, g: int) -> None:
        """Raise ValueError or TypeError where a group's options are not for this optimizer."""
        where, group = f"rank {self.transport.rank}: group {g}", self.param_groups[g]
        check_group(where, group)
        if not group["eps"] > 0:
            raise ValueError(f"{where}: eps must be above 0, got {group['eps']}")
        if group.get("exp_avg_mask") is not None:
            raise ValueError(
                f"{where} has an exp_avg_mask, which {type(self).__name__} does not have; leave it out, or shard "
                "inside the node (onebit.sharding)"
            )

    def _build(self) -> None:
        self.buckets.build()
        self._versions = None
        self._traffic.begin()

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        options = {
            "config": self._config,
            "momentum_dtype": self.momentum_dtype,
            "max_grad_norm": self._clip.max_norm,
            "bucket_elements": self.buckets.elements,
        }
        return [f"option {name} = {value}" for name, value in options.items()]

    def begin_group(self, g: int) -> None:
        """Called by `Buckets`. A group has nothing beside its buckets."""

    def new_bucket(self, g: int, members: Sequence[tuple[Tensor, str]], device: torch.device) -> ShardedBucket:
        """Called by `Buckets`: a bucket of these parameters of group g."""
        layout = lay_out([p.shape for p, _ in members], self._config.codec.block, self.transport.world_size)
        bucket = ShardedBucket.new(
            len(self.buckets),
            len(self.buckets.params),
            g,
            members,
            layout,
            self.transport.rank,
            self.momentum_dtype,
            is_warm=self._config.warmup_steps > 0,
        )
        if self._config.stage > 0 and self._has_masters:
            bucket.owned.copy_(bucket.gather_replica())
        self.publish(bucket)
        return bucket

    def publish(self, bucket: ShardedBucket) -> None:
        """Show what is each parameter's as torch does: in optimizer.state[p], views of the flat tensors."""
        views = bucket.layout.views(bucket.momentum)
        for p, step, momentum in zip(bucket.params, bucket.steps, views, strict=True):
            self.state[p] = {"step": step, "momentum": momentum}

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Masters ← the parameters as they are now. All ranks, after changing them outside step(), alike on all."""
        if self._config.stage > 0:
            for bucket in self.buckets:
                bucket.owned.copy_(bucket.gather_replica())
        self._has_masters, self._versions = True, None

    def _check_masters(self) -> None:
        """Take them from the parameters before the first step; say so if somebody has changed those since."""
        if not self._has_masters:
            self.adopt_parameters()
        is_edited = self._versions is not None and (
            self._versions != [p._version for p in self.buckets.params]
            or (self._bits is not None and not torch.equal(self._bits, replicas.fingerprints(self.buckets.params)))
        )
        if is_edited and self._config.stage > 0 and not self._is_warned_of_edits:
            self._is_warned_of_edits = True
            log.warning(
                "rank %d: parameters were changed outside of step(); the masters were not, and will pull them back; "
                "call adopt_parameters() on all ranks after such a change",
                self.transport.rank,
            )

    def _remember_parameters(self) -> None:
        """As they are now, which is as the masters have them; in some steps their bits, for edits through .data."""
        self._versions = [p._version for p in self.buckets.params]
        params, self._bits = self.buckets.params, None
        if self._config.stage > 0 and not self._is_warned_of_edits and is_inspected(self._steps_here):
            self._bits = replicas.fingerprints(params)
        self._steps_here += 1

    def check_replicas(self) -> None:
        """Vote on the bits of all parameters; ReplicaError on all ranks if they differ. Sends 16 bytes per peer."""
        replicas.check_replicas(self.transport, self.buckets.params, self.buckets.names, self.steps_taken())

    def steps_taken(self) -> int:
        """The most steps that any parameter has taken."""
        return max((int(step) for bucket in self.buckets for step in bucket.steps), default=0)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank: momentum, masters, variance. Without the buffers of a step."""
        return sum(bucket.state_bytes() for bucket in self.buckets)

    # ---------------------------------------------------------------- checkpoints

    def _identity(self) -> dict[str, object]:
        """What a state must say to be this rank's."""
        return {
            "kind": self.kind,
            "version": shard_state.VERSION,
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "block": self._config.codec.block,
            "has_masters": self._config.stage > 0,
        }

    def state_dict(self) -> dict:
        """As torch's, and the chunks that this rank owns under "onebit": each rank saves and loads its own.

        The parameters, which are the replicas, are not in it: save the model's state beside it (any rank's).
        """
        if not self._has_masters:
            self.adopt_parameters()
        state = super().state_dict()
        state["onebit"] = {
            **self._identity(),
            "buckets": shard_state.bucket_records(self.buckets, self._config.codec),
            "clip_average": self._clip.average,
            "skipped_steps": self._skipped_steps,
            "grad_stats": vars(self._grad_stats).copy(),
            "health": vars(self._health).copy(),
            **self._extra_state(),
        }
        return state

    def __getstate__(self) -> dict:
        raise refuse_copy(self)

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue exactly where `state_dict` was taken, on the same rank of a world of the same size. All ranks.

        Load the model's parameters as well, before or after. Raises ValueError, before anything is changed, where
        world size, rank, shapes, dtypes or options do not fit.
        """
        self._restore(load_checked(self, state_dict, self._check_loadable))

    def load_state_dicts(self, states: Sequence[dict]) -> None:
        """Continue from the states of all ranks of a world of any size, in rank order. All ranks, all the states.

        In a world of the same size this rank's own is loaded, exactly. In another, masters and variances move with
        their elements, and each rank's momentum is the mean of the old ranks': the sum of what is still to be
        delivered, over ranks and times lr/W, is what it was. Rank 0 logs that. `states` may load an item when it is
        asked for. Raises ValueError as `load_state_dict`, and where the states are not those of one world.
        """
        if len(states) == self.transport.world_size:
            self.load_state_dict(states[self.transport.rank])
            return
        self.load_state_dict(shard_state.regather(states, self.kind, self.buckets, self.transport.world_size))
        if self.transport.rank == 0:
            log.info(
                "optimizer state of %d ranks taken over by %d: each owes the mean of what was owed",
                len(states),
                self.transport.world_size,
            )

    def _check_loadable(self, state: dict) -> None:
        where = f"rank {self.transport.rank}: cannot load this optimizer state: "
        check_saved_groups(where, state["param_groups"], self.param_groups)
        shard_state.check_record(state.get("onebit"), self._identity(), self.buckets, type(self).__name__)
        for name, p, entry in self.buckets.saved_entries(state):
            shard_state.check_entry(entry, p, name, self.momentum_dtype, self.transport.rank)

    def _restore(self, state: dict) -> None:
        entries, record = {p: entry for _, p, entry in self.buckets.saved_entries(state)}, state["onebit"]
        self.state.clear()
        for bucket, saved in zip(self.buckets, record["buckets"], strict=True):
            shard_state.restore(bucket, saved, [entries[p] for p in bucket.params])
            self.publish(bucket)
        self._clip.average = tuple(record["clip_average"])
        self._skipped_steps = record["skipped_steps"]
        self._grad_stats, self._health = (
            shard_vote.GradStats(**record["grad_stats"]),
            shard_vote.Health(**record["health"]),
        )
        self._has_masters, self._versions = True, None
        self._load_extra_state(record)

    def _extra_state(self) -> dict:
        """What a leaf keeps besides; the same on all ranks."""
        return {}

    def _load_extra_state(self, record: dict) -> None:
        """Take over what `_extra_state` has put into a record."""
