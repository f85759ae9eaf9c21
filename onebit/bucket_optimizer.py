"""BucketOptimizer: the frame of a step, for every optimizer that exchanges its buckets compressed.

Two families rest on it: `optimizer.py`, with the state on every rank, and `zero/sharded/optimizer.py`, with a part on
each. A family defines how its buckets are exchanged and decided. The rest of a step is the same for both:

    step()      if ranks have different numbers of batches: does any rank have one left? (`join`)
                the family takes the step of all buckets, or all ranks skip it
                now and then a vote on the replicas' bits
                stats; an error after too many skipped steps in a row

So is the vote before a step: which step it is, with which options, from which gradients. One table defines the states
of a step and the events that change them, for both: `TRANSITIONS` of `step/driver.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor

from . import comm
from .agreement.join import Join, alone_in_join
from .agreement.replicas import ReplicaCheck
from .agreement.skips import MOST_SKIPS, SkipLimit
from .agreement.step_vote import Header, StepVote, check_headers, gather_headers
from .agreement.wrappers import COMPARED_STEPS, NOT_COMPARED, WrapperWatch, gradient_digest, refuse_wrapper
from .comm import PeerError, Transport
from .layout.buckets import B, Buckets, elements_of
from .membership.members import Members
from .model_parallel import ModelParallelGroup, model_parallel_group_of
from .rule import BucketRule
from .step.clip import Clipper
from .step.driver import Driver, StepState
from .step.overlap import Overlap
from .step.stats import Stats, StopWatch, Traffic, WaitClock
from .usage.contract import (
    Group,
    State,
    TorchOptions,
    check_arguments,
    check_group,
    check_is_number,
    listed_parameters,
    loss_of,
    refuse_copy,
)
from .usage.edits import edit_of_state
from .usage.graphs import Optimizer, outside_graphs
from .usage.marks import GradientMark, are_used_again, marks_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class BucketOptimizer(Optimizer, ABC, Generic[B]):
    """Base of both families. All ranks construct, step, load and add groups together.

    A family's constructor checks its options, calls `__init__`, which makes the parts and may join other ranks, binds
    its rule and its placement, and then calls `_construct`.

    Args:
        parts: `model_parallel_group` of `CommonOptions`.
        hooks: Whether to look at gradients as they are computed; see `Buckets`.
        max_grad_norm: As in `SharedOptions`, like the following. Default 0.
        transport: Default None: `onebit.comm.init()`.
        bucket_cap_mb: float32 MiB per bucket at most. Default None: 16 in host memory, 64 on a GPU.
        check_replicas_every: Steps between votes on the replicas' bits. Default 100.
        max_consecutive_skips: Skipped steps in a row that are an error. Default `MOST_SKIPS`.
        **torchs: See `TorchOptions`.
    """

    _step_supports_amp_scaling = True
    rule: BucketRule[B]
    overlap: Overlap
    _driver: Driver[B]

    def __init__(
        self,
        parts: ModelParallelGroup | Transport | None,
        hooks: bool,
        /,
        *,
        max_grad_norm: float = 0.0,
        transport: Transport | None = None,
        bucket_cap_mb: float | None = None,
        check_replicas_every: int = 100,
        max_consecutive_skips: int = MOST_SKIPS,
        **torchs: Unpack[TorchOptions],
    ):
        check_arguments(type(self).__name__, torchs)
        for key, number in (
            ("max_grad_norm", max_grad_norm),
            ("check_replicas_every", check_replicas_every),
            ("max_consecutive_skips", max_consecutive_skips),
            ("bucket_cap_mb", 0.0 if bucket_cap_mb is None else bucket_cap_mb),
        ):
            check_is_number(type(self).__name__, key, number)
        if not (max_grad_norm >= 0 and check_replicas_every >= 0):
            raise ValueError(
                "max_grad_norm and check_replicas_every must be at least 0 (0: off), got "
                f"{max_grad_norm}, {check_replicas_every}"
            )
        elements = elements_of(bucket_cap_mb)
        self.clipper = Clipper(max_grad_norm)
        self.skip_limit, self.replica_check = SkipLimit(max_consecutive_skips), ReplicaCheck(check_replicas_every)
        self.transport = comm.init() if transport is None else transport
        comm.check_transport(self.transport, may_change=True)
        self._members = self.transport if isinstance(self.transport, Members) else None
        self.model_parallel_group = model_parallel_group_of(parts)
        self.buckets: Buckets[B] = Buckets(self, self.transport, self.model_parallel_group, elements, hooks=hooks)
        self.stats = self._new_stats()
        self._traffic, self._waited, self.computing = Traffic(self.transport), WaitClock(), StopWatch()
        self._watch = WrapperWatch(self.transport, self.model_parallel_group)
        self._join, self._is_paused = Join(), False
        self._shown: dict[int, list[tuple[Tensor, State]]] = {}  # by bucket, the states that `publish` has shown
        self._edit = ""  # message on objects that were found replaced; see `_look_for_edits`
        self._used: list[GradientMark] = []  # the gradients of the last step
        self._steps_here = 0  # steps of this object, without those of a state that was loaded
        self._lost: PeerError | None = None  # a lost peer among members, until the next step can continue without it
        self._change_is_due = False  # all ranks have agreed to let newcomers in before the next step

    def _construct(self, params: object, defaults: dict[str, object]) -> None:
        """Construct torch's optimizer, and the buckets of these parameters."""
        if self._members is not None and (why := self._why_members_stay()):
            raise ValueError(
                f"{type(self).__name__} cannot go on as its members come and go (onebit.membership): {why}"
            )
        super().__init__(listed_parameters(type(self).__name__, params), defaults)
        self._build()

    def _why_members_stay(self) -> str:
        """Why members of a run with this optimizer may not come and go; "" if they may."""
        return "each rank has the only copy of a part of the state"

    def _new_stats(self) -> Stats:
        """The object for the figures of the last step."""
        return Stats()

    # ---------------------------------------------------------------- groups and buckets

    def add_param_group(self, param_group: Group) -> None:
        """Add a group. All ranks, at the same step.

        Args:
            param_group: The group, as in torch.

        Raises:
            ValueError: As the constructor. The optimizer is then as it was, as for TypeError.
            TypeError: As the constructor.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(f"rank {self.transport.rank}: group {len(self.param_groups) - 1}", self.param_groups[-1])
            if self.buckets.built_groups:
                self._build()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, where: str, group: Group) -> None:
        """Raise ValueError or TypeError if this optimizer cannot train a group.

        Args:
            where: Beginning of the message.
            group: The group.
        """
        check_group(where, group)

    def _build(self) -> None:
        self.buckets.build()
        self._traffic.begin()

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        options = {
            "bucket_elements": self.buckets.elements,
            "max_grad_norm": self.clipper.max_norm,
            "check_replicas_every": self.replica_check.every,
            "max_consecutive_skips": self.skip_limit.most,
        }
        return [f"option {name} = {value}" for name, value in {**self._options(), **options}.items()]

    @abstractmethod
    def _options(self) -> dict[str, object]:
        """The options of the family and of its rule, by name."""

    @abstractmethod
    def begin_group(self, g: int) -> None:
        """Called by `Buckets` when group g has been checked."""

    @abstractmethod
    def new_bucket(self, g: int, members: Sequence[tuple[Tensor, str]], device: torch.device) -> B:
        """Make a bucket of these parameters of group g. Called by `Buckets`.

        Args:
            g: Index of the group.
            members: (parameter, name) pairs.
            device: Device of the parameters.
        """

    @abstractmethod
    def states_of(self, bucket: B) -> list[State]:
        """The state of each parameter of a bucket by name, as torch shows it: views of the flat tensors."""

    def publish(self, bucket: B) -> None:
        """Show the bucket's state in optimizer.state."""
        self._shown[bucket.index] = list(zip(bucket.params, self.states_of(bucket), strict=True))
        self.state.update((p, dict(state)) for p, state in self._shown[bucket.index])

    def _look_at_groups(self) -> None:
        """Look for parameters that were replaced in param_groups; undo it, and note it for the next vote."""
        self._note_edit(self.buckets.find_edit(self._check_group))

    def _look_for_edits(self) -> None:
        """Look for replaced objects in param_groups, as `_look_at_groups` does, and in optimizer.state."""
        self._look_at_groups()
        has_others, edit = edit_of_state(self.state, self._shown.values())
        if has_others:
            for bucket in self.buckets:
                self.publish(bucket)
        self._note_edit(edit)

    def _note_edit(self, edit: str) -> None:
        if edit and not self._edit:
            self._edit = f"rank {self.transport.rank}: {edit}"

    def _refuse_edits(self) -> None:
        """Raise RuntimeError if objects were replaced, on this rank alone."""
        self._look_for_edits()
        if self._edit:
            raise RuntimeError(self._edit)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank, without the buffers of buckets and wires."""
        return sum(bucket.state_bytes() for bucket in self.buckets)

    # ---------------------------------------------------------------- step

    def gradient_is_ready(self, p: Tensor) -> None:
        """Called by p's hook when its gradient has just been accumulated."""
        if self._lost is not None or self._change_is_due:
            return  # this step is sent in step()
        try:
            self.on_gradient(p)
        except PeerError as error:
            if self._members is None:
                raise
            self._lost = error

    @abstractmethod
    def on_gradient(self, p: Tensor) -> None:
        """`gradient_is_ready` of the family; PeerErrors are handled by its caller."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this block backward passes only accumulate; gradients are sent in the first pass after it. As in DDP.

        The sharded optimizers need it at stage 2. Others count passes: as long as every step has the same number of
        passes as the one before it, they send gradients once even without this block, and otherwise twice.
        """
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters once, from this rank's gradients. All ranks. The module docstring has the sequence.

        Under GradScaler the loss scale is divided out here, and an overflow on one rank makes all skip.

        Args:
            closure: Computes the loss, as in torch. Default None.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            PeerError: A peer is lost.
            DesyncError: The ranks are not in the same step with the same options.
            ReplicaError: The replicas are no longer identical.
            SkippedStepsError: Too many steps in a row were skipped.
            RuntimeError: On some rank parameters were replaced in the groups, or tensors in the state: see
                `usage/edits.py`.
        """
        self.computing.stop()
        loss = None if closure is None else loss_of(closure)
        self._look_for_edits()
        if not self.buckets:
            self._refuse_edits()
            self._join.is_finished = False  # no rank has buckets: end the loop of `join`
            self.buckets.refuse_unfrozen([self.buckets.have_frozen_gradients()])
            return loss
        self._waited.total_s, self.stats.clip_factor, self.clipper.norm = 0.0, 1.0, None
        if self._join.is_on and not self._any_rank_has_data():
            return loss
        bad = self._take_step(self._unscale())
        if self._lost is None and self.replica_check.is_due(are_synchronised=self.rule.is_synchronised()):
            self.check_replicas()
        self._fill_stats()
        self._end_step()
        self._steps_here += 1
        self._watch.is_on = self._steps_here < COMPARED_STEPS
        if bad is not None or self.skip_limit.in_a_row:
            self.skip_limit.observe(bad is not None, bad or (), self.transport, self.model_parallel_group.whole)
        self.computing.start()
        return loss

    def _forget_step(self) -> None:
        """Drop the step under way without waiting for other ranks. Nothing of it was written; gradients stay."""
        if self._driver.state is not StepState.IDLE:
            self._driver.skip()
        self.overlap.end_step()
        self.rule.end_step()

    def _unscale(self) -> float:
        """The factor that undoes the loss scale: GradScaler sets grad_scale."""
        return 1.0 / float(getattr(self, "grad_scale", None) or 1.0)

    @abstractmethod
    def _take_step(self, scale: float) -> Sequence[str] | None:
        """Take the step of all buckets.

        Args:
            scale: Factor of their gradients.

        Returns:
            None if the step was taken. If all ranks have skipped it: the names of this rank's parameters with gradients
            that are not finite.
        """

    def _begin(self) -> None:
        """Begin the step and decide its kind, unless it has begun: learning rates may be edited before step()."""
        if self._driver.state is StepState.IDLE:
            self._look_at_groups()
            self._driver.begin()
            self.rule.begin_step()
            self._prepare_step()

    @abstractmethod
    def _prepare_step(self) -> None:
        """Set what the family keeps of a step, now that its kind is decided."""

    @abstractmethod
    def _launch_rest(self, scale: float) -> None:
        """Begin the steps of the buckets that backward has not sent, with their gradients times scale."""

    def _count_resent(self, ranks: Sequence[int]) -> None:
        """Count a step that was sent twice, because gradients of these ranks had changed; for no ranks, once."""
        if ranks and self.overlap.resent_steps == 0:
            refuse_wrapper(self.transport, self.buckets.params)
        self.overlap.count_resent(ranks)
        self.stats.resent_steps = self.overlap.resent_steps

    def _end_step(self) -> None:
        self.overlap.end_step()
        self._used = marks_of(self.buckets.params)
        self.rule.end_step()

    def _drop_step(self) -> None:
        """Drop a step that backward has begun and no step() will end. All ranks. Nothing of it was written."""
        if self._driver.launched:
            self._launch_rest(1.0)
            self._driver.wait()
        if self._driver.state is not StepState.IDLE:
            self._driver.skip()
            self.overlap.end_step()
            self.rule.end_step()

    def _fill_stats(self) -> None:
        sent, inter_node = self._traffic.take()
        elements = sum(bucket.layout.parameter_numel for bucket in self.buckets)
        self.stats.sent_bytes, self.stats.sent_bytes_inter_node = sent, inter_node
        self.stats.bits_per_parameter = 8.0 * inter_node / max(elements, 1)
        self.stats.comm_ms, self.stats.grad_norm = 1e3 * self._waited.total_s, self.clipper.norm

    # ---------------------------------------------------------------- what the ranks agree on

    @abstractmethod
    def steps_taken(self) -> int:
        """Number of training steps that were taken."""

    @abstractmethod
    def check_replicas(self) -> None:
        """Compare the bits that replicas have in common. All ranks; raises ReplicaError on all if they differ."""

    def _header(self, kind: str) -> Header:
        """The header of this rank's next step."""
        kind, step = f"{type(self).__name__}, {kind}", self.steps_taken() + 1
        return Header.of(self.param_groups, step, kind, is_finished=self._join.is_finished, edit=self._edit)

    def _call_roll(self, kind: str) -> list[Header]:
        """Every rank's header, before anything else of the step is sent. All ranks. Raises as `check_headers` does."""
        with self._waited.running():
            mine, device = self._header(kind), self.buckets[0].device
            headers = gather_headers(self.transport, mine, device)
        check_headers(self.transport, mine, headers, device)
        return headers

    def _own_vote(self, buckets: Sequence[B], *, resends: bool, note: bytes) -> tuple[Header, StepVote]:
        """This rank's header, and its vote on these buckets, without the sums of their gradients.

        The frozen parameters follow those of the last bucket. In the first steps it has a digest of the gradients.
        """
        header = self._header(self.rule.round_name())
        summary = header.summary(
            resends=resends,
            repeats=are_used_again(self.buckets.params, self._used),
            changes=self._members is not None and self._members.is_awaited(),
            gradients=gradient_digest(bucket.gradients() for bucket in buckets) if self._watch.is_on else NOT_COMPARED,
        )
        present = self.rule.present([p for bucket in buckets for p in bucket.params])
        if buckets[-1] is self.buckets[-1]:
            present += self.buckets.have_frozen_gradients()
        return header, StepVote(summary, present, note=note)

    # ---------------------------------------------------------------- ranks with different numbers of batches

    @contextmanager
    def join(self) -> Iterator[None]:
        """Wrap a loop over batches whose number may differ between ranks, as torch's Join. All ranks.

            with optimizer.join():
                for x, y in loader:
                    ...

        A rank that has finished takes part in the steps of the others, without gradients, until all have finished. The
        mean is over all ranks: its missing gradients count as zero. Its parameters stay bit-identical to the others',
        and it takes over their learning rates, betas and weight decays. Its scheduler does not know of these steps:
        `stats.shadow_steps` counts them. Costs a header per step to each peer, and the overlap with backward.

        Raises:
            RuntimeError: It is called between a backward pass and its step, or inside another optimizer's; in the loop
                as `step`.
        """
        self._check_at_rest("join()")
        with alone_in_join(self.transport.rank), self._join.loop(self._shadow_step):
            yield

    def _check_at_rest(self, what: str) -> None:
        """Raise RuntimeError if backward has sent a bucket of a step that step() has not ended."""
        if self._driver.launched:
            raise RuntimeError(
                f"rank {self.transport.rank}: {what} between a backward pass, whose gradients have left, and its step; "
                "call step() first"
            )

    def _shadow_step(self) -> None:
        self.zero_grad()
        self.step()

    def _any_rank_has_data(self) -> bool:
        goes_on = self._join.goes_on(self._call_roll("in join()"), self.param_groups)
        self.stats.shadow_steps = self._join.shadow_steps
        return goes_on

    # ---------------------------------------------------------------- states

    def _resume(self) -> None:
        """Begin to count votes and skips anew, and forget earlier edits, because a state was loaded."""
        self._edit = ""
        self.replica_check.restart(self.steps_taken())
        self.skip_limit.in_a_row = 0

    def __setstate__(self, state: State) -> None:
        """Take torch's new groups. Called by torch's load_state_dict."""
        super().__setstate__(state)
        self.buckets.link(self.param_groups)

    def __getstate__(self) -> State:
        raise refuse_copy(self)
