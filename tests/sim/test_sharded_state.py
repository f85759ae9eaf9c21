"""Checkpoints of sharded one-bit Adam: exact in the same world, and nothing lost on the way to another."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from errors import refused
from family import same
from sharded_ranks import OPTIONS, WARMUP, initial, new, state_of, take_steps, values
from torch import Tensor

from onebit.comm import Log4Codec, SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam
from onebit.zero.sharded.optimizer import ShardedOnebitOptimizer

SIZES = (1000, 7, 2000, 256)
FORMS = {
    "int4 differences": (ShardedOnebitAdam, {}),
    "clipped": (ShardedOnebitAdam, {"max_grad_norm": 100.0}),
    "sign updates": (ShardedOnebitAdam, {"stage": 0}),
    "four-bit warm-up": (ShardedOnebitAdam, {"warmup_codec": Log4Codec()}),
    "stage 2, float32": (
        ShardedOnebitAdam,
        {"stage": 2, "momentum_dtype": torch.float32, "bucket_cap_mb": 1100 * 4 / 2**20},
    ),
    "lamb, clipped": (ShardedOnebitLamb, {"weight_decay": 0.1, "max_grad_norm": 100.0}),
    "zero-one, clipped": (
        ShardedZeroOneAdam,  # with these warm-ups synchronises in steps 0, 1, 3, 7, 11
        {"local_step_scaler": 2, "local_step_clipper": 4, "max_grad_norm": 100.0},
    ),
}
ADAM = [form for form, (kind, _) in FORMS.items() if kind is ShardedOnebitAdam]


def saved(states: object) -> object:
    """Through a file, as weights only."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_until(
    transport: SimTransport, steps: int, form: str = "int4 differences", **more: object
) -> tuple[list, ShardedOnebitOptimizer]:
    kind, options = FORMS[form]
    params, optimizer = new(transport, torch.bfloat16, SIZES, kind, **options | more)
    take_steps(params, optimizer, range(steps))
    return params, optimizer


def resumed(transport: SimTransport, params: list[Tensor], states: list[dict], form: str, **more: object) -> tuple:
    """A new optimizer on the saved replicas, with what these states say."""
    kind, options = FORMS[form]
    mine = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = kind(mine, transport=transport, **OPTIONS | options | more)
    optimizer.load_state_dicts(states)
    return mine, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "stop"),
    [(form, 5) for form in FORMS]
    + [(form, k) for form in ("int4 differences", "zero-one, clipped") for k in (0, 1, 8)],
)
def test_resume_equals_no_interruption(form: str, stop: int) -> None:
    """Within a cycle of 0/1 Adam as well: steps 5 and 8 are in the middle of two."""

    def save(transport: SimTransport) -> tuple[object, Tensor, list[Tensor]]:
        params, optimizer = run_until(transport, stop, form, warmup_steps=2)
        kept = saved([[p.detach() for p in params], optimizer.state_dict()])
        take_steps(params, optimizer, range(stop, 12))
        return kept, values(params), state_of(optimizer)

    before = run_ranks(3, save)
    states = [kept[1] for kept, *_ in before]

    def load(transport: SimTransport) -> tuple[Tensor, ShardedOnebitOptimizer]:
        params, optimizer = resumed(transport, before[transport.rank][0][0], states, form, warmup_steps=2)
        take_steps(params, optimizer, range(stop, 12))
        return values(params), optimizer

    for (_, x, kept), (y, optimizer) in zip(before, run_ranks(3, load), strict=True):
        assert torch.equal(x, y)
        by_bucket = (kept[k : k + 4] for k in range(0, len(kept), 4))
        for bucket, (momentum, variance, owned, steps) in zip(optimizer.buckets, by_bucket, strict=True):
            assert torch.equal(bucket.variance, variance) and torch.equal(bucket.owned, owned)
            assert torch.equal(torch.stack(bucket.steps), steps)
            assert same(list(bucket.layout.views(bucket.momentum)), list(bucket.layout.views(momentum)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "warmup"),
    [(form, WARMUP) for form in FORMS]
    + [(form, 20) for form in ("sign updates", "four-bit warm-up", "zero-one, clipped")],
)
def test_four_ranks_become_two_and_then_eight(form: str, warmup: int) -> None:
    """Masters, variances and the mean of what is owed are what they were; the replicas go on from where they are."""

    def start(transport: SimTransport) -> tuple[list[Tensor], dict]:
        params, optimizer = run_until(transport, 5, form, warmup_steps=warmup)
        return [p.detach() for p in params], optimizer.state_dict()

    def go_on(transport: SimTransport, params: list[Tensor], states: list[dict]) -> tuple[list[Tensor], dict, dict]:
        mine, optimizer = resumed(transport, params, states, form, warmup_steps=warmup)
        loaded = copy.deepcopy(optimizer.state_dict())
        take_steps(mine, optimizer, range(5, 9))
        optimizer.check_replicas()
        return [p.detach() for p in mine], optimizer.state_dict(), loaded

    four = run_ranks(4, start)
    params, states = four[0][0], saved([state for _, state in four])
    for world_size in (2, 8):
        ranks = run_ranks(world_size, lambda transport, p=params, s=states: go_on(transport, p, s))
        loaded = [state for *_, state in ranks]
        exact = 1e-6 if form == "stage 2, float32" else 2**-8  # the mean is rounded to bfloat16
        for key, entry in loaded[0]["state"].items():
            mean = torch.stack([state["state"][key]["momentum"].double() for state in states]).mean(0)
            assert all(torch.equal(state["state"][key]["momentum"], entry["momentum"]) for state in loaded)
            torch.testing.assert_close(entry["momentum"].double(), mean, rtol=exact, atol=1e-9)
            assert float(entry["step"]) == float(states[0]["state"][key]["step"])
        for name in ("variance", "owned", "mean"):
            for k in range(len(loaded[0]["onebit"]["buckets"])):
                old, new = (_whole(world, k, name) for world in (states, loaded))
                assert (old is None) == (new is None) == (name == "mean" and "clipped" not in form and warmup == WARMUP)
                if old is not None:
                    size = min(len(old), len(new))  # they differ in padding
                    assert torch.equal(old[:size], new[:size]) and not old[size:].any() and not new[size:].any()
        assert not torch.equal(values(ranks[0][0]), values(params))
        params, states = ranks[0][0], [state for _, state, _ in ranks]
        assert all(same(params, other) for other, *_ in ranks)


def _whole(states: list[dict], k: int, name: str) -> Tensor | None:
    chunks = [state["onebit"]["buckets"][k][name] for state in states]
    return None if chunks[0] is None else torch.cat(chunks)


def test_what_waits_on_one_rank_alone_waits_for_all_of_the_next_world() -> None:
    """0/1 Adam in the middle of a cycle: a gradient of rank 1 moves its parameter at the end of it."""
    form = "zero-one, clipped"

    def begin(transport: SimTransport) -> tuple[list[Tensor], dict]:
        params, optimizer = run_until(transport, 4, form, warmup_steps=2)
        for _ in (4, 5):
            for p in params:
                p.grad = torch.ones_like(p) if transport.rank == 1 and p is params[1] else None
            optimizer.step()
        return [p.detach() for p in params], optimizer.state_dict()

    four = run_ranks(4, begin)

    def go_on(transport: SimTransport) -> list[bool]:
        params, optimizer = resumed(transport, four[0][0], [state for _, state in four], form, warmup_steps=2)
        record = optimizer.state_dict()["onebit"]
        assert record["interval"] == 4 and record["since_sync"] == 2
        for _ in (6, 7):
            for p in params:
                p.grad = None
            optimizer.step()
        optimizer.check_replicas()
        return [not torch.equal(p, old) for p, old in zip(params, four[0][0], strict=True)]

    assert run_ranks(2, go_on) == [[False, True, False, False]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("form", ADAM)
def test_a_warm_up_that_is_over_does_not_begin_again(form: str) -> None:
    """Saved in one bit, by the count of the loading optimizer in its warm-up; or before states said so."""

    def save(transport: SimTransport) -> tuple[list[Tensor], dict, Tensor]:
        params, optimizer = run_until(transport, 3, form, warmup_steps=0)
        kept = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
        take_steps(params, optimizer, range(3, 6))
        return *kept, values(params)

    before = run_ranks(3, save)

    def load(transport: SimTransport, says_so: bool) -> tuple[Tensor, str]:
        states = copy.deepcopy([state for _, state, _ in before])
        for bucket in (bucket for state in states for bucket in state["onebit"]["buckets"]):
            if not says_so:
                del bucket["is_warm"]
        params, optimizer = resumed(transport, before[transport.rank][0], states, form, warmup_steps=8)
        take_steps(params, optimizer, range(3, 6))
        return values(params), optimizer.stats.phase

    for says_so in (True, False):
        for (*_, x), (y, phase) in zip(
            before, run_ranks(3, lambda transport, s=says_so: load(transport, s)), strict=True
        ):
            assert torch.equal(x, y) and phase == "compressed"


@pytest.mark.slow
def test_a_world_of_another_size_does_as_well() -> None:
    """A quadratic, gradients with noise: after 4 -> 2 -> 8 the loss is where it would have been."""
    target = torch.linspace(-1, 1, 3000)

    def run(transport: SimTransport, x: Tensor, states: list[dict] | None, steps: range) -> tuple[Tensor, dict]:
        p = torch.nn.Parameter(x.clone())
        options = {"lr": 2e-2, "betas": (0.9, 0.99), "weight_decay": 0.0, "warmup_steps": 0}
        optimizer = ShardedOnebitAdam([p], transport=transport, **options)
        if states is not None:
            optimizer.load_state_dicts(states)
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * step + transport.rank)
            p.grad = p.detach() - target + 0.1 * torch.randn(3000, generator=generator)
            optimizer.step()
        return p.detach(), optimizer.state_dict()

    def loss(x: Tensor) -> float:
        return float((x - target).square().mean())

    x = torch.zeros(3000)
    straight = run_ranks(4, lambda transport: run(transport, x, None, range(60)))[0][0]
    states = None
    for world_size, steps in ((4, range(20)), (2, range(20, 40)), (8, range(40, 60))):
        ranks = run_ranks(world_size, lambda transport, x=x, s=states, k=steps: run(transport, x, s, k))
        x, states = ranks[0][0], [state for _, state in ranks]
    assert loss(torch.zeros(3000)) > 0.3 and loss(straight) < 0.01 and loss(x) < 1.5 * loss(straight)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    params, optimizer = run_until(SimTransport(), 2)
    good, kept = copy.deepcopy(optimizer.state_dict()), state_of(optimizer)
    adamw = torch.optim.AdamW(initial(torch.bfloat16, SIZES))

    def spoilt(**record: object) -> dict:
        return {**good, "onebit": {**good["onebit"], **record}}

    other_dtype = copy.deepcopy(good)
    other_dtype["state"][0]["momentum"] = other_dtype["state"][0]["momentum"].float()
    bad = {
        "not that of a ShardedOnebitAdam": adamw.state_dict(),
        "world_size is 4 there and 1 here": spoilt(world_size=4),
        "rank is 1 there": spoilt(rank=1),
        "block is 64 there": spoilt(block=64),
        "has_masters is False there": spoilt(has_masters=False),
        "version is 99": spoilt(version=99),
        "its buckets hold": spoilt(buckets=[]),
        "groups of": {**good, "param_groups": []},
        "momentum of parameter 0 of group 0 is torch.float32": other_dtype,
    }
    for message, state in bad.items():
        refused(ValueError, message, optimizer.load_state_dict, state)
    refused(ValueError, "number 0 is rank 1's", optimizer.load_state_dicts, [spoilt(rank=1), good])
    refused(ValueError, "all 3 ranks", optimizer.load_state_dicts, [spoilt(world_size=3), spoilt(world_size=3, rank=1)])
    refused(ValueError, "world of 5", optimizer.load_state_dicts, [spoilt(world_size=3), spoilt(world_size=5, rank=1)])
    assert all(torch.equal(a, b) for a, b in zip(state_of(optimizer), kept, strict=True))
    optimizer.load_state_dict(good)
    take_steps(params, optimizer, range(2, 3))


def test_a_mask_is_refused_rather_than_ignored() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "exp_avg_mask": torch.zeros(3)}]
    with pytest.raises(ValueError, match="rank 0: group 0 has an exp_avg_mask, which ShardedOnebitAdam does not have"):
        ShardedOnebitAdam(groups, transport=SimTransport(), **OPTIONS)


@pytest.mark.timeout(60)
def test_rank_0s_state_alone_is_refused_as_the_shard_that_it_is() -> None:
    held: dict[int, dict] = {}

    def first(transport: SimTransport) -> dict:
        return copy.deepcopy(run_until(transport, 3)[1].state_dict())

    def work(transport: SimTransport) -> None:
        _, optimizer = run_until(transport, 1)
        with pytest.raises(ValueError, match=r"rank 1: .* number 1 is that of rank 0 of 2"):
            optimizer.load_state_dicts([held[0], held[0]])
        if transport.rank == 1:
            refused(ValueError, r"a rank's state is a shard.* save on every rank", optimizer.load_state_dict, held[0])

    held.update(enumerate(run_ranks(2, first)))
    run_ranks(2, work)
