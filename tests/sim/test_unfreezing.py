"""Parameters that are frozen, unfrozen, resized or replaced after construction: trained, left alone, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
from test_skips import FAMILY
from torch import Tensor, nn

from onebit.comm import SimTransport, run_ranks
from onebit.dense import DenseAverager


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
    with pytest.raises(RuntimeError, match=r"rank 0: late has a gradient on rank \[0\], but was frozen when"):
        optimizer.step()


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


def test_the_dense_averager_refuses_resized_data() -> None:
    p = nn.Parameter(torch.ones(5))
    averager = DenseAverager([p], SimTransport())
    p.data = torch.ones(1)
    p.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"a parameter is now \(1,\) on cpu, at construction it was \(5,\) on cpu"):
        averager.finish()
