"""onebit.ddp_hook on ranks that are threads, with buckets as DDP hands them over: the exchange, and what it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport, run_ranks
from onebit.reference.codecs import compress, parameter_blocks

SIZES = [(30, 20), (300,), (7,), (16, 16)]
BLOCK = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in SIZES)


@dataclass
class FakeBucket:
    """DDP's bucket: gradients are views of a buffer."""

    number: int
    params: list[Tensor]
    flat: Tensor
    is_last_one: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[Tensor]:
        return self.params

    def gradients(self) -> list[Tensor]:
        pieces = self.flat.split([p.numel() for p in self.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    def is_last(self) -> bool:
        return self.is_last_one


def gradient(step: int, rank: int) -> np.ndarray:
    """Of all parameters, one behind the other. Each rank's own part is much larger than what they have in common."""
    total = sum(int(np.prod(size)) for size in SIZES)
    common, own = (np.random.default_rng(seed).standard_normal(total) for seed in (1, 100 + 10 * step + rank))
    return (0.3 * common + own).astype(np.float32)


def backward(
    model: Net,
    state: onebit.DDPHookState,
    flat: np.ndarray,
    plan: Sequence[Sequence[int]] = ((3, 2), (1,), (0,)),
    dtype: torch.dtype = torch.float32,
) -> np.ndarray:
    """One backward pass: the averaged gradient. plan: which parameters are in which bucket."""
    params = list(model.layers)
    pieces = dict(enumerate(torch.from_numpy(flat).split([p.numel() for p in params])))
    futures, buckets = [], []
    for number, members in enumerate(plan):
        buffer = torch.cat([pieces[k] for k in members]).to(dtype)
        bucket = FakeBucket(number, [params[k] for k in members], buffer, number == len(plan) - 1)
        futures.append(onebit.ddp_hook(state, bucket))  # type: ignore[arg-type]
        buckets.append((members, bucket))
    found: dict[int, Tensor] = {}
    for (members, bucket), future in zip(buckets, futures, strict=True):
        mean = future.value()
        assert mean is bucket.flat  # in place, as DDP expects where gradients are views
        found.update(zip(members, bucket.gradients(), strict=True))
    return torch.cat([found[k].reshape(-1).float() for k in sorted(found)]).numpy()


def new(transport: SimTransport, **options: object) -> tuple[Net, onebit.DDPHookState]:
    model = Net()
    options = {"start_step": 2, "codec": onebit.comm.SignCodec(block=BLOCK)} | options
    return model, onebit.DDPHookState(model, transport=transport, **options)  # type: ignore[arg-type]


def oracle(world_size: int, steps: int, start_step: int) -> list[np.ndarray]:
    """In float64: q = C(mean C(g_i + e_i) + E), with what each left out in e_i and E."""
    blocks = parameter_blocks([int(np.prod(size)) for size in SIZES], BLOCK)
    worker = np.zeros((world_size, blocks[-1].stop))
    server, means = np.zeros(blocks[-1].stop), []
    for step in range(steps):
        g = np.stack([gradient(step, rank) for rank in range(world_size)]).astype(np.float64)
        if step < start_step:
            means.append(g.mean(0))
            continue
        sent = np.stack([compress(c, blocks) for c in g + worker])
        worker = g + worker - sent
        c = sent.mean(0) + server
        means.append(compress(c, blocks))
        server = c - means[-1]
    return means


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_hook_is_the_oracles_loop(world_size: int) -> None:
    """Signs of float32 sums may differ from float64's where a sum is a rounding away from zero: none here."""

    def ours(transport: SimTransport) -> list[np.ndarray]:
        model, state = new(transport)
        return [backward(model, state, gradient(step, transport.rank)) for step in range(10)]

    expected = oracle(world_size, 10, 2)
    for found in run_ranks(world_size, ours):
        for step, (mean, theirs) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_allclose(mean, theirs, rtol=2e-5, atol=2e-6, err_msg=f"step {step}")


def test_what_is_sent_and_what_is_owed_are_what_there_was() -> None:
    """Over all steps, mean of gradients = sum of what came back + mean of worker errors + server errors."""

    def ours(transport: SimTransport) -> tuple[np.ndarray, np.ndarray]:
        model, state = new(transport, start_step=0)
        brought = sum(backward(model, state, gradient(step, transport.rank)) for step in range(20))
        owed = dict(pair for bucket in state._buckets.values() for pair in bucket.errors(transport.rank))
        names = [name for name, _ in model.named_parameters()]
        worker, server = (torch.cat([owed[name][k].reshape(-1) for name in names]).numpy() for k in (0, 1))
        return brought, worker / 3 + server

    results = run_ranks(3, ours)
    total = sum(gradient(step, rank).astype(np.float64) for step in range(20) for rank in range(3)) / 3
    np.testing.assert_allclose(results[0][0] + sum(owed for _, owed in results), total, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_lose_no_more_than_their_rounding(dtype: torch.dtype) -> None:
    def ours(transport: SimTransport, buckets: torch.dtype) -> list[np.ndarray]:
        model, state = new(transport)
        rounded = [torch.from_numpy(gradient(step, transport.rank)).to(dtype).float().numpy() for step in range(6)]
        return [backward(model, state, g, dtype=buckets) for g in rounded]

    half = run_ranks(2, lambda transport: ours(transport, dtype))[0]
    exact = run_ranks(2, lambda transport: ours(transport, torch.float32))[0]
    np.testing.assert_allclose(half, exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_arrives_and_poisons_nothing(bad: float) -> None:
    """As in DDP its mean is not finite, in those elements alone. All steps after it are as if it had never been."""

    def ours(transport: SimTransport, is_spoilt: bool) -> list[np.ndarray]:
        model, state = new(transport)
        found = []
        for step in range(8):
            if step == 5 and is_spoilt:
                g = gradient(99, transport.rank)
                g[700] = bad if transport.rank == 1 else g[700]
                spoilt = backward(model, state, g)
                assert np.flatnonzero(~np.isfinite(spoilt)).tolist() == [700]
            found.append(backward(model, state, gradient(step, transport.rank)))
        return found

    spoilt = run_ranks(2, lambda transport: ours(transport, True))
    clean = run_ranks(2, lambda transport: ours(transport, False))
    np.testing.assert_array_equal(spoilt, clean)


@pytest.mark.parametrize(
    "plans",
    [
        [((0, 1), (2, 3)), ((3,), (1, 2), (0,)), ((2, 0, 1, 3),)],
        [((0,), (1, 2), (3,)), ((0,), (1,), (2,), (3,)), ((0,), (3, 2, 1))],
    ],
)
def test_rebuilt_buckets_keep_what_is_owed(plans: Sequence[Sequence[Sequence[int]]]) -> None:
    """DDP rebuilds its buckets after its first backward pass, in the order in which gradients came; some may stay."""

    def ours(transport: SimTransport, plan_of: Callable[[int], Sequence[Sequence[int]]]) -> list[np.ndarray]:
        model, state = new(transport, start_step=0)
        return [backward(model, state, gradient(step, transport.rank), plan_of(step)) for step in range(9)]

    rebuilt = run_ranks(3, lambda transport: ours(transport, lambda step: plans[step // 3]))
    fixed = run_ranks(3, lambda transport: ours(transport, lambda step: plans[0]))
    np.testing.assert_array_equal(rebuilt, fixed)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_parameter_that_is_unfrozen_later_begins_without_a_residual(is_loaded: bool) -> None:
    def work(transport: SimTransport) -> tuple[np.ndarray, np.ndarray]:
        model, state = new(transport, start_step=0)
        for step in range(3):
            backward(model, state, gradient(step, transport.rank), plan=((3, 2), (1,)))
        if is_loaded:
            saved = state.state_dict()
            model, state = new(transport, start_step=0)
            state.load_state_dict(saved)
        flat = gradient(3, transport.rank)
        plan = ((0,), (3, 2), (1,))
        return backward(model, state, flat, plan)[:600], backward(*new(transport, start_step=0), flat, plan)[:600]

    for found, fresh in run_ranks(2, work):
        np.testing.assert_array_equal(found, fresh)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_rank_0_alone_has_saved_is_enough(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    def first(transport: SimTransport) -> dict[str, object]:
        model, state = new(transport)
        for step in range(5):
            backward(model, state, gradient(step, transport.rank))
        return copy.deepcopy(state.state_dict())

    def go_on(transport: SimTransport) -> list[np.ndarray]:
        model, state = new(transport)
        state.load_state_dict(copy.deepcopy(saved))
        return [backward(model, state, gradient(step, transport.rank)) for step in range(5, 8)]

    saved = run_ranks(2, first)[0]
    after = run_ranks(world_size, go_on)
    for rank, brought in enumerate(after):
        np.testing.assert_array_equal(brought, after[0])
        told = f"rank {rank}: this state of the hook is that of rank 0 of 2" in caplog.text
        assert told != ((rank, world_size) == (0, 2))


def test_a_saved_state_goes_on_in_the_same_bits_in_other_buckets_too() -> None:
    def ours(transport: SimTransport) -> tuple[list[np.ndarray], list[np.ndarray]]:
        model, state = new(transport)
        for step in range(5):
            backward(model, state, gradient(step, transport.rank))
        saved = copy.deepcopy(state.state_dict())
        straight = [backward(model, state, gradient(step, transport.rank)) for step in range(5, 9)]
        model, state = new(transport)
        state.load_state_dict(saved)
        again = state.state_dict()  # before a step
        model, state = new(transport)
        state.load_state_dict(again)
        first_plan = [((0, 1, 2, 3),), *[((3, 2), (1,), (0,))] * 3]
        resumed = [backward(model, state, gradient(5 + k, transport.rank), first_plan[k]) for k in range(4)]
        return straight, resumed

    for straight, resumed in run_ranks(2, ours):
        np.testing.assert_array_equal(straight, resumed)


def test_a_backward_pass_that_was_given_up_leaves_nothing() -> None:
    def ours(transport: SimTransport, gives_up: bool) -> np.ndarray:
        model, state = new(transport, start_step=0)
        backward(model, state, gradient(0, transport.rank))
        if gives_up:
            bucket = FakeBucket(0, list(model.layers)[2:], torch.ones(7 + 256), False)
            onebit.ddp_hook(state, bucket)  # type: ignore[arg-type]
        return backward(model, state, gradient(1, transport.rank), ((2, 3), (0, 1)))

    with_it = run_ranks(2, lambda transport: ours(transport, True))
    np.testing.assert_array_equal(with_it, run_ranks(2, lambda transport: ours(transport, False)))


def test_the_bytes_of_a_step_are_one_bit_and_scales_in_each_phase() -> None:
    def ours(transport: SimTransport) -> tuple[float, float]:
        model, state = new(transport, start_step=1)
        backward(model, state, gradient(0, transport.rank))
        dense = state.bits_per_parameter
        backward(model, state, gradient(1, transport.rank), ((0, 1, 2, 3),))
        return dense, state.sent_bytes

    blocks = -(-len(parameter_blocks([int(np.prod(size)) for size in SIZES], BLOCK)) // 2)  # of a chunk
    frame = onebit.comm.SignCodec(block=BLOCK).frame_bytes(blocks * BLOCK)
    assert run_ranks(2, ours) == [(32.0, 2 * frame)] * 2


def test_wrong_uses_are_refused_with_the_remedy() -> None:
    def ours(transport: SimTransport) -> None:
        model, state = new(transport, start_step=0)
        with pytest.raises(TypeError, match=r"onebit\.DDPHookState\(model\), onebit\.ddp_hook"):
            onebit.ddp_hook(None, None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="start_step must be at least 0"):
            new(transport, start_step=-1)
        with pytest.raises(ValueError, match="one level"):
            new(onebit.comm.hierarchy.hierarchical(transport, 2))  # type: ignore[arg-type]
        backward(model, state, gradient(0, transport.rank))
        saved = state.state_dict()
        for key, other in (("codec", "log4"), ("block", 128)):
            with pytest.raises(ValueError, match=f"rank {transport.rank}: this state of the hook has {key}={other}"):
                state.load_state_dict({**saved, key: other})
        with pytest.raises(ValueError, match="which the model does not"):
            onebit.DDPHookState(nn.Linear(2, 2), transport=transport, codec=state.codec).load_state_dict(saved)
        with pytest.raises(ValueError, match="parameter of shape"):
            backward(Net(), state, gradient(0, transport.rank))

    run_ranks(2, ours)
