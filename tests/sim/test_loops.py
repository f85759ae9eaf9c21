"""Training loops of other people: passes that no step follows, gradients edited late, ranks that are not in step."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from errors import error_of
from family import FAMILY, flat, fresh, loss_of, make, model, train
from torch import Tensor, nn

import onebit
from onebit import zero
from onebit.comm import PeerError, SimTransport, run_ranks
from onebit.zero.sharded.bucket import ShardedBucket

pytestmark = pytest.mark.slow

SHARDED = {
    "sharded": zero.ShardedOnebitAdam,
    "sharded 0/1": zero.ShardedZeroOneAdam,
    "sharded LAMB": zero.ShardedOnebitLamb,
}

# What happens between two steps, on one rank or all; `step` is the one that comes next.
Between = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]


def pass_through(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """Another network's loss through this one, as a GAN's generator's through its discriminator."""
    loss_of(net, 700 + step, rank).backward()


def give_up(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """`if loss > spike: optimizer.zero_grad(); continue`, the backward pass already done."""
    loss_of(net, 800 + step, rank).backward()
    optimizer.zero_grad()


def give_up_in_place(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    loss_of(net, 800 + step, rank).backward()
    net.zero_grad(set_to_none=False)


def give_up_half(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """An accumulation window of two passes, given up between them; the first one reaches a part of the model only."""
    net[2:](torch.ones(1, 33)).sum().backward()
    net.zero_grad()


BETWEEN = [pass_through, give_up, give_up_in_place, give_up_half]


def run(
    transport: SimTransport, name: str, between: Between | None, passes: int, on: tuple[int, ...], **options: object
):
    """Nine steps; `between` comes before steps 3 and 6, on these ranks."""
    net, optimizer = fresh(transport, name, bucket_cap_mb=0.004, **options)
    for step in range(9):
        if between is not None and step in (3, 6) and transport.rank in on:
            between(net, optimizer, step, transport.rank)
        net.zero_grad()
        for k in range(passes):
            loss_of(net, passes * step + k, transport.rank).backward()
        optimizer.step()
    return flat(net), optimizer.stats.resent_steps


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("ranks", "on"), [(2, (0, 1)), (2, (1,)), (1, (0,))], ids=["all ranks", "one rank", "in one process"]
)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", FAMILY)
def test_a_backward_pass_that_no_step_follows_changes_nothing(
    name: str, between: Between, passes: int, ranks: int, on: tuple[int, ...]
) -> None:
    expected = run_ranks(ranks, lambda transport: run(transport, name, None, passes, on))
    found = run_ranks(ranks, lambda transport: run(transport, name, between, passes, on))
    for (weights, _), (clean, _) in zip(found, expected, strict=True):
        assert torch.equal(weights, clean)


class Interruptible(SimTransport):
    """A SimTransport with a user who presses Ctrl-C as a given operation begins."""

    countdown = 0

    def _count(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor):
        self._count()
        return super().all_to_all(out_WB, in_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor):
        self._count()
        return super().all_gather(out_WB, in_B)


@pytest.mark.pairwise
@pytest.mark.parametrize("at", [2, 7])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", [*FAMILY, "sharded"])
def test_a_step_that_is_interrupted_can_be_repeated(kind: str, overlap: bool, at: int) -> None:
    """As in a notebook: its cell is run again, with the same batch. Nothing is written before a step is decided on."""

    def trained(operation: int) -> Tensor | None:
        """The weights; None if no step was interrupted, or the step had been decided on."""
        transport, net, is_interrupted, step = Interruptible(), model(), False, 0
        options = {"bucket_cap_mb": 0.004, "overlap": overlap}
        if kind in FAMILY:
            optimizer = make(kind, net, transport, **options)
        else:
            optimizer = SHARDED[kind](net.parameters(), transport=transport, warmup_steps=3, **options)
        while step < 9:
            transport.countdown = operation if step == at and not is_interrupted else 0
            optimizer.zero_grad()
            try:
                loss_of(net, step, 0).backward()
                optimizer.step()
                step += 1
            except KeyboardInterrupt:
                is_interrupted = True
                if optimizer.steps_taken() > step:
                    return None
        return flat(net) if is_interrupted or operation == 0 else None

    expected = trained(0)
    found = [weights for operation in range(1, 7) if (weights := trained(operation)) is not None]
    assert found
    assert all(torch.equal(weights, expected) for weights in found)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"overlap": False}], ids=str)
def test_the_loop_of_a_gan(options: dict) -> None:
    """Two backward passes of D, its step, G's pass through D: no step of D is sent twice after the first."""

    def ours(transport: SimTransport, overlap: bool) -> tuple[Tensor, Tensor, int]:
        G, D = model(1)[:3], nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1))
        with torch.no_grad():
            for p in D.parameters():
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view(p.shape))
        common = {"transport": transport, "freeze_step": 3, "bucket_cap_mb": 0.002} | options
        if not overlap:
            common["overlap"] = False
        of_D, of_G = (onebit.OnebitAdam(net.parameters(), lr=1e-3, **common) for net in (D, G))
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + transport.rank)
            real, noise = torch.randn(4, 33, generator=generator), torch.randn(4, 20, generator=generator)
            D.zero_grad()
            (-D(real).mean()).backward()
            fake = G(noise)
            D(fake.detach()).mean().backward()
            of_D.step()
            G.zero_grad()
            (-D(fake).mean()).backward()
            of_G.step()
        return flat(D), flat(G), of_D.stats.resent_steps + of_G.stats.resent_steps

    pairs = zip(
        run_ranks(2, lambda transport: ours(transport, True)),
        run_ranks(2, lambda transport: ours(transport, False)),
        strict=True,
    )
    for (D, G, resent), (plain_D, plain_G, _) in pairs:
        assert torch.equal(D, plain_D) and torch.equal(G, plain_G)
        assert resent == 0


def test_gradients_edited_late_are_sent_once_more_and_then_in_step(caplog: pytest.LogCaptureFixture) -> None:
    """As with overlap=False; three times over, after which nothing leaves during backward."""

    def ours(transport: SimTransport, overlap: bool) -> tuple[Tensor, int, list[int]]:
        net, optimizer = fresh(transport, bucket_cap_mb=0.004, overlap=overlap)
        early = []
        for step in range(9):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            early.append(optimizer._driver.launched)
            if transport.rank == 1:
                nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.step()
        return flat(net), optimizer.stats.resent_steps, early

    with caplog.at_level(logging.WARNING):
        found, plain = (run_ranks(2, lambda transport, on=on: ours(transport, on)) for on in (True, False))
    for (weights, resent, early), (expected, _, _) in zip(found, plain, strict=True):
        assert torch.equal(weights, expected)
        assert resent == 3 and [k > 0 for k in early] == [False, True, True, True] + [False] * 5
    assert "rank 1: the gradient of parameter 5 of group 0 changed after backward" in caplog.text
    assert "gradients of rank [1] changed" in caplog.text


def set_rate(group: dict, step: int) -> None:
    group["lr"] = 0.01 / (1 + step)


def set_rate_tensor(group: dict, step: int) -> None:
    group["lr"] = torch.tensor(0.01 / (1 + step))


def set_betas(group: dict, step: int) -> None:
    group["betas"] = (0.85 + 0.01 * step, 0.99)


@pytest.mark.parametrize("set_option", [set_rate, set_rate_tensor, set_betas])
@pytest.mark.parametrize("name", FAMILY)
def test_options_set_after_backward_are_those_of_the_step(
    name: str, set_option: Callable[[dict, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """As without overlap; many loops set them just before step(). Buckets that have left are sent once more if need be.

    With 0/1 Adam a step without exchange begins anew, too.
    """

    def ours(transport: SimTransport, overlap: bool) -> tuple[Tensor, int]:
        net, optimizer = fresh(transport, name, bucket_cap_mb=0.004, overlap=overlap)
        for step in range(9):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            for group in optimizer.param_groups:
                set_option(group, step)
            optimizer.step()
        return flat(net), optimizer.stats.resent_steps

    with caplog.at_level(logging.WARNING):
        found, plain = (run_ranks(2, lambda transport, on=on: ours(transport, on)) for on in (True, False))
    for (weights, resent), (expected, _) in zip(found, plain, strict=True):
        assert torch.equal(weights, expected)
        assert resent == 0 or "changed between backward, which had sent buckets by the old value, and" in caplog.text
        assert resent == 0 or set_option is set_betas or name == "ZeroOneAdam"


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("name", FAMILY)
def test_what_is_frozen_after_backward_has_no_gradient_in_the_step(name: str, on: tuple[int, ...]) -> None:
    """As without overlap, whether its gradient had been sent or not."""

    def ours(transport: SimTransport, overlap: bool) -> Tensor:
        net, optimizer = fresh(transport, name, bucket_cap_mb=0.004, overlap=overlap)
        for step in range(9):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            net[2].requires_grad_(step != 5 or transport.rank not in on)
            optimizer.step()
            net.requires_grad_(True)
        return flat(net)

    found, plain = (run_ranks(2, lambda transport, on=on: ours(transport, on)) for on in (True, False))
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize(("name", "early_from"), [("OnebitAdam", 7), *((name, 1) for name in FAMILY)])
def test_gradients_edited_behind_torchs_back_are_found(
    name: str, early_from: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`p.grad.data.clamp_()`, as many scripts have it; from there on nothing of that rank leaves during backward.

    However late a bucket leaves during backward for the first time: before, each step has fewer passes than the last.
    """
    meeting = threading.Barrier(2)

    def meet(grad: Tensor) -> None:
        meeting.wait(10)

    def ours(transport: SimTransport, overlap: bool) -> tuple[Tensor, list[bool]]:
        net, optimizer = fresh(transport, name, bucket_cap_mb=0.004, overlap=overlap, compression="always")
        # 0/1 Adam sends once the other rank's header is there, and that leaves with the first bucket.
        next(net.parameters()).register_hook(meet)
        early = []
        for step in range(12):
            optimizer.zero_grad()
            for k in range(max(1, early_from - step)):
                loss_of(net, 7 * step + k, transport.rank).backward()
            early.append(optimizer._driver.launched > 0)
            if transport.rank == 1:
                for p in net.parameters():
                    p.grad.data.clamp_(-1e-3, 1e-3)
            optimizer.step()
        return flat(net), early

    found, plain = (run_ranks(2, lambda transport, on=on: ours(transport, on)) for on in (True, False))
    for (weights, _), (expected, _) in zip(found, plain, strict=True):
        assert torch.equal(weights, expected)
    assert sum(found[1][1]) == 1 <= sum(found[0][1])
    assert found[1][1].index(True) >= early_from
    if name != "ZeroOneAdam":  # which hears rank 1's header first, and that comes in step() from here on
        assert sum(found[0][1]) > 1
    assert caplog.text.count("rank 1: gradients were edited after backward") == 1


def test_a_state_loaded_after_a_backward_pass_is_where_training_goes_on() -> None:
    """The loss has exploded behind a backward pass: back to the last state, and on."""

    def ours(transport: SimTransport, explodes: bool) -> Tensor:
        net, optimizer = fresh(transport, bucket_cap_mb=0.004)
        train(transport, range(4), net, optimizer)
        saved = flat(net).clone(), copy.deepcopy(optimizer.state_dict())
        if explodes:
            train(transport, range(40, 43), net, optimizer)
            loss_of(net, 43, transport.rank).backward()
            with torch.no_grad():
                nn.utils.vector_to_parameters(saved[0], net.parameters())
            optimizer.load_state_dict(saved[1])
        train(transport, range(4, 9), net, optimizer)
        return flat(net)

    assert torch.equal(*(run_ranks(2, lambda transport, on=on: ours(transport, on))[0] for on in (True, False)))


@pytest.mark.parametrize("bucket", [1, 2])
def test_a_sharded_step_that_is_interrupted_between_launches_can_be_repeated(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model()
        options = {"transport": SimTransport(), "warmup_steps": 3, "bucket_cap_mb": 0.004, "overlap": False}
        return net, SHARDED["sharded"](net.parameters(), **options)

    (net, optimizer), (clean, another) = begun(), begun()
    train(SimTransport(), range(6), net, optimizer)
    launch = optimizer._driver.launch

    def interrupted(next_one: ShardedBucket, step: object) -> None:
        if next_one.index == bucket:
            raise KeyboardInterrupt
        launch(next_one, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optimizer._driver, "launch", interrupted)
        train(SimTransport(), range(6, 7), net, optimizer)
    train(SimTransport(), range(6, 9), net, optimizer)
    train(SimTransport(), range(9), clean, another)
    assert torch.equal(flat(net), flat(clean))


def test_a_state_takes_the_place_of_an_interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+C in a notebook."""
    transport = SimTransport()
    net, optimizer = fresh(transport, bucket_cap_mb=0.004, overlap=False)
    train(transport, range(6), net, optimizer)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(transport, "all_gather", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        train(transport, range(6, 7), net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    train(transport, range(6, 9), net, optimizer)
    again, another = fresh(transport, bucket_cap_mb=0.004, overlap=False)
    train(transport, range(9), again, another)
    assert torch.equal(flat(net), flat(again))


# -------------------------------------------------------------------------------- ranks that are not in step


def build(name: str, net: nn.Module, transport: SimTransport, **options: object) -> torch.optim.Optimizer:
    if name in SHARDED:
        return SHARDED[name](net.parameters(), lr=0.01, transport=transport, warmup_steps=2, **options)
    return make(name, net, transport, **options)


def errors_of(world_size: int, work: Callable[[SimTransport], None]) -> list[str]:
    """What each rank's DesyncError or PeerError says."""

    kinds = onebit.DesyncError, PeerError, ValueError
    return run_ranks(world_size, lambda transport: error_of(kinds, work, transport), timeout_s=20.0)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, "lr") for name in (*FAMILY, *SHARDED)),
        *((name, option) for name in ("OnebitAdam", "sharded") for option in ("betas", "weight_decay", "eps")),
    ],
)
def test_options_that_differ_end_the_step_by_name(name: str, option: str) -> None:
    """As with ReduceLROnPlateau on each rank's own loss. Nothing of the step is written."""

    def ours(transport: SimTransport) -> None:
        net = model()
        optimizer = build(name, net, transport)
        train(transport, range(3), net, optimizer)
        before = flat(net).clone()
        if transport.rank == 2:
            group = optimizer.param_groups[0]
            group[option] = (0.7, 0.9) if option == "betas" else group[option] / 4 + 1e-4
        try:
            train(transport, range(3, 9), net, optimizer)
        finally:
            if name != "ZeroOneAdam":  # which may have taken local steps
                assert torch.equal(flat(net), before)

    for said in errors_of(3, ours):
        assert said.startswith("DesyncError: rank ")
        assert f"different values of {option}" in said and "on rank 0, 1" in said and "on rank 2" in said


@pytest.mark.parametrize("name", ["ZeroOneAdam", "sharded 0/1"])
def test_rounds_that_follow_unlike_rates_are_named(name: str) -> None:
    """The rank whose rate has fallen would skip exchanges that the other waits for."""

    def ours(transport: SimTransport) -> None:
        net = model()
        options = {"local_step_scaler": "auto", "local_step_clipper": 8}
        if name == "ZeroOneAdam":
            options |= {"var_freeze_step": 2}
        optimizer = build(name, net, transport, **options)
        train(transport, range(4), net, optimizer)
        if transport.rank == 1:
            optimizer.param_groups[0]["lr"] /= 8
        train(transport, range(4, 30), net, optimizer)

    for said in errors_of(2, ours):
        assert said.startswith("DesyncError: rank ")
        assert "different values of lr" in said or "step 1" in said or "are not in the same step" in said


@pytest.mark.parametrize("name", ["OnebitAdam", "sharded"])
@pytest.mark.parametrize("lr", [float("nan"), float("inf")])
def test_a_rate_that_is_not_finite_is_an_error(name: str, lr: float) -> None:
    def ours(transport: SimTransport) -> None:
        net = model()
        optimizer = build(name, net, transport)
        optimizer.param_groups[0]["lr"] = lr
        train(transport, range(1), net, optimizer)

    for said in errors_of(2, ours):
        assert said.startswith("ValueError: rank ") and "lr of parameter group 0 is" in said


@pytest.mark.parametrize("name", ["OnebitAdam", "sharded"])
def test_options_and_versions_are_compared_at_construction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(transport: SimTransport) -> None:
        net = model()
        groups = [{"params": [p], "lr": 0.01 * (1 + transport.rank)} for p in net.parameters()]
        (SHARDED.get(name) or onebit.OnebitAdam)(groups, transport=transport)

    for said in errors_of(2, ours):
        assert "differ between ranks" in said and "lr = 0.01" in said and "lr = 0.02" in said
    assert any(line.startswith("version of onebit = ") for line in onebit.agreement.step_vote.option_lines([]))


def errors_of_odd_loops(name: str, calls: dict[int, int], drops: bool = False) -> list[str]:
    """calls: how often rank 1 calls step() in these of eight steps. drops: with zero_grad() in between."""

    def ours(transport: SimTransport) -> None:
        net = model()
        optimizer = build(name, net, transport)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            for again in range(calls.get(step, 1) if transport.rank == 1 else 1):
                if again and drops:
                    optimizer.zero_grad()
                optimizer.step()

    return errors_of(2, ours)


@pytest.mark.parametrize("name", [*FAMILY, *SHARDED])
def test_a_rank_that_skips_a_step_uses_its_next_batch(name: str) -> None:
    """`if not loss.isfinite(): continue` on one rank: the others wait, and in the end it is the one that is missing."""
    said = errors_of_odd_loops(name, {4: 0})
    assert said[0].startswith("PeerError: rank 0: rank [1] ended") and said[1] == ""


@pytest.mark.parametrize(
    ("name", "drops"), [("OnebitAdam", True), ("sharded", True), *((name, False) for name in (*FAMILY, *SHARDED))]
)
def test_a_rank_that_repeats_a_step_is_named(name: str, drops: bool) -> None:
    """Without zero_grad(), in a step of the others; with it, it counts as one without gradients, and ends first."""
    said = errors_of_odd_loops(name, {4: 2, 5: 2, 6: 2}, drops)  # rounds of 0/1 Adam may be local
    if drops:
        assert said[0] == "" and said[1].startswith("PeerError: rank 1: rank [0] ended")
    else:
        for rank, one in enumerate(said):
            assert one.startswith(f"DesyncError: rank {rank}: rank 1 calls step() with the gradients of its last step")


def test_all_ranks_may_use_a_gradient_again() -> None:
    def ours(transport: SimTransport) -> Tensor:
        net, optimizer = fresh(transport)
        loss_of(net, 0, transport.rank).backward()
        for _ in range(7):
            optimizer.step()
        return flat(net)

    assert torch.equal(*run_ranks(2, ours))


# -------------------------------------------------------------------------------- uneven batches


@pytest.mark.parametrize(("name", "stage"), [("sharded", 2), *((name, 1) for name in (*FAMILY, *SHARDED))])
def test_join_goes_on_until_the_last_rank_is_through(name: str, stage: int) -> None:
    """As if the ranks that are through had batches without gradients; rates follow the schedule of the others."""
    batches = [9, 4, 0]

    def ours(transport: SimTransport, joins: bool) -> tuple[Tensor, int, float]:
        net = model()
        optimizer = build(name, net, transport, **({"stage": stage} if name in SHARDED else {}))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.8**k)

        def one(step: int) -> None:
            optimizer.zero_grad()
            if step < batches[transport.rank]:
                loss_of(net, step, transport.rank).backward()
            optimizer.step()

        if joins:
            with optimizer.join():
                for step in range(batches[transport.rank]):
                    one(step)
                    schedule.step()
        else:
            for step in range(max(batches)):
                one(step)
                schedule.step()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        return flat(net), optimizer.stats.shadow_steps, optimizer.param_groups[0]["lr"]

    plain = run_ranks(3, lambda transport: ours(transport, False))
    for (weights, shadows, _), (expected, _, _), count in zip(
        run_ranks(3, lambda transport: ours(transport, True)), plain, batches, strict=True
    ):
        assert torch.equal(weights, expected)
        assert shadows == max(batches) - count


@pytest.mark.parametrize("name", ["OnebitAdam", "sharded", "LocalSteps"])
def test_a_join_inside_another_is_an_error_and_ends_both(name: str) -> None:
    """Ranks that are through would follow the inner one, and the others wait in the outer one, until the timeout."""

    def ours(transport: SimTransport) -> None:
        def optimizer() -> torch.optim.Optimizer:
            if name == "LocalSteps":
                return onebit.LocalSteps(torch.optim.AdamW(model().parameters()), 2, transport=transport)
            return build(name, model(), transport)

        actor, critic = optimizer(), optimizer()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="with one optimizer, a group each"), actor.join(), critic.join():
                raise AssertionError("the loop has begun")
        with actor.join():
            pass

    run_ranks(2, ours)


def test_join_of_ranks_with_as_many_batches_changes_nothing() -> None:
    def ours(transport: SimTransport, joins: bool) -> Tensor:
        net, optimizer = fresh(transport)
        if joins:
            with optimizer.join():
                train(transport, range(7), net, optimizer)
            train(transport, range(7, 9), net, optimizer)
        else:
            train(transport, range(9), net, optimizer)
        return flat(net)

    for world_size in (1, 2):
        assert torch.equal(
            *(run_ranks(world_size, lambda transport, on=on: ours(transport, on))[0] for on in (True, False))
        )
