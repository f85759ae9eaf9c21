"""A frame that is spoilt on its way down: all ranks raise, and no parameter has moved."""

from __future__ import annotations

import pytest
import torch
from sharded_ranks import new, take_steps
from torch import Tensor

from onebit import zero
from onebit.comm import SimTransport, Work, run_ranks
from onebit.zero import NotFiniteError

FORMS: dict[str, dict] = {
    "stage 0": {"stage": 0, "updates": "int4"},
    "stage 1": {"stage": 1},
    "stage 1, signs": {"stage": 1, "differences": "sign"},
    "stage 2": {"stage": 2},
}
SIZES = (4096, 2048)
TWO_BUCKETS = 4096 * 4 / 2**20
CLEAN_STEPS = 2


class Spoiling(SimTransport):
    """Sends a frame of ones, whose scale is NaN, in the place of the next one that it is told to spoil."""

    spoils_in = 0  # frames from now; 0: none

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        if self.spoils_in and in_B.numel() > 100:  # votes are shorter
            self.spoils_in -= 1
            in_B = in_B if self.spoils_in else torch.full_like(in_B, 0xFF)
        return super().all_gather(out_WB, in_B)


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frame", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_raise_and_no_parameter_moves(form: str, frame: int, world_size: int) -> None:
    """frame: which of the step's two. The last rank spoils its own; the other bucket's is good."""

    def work(transport: SimTransport) -> tuple[str, list[bool], list[Tensor]]:
        spoiling = Spoiling(transport.network, transport.rank)
        params, optimizer = new(spoiling, sizes=SIZES, bucket_cap_mb=TWO_BUCKETS, **FORMS[form])
        take_steps(params, optimizer, range(CLEAN_STEPS))
        before = [p.detach().clone() for p in params]
        spoiling.spoils_in = frame if transport.rank == world_size - 1 else 0
        with pytest.raises(NotFiniteError) as raised:
            take_steps(params, optimizer, range(CLEAN_STEPS, CLEAN_STEPS + 1))
        moved = [not torch.equal(p, then) for p, then in zip(params, before, strict=True)]
        return str(raised.value), moved, [p.detach().clone() for p in params]

    ends = run_ranks(world_size, work)
    for rank, (message, moved, params) in enumerate(ends):
        assert message.startswith(f"rank {rank}: the update of") and "resume from a checkpoint" in message
        (spoilt,) = (k for k in range(len(SIZES)) if f"the update of parameter {k} of group 0 and" in message)
        assert spoilt == len(SIZES) - frame and not any(moved)
        assert all(
            torch.equal(mine, first) and mine.isfinite().all() for mine, first in zip(params, ends[0][2], strict=True)
        )


def test_it_is_part_of_the_public_face() -> None:
    assert zero.NotFiniteError is NotFiniteError and issubclass(NotFiniteError, RuntimeError)
