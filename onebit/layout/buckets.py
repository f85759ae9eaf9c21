"""The buckets of an optimizer: the trained parameters are grouped, checked, made equal on all ranks, and hooked.

Every optimizer that exchanges compressed uses it; the owner makes the buckets (`bucket.py`, `zero/sharded/bucket.py`).
Parameters stay in their own memory.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..agreement import replicas
from ..agreement.step_vote import option_lines
from ..comm import Transport
from ..comm.messages import raise_on_all_ranks
from ..model_parallel import ModelParallelGroup, local
from ..usage.contract import Group, State, check_parameters
from ..usage.edits import edit_of_groups, edit_of_options
from ..usage.gradients import gradient_of
from ..usage.graphs import outside_graphs
from .flat import Layout, least_elements, partition


class AnyBucket(Protocol):
    """The members that every kind of bucket has."""

    index: int
    first: int
    group_index: int
    group: State
    device: torch.device
    params: list[Tensor]
    names: list[str]
    layout: Layout

    def gradients(self) -> list[Tensor | None]:
        """The gradients, not copied; None for a parameter without one, or frozen now."""

    def state_bytes(self) -> int:
        """Bytes of its state on this rank."""


B = TypeVar("B", bound=AnyBucket)


class BucketOwner(Protocol[B]):
    """The optimizer, or the part of it that owns buckets."""

    @property
    def param_groups(self) -> list[Group]:
        """The optimizer's param groups."""

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""

    def begin_group(self, g: int) -> None:
        """Called when group g has been checked, before its buckets are made."""

    def new_bucket(self, g: int, members: Sequence[tuple[Tensor, str]], device: torch.device) -> B:
        """Make a bucket of these parameters of group g, with its state.

        Args:
            g: Index of the group.
            members: (parameter, name) pairs.
            device: Device of the parameters.
        """

    def publish(self, bucket: B) -> None:
        """Show a bucket's state, which has new tensors, in optimizer.state."""

    def gradient_is_ready(self, p: Tensor) -> None:
        """Called when p's gradient has just been accumulated."""


def elements_of(bucket_cap_mb: float | None) -> int | None:
    """Number of elements of a bucket of this many float32 MiB; None: as the device of its parameters asks.

    Raises ValueError on this rank alone.
    """
    if bucket_cap_mb is None:
        return None
    if not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb must be above 0 and finite, got {bucket_cap_mb}")
    return max(1, int(bucket_cap_mb * 2**20 / 4))


def default_elements(device: torch.device, world_size: int) -> int:
    """Number of elements of a bucket at most: 16 float32 MiB in host memory, 64 on a GPU; more for many ranks.

    On a GPU a bucket costs the host half a millisecond, whatever its size (scripts/records/gpu_h200_2026-11.md).
    """
    return max((16 if device.type == "cpu" else 64) << 18, 2 * least_elements(world_size))


class Buckets(list[B]):
    """A list of all groups' buckets, in the order in which backward produces gradients. All ranks build them together.

    Args:
        owner: Makes the buckets.
        transport: Between the replicas.
        parts: The ranks that hold the parts of this replica.
        elements: Elements of a bucket at most, see `elements_of`; a larger parameter has its own. None: as many as
            `default_elements` says.
        hooks: Whether to call the owner's `gradient_is_ready`. Default True.

    Attributes:
        elements: The same.
        params: The trained parameters, in the order of buckets.
        frozen: The other parameters, with their names; they have no state.
        built_groups: Number of groups that have buckets.
        of: The bucket of each trained parameter.
        groups: The optimizer's param groups; each bucket's `group` is one of them.
    """

    def __init__(
        self,
        owner: BucketOwner[B],
        transport: Transport,
        parts: ModelParallelGroup,
        elements: int | None,
        *,
        hooks: bool = True,
    ):
        super().__init__()
        self._owner, self._transport, self._parts, self._hooks = owner, transport, parts, hooks
        self.elements = elements
        self.params: list[Tensor] = []
        self.frozen: dict[Tensor, str] = {}
        self.built_groups = 0
        self.of: dict[Tensor, B] = {}
        self.groups: list[State] = []
        self._given: list[list[Tensor]] = []  # by group, the parameters from which it was built
        self._groups: list[Group] = []  # the groups at the last `find_edit`

    def link(self, groups: list[State]) -> None:
        """Give each bucket its group anew. Call it after loading a state, which replaces the optimizer's groups."""
        self.groups = groups
        for bucket in self:
            bucket.group = groups[bucket.group_index]

    @contextmanager
    def with_options(self, options: list[State]) -> Iterator[None]:
        """In this block groups have these options, of an earlier step. They contain options only, no parameters."""
        before = self.groups
        self.link(options)
        try:
            yield
        finally:
            self.link(before)

    def publish(self, bucket: B) -> None:
        """Show the bucket's state, which has new tensors, in optimizer.state."""
        self._owner.publish(bucket)

    @property
    def names(self) -> list[str]:
        """Names of `params`, in their order."""
        return [name for bucket in self for name in bucket.names]

    def named(self, g: int) -> Iterator[tuple[Tensor, str]]:
        """(parameter, name) for every parameter of group g."""
        group = self._owner.param_groups[g]
        names = group.get("param_names") or [f"parameter {k} of group {g}" for k in range(len(group["params"]))]
        return zip(group["params"], names, strict=True)

    def numbers(self) -> dict[Tensor, int]:
        """The number of each parameter in torch's state_dict, counted through all groups."""
        return {p: key for key, p in enumerate(p for group in self._owner.param_groups for p in group["params"])}

    def saved_entries(self, state: State) -> Iterator[tuple[str, Tensor, State]]:
        """(name, parameter, its saved state) for every trained parameter.

        Args:
            state: A state_dict.
        """
        for g, group in enumerate(state["param_groups"]):
            for (p, name), key in zip(self.named(g), group["params"], strict=True):
                if p in self.of:
                    yield name, p, state["state"].get(key, {})

    def find_edit(self, check: Callable[[str, Group], None]) -> str:
        """Find out whether others have changed the groups in ways that are not allowed, and undo it.

        Args:
            check: Raises TypeError or ValueError if the options of a group, whose name comes first, are bad.

        Returns:
            A message that names the change and its remedy; "" if there is none.
        """
        groups = self._owner.param_groups
        edit = edit_of_groups(groups, self._given) or edit_of_options(groups, self._groups, check)
        if edit:
            groups[:] = self._groups
            for group, params in zip(groups, self._given, strict=True):
                group["params"][:] = params
        elif not all(map(is_, groups, self._groups)):  # new group dicts with the same parameters
            self.link(groups)
        self._groups = list(groups)
        return edit

    def have_frozen_gradients(self) -> list[bool]:
        """For each parameter of `frozen`, whether it has a gradient here. In a vote, these follow those of `params`."""
        return [gradient_of(p) is not None for p in self.frozen]

    def refuse_unfrozen(self, by_rank: Sequence[Sequence[bool]]) -> None:
        """Raise RuntimeError on all ranks if any has a gradient for a parameter that was frozen at construction.

        Args:
            by_rank: `have_frozen_gradients` of each rank; the same on all ranks.
        """
        for name, column in zip(self.frozen.values(), zip(*by_rank, strict=True), strict=True):
            if any(column):
                ranks = [k for k, is_present in enumerate(column) if is_present]
                raise RuntimeError(
                    f"rank {self._transport.rank}: {name} has a gradient on rank {ranks}, but was frozen when the "
                    "optimizer was constructed, and has no state. Leave it out of the groups until it is to be "
                    "trained, and add_param_group it then, on all ranks before the same step; or construct with "
                    "requires_grad=True and freeze it afterwards"
                )

    # ---------------------------------------------------------------- construction

    def build(self) -> None:
        """Check, equalise and bucket the groups that have been added since the last call. All ranks.

        Raises:
            ValueError: Parameters are bad, or differ from other ranks'. There are no new buckets.
            TypeError: A parameter has a dtype that is not trained. There are no new buckets.
        """
        groups = self._owner.param_groups
        if self.built_groups:
            edit = edit_of_groups(groups[: self.built_groups], self._given)
            raise_on_all_ranks(self._transport, edit and f"rank {self._transport.rank}: {edit}", ValueError)
        self.link(groups)
        new = range(self.built_groups, len(groups))
        params = [(g, p, name) for g in new for p, name in self.named(g)]
        check_parameters(self._transport.rank, [(p, name) for _, p, name in params])
        for _, p, name in params:
            if p.is_meta:
                raise ValueError(
                    f'rank {self._transport.rank}: {name} is on the device "meta", without a value; give the model '
                    "values first (model.to_empty(device=...) and its initialisation, or zero.initialize(weights=...))"
                )
            self._parts.check_holds(p, name)
        device = params[0][1].device if params else torch.device("cpu")
        held = [local(p) for _, p, _ in params]
        options = self._owner.option_lines()
        of_groups = option_lines([groups[g] for g in new])
        # All comparisons before an error, as other ranks wait in them. Between replicas first: any other difference is
        # one between the shards of every replica.
        problem = ""
        for transport, tensors in ((self._transport, held), (self._parts.transport, [p for _, p, _ in params])):
            seen = [(name, p, tuple(x.shape)) for (_, p, name), x in zip(params, tensors, strict=True)]
            lines = [f"{name}: {p.dtype} {shape} requires_grad={p.requires_grad}" for name, p, shape in seen]
            found = replicas.unequal_lines(transport, "the parameters", [*lines, *options, *of_groups], device)
            problem = problem or found
        if self._parts.stages is not None:
            found = replicas.unequal_lines(self._parts.stages, "the stages' options", options, device)
            problem = problem or found
        raise_on_all_ranks(self._parts.whole, problem, ValueError)
        try:
            replicas.make_equal(self._transport, [x for x in held if x.numel() > 0])
        except ValueError as error:
            problem = str(error)
        raise_on_all_ranks(self._parts.whole, problem, ValueError)
        for g in new:
            self._owner.begin_group(g)
        for g in new:
            self._build_group(g)
        self.built_groups = len(groups)
        self._given += [list(groups[g]["params"]) for g in new]
        self._groups = list(groups)

    def _build_group(self, g: int) -> None:
        trained = [(p, name) for p, name in self.named(g) if p.requires_grad]
        self.frozen |= {p: name for p, name in self.named(g) if not p.requires_grad}
        W = self._transport.world_size
        for device in dict.fromkeys(p.device for p, _ in trained):
            here = [(p, name) for p, name in trained if p.device == device]
            # By whole sizes, so that all shards have the same parameters in the same buckets, even without elements.
            sizes = [-(-p.numel() // self._parts.pieces(p)) for p, _ in here]
            for indices in partition(sizes, self.elements or default_elements(device, W), least_elements(W)):
                bucket = self._owner.new_bucket(g, [here[i] for i in indices], device)
                self.append(bucket)
                for p in bucket.params:
                    self.params.append(p)
                    self.of[p] = bucket
                    if self._hooks:
                        self._hook(p)

    def _hook(self, p: Tensor) -> None:
        mine = weakref.ref(self._owner)  # a hook lives as long as its parameter

        @outside_graphs
        def gradient_is_ready(param: Tensor) -> None:
            owner = mine()
            if owner is not None:
                owner.gradient_is_ready(param)

        p.register_post_accumulate_grad_hook(gradient_is_ready)
