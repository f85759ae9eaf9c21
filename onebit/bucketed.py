"""BucketedOptimizer: a compressed optimizer at rest. Its parameters in flat buckets, its state, its checkpoints.

Parameters stay where they are; what belongs to them lies flat in buckets, in the order in which backward produces
gradients, and shows in `optimizer.state` as views. What happens in a step is in `base.py`.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from . import comm
from .adam import sums_of_live_blocks
from .agreement import replicas
from .agreement.step_vote import option_lines
from .bucket import Bucket
from .checkpoint.change_world_size import gather_states, reframe, resize
from .comm import FusedCodec, Hierarchy, SignCodec, Transport
from .contract import (
    check_adam_entry,
    check_group,
    check_parameters,
    check_saved_groups,
    load_checked,
    refuse_copy,
)
from .flat import lay_out, partition
from .frozen import check_place
from .model_parallel import ModelParallelGroup, local, model_parallel_group_of

log = logging.getLogger(__name__)

_CHECKPOINT_VERSION = 1


@dataclass
class Slot:
    """Where a parameter belongs, and how many backward passes since the last step are in its gradient."""

    bucket: Bucket
    passes: int = 0
    is_complete: bool = False
    _grad: weakref.ref[Tensor] | None = field(default=None, repr=False)

    def count_pass(self, grad: Tensor) -> None:
        """A backward pass has added to this gradient. A new one drops what earlier passes had added to another."""
        if self._grad is None or self._grad() is not grad:
            self._grad, self.passes = weakref.ref(grad), 0
        self.passes += 1


class BucketedOptimizer(torch.optim.Optimizer, ABC):
    """Parameters in buckets; all ranks construct, load and add groups together. Arguments: see `CommonOptions`.

    kind: what its states are called. adam_names: torch.optim's names for what is named otherwise here.
    """

    kind = ""
    adam_names: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        params: object,
        defaults: dict[str, object],
        *,
        transport: Transport | None,
        model_parallel_group: ModelParallelGroup | Transport | None,
        codec: FusedCodec | None,
        error_dtype: torch.dtype,
        bucket_cap_mb: float,
    ):
        if error_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"error_dtype must be torch.float32 or torch.bfloat16, got {error_dtype}")
        if not 0 < bucket_cap_mb < math.inf:
            raise ValueError(f"bucket_cap_mb must be above 0 and finite, got {bucket_cap_mb}")
        self.transport = comm.init() if transport is None else transport
        comm.check_transport(self.transport)
        self.model_parallel_group = model_parallel_group_of(model_parallel_group)
        self._hierarchy = Hierarchy.of(self.transport)
        self.codec: FusedCodec = SignCodec() if codec is None else comm.check_fused(codec)
        self.error_dtype = error_dtype
        self._bucket_elements = max(1, int(bucket_cap_mb * 2**20 / 4))
        self._buckets: list[Bucket] = []
        self._slots: dict[Tensor, Slot] = {}
        self._frozen: dict[Tensor, str] = {}  # without state, by name
        self._steps: list[Tensor] = []
        self._masks: dict[int, dict[Tensor, Tensor]] = {}
        self._built_groups = 0
        super().__init__(params, defaults)  # type: ignore[arg-type]
        self._build_groups()

    # ---------------------------------------------------------------- what a leaf defines

    @abstractmethod
    def _allocate(self, bucket: Bucket, phase: str) -> None:
        """Give the bucket the zeroed state (flat, frames, ef) of a phase. "warmup" is the first."""

    def _adopt_dense_state(self) -> None:
        """The state that was just loaded is that of a dense optimizer: torch.optim.AdamW, or Lamb."""

    @abstractmethod
    def _on_gradient(self, p: Tensor) -> None:
        """p's gradient has just been accumulated."""

    # ---------------------------------------------------------------- construction

    def add_param_group(self, param_group: dict) -> None:
        """Add a group; all ranks, at the same step. It warms up for as many steps as the first groups did.

        Raises ValueError/TypeError as the constructor, and is then as it was.
        """
        super().add_param_group(param_group)
        try:
            check_group(f"rank {self.transport.rank}: group {len(self.param_groups) - 1}", self.param_groups[-1])
            if self._built_groups:
                self._build_groups()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _build_groups(self) -> None:
        """Check, equalise and bucket the groups that have been added since the last call."""
        new = range(self._built_groups, len(self.param_groups))
        params = [(g, p, name) for g in new for p, name in self._named(g)]
        check_parameters(self.transport.rank, [(p, name) for _, p, name in params])
        for _, p, name in params:
            self.model_parallel_group.check_holds(p, name)
        device = params[0][1].device if params else torch.device("cpu")
        # Along the transport first: what it does not show differs between the shards of every replica.
        for transport, held in ((self.transport, local), (self.model_parallel_group.transport, lambda p: p)):
            seen = [(name, p, tuple(held(p).shape)) for _, p, name in params]
            lines = [f"{name}: {p.dtype} {shape} requires_grad={p.requires_grad}" for name, p, shape in seen]
            lines += [*self._options(), *option_lines(self.param_groups[g] for g in new)]
            check = functools.partial(replicas.check_same_lines, transport, "the parameters", lines, device)
            self.model_parallel_group.raise_on_all_ranks(ValueError, check)
        if self.model_parallel_group.stages is not None:
            replicas.check_same_lines(self.model_parallel_group.stages, "the stages' options", self._options(), device)
        replicas.make_equal(self.transport, [local(p) for _, p, _ in params if local(p).numel() > 0])
        for g in new:
            self._read_masks(g)
        for g in new:
            self._steps.append(torch.tensor(0.0))
            self._build_buckets(g)
        self._built_groups = len(self.param_groups)

    def _options(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        names = ("codec", "error_dtype", "_bucket_elements")
        return [f"option {name.lstrip('_')} = {getattr(self, name)}" for name in names]

    def _named(self, g: int) -> Iterator[tuple[Tensor, str]]:
        group = self.param_groups[g]
        names = group.get("param_names") or [f"parameter {k} of group {g}" for k in range(len(group["params"]))]
        return zip(group["params"], names, strict=True)

    def _read_masks(self, g: int) -> None:
        """Check the group's "exp_avg_mask": a tensor for all its parameters, or one for each; 0 where none may move."""
        masks = self.param_groups[g].get("exp_avg_mask")
        if masks is None:
            self._masks.pop(g, None)
            return
        named = list(self._named(g))
        per_parameter = [masks] * len(named) if isinstance(masks, Tensor) else list(masks)
        if len(per_parameter) != len(named):
            raise ValueError(
                f"rank {self.transport.rank}: exp_avg_mask of group {g} has {len(per_parameter)} masks for "
                f"{len(named)} parameters; give one tensor, or one for each"
            )
        for (p, name), mask in zip(named, per_parameter, strict=True):
            try:
                fits = torch.broadcast_shapes(mask.shape, p.shape) == p.shape
            except RuntimeError:
                fits = False
            if not fits:
                raise ValueError(
                    f"rank {self.transport.rank}: exp_avg_mask of {name} has shape {tuple(mask.shape)}, which does not "
                    f"broadcast to the parameter's {tuple(p.shape)}"
                )
        pairs = zip(named, per_parameter, strict=True)
        self._masks[g] = {p: _local_mask(mask, p).to(p.device, torch.float32) for (p, _), mask in pairs}

    def _build_buckets(self, g: int) -> None:
        trained = [(p, name) for p, name in self._named(g) if p.requires_grad]
        self._frozen |= {p: name for p, name in self._named(g) if not p.requires_grad}
        for device in dict.fromkeys(p.device for p, _ in trained):
            here = [(p, name) for p, name in trained if p.device == device]
            # By whole sizes: all shards have the same parameters in the same buckets, some of them with no elements.
            sizes = [-(-p.numel() // self.model_parallel_group.pieces(p)) for p, _ in here]
            for indices in partition(sizes, self._bucket_elements):
                bucket = self._new_bucket(g, [here[i] for i in indices], device)
                self._buckets.append(bucket)
                for p in bucket.params:
                    self._slots[p] = Slot(bucket)
                    self._hook(p)

    def _new_bucket(self, g: int, members: list[tuple[Tensor, str]], device: torch.device) -> Bucket:
        params, names = [p for p, _ in members], [name for _, name in members]
        layout = lay_out([local(p).shape for p in params], self.codec.block, self.transport.world_size)
        bucket = Bucket(
            index=len(self._buckets),
            first=len(self._slots),
            hierarchy=self._hierarchy,
            group_index=g,
            device=device,
            params=params,
            names=names,
            layout=layout,
            counts=layout.counts(device),
            share_K=tuple(1.0 / self.model_parallel_group.copies(p) for p in params),
        )
        self._allocate(bucket, "warmup")
        self._publish(bucket)
        return bucket

    def _hook(self, p: Tensor) -> None:
        myself = weakref.ref(self)

        def gradient_is_ready(param: Tensor) -> None:
            optimizer = myself()
            if optimizer is not None:
                optimizer._on_gradient(param)

        p.register_post_accumulate_grad_hook(gradient_is_ready)

    def _gradients(self, bucket: Bucket) -> list[Tensor | None]:
        """The bucket's gradients where they lie, or in new tensors where a mask is on them.

        Raises RuntimeError as `Bucket.gradients`, and where a parameter was moved or resized.
        """
        for p, name, shape in zip(bucket.params, bucket.names, bucket.layout.shapes, strict=True):
            check_place(self.transport.rank, p, name, shape, bucket.device)
        grads, masks = bucket.gradients(), self._masks.get(bucket.group_index)
        if masks is None:
            return grads
        return [None if g is None else g * masks[p] for p, g in zip(bucket.params, grads, strict=True)]

    def _mask(self, bucket: Bucket) -> None:
        """x ← x · the masks of the bucket's group, one for each parameter, where it has any."""
        masks = self._masks.get(bucket.group_index)
        if masks is not None:
            for p, view in zip(bucket.params, bucket.x_views, strict=True):
                view.mul_(masks[p])

    def _may_move(self, bucket: Bucket) -> Tensor | None:
        """Flat, 1 where the masks of the bucket's group let an element move, else 0; None where it has no masks."""
        masks = self._masks.get(bucket.group_index)
        if masks is None:
            return None
        flat = torch.ones(bucket.layout.numel, device=bucket.device)
        for p, view in zip(bucket.params, bucket.layout.views(flat), strict=True):
            view.copy_(masks[p] != 0)
        return flat

    def _mask_state(self, bucket: Bucket) -> None:
        """What may not move has no momentum, owes nothing, and is owed nothing."""
        may_move = self._may_move(bucket)
        if may_move is None:
            return
        for name in {"exp_avg", "exp_avg_update", "accumulated"} & bucket.flat.keys():
            bucket.flat[name].mul_(may_move)
        if bucket.ef is not None:
            bucket.ef.worker.mul_(bucket.own_rows(may_move).reshape(-1))
            bucket.ef.server.mul_(bucket.own_chunk(may_move))

    def _rows(self, flat: Tensor) -> Tensor:
        """A flat tensor of a bucket, one row for each owner."""
        return flat.view(self.transport.world_size, -1)

    def _mean_of_live_blocks(self, buckets: Sequence[Bucket], variances: Sequence[Tensor]) -> float:
        """The mean of v over all blocks of the model in which it is not zero; 1 where there is none."""
        shares = [bucket.share_J for bucket in buckets]
        total, elements = self.model_parallel_group.total(*sums_of_live_blocks(variances, shares, self.codec.block))
        return total / elements if elements else 1.0

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank: moments, errors, packed momentum. Without bucket and wire buffers."""
        return sum(
            sum(t.nbytes for t in bucket.flat.values())
            + (0 if bucket.frames is None else bucket.frames.nbytes)
            + (0 if bucket.ef is None else bucket.ef.worker.nbytes + bucket.ef.server.nbytes)
            for bucket in self._buckets
        )

    def buffer_bytes(self) -> int:
        """Bytes of buckets and wire buffers on this rank; what DDP calls its buckets."""
        wires = [wire for bucket in self._buckets for wire in bucket.wires.values()]
        efs = [bucket.ef for bucket in self._buckets if bucket.ef is not None]
        tensors = [bucket.x for bucket in self._buckets if bucket.x_bytes]
        tensors += [t for wire in wires for t in (wire.frames_WB, wire.received_HB, wire.mean) if t is not None]
        tensors += [t for ef in efs for t in (ef.worker_next, ef.server_next)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    # ---------------------------------------------------------------- checkpoints

    def _publish(self, bucket: Bucket) -> None:
        """Show the bucket's state as torch does: optimizer.state[p], views of the flat tensors."""
        views = {name: bucket.layout.views(flat) for name, flat in bucket.flat.items()}
        for k, p in enumerate(bucket.params):
            self.state[p] = {"step": self._steps[bucket.group_index], **{name: v[k] for name, v in views.items()}}

    def state_dict(self) -> dict:
        """As torch's, and this rank's share of the compression under "onebit": each rank saves and loads its own.

        What is owed is among the entries of the parameters, as "worker_error"; in two levels, zeros where another rank
        of the node exchanges the element.
        """
        state = super().state_dict()
        for key, entry in state["state"].items():
            # One tensor counts for a whole group here; torch's optimizers take each parameter's for its own.
            state["state"][key] = {**entry, "step": entry["step"].clone()}
        self._add_worker_errors(state)
        keys = self._keys()
        state["onebit"] = {
            **self._identity(),
            "steps": [int(count) for count in self._steps],
            "buckets": [
                {
                    "phase": bucket.phase,
                    "numel": bucket.layout.numel,
                    "params": [keys[p] for p in bucket.params],
                    "frames": bucket.frames,
                    "server_error": None if bucket.ef is None else bucket.ef.server,
                }
                for bucket in self._buckets
            ],
            **self._extra_state(),
        }
        return state

    def _identity(self) -> dict[str, object]:
        """What a state must say to be this rank's."""
        return {
            "kind": self.kind,
            "version": _CHECKPOINT_VERSION,
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "local_size": self._hierarchy.local_size,
            "shard": self.model_parallel_group.whole.rank,
            "shards": self.model_parallel_group.whole.world_size,
            "block": self.codec.block,
            "codec": self.codec.name,
        }

    def _keys(self) -> dict[Tensor, int]:
        """What torch calls each parameter in a state: its number, through all groups."""
        return {p: key for key, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def _add_worker_errors(self, state: dict) -> None:
        errors: dict[Tensor, Tensor] = {}
        for bucket in self._buckets:
            if bucket.ef is not None:
                errors |= zip(bucket.params, bucket.layout.views(bucket.spread(bucket.ef.worker)), strict=True)
        for group, packed in zip(self.param_groups, state["param_groups"], strict=True):
            for p, key in zip(group["params"], packed["params"], strict=True):
                if p in errors:
                    state["state"][key] = {**state["state"][key], "worker_error": errors[p]}

    def __getstate__(self) -> dict:
        raise refuse_copy(self)

    def load_state_dicts(self, states: Sequence[dict]) -> None:
        """Continue from the states of all ranks of a world of any size, in rank order. All ranks, all the states.

        In a world of the same size and levels, this rank's own is loaded, exactly. Otherwise each rank will owe the
        mean of what the old ranks owed, which keeps its sum, and rank 0 logs that. Between synchronisations of 0/1 Adam
        parameters are part of the state: they become the mean of the old ranks' too. `states` may load an item when it
        is asked for. Raises ValueError as `load_state_dict`, and where the states are not those of one world.
        """
        if len(states) == self.transport.world_size and self._is_of_these_levels(mine := states[self.transport.rank]):
            self.load_state_dict(mine)
            return
        if states and (first := states[0].get("onebit")) is not None:
            self._check_kind(first)
        world = gather_states(states)
        record = world.state["onebit"] | {
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "local_size": self._hierarchy.local_size,
        }
        is_of_this_codec = (record["block"], record.get("codec", "sign")) == (self.codec.block, self.codec.name)
        if is_of_this_codec and len(record["buckets"]) == len(self._buckets):
            record["buckets"] = [
                self._adapt(*saved) for saved in zip(self._buckets, record["buckets"], world.server_errors, strict=True)
            ]
        self.load_state_dict({**world.state, "onebit": record})
        if self.transport.rank == 0:
            log.info(
                "optimizer state of %d ranks taken over by %d: each owes the mean of what was owed, its sum is kept",
                world.size,
                self.transport.world_size,
            )

    def _is_of_these_levels(self, state: dict) -> bool:
        return state.get("onebit", {}).get("local_size", 1) == self._hierarchy.local_size

    def _adapt(self, bucket: Bucket, saved: dict, server_error: Tensor | None) -> dict:
        """A bucket's record, for this rank of this world."""
        layout = bucket.layout
        frames = saved["frames"]
        return {
            "phase": saved["phase"],
            "numel": layout.numel,
            "frames": None if frames is None else reframe(frames, self.codec, saved["numel"], layout),
            "server_error": None if server_error is None else bucket.own_chunk(resize(server_error, layout.numel)),
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue exactly where `state_dict` was taken, on the same rank of a world of the same size. All ranks.

        The state of a torch.optim.AdamW is taken as the state of a warm-up. An "exp_avg_mask" stays as it was given
        here. Raises ValueError, before anything is changed, where world size, rank, shapes, dtypes or options do not
        fit.
        """
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        saved = load_checked(self, state_dict, self._check_loadable)
        for g, (group, mask) in enumerate(zip(self.param_groups, masks, strict=True)):
            if group.pop("exp_avg_mask", None) is not None and mask is None and self.transport.rank == 0:
                log.warning(
                    "the exp_avg_mask of group %d in this state is not taken over: give it to the optimizer's group if "
                    "it is still wanted",
                    g,
                )
            if mask is not None:
                group["exp_avg_mask"] = mask
        self._restore(saved)

    def _check_kind(self, record: dict) -> None:
        of_old = "1-bit LAMB" if "layers" in record else "1-bit Adam" if "last_dense" in record else "0/1 Adam"
        kind = record.get("kind", of_old)
        if kind != self.kind:
            raise ValueError(
                f"rank {self.transport.rank}: cannot load this optimizer state: it is that of {kind}, this is "
                f"{self.kind}, for which it has no meaning; to go on from the model's weights alone load no "
                "optimizer state"
            )

    def _check_loadable(self, state: dict) -> None:
        where = f"rank {self.transport.rank}: cannot load this optimizer state: "
        check_saved_groups(where, state["param_groups"], self.param_groups)
        record = state.get("onebit")
        if record is not None:
            self._check_kind(record)
            # Not in the first files.
            record = {"local_size": 1, "shard": 0, "shards": 1, "kind": self.kind, "codec": "sign"} | record
            for key, value in self._identity().items():
                there = record[key]
                if there != value:
                    raise ValueError(
                        f"{where}{key} is {there} there and {value} here; each rank loads its own, or all ranks "
                        "load those of all ranks with load_state_dicts"
                    )
            numels = [bucket.layout.numel for bucket in self._buckets]
            if [b["numel"] for b in record["buckets"]] != numels:
                raise ValueError(f"{where}the buckets differ; construct with the same groups, shapes and bucket_cap_mb")
        for name, p, entry in self._saved_entries(state):
            if record is None:
                check_adam_entry(where, name, entry, local(p).shape)
            for key, value in entry.items():
                if key == "step":
                    continue
                shape = local(p).shape
                if value.shape != shape:
                    raise ValueError(
                        f"{where}{key} of {name} has shape {tuple(value.shape)}, the parameter {tuple(shape)}"
                    )
                expected = self.error_dtype if key == "worker_error" else None
                if not value.is_floating_point() or expected not in (None, value.dtype):
                    raise ValueError(
                        f"{where}{key} of {name} is {value.dtype}, expected {expected or 'floating point'}"
                    )

    def _saved_entries(self, state: dict) -> Iterator[tuple[str, Tensor, dict]]:
        """(name, parameter, its saved state) for every trained parameter."""
        for g, group in enumerate(state["param_groups"]):
            for (p, name), key in zip(self._named(g), group["params"], strict=True):
                if p in self._slots:
                    yield name, p, state["state"].get(key, {})

    def _restore(self, state: dict) -> None:
        record = state.get("onebit")
        if record is not None:
            for count, saved_count in zip(self._steps, record.get("steps", ()), strict=False):
                count.fill_(float(saved_count))  # also of groups that have no parameters here
        entries = {p: entry for _, p, entry in self._saved_entries(state)}
        for bucket in self._buckets:
            saved = None if record is None else record["buckets"][bucket.index]
            self._allocate(bucket, "warmup" if saved is None else saved["phase"])
            for name, flat in bucket.flat.items():
                for p, view in zip(bucket.params, bucket.layout.views(flat), strict=True):
                    found = entries[p].get(name, entries[p].get(self.adam_names.get(name, "")))
                    if found is not None:
                        view.copy_(found)
            if saved is not None and bucket.frames is not None:
                bucket.frames.copy_(saved["frames"])
            if saved is not None and bucket.ef is not None:
                bucket.ef.server.copy_(saved["server_error"])
                self._restore_worker_error(bucket, [entries[p].get("worker_error") for p in bucket.params])
            step = entries[bucket.params[0]].get("step")
            if step is not None:
                self._steps[bucket.group_index].fill_(float(step))
        self.state.clear()
        for bucket in self._buckets:
            self._publish(bucket)
        if record is not None:
            self._load_extra_state(record)
        else:
            self._adopt_dense_state()
        for g in range(len(self.param_groups)):
            self._read_masks(g)
        for bucket in self._buckets:
            self._mask_state(bucket)

    def _restore_worker_error(self, bucket: Bucket, saved: Sequence[Tensor | None]) -> None:
        assert bucket.ef is not None
        flat = torch.zeros(bucket.layout.numel, dtype=self.error_dtype, device=bucket.device)
        for view, error in zip(bucket.layout.views(flat), saved, strict=True):
            if error is not None:
                view.copy_(error)
        bucket.ef.worker.copy_(bucket.own_rows(flat).view(-1))

    def _extra_state(self) -> dict:
        """What else a leaf must keep, as plain numbers and tensors."""
        return {}

    def _load_extra_state(self, record: dict) -> None:
        """Take back what `_extra_state` gave."""


def _local_mask(mask: Tensor, p: Tensor) -> Tensor:
    """The part of a mask that belongs to what this rank holds of p; the mask is the whole parameter's."""
    if not hasattr(p, "to_local"):
        return mask
    from torch.distributed.tensor import distribute_tensor

    whole = mask.expand(p.shape).to(p.device).contiguous()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))
