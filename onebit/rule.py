"""Rules: one paper's step of one bucket as a generator, and the state that it keeps.

`BucketRule` is the interface for both families; `Rule` adds what the family with the state on every rank needs. Rules
are in `onebit_adam.py`, `onebit_lamb.py`, `zero_one_adam.py` and `onebit_muon.py`, and in `zero/sharded`.
`step/bucket_step.py` defines what a step yields, `step/replicated.py` exchanges a bucket's tensors, and
`step/driver.py` runs the steps of all buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, TypeAlias

from torch import Tensor

from .checkpoint.parameter_state import ParameterState
from .comm import CODECS, Codec, FusedCodec, Int8Codec, SignCodec, Variance, check_fused
from .layout.bucket import Bucket
from .layout.buckets import B, Buckets
from .layout.flat import Layout
from .model_parallel import ModelParallelGroup
from .step.bucket_step import Answer, BucketStep, Decision, Meeting
from .step.link_probe import CompressionPolicy
from .step.replicated import Replicated
from .usage.contract import State
from .usage.gradients import gradient_of

Factored: TypeAlias = tuple[float, Tensor, Tensor | Variance]
"""factor·m·D: the factor, m as frames of the codec [W, B] or float32 [W, N], D as float32 [W, N] or a variance."""

MEETS_AGAIN = "its ranks tell each other more after a step is decided, when a lost one would leave it half written"


class BucketRule(ABC, Generic[B]):
    """One algorithm: the step of a bucket, and the kind of the next step.

    Attributes:
        kind: Name of the algorithm in states.
    """

    kind: ClassVar[str] = ""

    def check(self, name: str) -> None:
        """Raise TypeError or ValueError if an option is bad.

        Args:
            name: Name of the optimizer, for the message.
        """
        return

    @abstractmethod
    def options(self) -> Mapping[str, object]:
        """The options that must be the same on all ranks, by name."""

    def begin_group(self) -> None:
        """Make what the rule keeps of each group. Called when one was added, before its buckets, if it has any."""
        return

    def begin_step(self) -> None:
        """Decide the kind of the next step. Called once per step, before any other question about it."""
        return

    @abstractmethod
    def round_name(self) -> str:
        """The kind of this step, for messages; the same on all ranks."""

    def is_silent(self) -> bool:
        """Whether this step exchanges nothing at all."""
        return False

    @abstractmethod
    def step(self, bucket: B, scale: float) -> BucketStep:
        """This step of a bucket. All ranks run it, with the buckets in the same order.

        Args:
            bucket: The bucket.
            scale: Factor of its gradients.
        """

    def after_step(self) -> str:
        """Change phase if it is time, after all buckets have taken their step. Returns the kind of that step."""
        return self.round_name()

    def end_step(self) -> None:
        """End the step, taken or skipped."""
        return

    def is_synchronised(self) -> bool:
        """Whether all replicas are meant to be the same now, and know that they are."""
        return True

    def present(self, params: Sequence[Tensor]) -> list[bool]:
        """For each parameter, whether this rank has a gradient."""
        return [gradient_of(p) is not None for p in params]

    def check_state(self, where: str, state: State) -> None:
        """Raise ValueError if a state of this kind, with these groups and shapes, does not fit this rule.

        Args:
            where: Beginning of the message.
            state: The state.
        """
        return

    def record(self) -> State:
        """The rule's own entries of a checkpoint, as plain numbers and tensors; this rank's."""
        return {}

    def load_record(self, record: State) -> None:
        """Take back entries from `record`."""
        return


LARGEST_MOVE = 8.0
"""The largest m/D that is taken over from other ranks, where D may be older than the gradients.

Adam allows |m|/√v of 7.3 with the usual decays: (1-β1)/√((1-β2)(1-β1²/β2)), by Cauchy and Schwarz.
"""


class Rule(BucketRule[Bucket]):
    """One paper's algorithm. The optimizer binds it to its parts once, before any bucket is made.

    Attributes:
        adam_names: torch.optim's names for state that has another name here.
        of_parameters: Entries of `record` that concern single parameters.
        can_be_delayed: Whether the frames that were sent are all there is to a step under way.
        sends_by: Options of a group on which what is sent depends, as numbers or tuples of them.
        common: Names of the flat state that a newcomer copies: what `Replicated.take` overwrites, then what steps in
            one bit do not change.
        placement: Exchanges buckets.
        buckets: All buckets.
        policy: Decides whether to compress.
        parts: The ranks that hold the parts of this replica.
        steps: Number of steps of each group, tensors of no dimensions.
    """

    adam_names: ClassVar[Mapping[str, str]] = {}
    of_parameters: ClassVar[tuple[str, ...]] = ()
    can_be_delayed: ClassVar[bool] = False
    sends_by: ClassVar[tuple[str, ...]] = ("betas",)
    common: ClassVar[tuple[str, ...]] = ()

    placement: Replicated
    buckets: Buckets[Bucket]
    policy: CompressionPolicy
    parts: ModelParallelGroup
    steps: Sequence[Tensor]  # by group

    def bind(
        self,
        placement: Replicated,
        buckets: Buckets[Bucket],
        policy: CompressionPolicy,
        parts: ModelParallelGroup,
        steps: Sequence[Tensor],
    ) -> None:
        """Take over the optimizer's parts; arguments as the attributes."""
        self.placement, self.buckets, self.policy, self.parts, self.steps = placement, buckets, policy, parts, steps

    @property
    def codec(self) -> FusedCodec:
        """Format in which momentum is sent."""
        return self.placement.codec

    # ---------------------------------------------------------------- a step

    @abstractmethod
    def averages_gradients(self, bucket: Bucket) -> bool:
        """Whether the bucket's step exchanges gradients."""

    def begin_again(self) -> None:
        """Take over options `sends_by` that were set after the step had begun. Its kind stays if ranks exchange."""

    def is_delayed(self) -> bool:
        """Whether the step that has begun may land in the next one. In a rule that can be delayed."""
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def send_again(self, bucket: Bucket, sent: Tensor) -> BucketStep:
        """The rest of a compressed step for which these frames were sent. In a rule that can be delayed.

        Args:
            bucket: The bucket.
            sent: This rank's frames.
        """
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def ahead(self, bucket: Bucket) -> float:
        """How far parameters may look ahead of the step just taken: the weight in p - weight·m/D.

        In a rule that can be delayed.
        """
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def follow(self, bucket: Bucket, decision: Decision) -> None:
        """Move the parameters by a step that was taken but has not moved them. In a rule that can be delayed."""
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def look_ahead(self, bucket: Bucket, decision: Decision, weight: float) -> None:
        """p ← p + weight·m/D for the parameters that move by this decision. In a rule that can be delayed."""
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def why_members_stay(self) -> str:
        """Why members of a run may not come and go.

        "" if they may, because everything is exchanged before anything is written.
        """
        return MEETS_AGAIN

    def prepare_commit(self, decision: Decision) -> None:
        """Bound what has arrived, and exchange what else a step needs that is about to be committed. All ranks.

        No state has been written.

        Args:
            decision: The decision of all ranks.
        """

    def end_interrupted_step(self) -> None:
        """Do what is left of `after_step` if a lost member has ended it early. All members, after a change of members.

        Does nothing if nothing is left.
        """

    @property
    def clips_apart(self) -> bool:
        """Whether ranks may remember different clip factors, because each clips its own steps without traffic."""
        return False

    @property
    def waits_for_backward(self) -> bool:
        """Whether buckets are sent in step() alone, as their steps begin with collectives of the model's ranks."""
        return False

    @property
    def asks_first(self) -> bool:
        """Whether ranks compare options before the first bucket of a step is sent, as its kind follows from them."""
        return False

    def meet(self, buckets: Sequence[Bucket], meetings: Sequence[Meeting]) -> Sequence[Answer]:
        """The answers to meetings after the decision. All ranks, with the same buckets.

        Args:
            buckets: The buckets that meet.
            meetings: Their meetings.
        """
        raise AssertionError(f"{type(self).__name__} has no further meeting")

    # ---------------------------------------------------------------- state

    @abstractmethod
    def allocate(self, bucket: Bucket, phase: str) -> None:
        """Give the bucket the zeroed state (flat, frames, ef) of a phase.

        Args:
            bucket: The bucket.
            phase: "warmup" first, or a later phase.
        """

    @abstractmethod
    def momentum(self, bucket: Bucket) -> Tensor:
        """The bias-corrected momentum, the same on all ranks, float32 [W·N]. May be a copy."""

    def factored_momentum(self, bucket: Bucket) -> Factored | None:
        """The same without a copy, if it is a product that kernels take; otherwise None."""
        return None

    @abstractmethod
    def last_average(self, bucket: Bucket) -> Tensor:
        """The result of the last compressed exchange, float32 [W·N], in the coordinates of the worker error.

        May be a copy.
        """

    def mask_state(self, bucket: Bucket) -> None:
        """Set momentum and residuals to zero in elements that may not move."""
        may_move = bucket.may_move()
        if may_move is None:
            return
        for name in {"exp_avg", "exp_avg_update", "accumulated", "momentum_buffer"} & bucket.flat.keys():
            bucket.flat[name].mul_(may_move)
        if bucket.ef is not None:
            bucket.ef.worker.mul_(bucket.own_rows(may_move).reshape(-1))
            bucket.ef.server.mul_(bucket.own_chunk(may_move))

    def take_apart(self, record: State, index: int, layout: Layout, states: Sequence[ParameterState]) -> None:
        """Give each parameter its part of a saved record's bucket. All on the host.

        Args:
            record: The saved record.
            index: Index of the bucket in it.
            layout: Layout of that bucket.
            states: The states of its parameters; modified.
        """
        return

    def pack(self, bucket: Bucket, states: Sequence[ParameterState], beta1: float) -> Tensor | None:
        """The bucket's frames from the values that `take_apart` gave, uint8 [W, B] on the host; None if it keeps none.

        Args:
            bucket: The bucket.
            states: The states of its parameters; modified.
            beta1: Decay of the momentum.
        """
        return None

    def put_together(self, of_buckets: Sequence[tuple[Bucket, Sequence[ParameterState]]]) -> State:
        """The entries `of_parameters`, from the values that `take_apart` gave.

        Elements that torch does not know are removed from the states.

        Args:
            of_buckets: Each bucket with the states of its parameters; modified.
        """
        return {}

    def adopt_dense_state(self) -> None:
        """Adapt a state that was just loaded from a dense optimizer: torch.optim.AdamW, or Lamb."""
        return


def codec_of_gradients(
    given: Codec | None, codec: FusedCodec | None, default: Callable[[int], Codec] = Int8Codec
) -> Codec:
    """The format of gradients: the given one, or the default in the blocks of the momentum's codec.

    Args:
        given: Format that the user wants. None: the default.
        codec: Format of momentum. None: `SignCodec()`.
        default: Makes the default of blocks of this many elements. Default eight bits.
    """
    block = (SignCodec() if codec is None else check_fused(codec)).block
    return default(block) if given is None else check_blocks(given, block)


def check_codec(what: str, codec: object) -> Codec:
    """Return the codec. Raises TypeError if it is not one; what: the values that travel in it, for the message."""
    if not isinstance(codec, Codec):
        known = ", ".join(f"{kind.__name__}()" for kind in CODECS.values())
        raise TypeError(f"{what} travel in a Codec, an object of onebit.comm: {known}; got {codec!r}")
    return codec


def check_blocks(codec: Codec, block: int) -> Codec:
    """Return a codec of gradients, after checking that momentum can have the same blocks.

    Args:
        codec: The codec.
        block: Elements of a block of momentum.

    Raises:
        TypeError: It is not a codec.
        ValueError: Its blocks have another size.
    """
    check_codec("gradients", codec)
    if codec.block != block and not codec.sends_in_place:
        raise ValueError(f"{codec} has blocks of {codec.block}, the one-bit codec of {block}; give both the same")
    return codec
