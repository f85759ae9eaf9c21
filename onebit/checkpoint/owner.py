"""StateOwner: an optimizer as its state is saved and taken back. `CompressedOptimizer` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..comm import FusedCodec, Transport
from ..layout.bucket import Bucket
from ..layout.buckets import Buckets
from ..model_parallel import ModelParallelGroup
from ..rule import Rule
from ..step.clip import Clipper
from ..step.link_probe import CompressionPolicy
from ..step.replicated import Replicated
from ..step.stats import Stats
from ..step.under_way import Lookahead, StepUnderWay
from ..usage.contract import Group, State


class StateOwner(Protocol):
    """What there is to save, and how to show what was taken back."""

    param_groups: list[Group]
    state: Any  # torch's defaultdict
    transport: Transport
    model_parallel_group: ModelParallelGroup
    codec: FusedCodec
    rule: Rule
    policy: CompressionPolicy
    placement: Replicated
    buckets: Buckets[Bucket]
    steps: list[Tensor]
    stats: Stats
    clipper: Clipper
    ahead: Lookahead | None
    forgotten: State | None

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """Sent, and not landed."""

    def state_dict(self) -> State:
        """As torch's."""

    def load_state_dict(self, state_dict: State) -> None:
        """As torch's."""

    def load_state_dicts(self, states: Sequence[State]) -> None:
        """From those of all ranks of a world of any size."""

    def publish(self, bucket: Bucket) -> None:
        """Show the bucket's state."""

    def read_masks(self) -> None:
        """Take over the masks of the groups."""

    def relay(self) -> None:
        """Lay all buckets out for the transport's ranks as they are now."""

    def send_again(self, record: State) -> None:
        """Launch a step that was under way."""
