"""OnebitMuon: equal to the textbook loop, bit-identical replicas, exact resume; which parameters are whose."""

from __future__ import annotations

import copy
from collections.abc import Generator

import numpy as np
import pytest
import torch
from family import same
from torch import Tensor, nn

import onebit
from onebit import onebit_muon
from onebit.arithmetic.muon import adjustment, newton_schulz
from onebit.comm import IdentityCodec, SignCodec, SimTransport, run_ranks
from onebit.layout.bucket import Bucket
from onebit.reference.onebit_muon import OnebitMuon as OnebitMuonOracle
from onebit.reference.onebit_muon import orthogonalised
from onebit.step.link_probe import CompressionPolicy
from onebit.step.replicated import Replicated

SHAPES = ((12, 40), (33, 8), (1, 5), (6, 1))
SIZES = [r * c for r, c in SHAPES]
DENSE = 5
LRS = [0.02 * (1 - k / 60) for k in range(30)]


def start() -> np.ndarray:
    return np.random.default_rng(3).normal(size=sum(SIZES)).astype(np.float32).astype(np.float64)


def gradient(step: int, worker: int) -> np.ndarray:
    """A drifting pull of each worker's own, with noise. No function of x: a rounding must not feed back into it."""
    pull = np.random.default_rng(worker).normal(size=sum(SIZES)) * np.cos(0.1 * step)
    noise = np.random.default_rng((step, worker)).normal(size=sum(SIZES))
    return (pull + 0.5 * noise).astype(np.float32).astype(np.float64)


def matrices() -> list[nn.Parameter]:
    parts = torch.from_numpy(start()).float().split(SIZES)
    return [nn.Parameter(part.view(shape).clone()) for part, shape in zip(parts, SHAPES, strict=True)]


def flat(params: list[nn.Parameter]) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in params]).double().numpy()


def give_gradients(params: list[nn.Parameter], step: int, worker: int) -> None:
    parts = torch.from_numpy(gradient(step, worker)).float().split(SIZES)
    for p, part in zip(params, parts, strict=True):
        p.grad = part.view_as(p).clone()


def train(transport: SimTransport, **options: object) -> np.ndarray:
    params = matrices()
    groups = [{"params": params, "use_muon": True}]
    optimizer = onebit.OnebitMuon(
        groups, transport=transport, freeze_step=DENSE, warmup_codec=IdentityCodec(), **options
    )
    trajectory = []
    for step, lr in enumerate(LRS):
        optimizer.param_groups[0]["lr"] = lr
        give_gradients(params, step, transport.rank)
        optimizer.step()
        trajectory.append(flat(params))
    return np.stack(trajectory)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (2, {}), (4, {}), (2, {"nesterov": False}), (2, {"adjust_lr": "original"}), (2, {"momentum": 0.0})],
    ids=str,
)
def test_equals_the_textbook_loop(world_size: int, options: dict) -> None:
    """float32 against float64. Newton-Schulz makes up to 500 times more of what is small in a matrix."""
    oracle = OnebitMuonOracle(start(), world_size, SHAPES, dense=DENSE, **options)
    expected = []
    for step, lr in enumerate(LRS):
        oracle.step(np.stack([gradient(step, worker) for worker in range(world_size)]), lr)
        expected.append(oracle.x.copy())
    results = run_ranks(world_size, lambda transport: train(transport, **options))
    for trajectory in results:
        np.testing.assert_array_equal(trajectory, results[0])
    np.testing.assert_allclose(results[0], np.stack(expected), atol=5e-4, rtol=0)


@pytest.mark.parametrize("present", [0, 1])
def test_a_rank_without_a_gradient_does_not_go_on_by_its_old_momentum(present: int) -> None:
    """The momentum fades, but the move of any momentum has the same size. Of two ranks one has a gradient, or none."""
    gradients, moves = [torch.randn(4, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)], 40

    def work(transport: SimTransport) -> Tensor:
        params = [nn.Parameter(torch.zeros(4, 8)) for _ in gradients]
        group = {"params": params, "use_muon": True}
        optimizer = onebit.OnebitMuon([group], lr=0.01, weight_decay=0.0, freeze_step=1, transport=transport)
        for step in range(10 + moves):
            for p, g in zip(params, gradients, strict=True):
                p.grad = g.clone()
            if step >= 10:
                params[1].grad = gradients[1].clone() if transport.rank < present else None
            else:
                before = params[1].detach().clone()
            optimizer.step()
        return params[1].detach() - before

    first, second = run_ranks(2, work)
    one_move = 0.01 * adjustment((4, 8), "match_rms_adamw") * newton_schulz(gradients[1])
    assert torch.equal(first, second)
    torch.testing.assert_close(-first, one_move + moves * present / 2 * one_move, rtol=0, atol=0.02)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (7, 3), (64, 64), (5, 1)])
def test_newton_schulz_is_the_quintic_of_the_singular_values(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    np.testing.assert_allclose(newton_schulz(x).numpy(), orthogonalised(x.double().numpy()), atol=2e-3)
    singular = torch.linalg.svdvals(newton_schulz(torch.eye(max(shape))[: shape[0], : shape[1]].contiguous()))
    assert bool(((singular > 0.6) & (singular < 1.3)).all())
    assert not newton_schulz(torch.zeros(shape)).any()
    for power in (64, 70, 90, 120):  # squares are not finite in float32
        large = x / x.abs().max() * 2.0**power
        torch.testing.assert_close(newton_schulz(large), newton_schulz(x), rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.norm = nn.Embedding(11, 12), nn.Linear(12, 20), nn.LayerNorm(20)
        self.head = nn.Linear(20, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(self.words(x))))


def test_groups_are_hidden_matrices_and_the_rest() -> None:
    net = Net()
    muon, others = onebit.muon_groups(net, head=net.head)
    assert [name for name, _ in muon["params"]] == ["hidden.weight"] and muon["use_muon"]
    assert {name for name, _ in others["params"]} == {name for name, _ in net.named_parameters()} - {"hidden.weight"}
    tied = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3, bias=False))
    tied[1].weight = tied[0].weight
    (alone,) = onebit.muon_groups(tied, head=None)
    assert not alone["use_muon"]


def test_a_head_is_a_module_of_the_model() -> None:
    with pytest.raises(ValueError, match="head, a Linear, has parameters that model does not have"):
        onebit.muon_groups(Net(), head=Net().head)
    with pytest.raises(TypeError, match=r"head must be a module, or None .*, got 'head'"):
        onebit.muon_groups(Net(), head="head")  # type: ignore[arg-type]


def test_groups_that_cannot_be_are_refused_and_leave_nothing() -> None:
    p, vector = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"group 0 has no use_muon.*muon_groups"):
        onebit.OnebitMuon([p], transport=SimTransport())
    with pytest.raises(ValueError, match=r"use_muon and a parameter of shape \(3,\), which is no matrix"):
        onebit.OnebitMuon([{"params": [p, vector], "use_muon": True}], transport=SimTransport())
    for bad in ({"momentum": 1.0}, {"ns_steps": 0}, {"ns_steps": 5.0}, {"adjust_lr": "none"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            onebit.OnebitMuon([{"params": [p], "use_muon": True}], transport=SimTransport(), **bad)


def take_steps(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randint(11, (16,), generator=torch.Generator().manual_seed(100 * step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), (x + 1) % 11).backward()
        optimizer.step()


def make(net: Net) -> onebit.OnebitMuon:
    groups = onebit.muon_groups(net, head=net.head)
    return onebit.OnebitMuon(groups, lr=0.02, freeze_step=4, bucket_cap_mb=0.0005, transport=SimTransport())


def built() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def test_a_state_that_is_not_this_muons_is_refused_before_anything_changes() -> None:
    """AdamW's, or one whose groups are the other way round: loaded, the next step would be another kind or none."""
    net = built()
    optimizer = make(net)
    take_steps(net, optimizer, range(6))
    adamw = torch.optim.AdamW(onebit.muon_groups(net, head=net.head))
    take_steps(net, adamw, range(1))
    plain = torch.optim.AdamW([{"params": group["params"]} for group in onebit.muon_groups(net, head=net.head)])
    take_steps(net, plain, range(1))
    crossed = copy.deepcopy(optimizer.state_dict())
    for group in crossed["param_groups"]:
        group["use_muon"] = not group["use_muon"]
    before = copy.deepcopy(optimizer.state_dict())
    for state, message in (
        (plain.state_dict(), "group 0 has no use_muon, here it is True"),
        (adamw.state_dict(), "no state of OnebitMuon"),
        (crossed, "group 0 has use_muon=False, here it is True"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert same(optimizer.state_dict(), before)
    take_steps(net, optimizer, range(6, 8))


def test_residuals_of_gradients_are_none_of_moves(caplog: pytest.LogCaptureFixture) -> None:
    """Up to version 0.2 increments of the momentum were compressed."""
    net = built()
    optimizer = make(net)
    take_steps(net, optimizer, range(8))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(state))
    matrices = [bucket for bucket in optimizer.buckets if bucket.group["use_muon"]]
    assert not caplog.messages and all(bucket.ef.worker.any() for bucket in matrices)
    del state["onebit"]["residuals"]
    optimizer.load_state_dict(state)
    assert "version 0.2 or older" in caplog.text
    assert not any(bucket.ef.worker.any() or bucket.ef.server.any() for bucket in matrices)
    assert all(bucket.ef.worker.any() for bucket in optimizer.buckets if bucket not in matrices)
    take_steps(net, optimizer, range(8, 10))


@pytest.mark.parametrize("are_all_hidden", [False, True])
def test_matrices_warm_up_and_freeze_as_the_others_do(are_all_hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The phase is said, nothing is owed before anything is sent in one bit, and "auto" asks the network once."""
    asked = []
    decide = CompressionPolicy.decide
    monkeypatch.setattr(CompressionPolicy, "decide", lambda policy: asked.append(1) or decide(policy))

    def work(transport: SimTransport) -> list[tuple[str, bool]]:
        net = built()
        if are_all_hidden:
            net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        groups = onebit.muon_groups(net, head=None if are_all_hidden else net.head)
        optimizer = onebit.OnebitMuon(groups, lr=0.01, freeze_step=3, transport=transport)
        seen = []
        for step in range(5):
            for k, p in enumerate(net.parameters()):
                generator = torch.Generator().manual_seed(100 * step + 10 * k + transport.rank)
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
            seen.append((optimizer.stats.phase, any(bucket.ef is not None for bucket in optimizer.buckets)))
        return seen

    phases = [("warmup", False)] * 2 + [("warmup", True)] + [("compressed", True)] * 2
    assert run_ranks(2, work) == [phases] * 2
    assert len(asked) == 2  # once on each rank


def test_what_may_not_move_is_not_orthogonalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a masked element must not take part in the matrix, nor its move in what a block sends."""
    orthogonalise_, average, seen, sent = onebit_muon.orthogonalise_, Replicated.average, [], []

    def spied(updates: list[Tensor], params: list[Tensor], steps: int, *, first: int) -> None:
        seen.extend(bool(u[:, 6:].any()) or not bool(u[:, :6].any()) for u in updates)
        orthogonalise_(updates, params, steps, first=first)

    def watched(self: Replicated, bucket: Bucket, **options: bool) -> Generator:
        sent.append(bool(bucket.views[0][mask == 0].any()))
        return average(self, bucket, **options)

    monkeypatch.setattr(onebit_muon, "orthogonalise_", spied)
    monkeypatch.setattr(Replicated, "average", watched)
    mask = torch.ones(8, 12)
    mask[:, 6:] = mask[0, 0] = 0.0

    def work(transport: SimTransport) -> None:
        p = nn.Parameter(torch.ones(8, 12))
        group = {"params": [p], "use_muon": True, "exp_avg_mask": mask}
        made = onebit.OnebitMuon([group], lr=0.01, freeze_step=1, transport=transport, codec=SignCodec(64))
        for step in range(4):
            p.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + transport.rank))
            made.step()
        assert (p[mask == 0] == 1.0).all()

    run_ranks(2, work)
    assert seen == [False] * 8 and sent == [False] * 6


def test_matrices_end_their_warm_up_if_the_other_groups_have_no_gradient() -> None:
    """Its end had waited for a gradient in the groups with a variance, and matrices were sent in four bits for good."""

    def work(transport: SimTransport) -> tuple[str, bool]:
        net = built()
        optimizer = onebit.OnebitMuon(onebit.muon_groups(net, head=net.head), transport=transport, compression="always")
        for step in range(8):
            for k, p in enumerate(optimizer.param_groups[0]["params"]):
                generator = torch.Generator().manual_seed(100 * step + 10 * k + transport.rank)
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        matrices = [bucket for bucket in optimizer.buckets if bucket.group["use_muon"]]
        return optimizer.stats.phase, all(bucket.phase == "compressed" for bucket in matrices)

    assert run_ranks(2, work) == [("compressed", True)] * 2
