"""What the ranks of test_partitioned.py do: models that stages 1 and 2 must train as one process would."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import onebit
from onebit import zero
from onebit.zero import grid as grids

STEPS, MICROS = 4, 2
Loss = Callable[[nn.Module, Tensor], Tensor]


class Odd(nn.Module):
    """All that FSDP2 refuses: scalars, empty, transposed, channels_last and complex ones, an entry beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.across = nn.Parameter(torch.randn(6, 5).t() * 0.3)
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.waves = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64) * 0.3)
        self.empty = nn.Parameter(torch.zeros(0, 6))
        self.one_row = nn.Parameter(torch.randn(1, 6))
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def encode(self, x: Tensor) -> Tensor:
        image = x[:, :3].reshape(-1, 3, 1, 1).expand(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        pixels = self.conv(image).mean((2, 3))
        return (x @ self.across) * self.scale + pixels.mean(1, keepdim=True)

    def forward(self, x: Tensor, branch: str = "left") -> Tensor:
        h = self.encode(x)
        h = h + torch.view_as_real(torch.fft.fft(h[:, :5]) @ self.waves).reshape(len(h), 6)
        h = torch.tanh(h * self.one_row + self.frozen(h))
        return getattr(self, branch)(h) + self.empty.sum()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """A weight penalty, and a gradient penalty with a graph of its own."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    weights = sum(p.abs().square().sum() for p in model.parameters() if p.requires_grad)
    return plain(model, x) + slope.square().sum() + 1e-3 * weights


def by_encoder(model: nn.Module, x: Tensor) -> Tensor:
    return model.encode(x).square().mean() + plain(model, x)


def branching(model: nn.Module, x: Tensor) -> Tensor:
    """Rows choose their branch, so that ranks may run different ones."""
    return model(x, "left" if float(x[0, 0]) > 0 else "right").square().mean()


LOSSES: Mapping[str, Loss] = {f.__name__: f for f in (plain, penalised, by_encoder, branching)}


def odd() -> Odd:
    torch.manual_seed(3)
    return Odd()


def inputs(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def config(stage: int, micros: int, optimizer: Mapping[str, object], **blocks: object) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": micros,
        "optimizer": copy.deepcopy(optimizer),
        "zero_optimization": {"stage": stage},
        **blocks,
    }


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in engine.module_state_dict().items()}


def trains(cases: Sequence[tuple[dict[str, Any], str]], folder: str) -> None:
    """Train each case; files have the weights, averaged ones, those of one rank alone, and those that forward uses."""
    grid, found = grids.start(backend="gloo", timeout_s=30.0, shard=2), []
    for given, kind in cases:
        engine = zero.initialize(model=odd(), config=given, grid=grid)[0]
        average = list(copy.deepcopy(engine.module).parameters())  # as scripts make an average of weights
        micros = given["gradient_accumulation_steps"]
        for step in range(STEPS):
            for micro in range(micros):
                engine.backward(LOSSES[kind](engine.module, inputs(step, micro, grid.world.rank)))
                engine.step()
            with torch.no_grad():
                for mean, p in zip(average, engine.module.parameters(), strict=True):
                    mean.lerp_(p, 0.3)
        alone = dict(engine.module.state_dict()) if grid.world.rank == 0 else {}  # on one rank
        used = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        found.append({"weights": whole(engine), "average": [p.detach() for p in average], "alone": alone, "used": used})
    torch.save(found, f"{folder}/{grid.world.rank}.pt")
    grid.close()


def alone(given: Mapping[str, Any], kind: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """One process on the batches of both ranks: torch's AdamW, written without our code."""
    model = odd()
    model._apply(lambda x: x.to(torch.complex128 if x.is_complex() else dtype))
    params = [p for p in model.parameters() if p.requires_grad]
    options = given["optimizer"]["params"]
    optimizer = torch.optim.AdamW(params, foreach=False, **options)
    average, micros = copy.deepcopy(list(model.parameters())), given["gradient_accumulation_steps"]
    for step in range(STEPS):
        for micro in range(micros):
            for rank in range(2):
                (LOSSES[kind](model, inputs(step, micro, rank).to(dtype)) / (2 * micros)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.3)
    return {"weights": model.state_dict(), "average": [p.detach() for p in average]}


def shares_a_trunk(folder: str) -> None:
    """Two engines over one trunk, in turns; and one process that does the same."""
    grid = grids.start(backend="gloo", timeout_s=30.0, shard=2)
    found: dict[str, Any] = {}
    for low in (False, True):
        for stage in (1, 2):
            models = _two()
            blocks = {"bf16": {"enabled": True}} if low else {}
            adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
            engines = [zero.initialize(model=m, config=config(stage, 1, adam, **blocks), grid=grid)[0] for m in models]
            for step in range(STEPS):
                for k, engine in enumerate(engines):
                    loss = engine(inputs(step, k, grid.world.rank)).square().mean()
                    engine.backward(loss)
                    engine.step()
            found[f"{stage} {low}"] = [whole(engine) for engine in engines]
    grid.close()
    models = _two()
    adams = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.0) for m in models]
    for step in range(STEPS):
        for k, (model, adam_) in enumerate(zip(models, adams, strict=True)):
            for rank in range(2):
                (model(inputs(step, k, rank)).square().mean() / 2).backward()
            adam_.step()
            for each in models:
                each.zero_grad()
    found["alone"] = [model.state_dict() for model in models]
    torch.save(found, f"{folder}/{os.environ['RANK']}.pt")


def _two() -> list[nn.Module]:
    torch.manual_seed(4)
    trunk = nn.Linear(5, 6)
    return [nn.Sequential(trunk, nn.Tanh(), nn.Linear(6, 2)), nn.Sequential(trunk, nn.ReLU(), nn.Linear(6, 3))]


def is_rounded_right(stages: Sequence[int]) -> list[dict[str, Any]]:
    """bf16: what scripts write into weights, and losses without a graph; gradients that a script reads and sets."""
    grid = grids.start(backend="gloo", timeout_s=30.0, shard=2)
    found = [_is_rounded_right(grid, stage) for stage in stages]
    grid.close()
    return found


def _is_rounded_right(grid: grids.Grid, stage: int) -> dict[str, Any]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    sgd = {"type": "AdamW", "params": {"lr": 1e-30, "weight_decay": 0.0}}
    engine = zero.initialize(model=model, config=config(stage, 1, sgd, bf16={"enabled": True}), grid=grid)[0]

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    first, rank = engine.module[0].weight, grid.world.rank
    exact = whole(engine)["0.weight"]
    step(engine(inputs(0, 0, rank)).mean())
    found = {"kept": torch.equal(whole(engine)["0.weight"], exact), "is rounded": first.dtype == torch.bfloat16}
    first.data.copy_(torch.full_like(first, 0.5))  # which torch does not count
    step(engine(inputs(1, 0, rank)).mean())
    found["written"] = whole(engine)["0.weight"].unique().tolist()
    step(torch.tensor(1.0) if rank == 0 else engine(inputs(2, 0, rank)).mean())  # one rank without a graph
    engine.backward(engine(inputs(3, 0, rank)).mean())
    bias = engine.module[2].bias
    found["gradient"] = zero.utils.safe_get_full_grad(bias).tolist()
    zero.utils.safe_set_full_grad(bias, torch.tensor([7.0]))
    found["set"] = zero.utils.safe_get_full_grad(bias).tolist()
    engine.step()
    found["moment"] = zero.utils.safe_get_full_optimizer_state(bias, "exp_avg").tolist()
    with contextlib.suppress(AttributeError):
        found["bytes of gradients"] = sum(p.grad.nbytes for p in engine.module.parameters() if p.grad is not None)
    return found


def trains_at_stage_3(cases: Sequence[dict[str, Any]], folder: str) -> list[str]:
    """The same model under FSDP2, which leaves some parameters whole, and a checkpoint of it at stage 1."""
    grid, found, texts = grids.start(backend="gloo", timeout_s=30.0, shard=2), [], []
    for given in cases:
        engine = zero.initialize(model=odd(), config=copy.deepcopy(given), grid=grid)[0]
        for step in range(STEPS):
            for micro in range(given["gradient_accumulation_steps"]):
                x = inputs(step, micro, grid.world.rank)
                engine.backward(engine(x).square().mean() + engine.module.encode(x).square().mean())
                engine.step()
            if step == STEPS // 2:
                engine.save_checkpoint(f"{folder}/{len(found)}")
        found.append(whole(engine))
        other = {**given, "zero_optimization": {"stage": 1}, "onebit": {}}
        again = zero.initialize(model=odd(), config=other, grid=grid)[0]
        again.load_checkpoint(f"{folder}/{len(found) - 1}")
        for step in range(STEPS // 2 + 1, STEPS):
            for micro in range(given["gradient_accumulation_steps"]):
                again.backward(by_encoder(again, inputs(step, micro, grid.world.rank)))
                again.step()
        found.append(whole(again))
    for model in (engine.module, _Missing()):
        try:
            zero.initialize(model=model, config=cases[0], grid=grid)
        except (TypeError, ValueError) as error:
            texts.append(str(error))
    torch.save(found, f"{folder}/{grid.world.rank}.pt")
    grid.close()
    return texts


class _Missing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.unused = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


def leaves_unused_alone(cases: Sequence[tuple[int, bool]]) -> list[list[bool]]:
    """AdamW takes no step with a parameter that no rank uses, at any stage; with one used once on one rank it does."""
    made = {shard: grids.start(backend="gloo", timeout_s=30.0, shard=shard) for shard in (1, 2)}
    found = [_leaves_unused_alone(made[2 if stage else 1], stage, is_local) for stage, is_local in cases]
    for grid in made.values():
        grid.close()
    return found


def _leaves_unused_alone(grid: grids.Grid, stage: int, is_local: bool) -> list[bool]:
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.5}}
    given = config(stage, MICROS, adam, onebit={"local_steps": {"every": 2}} if is_local else {})
    engine, before = zero.initialize(model=Branches(), config=given, grid=grid)[0], Branches().state_dict()
    for step in range(2):
        for micro in range(MICROS):
            branch = "right" if micro == grid.world.rank == 0 else "left"
            engine.backward(engine(inputs(step, micro, grid.world.rank), branch).square().mean())
            engine.step()
    after = whole(engine)
    return [torch.equal(after[f"{name}.weight"], before[f"{name}.weight"]) for name in ("unused", "right", "left")]


def unfreezes(stages: Sequence[int]) -> list[float]:
    """A layer that is frozen at first, and given to the optimizer, joins with its first gradient: as in one process."""
    grid = grids.start(backend="gloo", timeout_s=30.0, shard=2)
    gaps = [_unfreezes(grid, stage) for stage in stages]
    grid.close()
    return gaps


def _unfreezes(grid: grids.Grid, stage: int) -> float:
    models = [Branches(), Branches()]
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-2}}
    for model in models:
        model.right.requires_grad_(False)
    given = config(stage, 1, adam)
    engine = zero.initialize(model=models[0], model_parameters=models[0].parameters(), config=given, grid=grid)[0]
    alone_ = torch.optim.AdamW(models[1].parameters(), lr=0.01, weight_decay=0.0, eps=1e-2)
    for step in range(STEPS):
        if step == 2:
            for model in (engine.module, models[1]):
                model.right.requires_grad_(True)
        xs = [inputs(step, 0, rank) for rank in range(2)]

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return (model(x, "left") + model(x, "right")).square().mean()

        engine.backward(loss(engine.module, xs[grid.world.rank]))
        engine.step()
        sum(loss(models[1], x) / 2 for x in xs).backward()
        alone_.step()
        alone_.zero_grad()
    expected = models[1].state_dict()
    gap = max(float((x - expected[name]).abs().max()) for name, x in whole(engine).items())
    return gap if not torch.equal(expected["right.weight"], Branches().right.weight) else 1.0


# -------------------------------------------------------------------------------- several engines


def _roles() -> dict[str, nn.Module]:
    torch.manual_seed(6)
    actor = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    reward = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 1)).requires_grad_(False)
    return {"actor": actor, "critic": nn.Linear(5, 1), "reference": copy.deepcopy(actor), "reward": reward}


def _losses(roles: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """A clipped policy loss with a KL penalty, and the critic's."""
    with torch.no_grad():
        reward, before = roles["reward"](x).squeeze(1), torch.log_softmax(roles["reference"](x), -1)
    value = roles["critic"](x).squeeze(1)
    now = torch.log_softmax(roles["actor"](x), -1)
    ratio = (now - before).gather(1, chosen[:, None]).squeeze(1).exp()
    gain = (reward - value).detach()
    policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return policy + 0.1 * (now.exp() * (now - before)).sum(-1).mean(), (value - reward).square().mean()


def _choices(step: int, rank: int) -> Tensor:
    return torch.randint(4, (3,), generator=torch.Generator().manual_seed(50 * step + rank))


def several_engines() -> dict[str, Any]:
    """Actor and critic beside a reference without optimizer, at stage 3, and a frozen reward: as in one process."""
    grid, found = grids.start(backend="gloo", timeout_s=30.0, shard=2), {}
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-2}}
    configs = {
        "actor": config(2, 1, adam), "critic": config(1, 1, adam), "reward": config(2, 1, adam),
        "reference": {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}},
    }  # fmt: skip
    made = {role: zero.initialize(model=model, config=configs[role], grid=grid) for role, model in _roles().items()}
    engines = {role: each[0] for role, each in made.items()}
    alone_ = _roles()
    adams = {
        r: torch.optim.AdamW(alone_[r].parameters(), lr=0.01, weight_decay=0.0, eps=1e-2) for r in ("actor", "critic")
    }
    for step in range(STEPS):
        for engine, loss in zip(
            (engines["actor"], engines["critic"]),
            _losses(engines, inputs(step, 0, grid.world.rank), _choices(step, grid.world.rank)),
            strict=True,
        ):
            engine.backward(loss)
            engine.step()
        for rank in range(2):
            for loss in _losses(alone_, inputs(step, 0, rank), _choices(step, rank)):
                (loss / 2).backward()
        for adam_ in adams.values():
            adam_.step()
            adam_.zero_grad()
    gaps = {
        role: max(float((x - alone_[role].state_dict()[name]).abs().max()) for name, x in whole(engines[role]).items())
        for role in engines
    }
    found["gaps"], found["moved"] = (
        gaps,
        float((alone_["actor"][0].weight - alone_["reference"][0].weight).detach().abs().max()),
    )
    found["optimizers"] = [role for role, each in made.items() if each[1] is not None]
    for role in ("reference", "reward"):
        try:
            engines[role].backward(engines["critic"](inputs(0, 0, 0)).mean())
        except RuntimeError as error:
            found[role] = str(error)
    engines["reference"].save_checkpoint("weights")
    engines["actor"].load_checkpoint("weights", load_module_only=True)
    kept = whole(engines["reference"])
    found["loads"] = all(torch.equal(x, kept[name]) for name, x in whole(engines["actor"]).items())
    engines["actor"].save_checkpoint("weights", "trained")
    engines["reference"].load_checkpoint("weights", "trained", load_module_only=True)
    grid.close()
    return found


def trains_with_muon(folder: str) -> None:
    """Dense Muon at every stage, on a model with matrices of odd sizes, of three dimensions and of one row."""
    grid, found = grids.start(backend="gloo", timeout_s=30.0, shard=2), {}
    muon = {"type": "Muon", "params": {"lr": 0.01, "muon_lr": 0.05, "head": "head", "weight_decay": 0.1}}
    for stage in range(1, 4):
        engine = zero.initialize(model=_matrices(), config=config(stage, 1, muon), grid=grid)[0]
        for step in range(STEPS):
            engine.backward(engine.module(inputs(step, 0, grid.world.rank)).square().mean())
            engine.step()
        found[stage] = whole(engine)
    torch.save(found, f"{folder}/{grid.world.rank}.pt")
    grid.close()


def alone_with_muon() -> dict[str, Tensor]:
    model = _matrices()
    groups = onebit.muon_groups(model, head=model.head)
    for group in groups:
        group["lr"] = 0.05 if group["use_muon"] else 0.01
    optimizer = onebit.Muon(groups, weight_decay=0.1, adjust_lr="original")
    for step in range(STEPS):
        for rank in range(2):
            (model(inputs(step, 0, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def _matrices() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Unflatten(1, (7, 1)), nn.Conv1d(7, 3, 1), nn.Flatten())
    model.add_module("narrow", nn.Linear(3, 1))
    model.add_module("head", nn.Linear(1, 3))
    return model
