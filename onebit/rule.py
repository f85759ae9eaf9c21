"""What a rule is: one paper's step of one bucket as a generator, and the state that it keeps.

`BucketRule` is what both families ask of one, `Rule` what the one with the state on every rank asks besides. Rules are
in `onebit_adam.py`, `onebit_lamb.py`, `zero_one_adam.py` and `onebit_muon.py`, and in `zero/sharded`. What a step
yields is in `step/bucket_step.py`, how a bucket's tensors are exchanged in `step/replicated.py`, who runs the steps of
all buckets in `step/driver.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic

from torch import Tensor

from .checkpoint.parameter_state import ParameterState
from .comm import CODECS, Codec, FusedCodec, Int8Codec, SignCodec, check_fused
from .layout.bucket import Bucket
from .layout.buckets import B, Buckets
from .layout.flat import Layout
from .model_parallel import ModelParallelGroup
from .step.bucket_step import Answer, BucketStep, Decision, Meeting
from .step.link_probe import CompressionPolicy
from .step.replicated import Replicated
from .usage.contract import State
from .usage.frozen import gradient_of

MEETS_AGAIN = "its ranks tell each other more after a step is decided, when a lost one would leave it half written"


class BucketRule(ABC, Generic[B]):
    """One algorithm: the step of a bucket, and what kind of step the next one is. kind: what its states are called."""

    kind: ClassVar[str] = ""

    def check(self, name: str) -> None:
        """Raise TypeError or ValueError where an option is bad. name: the optimizer's, for the message."""
        return

    @abstractmethod
    def options(self) -> Mapping[str, object]:
        """Those that must be the same on all ranks, by name."""

    def begin_step(self) -> None:
        """Decide what kind of step the next one is. Once a step, before anything else is asked about it."""
        return

    @abstractmethod
    def round_name(self) -> str:
        """What kind of step this is, for messages; the same on all ranks."""

    def is_silent(self) -> bool:
        """Whether this step exchanges nothing at all."""
        return False

    @abstractmethod
    def step(self, bucket: B, scale: float) -> BucketStep:
        """This step of a bucket, from its gradients times scale."""

    def after_step(self) -> str:
        """All buckets have taken their step: change phase. What the step was."""
        return self.round_name()

    def end_step(self) -> None:
        """The step is over, taken or skipped."""
        return

    def is_synchronised(self) -> bool:
        """Whether all replicas are meant to be the same now, and know that they are."""
        return True

    def present(self, params: Sequence[Tensor]) -> list[bool]:
        """For which of these this rank has a gradient."""
        return [gradient_of(p) is not None for p in params]

    def check_state(self, where: str, state: State) -> None:
        """Raise ValueError where a state of this kind, with these groups and shapes, is not this rule's."""
        return

    def record(self) -> State:
        """What else a checkpoint keeps, as plain numbers and tensors; this rank's."""
        return {}

    def load_record(self, record: State) -> None:
        """Take back what `record` gave."""
        return


class Rule(BucketRule[Bucket]):
    """One paper. The optimizer binds it to its parts once, before any bucket is made.

    adam_names: torch.optim's names for state that is named otherwise here.
    """

    adam_names: ClassVar[Mapping[str, str]] = {}
    of_parameters: ClassVar[tuple[str, ...]] = ()  # the entries of `record` that say something of single parameters
    can_be_delayed: ClassVar[bool] = False  # whether all of a step that is under way is in what was sent

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
        """Take over the optimizer's parts."""
        self.placement, self.buckets, self.policy, self.parts, self.steps = placement, buckets, policy, parts, steps

    @property
    def codec(self) -> FusedCodec:
        """What momentum travels in."""
        return self.placement.codec

    # ---------------------------------------------------------------- a step

    @abstractmethod
    def averages_gradients(self, bucket: Bucket) -> bool:
        """Whether the bucket's step exchanges gradients."""

    def send_again(self, bucket: Bucket, sent: Tensor) -> BucketStep:
        """A compressed step of which these frames were sent, in a rule that can be delayed."""
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def ahead(self, bucket: Bucket) -> float:
        """How far parameters may look ahead of the step just taken: p - this·m/D. In a rule that can be delayed."""
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def follow(self, bucket: Bucket, decision: Decision) -> None:
        """Move the parameters by a step taken, where it has not moved them itself. In a rule that can be delayed."""
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def look_ahead(self, bucket: Bucket, decision: Decision, weight: float) -> None:
        """p ← p + weight·m/D for the parameters that move by this decision. In a rule that can be delayed."""
        raise AssertionError(f"{type(self).__name__} cannot be delayed")

    def why_members_stay(self) -> str:
        """Why members of a run may not come and go; "" if they may: all is exchanged before anything is written."""
        return MEETS_AGAIN

    @property
    def asks_first(self) -> bool:
        """Whether ranks compare options before the first bucket of a step leaves, as its kind follows from them."""
        return False

    def meet(self, buckets: Sequence[Bucket], said: Sequence[Meeting]) -> Sequence[Answer]:
        """The answers to what these buckets have said after the decision. All ranks, the same buckets."""
        raise AssertionError(f"{type(self).__name__} has no further meeting")

    # ---------------------------------------------------------------- state

    @abstractmethod
    def allocate(self, bucket: Bucket, phase: str) -> None:
        """Give the bucket the zeroed state (flat, frames, ef) of a phase. "warmup" is the first."""

    @abstractmethod
    def momentum(self, bucket: Bucket) -> Tensor:
        """The momentum as the ranks share it, float32 [W·N]; bias-corrected. May be a copy."""

    @abstractmethod
    def last_average(self, bucket: Bucket) -> Tensor:
        """What a compressed exchange brings, float32 [W·N], in the coordinates of the worker error. May be a copy."""

    def mask_state(self, bucket: Bucket) -> None:
        """What may not move has no momentum, owes nothing, and is owed nothing."""
        may_move = bucket.may_move()
        if may_move is None:
            return
        for name in {"exp_avg", "exp_avg_update", "accumulated", "momentum_buffer"} & bucket.flat.keys():
            bucket.flat[name].mul_(may_move)
        if bucket.ef is not None:
            bucket.ef.worker.mul_(bucket.own_rows(may_move).reshape(-1))
            bucket.ef.server.mul_(bucket.own_chunk(may_move))

    def take_apart(self, record: State, index: int, layout: Layout, states: Sequence[ParameterState]) -> None:
        """Give the parameters of bucket `index` of a saved record what that says of each. All on the host."""
        return

    def pack(self, bucket: Bucket, states: Sequence[ParameterState], beta1: float) -> Tensor | None:
        """The bucket's frames, uint8 [W, B] on the host, of what `take_apart` gave; None where it keeps none."""
        return None

    def put_together(self, of_buckets: Sequence[tuple[Bucket, Sequence[ParameterState]]]) -> State:
        """The entries `of_parameters`, of what `take_apart` gave. What torch does not know leaves the states."""
        return {}

    def adopt_dense_state(self) -> None:
        """The state that was just loaded is that of a dense optimizer: torch.optim.AdamW, or Lamb."""
        return


def codec_of_gradients(given: Codec | None, codec: FusedCodec | None) -> Codec:
    """What gradients travel in: eight bits, in the blocks of the momentum's codec, unless another codec was given."""
    block = (SignCodec() if codec is None else check_fused(codec)).block
    return Int8Codec(block) if given is None else check_blocks(given, block)


def check_blocks(codec: Codec, block: int) -> Codec:
    """A codec of gradients, whose blocks those of momentum can be. Raises TypeError for none, ValueError for others."""
    if not isinstance(codec, Codec):
        known = ", ".join(f"{kind.__name__}()" for kind in CODECS.values())
        raise TypeError(f"gradients travel in a Codec, an object of onebit.comm: {known}; got {codec!r}")
    if codec.block != block and not codec.sends_in_place:
        raise ValueError(f"{codec} has blocks of {codec.block}, the one-bit codec of {block}; give both the same")
    return codec
