"""Gradients that are missing, masked, unlike or bad, and what is refused, for every optimizer of the family."""

from __future__ import annotations

import copy

import pytest
import torch
from family import FAMILY, FREEZE, batch, flat, fresh, loss_of, make, model, same, snapshot, train
from family_contract import check_skip
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onebit
from onebit.arithmetic.squares import gradient_dots, gradient_sums
from onebit.comm import IdentityCodec, Int8Codec, SignCodec, SimTransport, run_ranks
from onebit.optimizer import CompressedOptimizer

# -------------------------------------------------------------------------------- missing, empty, frozen


@pytest.mark.parametrize("name", FAMILY)
def test_a_gradient_that_is_missing_on_one_rank_holds_nobody_up(name: str) -> None:
    """Buckets leave during backward on one rank and in step() on the other: both must send the same sequence."""

    def ours(transport: SimTransport) -> Tensor:
        net, optimizer = fresh(transport, name, bucket_cap_mb=0.003)
        assert len(optimizer.buckets) > 2
        for step in range(3 * FREEZE):
            x, y = batch(step, transport.rank)
            skips = transport.rank == 1 and step % 3 == 2  # the layer in the middle
            out = net[4](net[3](net[1](net[0](x)))) if skips else net(x)
            nn.functional.cross_entropy(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, onebit.ZeroOneAdam):
            optimizer.sync()
        return flat(net)

    first, second = run_ranks(2, ours, timeout_s=20)
    assert torch.equal(first, second)


def test_parameters_without_a_gradient() -> None:
    """None on all ranks: not moved. None on one rank: a zero there. Empty and frozen parameters: left alone."""

    def ours(transport: SimTransport) -> None:
        used, unused, sometimes = (nn.Parameter(torch.ones(5)) for _ in range(3))
        empty, frozen = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(5), requires_grad=False)
        optimizer = onebit.OnebitAdam(
            [used, unused, empty, frozen, sometimes], lr=0.1, weight_decay=0.5, freeze_step=2, transport=transport
        )
        for _ in range(6):
            optimizer.zero_grad()
            loss = (used * 2).sum() + empty.sum()
            if transport.rank == 1:
                loss = loss + sometimes.sum()
            loss.backward()
            optimizer.step()
        assert torch.equal(unused, torch.ones(5)) and torch.equal(frozen, torch.ones(5)) and empty.numel() == 0
        assert (used < 0.9).all() and (sometimes < 0.9).all() and (sometimes > -2).all()

    run_ranks(2, ours)


def test_warmup_counts_a_missing_gradient_as_zero() -> None:
    def ours(transport: SimTransport) -> Tensor:
        p = nn.Parameter(torch.ones(3))
        optimizer = onebit.OnebitAdam([p], lr=0.1, freeze_step=100, transport=transport, warmup_codec=IdentityCodec())
        for _ in range(3):
            p.grad = torch.full((3,), 4.0) if transport.rank == 0 else None
            optimizer.step()
        return p.detach()

    reference = nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([reference], lr=0.1)
    for _ in range(3):
        reference.grad = torch.full((3,), 2.0)
        adamw.step()
    for result in run_ranks(2, ours):
        torch.testing.assert_close(result, reference.detach(), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("freeze_step", [10, "auto"])
@pytest.mark.parametrize("kind", ["OnebitAdam", "ZeroOneAdam"])
def test_rows_that_wake_up_late_neither_explode_nor_stand_still(kind: str, freeze_step: int | str) -> None:
    """An embedding whose upper half is first used after the freeze moves its rows as far as the lower half's.

    In "auto" that is between two refreshes. `test_onebit_lamb.py` has LAMB's case.
    """
    first = 15 if freeze_step == 10 else 106

    def ours(transport: SimTransport) -> tuple[float, float]:
        table = nn.Embedding(16, 256, _weight=torch.randn(16, 256, generator=torch.Generator().manual_seed(0)))
        late = nn.Parameter(torch.zeros(300))
        before = table.weight.detach().clone()
        options = {"freeze_step": freeze_step} if kind == "OnebitAdam" else {"var_update_scaler": 2}
        optimizer = getattr(onebit, kind)(
            [table.weight, late], lr=0.01, weight_decay=0.0, transport=transport, **options
        )
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(first + 15):
            optimizer.zero_grad()
            rows = torch.randint(0, 8, (16,), generator=generator) + (8 if step >= first else 0)
            target = torch.ones(256) * (1 if step % 2 else 0.8)
            loss = ((table(rows) - target) ** 2).sum()
            if step >= first:
                loss = loss + ((late - 1) ** 2).sum()
            loss.backward()
            optimizer.step()
            if step < first:
                assert torch.equal(table.weight[8:], before[8:])
        moved = (table.weight.detach() - before)[8:].abs()
        return float(moved.max()), float(late.detach().mean())

    for largest, late in run_ranks(2, ours):
        assert 0.01 < largest < 1.0
        assert 0.001 < late < 1.5


@pytest.mark.parametrize("name", FAMILY)
def test_where_a_mask_is_zero_nothing_moves(name: str) -> None:
    """The peer's `exp_avg_mask`, one for a group or one per parameter, decay included; also after a resume."""

    def ours(transport: SimTransport) -> None:
        table, bias = nn.Parameter(torch.ones(6, 100)), nn.Parameter(torch.ones(40))
        mask = torch.ones(6, 1)
        mask[4:] = 0.0
        kind, defaults = FAMILY[name]

        def build() -> CompressedOptimizer:
            groups = [{"params": [table, bias], "exp_avg_mask": [mask, torch.ones(40)]}]
            return kind(groups, transport=transport, weight_decay=0.1, **defaults)

        optimizer = build()
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(24):
            if step == 12:
                state, optimizer = copy.deepcopy(optimizer.state_dict()), build()
                optimizer.load_state_dict(state)
            for p in (table, bias):
                p.grad = 1.0 + 0.5 * torch.randn(p.shape, generator=generator)
            optimizer.step()
        assert torch.equal(table[4:], torch.ones(2, 100)) and (bias < 0.99).all()
        # Muon gives all directions of a matrix one length, those of the noise too: single elements go astray.
        assert table[:4].mean() < 0.97 if name == "OnebitMuon" else (table[:4] < 0.99).all()

    run_ranks(2, ours)


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", FAMILY)
def test_loading_between_backward_and_step_forgets_what_was_decided(name: str, max_grad_norm: float) -> None:
    """A kind of step is decided in backward, and nothing sent yet, where one clips or is silent."""

    def work(transport: SimTransport) -> None:
        net, optimizer = fresh(transport, name, max_grad_norm=max_grad_norm)
        kept = []
        for step in range(16):
            kept.append((snapshot(optimizer), copy.deepcopy(net.state_dict())))
            train(transport, range(step, step + 1), net, optimizer)
        for abandoned, step in ((3, 9), (3, 11), (10, 2), (10, 7), (13, 2), (13, 9)):
            optimizer.load_state_dict(copy.deepcopy(kept[abandoned][0]))
            optimizer.zero_grad()
            loss_of(net, abandoned, transport.rank).backward()
            state, weights = copy.deepcopy(kept[step])
            net.load_state_dict(weights)
            optimizer.load_state_dict(state)
            train(transport, range(step, step + 2), net, optimizer)
            assert same(snapshot(optimizer), kept[step + 2][0]), (abandoned, step)

    run_ranks(2, work)


@pytest.mark.parametrize("name", FAMILY)
def test_the_mask_given_at_construction_outlives_a_checkpoint(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another mask than the checkpoint's, one where it has none, and none where it has one, which is said."""
    kind, defaults = FAMILY[name]
    first, second = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])

    def trained(mask: Tensor | None, state: dict | None) -> tuple[list[bool], dict]:
        p = nn.Parameter(torch.ones(3))
        group = {"params": [p]} if mask is None else {"params": [p], "exp_avg_mask": mask}
        optimizer = kind([group], transport=SimTransport(), **defaults)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(2):
            p.grad = torch.ones(3)
            optimizer.step()
        return (p.detach() != 1.0).tolist(), copy.deepcopy(optimizer.state_dict())

    for saved, here in ((first, second), (None, second), (first, None)):
        moves, _ = trained(here, trained(saved, None)[1])
        assert moves == ([True] * 3 if here is None else here.bool().tolist())
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "exp_avg_mask of group 0 in this state is not taken over" in said[0]


@pytest.mark.parametrize(
    ("masks", "message"), [(torch.ones(7), "does not broadcast"), ([torch.ones(3)] * 2, "2 masks for 1 parameters")]
)
def test_a_mask_that_does_not_fit_is_refused(masks: Tensor | list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onebit.OnebitAdam([{"params": [nn.Parameter(torch.ones(3))], "exp_avg_mask": masks}], transport=SimTransport())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen", "auto", "ZeroOneAdam"])
def test_gradients_that_grow_a_thousandfold_move_nothing_a_thousand_times_as_far(kind: str) -> None:
    """As in attention that wakes up: the variance is steps old and knows nothing of it. Adam itself moves by 6.6 lr.

    What arrives is bounded by 8; in Adam m/D can be 7.3.
    """
    begin = 40 if kind == "frozen" else 115  # "auto": between two refreshes

    def ours(transport: SimTransport) -> float:
        p = nn.Parameter(torch.zeros(1024))
        options: dict = {"freeze_step": 20 if kind == "frozen" else "auto"}
        optimizer = (
            onebit.ZeroOneAdam([p], lr=1e-3, weight_decay=0.0, transport=transport)
            if kind == "ZeroOneAdam"
            else onebit.OnebitAdam([p], lr=1e-3, weight_decay=0.0, transport=transport, **options)
        )
        generator, largest = torch.Generator().manual_seed(transport.rank), 0.0
        for step in range(begin + 35):
            before = p.detach().clone()
            p.grad = (1e-3 if step < begin else 1.0) * (1.0 + 0.3 * torch.randn(1024, generator=generator))
            optimizer.step()
            largest = max(largest, float((p.detach() - before).abs().max()) / 1e-3)
        return largest

    for largest in run_ranks(2, ours):
        assert 1.0 < largest < 8.2


@pytest.mark.slow
def test_what_arrives_in_sync_is_bounded_as_in_a_step() -> None:
    def ours(transport: SimTransport) -> tuple[int, float]:
        p = nn.Parameter(torch.zeros(1024))
        schedule = {"var_freeze_step": 20, "local_step_scaler": 1, "local_step_clipper": 8}
        optimizer = onebit.ZeroOneAdam([p], lr=1e-3, transport=transport, **schedule)
        for step in range(76):
            p.grad = torch.full_like(p, 1e-3 if step < 69 else 1.0)
            optimizer.step()
        local_steps = optimizer.rule.since_sync
        optimizer.sync()
        return local_steps, float(optimizer.buckets[0].flat["exp_avg_update"].abs().max())

    for local_steps, largest in run_ranks(2, ours):
        assert local_steps == 7 and 1.0 < largest <= 8.0


@pytest.mark.parametrize("longest", [1, 4])
def test_a_group_that_does_not_learn_for_a_while_loses_no_residual(longest: int) -> None:
    """What it has yet to send arrives all the same: parameters less the mean residual stay where they are."""

    def ours(transport: SimTransport) -> tuple[Tensor, Tensor]:
        params = [nn.Parameter(torch.zeros(256 * transport.world_size)) for _ in range(2)]
        schedule = {"var_freeze_step": 5, "local_step_scaler": 1, "local_step_clipper": longest}
        groups = [{"params": [p]} for p in params]
        optimizer = onebit.ZeroOneAdam(groups, lr=1e-2, weight_decay=0.0, transport=transport, **schedule)
        generator, found = torch.Generator().manual_seed(transport.rank), []
        for step in range(24):
            if step == 16:
                optimizer.sync()
                optimizer.param_groups[1]["lr"] = 0.0
            if step in (16, 23):
                ef = optimizer.buckets[1].ef
                residual = ef.worker / transport.world_size
                residual.view(transport.world_size, -1)[transport.rank] += ef.server
                found.append(params[1].detach() / transport.world_size - residual)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return found[0], found[1]

    before, after = (sum(parts) for parts in zip(*run_ranks(2, ours), strict=True))
    assert float((after - before).abs().max()) < 1e-7 < float(before.abs().max())


@pytest.mark.parametrize("name", FAMILY)
def test_blocks_of_another_size(name: str) -> None:
    """All that travels is cut alike; a codec of gradients that is not is refused."""

    def ours(transport: SimTransport) -> Tensor:
        net = model()
        return train(transport, range(14), net, make(name, net, transport, codec=SignCodec(64)))[-1]

    results = run_ranks(2, ours)
    assert results[0].isfinite().all()
    option = "variance_codec" if name == "ZeroOneAdam" else "warmup_codec"
    with pytest.raises(ValueError, match="has blocks of 256, the one-bit codec of 64; give both the same"):
        make(name, model(), SimTransport(), codec=SignCodec(64), **{option: Int8Codec(256)})


def test_elements_of_unlike_size_move_alike_after_the_freeze() -> None:
    """Gradients of 0.01 to 1 in one block: Adam moves each by about lr a step, and so must its one-bit form.

    With the momentum compressed as it is, the small ones moved by up to 10 lr, and runs diverged.
    """
    sizes = torch.logspace(-2, 0, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))].repeat(4)

    def ours(transport: SimTransport) -> float:
        p = nn.Parameter(torch.zeros(1024))
        optimizer = onebit.OnebitAdam([p], lr=1e-3, weight_decay=0.0, freeze_step=20, transport=transport)
        generator, largest = torch.Generator().manual_seed(transport.rank), 0.0
        for step in range(60):
            before = p.detach().clone()
            p.grad = sizes * (1.0 + 0.3 * torch.randn(1024, generator=generator))
            optimizer.step()
            if step >= 20:
                largest = max(largest, float((p.detach() - before).abs().max()) / 1e-3)
        return largest

    for largest in run_ranks(4, ours):
        assert 0.5 < largest < 2.0


# -------------------------------------------------------------------------------- bad gradients


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
@pytest.mark.parametrize("bad_step", [2, 9])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_makes_all_skip_and_leaves_no_trace(bad: float, bad_step: int, name: str) -> None:
    for max_grad_norm in (0.0, 0.2):
        check_skip(name, (2, None), bad_step, bad, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("name", FAMILY)
def test_a_gradient_that_no_variance_can_hold_is_skipped_without_a_trace(name: str) -> None:
    """Finite, but its square is not: the variance was infinite from there on, and nothing moved any more."""
    check_skip(name, (2, None), 2, 1e24)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("at", [2, 12])
def test_a_gradient_whose_squares_overflow_is_clipped_or_skipped(at: int, name: str) -> None:
    """Finite, but its norm is not in float32: the factor was NaN, behind the verdict, and so were all parameters."""

    def ours(transport: SimTransport) -> None:
        net, optimizer = fresh(transport, name, max_grad_norm=1.0)
        train(transport, range(at), net, optimizer)
        for p in net.parameters():
            p.grad = torch.full_like(p, 1e30)
        optimizer.step()
        train(transport, range(at + 1, at + 4), net, optimizer)
        assert flat(net).isfinite().all() and optimizer.stats.skipped_steps <= 1

    run_ranks(2, ours)


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
def test_a_norm_given_in_the_loop_clips_as_one_given_at_construction(name: str) -> None:
    """Before the first step, as a framework's clip_grad_norm_ gives it; and anew with every step."""

    def ours(transport: SimTransport) -> bool:
        net, optimizer = fresh(transport, name)
        other_net, other = fresh(transport, name, max_grad_norm=0.2)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            optimizer.max_grad_norm = 0.2
            optimizer.step()
        train(transport, range(12), other_net, other)
        assert optimizer.stats.clip_factor < 1.0
        return torch.equal(flat(net), flat(other_net)) and optimizer.max_grad_norm == 0.2

    assert run_ranks(2, ours) == [True, True]


def test_a_first_norm_that_comes_after_backward_clips_this_step() -> None:
    def ours(transport: SimTransport) -> bool:
        net, late = fresh(transport)
        other_net, early = fresh(transport)
        train(transport, range(11), net, late)
        train(transport, range(11), other_net, early)
        early.max_grad_norm = 0.2
        for each, optimizer in ((net, late), (other_net, early)):
            optimizer.zero_grad()
            loss_of(each, 11, transport.rank).backward()
            assert optimizer._driver.launched
            optimizer.max_grad_norm = 0.2
            with pytest.raises(ValueError, match="at least 0"):
                optimizer.max_grad_norm = float("nan")
            optimizer.step()
            assert optimizer.stats.clip_factor < 1.0
        return torch.equal(flat(net), flat(other_net)) and late.max_grad_norm == 0.2

    assert run_ranks(2, ours) == [True, True]


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(4, 8, sparse=True)
    optimizer = onebit.OnebitAdam(table.named_parameters(), freeze_step=1, transport=SimTransport())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight has a torch.sparse_coo gradient; .*sparse=False"):
        optimizer.step()


def test_a_dtype_that_is_none_of_ours_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"weights is torch.float64; onebit trains float32, bfloat16 and float16"):
        onebit.OnebitAdam([("weights", nn.Parameter(torch.ones(3).double()))], transport=SimTransport())


@pytest.mark.parametrize("what", ["shape", "order", "option", "missing"])
def test_ranks_that_disagree_are_told_at_construction(what: str) -> None:
    def ours(transport: SimTransport) -> str:
        odd = transport.rank == 2
        params = [("wide", nn.Parameter(torch.ones(4, 3))), ("long", nn.Parameter(torch.ones(7)))]
        if what == "shape" and odd:
            params[1] = ("long", nn.Parameter(torch.ones(8)))
        if what == "order" and odd:
            params.reverse()
        if what == "missing" and odd:
            params.pop()
        with pytest.raises(ValueError) as caught:
            onebit.OnebitAdam(params, freeze_step=3 if what == "option" and odd else 2, transport=transport)
        return str(caught.value)

    expected = {
        "shape": "entry 1 is long: torch.float32 (7,) requires_grad=True on rank 0 and long: torch.float32 (8,)",
        "order": "entry 0 is wide: torch.float32 (4, 3) requires_grad=True on rank 0 and long: torch.float32 (7,)",
        "option": "freeze_step=2",
        "missing": "entry 1 is long: torch.float32 (7,) requires_grad=True on rank 0 and option",
    }[what]
    for rank, message in enumerate(run_ranks(3, ours)):
        assert message.startswith(f"rank {rank}: ") and expected in message and "on rank 2" in message


def test_a_replica_that_drifts_stops_the_run_by_name() -> None:
    def ours(transport: SimTransport) -> str:
        net = model()
        optimizer = onebit.OnebitAdam(
            net.named_parameters(), lr=0.01, freeze_step=2, transport=transport, check_replicas_every=4
        )
        train(transport, range(3), net, optimizer)
        if transport.rank == 1:
            with torch.no_grad():
                net[2].weight[0, 0] += 1e-6
        with pytest.raises(onebit.ReplicaError) as caught:
            train(transport, range(3, 4), net, optimizer)
        return str(caught.value)

    for message in run_ranks(3, ours):
        assert "after step 4 rank [1] holds other values than rank 0 in 2.weight" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_step": 0}, "at least 1"),
        ({"freeze_step": "soon"}, '"auto"'),
        ({"error_dtype": torch.int8}, "error_dtype"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onebit.OnebitAdam([nn.Parameter(torch.ones(3))], **{"freeze_step": 2, "transport": SimTransport()} | options)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [onebit.OnebitAdam, onebit.zero.ShardedOnebitAdam])
def test_a_bad_bucket_size_is_refused_before_anything_is_joined(
    kind: type, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebit.comm.init", lambda: pytest.fail("joined the launcher's ranks"))
    with pytest.raises(ValueError, match="bucket_cap_mb must be above 0 and finite"):
        kind([nn.Parameter(torch.ones(3))], bucket_cap_mb=cap)


@pytest.mark.parametrize("name", FAMILY)
def test_a_bad_variance_floor_names_the_optimizer_that_got_it(name: str) -> None:
    kind, defaults = FAMILY[name]
    with pytest.raises(ValueError, match=f"^{name}: variance_floor must not be negative"):
        kind([nn.Parameter(torch.ones(3))], transport=SimTransport(), **defaults | {"variance_floor": -1.0})


class Questions(TorchDispatchMode):
    """How often the device is asked for a number, for which the host waits."""

    asked = 0

    def __torch_dispatch__(self, function: object, types: object, args: tuple = (), kwargs: object = None) -> object:
        self.asked += str(function) == "aten._local_scalar_dense.default"
        return function(*args, **(kwargs or {}))  # type: ignore[operator]


@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_an_estimated_norm_waits_for_the_device_once_a_bucket(name: str) -> None:
    """It was twice for every tensor."""

    def asked(tensors: int) -> int:
        params = [nn.Parameter(torch.ones(7)) for _ in range(tensors)]
        early = {"freeze_step": 1} if name == "OnebitAdam" else {"var_freeze_step": 1}
        optimizer = getattr(onebit, name)(params, transport=SimTransport(), max_grad_norm=0.1, **early)
        for _ in range(4):
            for p in params:
                p.grad = torch.ones_like(p)
            with Questions() as questions:
                optimizer.step()
        assert optimizer.stats.phase == "compressed" and 0.0 < optimizer.stats.clip_factor < 1.0
        return questions.asked

    assert asked(40) == asked(2)


@pytest.mark.parametrize("shares", [(1.0,) * 7, (1.0, 0.5, 1.0 / 3.0, 0.25, 1.0, 0.2, 0.7)])
def test_sums_on_the_device_are_those_of_the_host_to_the_bit(shares: tuple[float, ...]) -> None:
    generator, scale = torch.Generator().manual_seed(0), 1.0 / 3.0
    pairs = [
        (torch.randn(3, k + 1, generator=generator), torch.randn(3 * k + 3, generator=generator)) for k in range(7)
    ]
    squares = products = 0.0
    for share, (square, product) in zip(shares, gradient_dots(lambda: pairs), strict=True):
        squares += share * scale * scale * square
        products += share * scale * product
    assert gradient_sums(pairs, shares, scale, torch.device("cpu")).tolist() == [squares, products]
    assert gradient_sums([], [], scale, torch.device("cpu")).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("has_mask", [False, True])
def test_sums_of_whole_buckets_are_those_of_their_parameters(has_mask: bool) -> None:
    """And so are those of kernels: a missing gradient counts as zero, and one in another dtype is read as float32."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((7, 3), (5,), (0, 2), (300,))]
    masks = [torch.ones_like(p) if p.dim() == 2 else (torch.rand_like(p) > 0.5).float() for p in params]
    group = {"params": params} | ({"exp_avg_mask": masks} if has_mask else {})
    optimizer = onebit.OnebitAdam([group], lr=0.1, freeze_step=2, transport=SimTransport(), bucket_cap_mb=1e-3)
    for _ in range(4):
        for p in (params[0], params[3]):
            p.grad = torch.randn_like(p)
        optimizer.step()
    params[0].grad, params[1].grad = torch.randn_like(params[0]), None
    norm = optimizer._norm
    whole = gradient_sums(norm._whole(optimizer.buckets), [1.0] * len(optimizer.buckets), 0.5, torch.device("cpu"))
    assert whole.tolist() == pytest.approx(norm.own_sums(0.5), rel=1e-5)
    assert norm.own_sums_on_device(0.5).tolist() == pytest.approx(norm.own_sums(0.5), rel=1e-5)
    assert len(optimizer.buckets) > 1 and whole[0] > 0


def test_a_norm_beyond_float32_clips_a_compressed_step() -> None:
    """Its square overflows on one rank alone: all vote once more, in float64, and take the step."""

    def work(transport: SimTransport) -> tuple[float, Tensor]:
        p = nn.Parameter(torch.ones(64))
        optimizer = onebit.OnebitAdam([p], transport=transport, freeze_step=2, max_grad_norm=0.5)
        for step in range(5):
            p.grad = torch.full_like(p, 1e20 if step == 4 and transport.rank == 1 else 1.0)
            optimizer.step()
        assert optimizer.stats.phase == "compressed" and optimizer.stats.skipped_steps == 0
        return optimizer.stats.clip_factor, p.detach()

    (factor, p), (same_factor, q) = run_ranks(2, work)
    # The estimate of the norm: the mean of squares over the ranks, 64e40 / 2, and of products, 64e20 / 2, both halved.
    assert factor == same_factor == pytest.approx(0.5 / (64e40 / 4) ** 0.5, rel=1e-3)
    assert torch.equal(p, q) and bool(p.isfinite().all())
