"""Sharded one-bit LAMB: equal to its textbook loop, whoever owns which part of a layer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sharded_ranks import OPTIONS, SIZES, WARMUP, assert_state_is, gradient, initial, new, owners, take_steps, values
from torch import Tensor

from onebit.comm import SimTransport, run_ranks
from onebit.reference.sharded import ShardedLamb as ShardedLambOracle
from onebit.zero import ShardedOnebitLamb

STEPS = 12
CAP = 600 * 4 / 2**20
FORMS = {
    "int4": {},
    "sign": {"differences": "sign"},
    "decay": {"weight_decay": 0.1},
    "bounds": {"min_coeff": 0.4, "max_coeff": 0.6},
    "clipped": {"max_grad_norm": 100.0},
    "several buckets": {"bucket_cap_mb": CAP},
    "stage 2": {"stage": 2, "bucket_cap_mb": CAP},
}


@pytest.mark.parametrize(
    ("form", "world_size"), [(form, 3) for form in FORMS] + [(form, W) for W in (1, 4) for form in ("int4", "stage 2")]
)
def test_equals_the_textbook_loop(form: str, world_size: int) -> None:
    """Masters within float32, two ranks or more having a part each of the largest layer.

    Of the replicas, some may be on the other side of a rounding: an element of an int4 step, a block of its scale.
    """
    options = FORMS[form]

    def work(transport: SimTransport) -> tuple[Tensor, ShardedOnebitLamb]:
        params, optimizer = new(transport, kind=ShardedOnebitLamb, momentum_dtype=torch.float32, **options)
        take_steps(params, optimizer, range(STEPS))
        return values(params), optimizer

    xs, optimizers = zip(*run_ranks(world_size, work), strict=True)
    assert all(torch.equal(x, xs[0]) for x in xs)
    owner = owners(optimizers)
    assert world_size == 1 or len(set(owner[307:820])) > 1
    oracle = ShardedLambOracle(
        values(initial()).double().numpy(),
        world_size,
        SIZES,
        owner,
        betas=OPTIONS["betas"],
        warmup=WARMUP,
        down="sign" if form == "sign" else "int4",
        clip=options.get("max_grad_norm", 0.0),
        **{name: options[name] for name in ("weight_decay", "min_coeff", "max_coeff") if name in options},
    )
    for step in range(STEPS):
        grads = [torch.cat(gradient(step, rank)).double().numpy() for rank in range(world_size)]
        oracle.step(np.stack(grads), lr=OPTIONS["lr"])
    off = np.abs(xs[0].double().numpy() - oracle.x)
    moved = np.linalg.norm(oracle.x - values(initial()).double().numpy())
    assert moved > 0.1 and np.linalg.norm(off) < 2e-2 * moved
    assert_state_is(oracle, optimizers)


def test_a_layer_without_weights_moves_as_adam_does_and_then_by_its_norm() -> None:
    """Ratio 1 where a norm is zero; then ‖p‖/‖u‖. Of a layer that two ranks own, both parts move by the same."""

    def work(transport: SimTransport) -> list[Tensor]:
        p = torch.nn.Parameter(torch.zeros(512))
        optimizer = ShardedOnebitLamb([p], lr=0.1, transport=transport, max_coeff=1e9)
        masters = [torch.zeros(256)]
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
            masters.append(optimizer.buckets[0].owned.clone())
        return [before - after for before, after in pairwise(masters)]

    for first, second in run_ranks(2, work):  # of either half; ‖p‖/‖u‖ is 0.1 in the second step
        torch.testing.assert_close(first, torch.full((256,), 0.1), rtol=1e-2, atol=0.0)  # scales are bfloat16
        torch.testing.assert_close(second, torch.full((256,), 0.1 * 0.1), rtol=1e-2, atol=0.0)


def test_norms_cost_thirty_two_bytes_per_layer_and_peer() -> None:
    W, sizes = 4, (64 * 256, 128 * 256, 100)
    chunk = -(-(64 + 128 + 1) // W)
    up, down = (-(-(chunk * bytes_per_block) // 16) * 16 for bytes_per_block in (34, 130))
    vote = 26 + 48 + 1  # the step and its digests, six doubles, a bit for each of three parameters

    def work(transport: SimTransport) -> tuple[int, int]:
        params, optimizer = new(transport, sizes=sizes, kind=ShardedOnebitLamb)
        take_steps(params, optimizer, range(WARMUP + 1))
        assert optimizer.stats.bits_per_parameter <= 5.3
        return optimizer.stats.sent_bytes, optimizer.state_bytes()

    padded = W * chunk * 256
    state = 2 * padded + 8 * chunk * 256
    assert run_ranks(W, work) == [((W - 1) * (up + down + vote + 32 * len(sizes)), state)] * W
