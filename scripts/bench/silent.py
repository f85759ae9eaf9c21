"""Steps without traffic: a transport that moves nothing, and the steps after a warm-up from the second one on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates
from onebit.comm import Transport
from onebit.onebit_adam import AdamRule


class Silent(Transport):
    """A transport that moves nothing: what a step costs beside its traffic. Received frames are this rank's own."""

    sent_bytes = 0
    timeout_s = 1.0

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> _Done:
        out_WB.copy_(in_WB)
        return _Done()

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> _Done:
        out_WB.copy_(in_B.clone().expand_as(out_WB))  # in_B is a row of out_WB
        return _Done()

    def all_reduce(self, x: Tensor) -> _Done:
        return _Done()

    def broadcast(self, x: Tensor, src: int) -> _Done:
        return _Done()

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> _Done:
        out_B.zero_()  # it may be longer than in_B
        return _Done()

    def split(self, ranks: Sequence[int]) -> Silent:
        return Silent(list(ranks).index(self.rank), len(ranks))

    def close(self) -> None:
        """Nothing is held."""


class _Done:
    def wait(self) -> None:
        """It is."""

    def is_ready(self) -> bool:
        return True


def skip_warmup(rule: AdamRule) -> None:
    """One step of warm-up and no refresh: what its steps in "auto" are after warm-up, from the second on."""
    rule.schedule = DenseSteps("auto", warmup=1, refreshes=VarianceUpdates(1, var_freeze_step=0))
