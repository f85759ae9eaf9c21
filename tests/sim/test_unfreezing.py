"""Parameters that are frozen, unfrozen, resized or replaced after construction: trained, left alone, or an error."""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Callable

import pytest
import torch
from errors import refused
from test_skips import FAMILY
from torch import Tensor, nn

import onebit
from onebit import zero
from onebit.comm import IdentityCodec, SimTransport, run_ranks
from onebit.dense import DenseAverager
from onebit.model_parallel import ModelParallelGroup


def new_params() -> dict[str, Tensor]:
    """Three parameters; "late" is frozen."""
    params = {part: nn.Parameter(torch.linspace(-1.0, 1.0, 300)) for part in ("late", "head", "body")}
    params["late"].requires_grad_(False)
    return params


def build(name: str, transport: SimTransport, *parts: str) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """A bucket for each parameter that is trained. parts: which there are; default: all."""
    params = {part: p for part, p in new_params().items() if part in parts or not parts}
    kind, defaults = FAMILY[name]
    return params, kind(params.items(), transport=transport, bucket_cap_mb=1e-3, **defaults)


def backward(params: dict[str, Tensor], rank: int, step: int, parts: list[str]) -> None:
    for k, part in enumerate(parts):
        generator = torch.Generator().manual_seed(100 * step + 10 * k + rank)
        (params[part] * torch.randn(params[part].shape, generator=generator)).sum().backward()


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_a_gradient_of_what_was_frozen_at_construction_is_an_error_on_all_ranks(name: str, on: tuple[int, ...]) -> None:
    """It never trained, without a word."""

    def ours(transport: SimTransport) -> str:
        params, optimizer = build(name, transport)
        for step in range(4):
            optimizer.zero_grad()
            backward(params, transport.rank, step, ["body", "head"])
            optimizer.step()
        params["late"].requires_grad_(True)
        with pytest.raises(RuntimeError) as caught:
            for step in range(4, 8):  # local steps say nothing
                optimizer.zero_grad()
                backward(params, transport.rank, step, ["body", "head", *(["late"] if transport.rank in on else [])])
                optimizer.step()
        return str(caught.value)

    for rank, message in enumerate(run_ranks(2, ours)):
        assert message.startswith(f"rank {rank}: late has a gradient on rank {list(on)}, but was frozen when")
        assert "add_param_group" in message


@pytest.mark.parametrize("name", FAMILY)
def test_an_optimizer_of_frozen_parameters_alone_says_so_too(name: str) -> None:
    params, optimizer = build(name, SimTransport(), "late")
    optimizer.step()
    params["late"].requires_grad_(True)
    backward(params, 0, 0, ["late"])
    refused(RuntimeError, r"rank 0: late has a gradient on rank \[0\], but was frozen when", optimizer.step)


@pytest.mark.parametrize("name", FAMILY)
def test_the_remedy_trains_it(name: str) -> None:
    def ours(transport: SimTransport) -> list[Tensor]:
        params = new_params()
        kind, defaults = FAMILY[name]
        optimizer = kind([params["head"], params["body"]], transport=transport, **defaults)
        start = params["late"].detach().clone()
        for step in range(9):
            if step == 4:
                if hasattr(optimizer, "sync"):
                    optimizer.sync()
                params["late"].requires_grad_(True)
                optimizer.add_param_group({"params": [params["late"]]})
            optimizer.zero_grad()
            backward(params, transport.rank, step, ["body", "head", *(["late"] if step >= 4 else [])])
            optimizer.step()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        assert not torch.equal(params["late"], start)
        return [p.detach().clone() for p in params.values()]

    first, second = run_ranks(2, ours)
    assert all(map(torch.equal, first, second))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_what_is_frozen_later_stays_whatever_is_left_in_its_gradient(name: str, on: tuple[int, ...]) -> None:
    """Where one rank alone freezes it, it counts as a gradient of zero there, and replicas stay replicas."""

    def ours(transport: SimTransport) -> tuple[bool, list[Tensor]]:
        params, optimizer = build(name, transport)
        for step in range(8):
            if step == 4:
                if hasattr(optimizer, "sync"):
                    optimizer.sync()
                start = params["head"].detach().clone()
                params["head"].requires_grad_(transport.rank not in on)
                lingering = torch.ones(300)
            optimizer.zero_grad()
            frozen = step >= 4 and transport.rank in on
            backward(params, transport.rank, step, ["body"] if frozen else ["body", "head"])
            if frozen:
                params["head"].grad = lingering
            optimizer.step()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        return torch.equal(params["head"], start), [p.detach().clone() for p in params.values()]

    (stays, first), (_, second) = run_ranks(2, ours)
    assert stays == (len(on) == 2)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", FAMILY)
def test_resized_data_is_an_error_by_name_and_replaced_data_is_not(name: str) -> None:
    params, optimizer = build(name, SimTransport())
    backward(params, 0, 0, ["body", "head"])
    optimizer.step()
    optimizer.zero_grad()
    if "sharded" not in name or name.endswith("stage 0"):  # masters would pull it back, which is said elsewhere
        params["body"].data = torch.full((300,), 5.0)
    backward(params, 0, 1, ["body", "head"])
    optimizer.step()
    if "sharded" not in name or name.endswith("stage 0"):
        assert (params["body"] > 4.0).all()
    optimizer.zero_grad()
    params["body"].data = torch.ones(7)
    with pytest.raises(RuntimeError, match=r"rank 0: body is now \(7,\) on cpu, .* it was \(300,\) on cpu"):
        backward(params, 0, 2, ["body", "head"])
        optimizer.step()


# ---------------------------------------------------------------- param_groups and state, changed by hand


def fresh_parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1.0, 1.0, 300))


def replace_a_moment(optimizer: torch.optim.Optimizer) -> None:
    entry = optimizer.state[optimizer.param_groups[0]["params"][1]]
    name = next(name for name in entry if name != "step")
    entry[name] = entry[name] + 1.0


GROUP_EDITS: dict[str, tuple[Callable, str]] = {
    "replace one": (
        lambda optimizer: optimizer.param_groups[0]["params"].__setitem__(1, fresh_parameter()),
        "parameter 1 of group 0 is another than the optimizer was given",
    ),
    "append one": (
        lambda optimizer: optimizer.param_groups[0]["params"].append(fresh_parameter()),
        "group 0 has 4 parameters, the optimizer was given 3",
    ),
    "take one away": (
        lambda optimizer: optimizer.param_groups[0]["params"].pop(),
        "group 0 has 2 parameters, the optimizer was given 3",
    ),
    "take a group away": (
        lambda optimizer: optimizer.param_groups.pop(),
        "param_groups has 0 groups, the optimizer was given 1",
    ),
}
EDITS = GROUP_EDITS | {
    "begin state anew": (
        lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
        r"step of a parameter of shape \(300,\) in optimizer.state is not there any more",
    ),
    "replace a moment": (replace_a_moment, r"of a parameter of shape \(300,\) in optimizer.state was replaced"),
}


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("after_backward", [False, True])
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", FAMILY)
def test_what_is_replaced_by_hand_is_an_error_on_all_ranks(
    name: str, edit: str, on: tuple[int, ...], after_backward: bool
) -> None:
    """Between steps or between backward and step; nothing hangs, and nothing is lost."""
    act, message = EDITS[edit]

    def ours(transport: SimTransport) -> str:
        params, optimizer = build(name, transport)
        with pytest.raises(RuntimeError) as caught:
            for step in range(8):
                optimizer.zero_grad()
                if step == 3 and not after_backward and transport.rank in on:
                    act(optimizer)
                backward(params, transport.rank, step, ["body", "head"])
                if step == 3 and after_backward and transport.rank in on:
                    act(optimizer)
                optimizer.step()  # local steps say nothing, nor do gradients that left during backward
        assert step in (3, 4)
        return str(caught.value)

    for said in run_ranks(2, ours):  # the words of the first rank that has one
        assert re.search(f"^rank {on[0]}: .*{message}", said)


@pytest.mark.parametrize("name", FAMILY)
def test_a_state_that_was_replaced_is_never_saved_and_one_that_was_copied_is(name: str) -> None:
    params, optimizer = build(name, SimTransport())
    backward(params, 0, 0, ["body", "head"])
    optimizer.step()
    for entry in optimizer.state.values():  # as frameworks do when they move a state to a device
        entry.update({key: x.clone() for key, x in entry.items()})
    expected = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(expected)
    EDITS["begin state anew"][0](optimizer)
    with pytest.raises(RuntimeError, match=r"rank 0: step of .* is not there any more: .*construct another optimizer"):
        optimizer.state_dict()


@pytest.mark.parametrize("edit", GROUP_EDITS)
@pytest.mark.parametrize("kind", ["LocalSteps", "Offload"])
def test_around_other_optimizers_too(kind: str, edit: str) -> None:
    params = [fresh_parameter() for _ in range(3)]
    if kind == "Offload":
        optimizer = zero.Offload(params, torch.optim.AdamW)
    else:
        optimizer = onebit.LocalSteps(torch.optim.AdamW(params), every=2, transport=SimTransport())
    sum(p.sum() for p in params).backward()
    optimizer.step()
    act, message = EDITS[edit]
    act(optimizer)
    refused(RuntimeError, message, optimizer.step)


def test_the_state_of_an_offload_is_not_replaced() -> None:
    optimizer = zero.Offload([fresh_parameter()], torch.optim.AdamW)
    refused(RuntimeError, "load_state_dict", EDITS["begin state anew"][0], optimizer)


@pytest.mark.parametrize("kind", [onebit.Lamb, onebit.LaProp, onebit.HostAdam])
def test_the_dense_optimizers_train_what_was_put_into_a_group_as_torchs_do(kind: type) -> None:
    p, late = fresh_parameter(), fresh_parameter()
    optimizer = kind([p], lr=1e-2)
    for step in range(3):
        for q in (p, late):
            q.grad = torch.ones_like(q)
        optimizer.step()
        if step == 0:
            optimizer.param_groups[0]["params"][0] = late
            optimizer.state = collections.defaultdict(dict)
            before = p.detach().clone()
    assert torch.equal(p, before) and not torch.equal(late, fresh_parameter())
    late.data = late.data.to(torch.bfloat16)  # begins a master
    late.grad = torch.ones_like(late)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(wide := nn.Parameter(torch.ones(3, dtype=torch.float64)))
    wide.grad = torch.ones_like(wide)
    refused(TypeError, r"a parameter is torch\.float64", optimizer.step)


# ---------------------------------------------------------------- the dense averager


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_the_dense_averager_takes_in_what_is_unfrozen_and_leaves_what_is_frozen(on: tuple[int, ...]) -> None:
    def ours(transport: SimTransport) -> list[Tensor | None]:
        params = {part: nn.Parameter(torch.ones(5)) for part in ("late", "head", "body")}
        params["late"].requires_grad_(False)
        averager, seen = DenseAverager(params.values(), transport), []
        for step in range(3):
            for p in params.values():
                p.grad = None
            if step == 1:
                params["late"].requires_grad_(True)
                params["head"].requires_grad_(False)
            for part, p in params.items():
                if p.requires_grad and (part != "late" or transport.rank in on):
                    (p * (1.0 + transport.rank + step)).sum().backward()
            averager.finish()
            seen += [copy.deepcopy(p.grad) for p in params.values()]
        return seen

    share = 1.0 if len(on) == 2 else 0.5
    late = [None, 2.5 if len(on) == 2 else 3.0 * share, 3.5 if len(on) == 2 else 4.0 * share]
    expected = [[late[0], 1.5, 1.5], [late[1], None, 2.5], [late[2], None, 3.5]]
    for seen in run_ranks(2, ours):
        for grad, value in zip(seen, [value for row in expected for value in row], strict=True):
            assert grad is None if value is None else torch.equal(grad, torch.full((5,), value))


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_what_is_frozen_after_backward_has_no_gradient_in_the_dense_averager_either(on: tuple[int, ...]) -> None:
    """torch's optimizers step with a frozen parameter's gradient, which was each rank's own."""

    def ours(transport: SimTransport) -> tuple[Tensor | None, Tensor]:
        head, body = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
        averager = DenseAverager([head, body], transport)
        ((head + body) * (1.0 + transport.rank)).sum().backward()
        head.requires_grad_(transport.rank not in on)
        averager.finish()
        return head.grad, body.grad

    for head, body in run_ranks(2, ours):
        assert torch.equal(body, torch.full((5,), 1.5))
        assert head is None if len(on) == 2 else torch.equal(head, torch.full((5,), 0.5))


def test_the_dense_averager_refuses_resized_data() -> None:
    p = nn.Parameter(torch.ones(5))
    averager = DenseAverager([p], SimTransport())
    p.data = torch.ones(1)
    p.grad = torch.ones(1)
    refused(RuntimeError, r"a parameter is now \(1,\) on cpu, at construction it was \(5,\) on cpu", averager.finish)


CHANGES: dict[str, Callable[[list], object]] = {
    "a bare group": lambda groups: groups.__setitem__(0, {"params": groups[0]["params"]}),
    "a negative rate": lambda groups: groups.__setitem__(0, groups[0] | {"lr": -1.0}),
    "another parameter": lambda groups: groups[0]["params"].__setitem__(0, nn.Parameter(torch.ones(8))),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["OnebitAdam", "ShardedOnebitAdam", "LocalSteps"])
def test_an_edit_of_one_rank_is_the_same_error_on_all_and_loading_makes_it_good(name: str, change: str) -> None:
    def ours(transport: SimTransport) -> str:
        param = nn.Parameter(torch.ones(300))
        if name == "LocalSteps":
            optimizer = onebit.LocalSteps(torch.optim.AdamW([param]), every=2, transport=transport)
        else:
            optimizer = {"OnebitAdam": onebit.OnebitAdam, "ShardedOnebitAdam": zero.ShardedOnebitAdam}[name](
                [param], transport=transport
            )

        def train() -> None:
            for _ in range(2):
                param.grad = torch.full_like(param, 1.0 + transport.rank)
                optimizer.step()

        train()
        saved, groups = copy.deepcopy(optimizer.state_dict()), [dict(group) for group in optimizer.param_groups]
        groups[0]["params"] = list(groups[0]["params"])
        if transport.rank == 1:
            CHANGES[change](optimizer.param_groups)
        with pytest.raises(RuntimeError, match=r"^rank 1: (group|parameter) 0 ?") as caught:
            train()
        optimizer.param_groups = groups
        optimizer.load_state_dict(saved)
        train()
        return str(caught.value)

    first, second = run_ranks(2, ours)
    assert first == second


@pytest.mark.timeout(60)
def test_an_edit_of_one_rank_of_a_replica_in_parts_is_an_error_on_all() -> None:
    """Its own peers hear of it, and so do those of the other parts."""

    def ours(transport: SimTransport) -> str:
        replica, place = divmod(transport.rank, 2)
        parts = ModelParallelGroup(SimTransport(), stages=transport.split([2 * replica, 2 * replica + 1]))
        param = nn.Parameter(torch.ones(300))
        optimizer = onebit.LocalSteps(
            torch.optim.AdamW([param]),
            every=2,
            model_parallel_group=parts,
            transport=transport.split([place, place + 2]),
        )
        for step in range(4):
            param.grad = torch.full_like(param, 1.0 + transport.rank)
            if step == 2 and transport.rank == 1:
                CHANGES["another parameter"](optimizer.param_groups)
            if step < 3:
                optimizer.step()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)

    told = run_ranks(4, ours)
    assert told[0] == told[2] and "another rank of this replica" in told[0]
    assert told[1] == told[3] and "parameter 0 of group 0" in told[1]


@pytest.mark.timeout(60)
def test_adding_a_group_after_one_rank_took_one_away_is_the_same_error_on_all() -> None:
    def ours(transport: SimTransport) -> str:
        optimizer = onebit.OnebitAdam(
            [{"params": [nn.Parameter(torch.ones(n))]} for n in (300, 40)], transport=transport
        )
        if transport.rank == 1:
            optimizer.param_groups.pop()
        with pytest.raises(ValueError, match=r"^rank 1: .*add_param_group") as caught:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8))]})
        return str(caught.value)

    first, second = run_ranks(2, ours)
    assert first == second


# ---------------------------------------------------------------- layers that are unfrozen later


def late_gradient(step: int, k: int, rank: int) -> Tensor:
    """Of the early layer (0) or the late one, whose gradients are much smaller."""
    noise = torch.randn(600, generator=torch.Generator().manual_seed(10_000 * k + 10 * step + rank))
    return (torch.linspace(-1.0, 1.0, 600) + 0.3 * noise) * 10.0 ** (-2 * k)


def late_run(
    transport: SimTransport, make: Callable, joins: int, steps: int, at: dict[int, Callable] | None = None
) -> list[Tensor]:
    """The values of a layer after each step; it trains from step `joins` on, beside one that always does.

    Gradients have a mean and noise, another one on each rank. at: by step, what becomes of the optimizer before it.
    """
    early, late = (nn.Parameter(torch.zeros(600)) for _ in range(2))
    optimizer, values = make([early, late], transport), []
    for step in range(steps):
        if at and step in at:
            optimizer = at[step](optimizer, [early, late])
        for k, p in enumerate((early, late)):
            p.grad = None if k == 1 and step < joins else late_gradient(step, k, transport.rank)
        optimizer.step()
        values.append(late.detach().clone())
    return values


def adamw_of_two(joins: int, steps: int) -> list[Tensor]:
    """torch's AdamW of both ranks' mean gradients: it counts the steps of each parameter."""
    early, late = (nn.Parameter(torch.zeros(600)) for _ in range(2))
    optimizer, values = torch.optim.AdamW([early, late], lr=1e-2, weight_decay=0.0), []
    for step in range(steps):
        for k, p in enumerate((early, late)):
            grads = [late_gradient(step, k, rank) for rank in range(2)]
            p.grad = None if k == 1 and step < joins else (grads[0] + grads[1]) / 2
        optimizer.step()
        values.append(late.detach().clone())
    return values


def onebit_adam(**options: object) -> Callable:
    return lambda params, transport: onebit.OnebitAdam(
        params, lr=1e-2, weight_decay=0.0, transport=transport, compression="always", **options
    )


@pytest.mark.parametrize("joins", [1, 7])
@pytest.mark.parametrize("cap", [1e-3, 25.0], ids=["two buckets", "one bucket"])
def test_in_the_warm_up_a_late_layer_moves_as_under_adamw(joins: int, cap: float) -> None:
    make = onebit_adam(freeze_step=100, warmup_codec=IdentityCodec(), bucket_cap_mb=cap)
    expected = adamw_of_two(joins, 20)
    for values in run_ranks(2, lambda transport: late_run(transport, make, joins, 20)):
        for ours, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("joins", [4, 300])
def test_after_it_a_late_layer_moves_about_as_under_adamw(joins: int) -> None:
    """It had moved by five times AdamW's steps, because its variance was taken for that of the whole run.

    With a freeze_step that is a number, the variance of what joins later never changes, as in the paper.
    """
    expected, values = adamw_of_two(joins, joins + 60), run_ranks(
        2, lambda transport: late_run(transport, onebit_adam(), joins, joins + 60)
    )  # fmt: skip
    assert all(map(torch.equal, *values))
    ours, steps = values[0], [b - a for a, b in zip(values[0], values[0][1:], strict=False)]
    large = torch.linspace(-1.0, 1.0, 600).abs() > 0.2  # where the mean is not lost in the noise
    ratio = (ours[-1][large] / expected[-1][large]).median()
    assert 0.8 < ratio < 1.2
    assert max(step.abs().max() for step in steps[joins + 8 :]) < 2.5e-2


def test_births_are_part_of_the_state() -> None:
    def reload(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> torch.optim.Optimizer:
        again = onebit_adam()(params, optimizer.placement.transport)  # type: ignore[attr-defined]
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return again

    plain = run_ranks(2, lambda transport: late_run(transport, onebit_adam(), 60, 90))
    broken = run_ranks(
        2, lambda transport: late_run(transport, onebit_adam(), 60, 90, {s: reload for s in (3, 61, 70)})
    )
    for a, b in zip(plain, broken, strict=True):
        assert torch.equal(a[-1], b[-1])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_a_layer_without_a_variance_takes_the_mean_of_the_models_without_padding(name: str, world_size: int) -> None:
    """And without the bias towards its zero start. All gradients have the size c, so each D is c.

    On one rank the layer had moved 2.3 times as far, and with 0/1 Adam 6.9 times: padding counted as elements without a
    variance, and 0/1 Adam took the mean of v in place of v̂.
    """
    c, joins, lr = 0.3, 17, 1e-2

    def work(transport: SimTransport) -> Tensor:
        params = [nn.Parameter(torch.zeros(size)) for size in (7, 64, 300)]
        options = {"weight_decay": 0.0, "compression": "always", "transport": transport}
        optimizer = getattr(onebit, name)(params, lr=lr, **options)
        for step in range(joins + 1):
            for p in params:
                p.grad = None if p is params[-1] and step < joins else torch.full_like(p, c)
            optimizer.step()
        assert optimizer.stats.phase == "compressed"
        return params[-1].detach()

    for late in run_ranks(world_size, work):
        expected = torch.full_like(late, -lr * 0.1 / (1 - 0.9 ** (joins + 1)))
        torch.testing.assert_close(late, expected, rtol=0.05, atol=0.0)
