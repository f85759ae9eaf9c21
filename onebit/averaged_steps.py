"""AveragedSteps: any torch optimizer on gradients averaged over members that come and go (`onebit.membership`).

    optimizer = onebit.AveragedSteps(torch.optim.AdamW(model.parameters(), lr=1e-3), transport=members)

One step, top to bottom:

    step()   vote: whether all ranks are in the same step with the same options, and which gradients any rank has
             send copies of the gradients in float32, and wait for all of them
             write the means into the gradients, clip them, and take the inner optimizer's step; if the mean is not
             finite, all ranks skip
             every `check_replicas_every` steps, compare parameters and state

Nothing is written before all means have arrived, so a step that a lost member has cut off is taken again from the
gradients that are still there. Elsewhere `dense.DenseAverager` sends during the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from .agreement import replicas
from .agreement.replicas import ReplicaCheck, ReplicaError
from .agreement.skips import MOST_SKIPS, SkipLimit
from .agreement.step_vote import Header, StepVote, cast_votes, present_anywhere
from .comm import PeerError, Transport
from .dense import Bucket, in_buckets, new_bucket, real
from .local.wrapped import Wrapped, are_finite, local_state, with_shards
from .membership.change import change
from .membership.members import Members
from .model_parallel import ModelParallelGroup, local, model_parallel_group_of
from .step.stats import Stats, Traffic, WaitClock
from .usage.contract import State, check_is_number, loss_of
from .usage.graphs import outside_graphs
from .version import VERSION


class AveragedSteps(Wrapped):
    """Lets a torch optimizer step with the members' mean gradient, whoever of them is lost or joins.

    It shows param_groups and state of the wrapped optimizer, which must give the same on all ranks: no random numbers.
    All ranks construct and step together. Sends about 2·(W-1)/W·4 bytes per element and rank, after the backward pass.
    Keeps 4 bytes per element for the gradients under way.

    Args:
        inner: A torch optimizer that steps without a closure, such as `torch.optim.AdamW`, `onebit.Muon`,
            `onebit.Lion`. Its state must be tensors and plain values.
        transport: The `onebit.membership.Members` of the run.
        model_parallel_group: `transport.parts(group)`, if a member has several ranks, which divide the model. Default
            None.
        max_grad_norm: Norm to which mean gradients are clipped. Default 0: off.
        bucket_cap_mb: Largest bucket, in MiB. Default None: 25.
        check_replicas_every: Steps, taken or skipped, between comparisons of the replicas' bits; 0: never. Default 100.
        max_consecutive_skips: Skipped steps in a row that are an error. Default 50.

    Attributes:
        stats: Figures of the last step.

    Raises:
        TypeError: inner is no torch optimizer, or exchanges gradients itself; transport is not a `Members`.
        ValueError: max_grad_norm or check_replicas_every is negative; or model_parallel_group is not of all ranks of
            this member.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        transport: Members,
        model_parallel_group: ModelParallelGroup | Transport | None = None,
        max_grad_norm: float = 0.0,
        bucket_cap_mb: float | None = None,
        check_replicas_every: int = 100,
        max_consecutive_skips: int = MOST_SKIPS,
    ):
        if not isinstance(transport, Members):
            raise TypeError(
                f"AveragedSteps is for members that come and go, got {type(transport).__name__}: pass "
                "transport=onebit.membership.connect(); for ranks that stay take onebit.dense.DenseAverager"
            )
        if not isinstance(inner, torch.optim.Optimizer) or hasattr(inner, "transport"):
            raise TypeError(
                f"AveragedSteps takes an optimizer that sends nothing itself, such as torch.optim.AdamW, got "
                f"{type(inner).__name__}"
            )
        check_is_number("AveragedSteps", "max_grad_norm", max_grad_norm)
        check_is_number("AveragedSteps", "check_replicas_every", check_replicas_every)
        if not (max_grad_norm >= 0 and check_replicas_every >= 0):
            raise ValueError(
                "max_grad_norm and check_replicas_every must be at least 0 (0: off), got "
                f"{max_grad_norm}, {check_replicas_every}"
            )
        super().__init__(inner)
        self.transport: Transport = transport
        self._members, self.stats = transport, Stats(phase="dense")
        self.model_parallel_group = model_parallel_group_of(model_parallel_group)
        if why := transport.why_not_parts(self.model_parallel_group):
            raise ValueError(f"AveragedSteps: {why}")
        self._max_norm, self._cap_mb = max_grad_norm, bucket_cap_mb
        self._replica_check = ReplicaCheck(check_replicas_every)
        self._skips, self._traffic, self._waited = SkipLimit(max_consecutive_skips), Traffic(transport), WaitClock()
        self._steps = 0
        self._lost: PeerError | None = None  # a lost member, until the next step can continue without it
        self._change_is_due = False  # all members have agreed to let newcomers in before the next step
        self._buckets: list[Bucket] = []
        self.build()

    def build(self) -> None:
        """Make the buckets of all groups. All ranks."""
        self._buckets = [new_bucket(params) for params in in_buckets(self._params, self._cap_mb)]

    @property
    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    # ---------------------------------------------------------------- step

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average the gradients over all members, and take the inner optimizer's step. All ranks.

        Under GradScaler the loss scale is divided out here, and an overflow on one rank makes all skip.

        Args:
            closure: Computes the loss, as in torch. Default None.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            DesyncError: The ranks are not in the same step with the same options.
            MembershipError: The run has ended, or the rendezvous is away for too long.
            ReplicaError: The replicas were compared, and differ. On all ranks.
            RuntimeError: `onebit.membership.begin` was not called.
            SkippedStepsError: Too many steps in a row were skipped.
        """
        loss, members = None if closure is None else loss_of(closure), self._members
        if members.roster is None:
            raise RuntimeError(
                f"{members.rendezvous.name} is in no run yet: call onebit.membership.begin(optimizer) before step()"
            )
        self._waited.total_s, skipped = 0.0, self.stats.skipped_steps
        while True:
            why, self._lost = self._lost, None
            try:
                if why is None:
                    self._change_is_due = members.is_due(self._change_is_due)
                if why is not None or self._change_is_due:
                    self._change_is_due = False
                    found = change(self, members, why)
                    if found.took_step:
                        if self.stats.skipped_steps > skipped:
                            self._skips.observe(True, [], self.transport)
                        break
                    if found.is_back:  # its gradients are of parameters that the run has no longer
                        self.zero_grad()
                is_finite = self._average()
            except PeerError as error:
                self._lost = error
                continue
            self._take_inner_step(is_finite)
            if self._replica_check.is_due(are_synchronised=True):
                self.check_replicas()
            break
        self.stats.sent_bytes, self.stats.sent_bytes_inter_node = self._traffic.take()
        self.stats.comm_ms = 1e3 * self._waited.total_s
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Does nothing: backward passes send nothing."""
        return nullcontext()

    def _average(self) -> bool:
        """Vote, and bring the means of all gradients here. Writes nothing but the buckets.

        Returns whether they are finite, on all ranks of this member: all of them take the step, or none.
        """
        scale = float(getattr(self, "grad_scale", None) or 1.0)
        header = Header.of(self.param_groups, self._steps + 1, f"AveragedSteps, {type(self.inner).__name__}")
        present = [is_there for bucket in self._buckets for is_there in bucket.present()]
        members = self._members
        mine = StepVote(header.summary(changes=members.is_awaited()), present, note=members.note())
        with self._waited.running():
            votes = cast_votes(self.transport, header, mine, self.transport.device)
        self._change_is_due = any(vote.summary.changes for vote in votes)
        members.hear([vote.note for vote in votes])
        are_seen = iter(present_anywhere(votes))
        for bucket in self._buckets:
            bucket.absent = [not next(are_seen) for _ in bucket.params]
            bucket.launch(self.transport, scale=members.gradient_factor / scale)
        with self._waited.running():
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
            return self.model_parallel_group.agree(are_finite([bucket.flat for bucket in self._buckets]))

    def _take_inner_step(self, is_finite: bool) -> None:
        for bucket in self._buckets:
            bucket.finish(self.transport.world_size)
        self.stats.grad_norm, self.stats.clip_factor = None, 1.0
        if is_finite:
            if self._max_norm > 0:
                self._clip()
            self.inner.step()
            self._steps += 1
        else:
            self.stats.skipped_steps += 1
            self._skips.tell(self.transport.rank, self._steps + 1, [], "all ranks skip the step")
        self._skips.observe(not is_finite, [], self.transport)

    def _clip(self) -> None:
        with_grad = [p for p in self._params if p.grad is not None]
        grads = [real(local(p.grad)) for p in with_grad if p.grad is not None]
        norm = self.model_parallel_group.global_norm(with_grad, grads)
        self.stats.grad_norm, self.stats.clip_factor = norm, min(1.0, self._max_norm / (norm + 1e-6))
        if grads:
            torch._foreach_mul_(grads, self.stats.clip_factor)

    # ---------------------------------------------------------------- agreement of the ranks

    def check_replicas(self) -> None:
        """Compare the bits of parameters and state. All ranks; raises ReplicaError on all if they differ.

        If a member is lost meanwhile, nothing is compared, with a warning.
        """
        tensors, names = [local(p) for p in self._params], [f"parameter {k}" for k in range(len(self._params))]
        for k, p in enumerate(self._params):
            entry = [(name, x) for name, x in sorted(self.state.get(p, {}).items()) if isinstance(x, Tensor)]
            tensors += [local(x) for _, x in entry]
            names += [f"{name} of parameter {k}" for name, _ in entry]
        check = partial(replicas.check_replicas, self.transport, tensors, names, self._steps)
        together = partial(self.model_parallel_group.raise_on_all_ranks, ReplicaError, check)
        self._lost = self._members.attempt("check_replicas()", self.progress(), together) or self._lost

    # ---------------------------------------------------------------- members that come and go

    def steps_taken(self) -> int:
        """Number of training steps that were taken."""
        return self._steps

    def progress(self) -> tuple[int, ...]:
        """See `membership.change.Changing`. For the program a step that all skip is over, too."""
        return (self._steps + self.stats.skipped_steps,)

    def end_interrupted_step(self) -> None:
        """See `membership.change.Changing`: nothing is left undone."""

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        own = f"option max_grad_norm = {self._max_norm}, bucket_cap_mb = {self._cap_mb}, inner = {type(self.inner)}"
        every = f"option check_replicas_every = {self._replica_check.every}"
        return [f"version of onebit = {VERSION}", own, every, f"groups: {len(self.param_groups)}"]

    def leave_world(self) -> State:
        """See `membership.change.Changing`: no rank has anything of its own."""
        return {}

    def for_others(self, state: State) -> State:
        """See `membership.change.Changing`."""
        parameters = [local(p).detach() for group in self.param_groups for p in group["params"]]
        counts = {"steps": self._steps, "skipped_steps": self.stats.skipped_steps}
        return {**counts, "parameters": parameters, "inner": local_state(self.inner)}

    def enter_world(self, state: State) -> None:
        """See `membership.change.Changing`."""
        self._replica_check.restart(self._steps)  # as newcomers, so that all compare after the same steps

    @torch.no_grad()
    def take_over(self, theirs: State, own: State | None) -> None:
        """See `membership.change.Changing`. A member of the run keeps its options: its schedule moves on from there."""
        inner = with_shards(self.inner, theirs["inner"])
        self.inner.load_state_dict(inner if own is None else {**inner, "param_groups": self._options()})
        params: Sequence[Tensor] = [p for group in self.param_groups for p in group["params"]]
        for p, x in zip(params, theirs["parameters"], strict=True):
            local(p).copy_(x)
        self._steps, self.stats.skipped_steps = theirs["steps"], theirs["skipped_steps"]
        self._replica_check.restart(self._steps)

    def _options(self) -> object:
        return self.inner.state_dict()["param_groups"]

    # ---------------------------------------------------------------- states

    def state_dict(self) -> State:
        """The inner optimizer's state, and the number of steps under "onebit". The same on all ranks."""
        return {**self.inner.state_dict(), "onebit": {"steps": self._steps}}

    def load_state_dict(self, state_dict: State) -> None:
        """Continue where `state_dict` was taken, by a world of any size; also from the inner optimizer's own state.

        Args:
            state_dict: From `state_dict()`.
        """
        rest = dict(state_dict)
        self._steps = int(rest.pop("onebit", {"steps": 0})["steps"])
        self.inner.load_state_dict(rest)
        self._replica_check.restart(self._steps)
