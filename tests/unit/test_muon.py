"""Dense Muon: equal to a float64 loop, resumable to the bit, and in the JSON by DeepSpeed's name and keys."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.comm import torch_versions
from onebit.zero.config.optimizers import OPTIMIZERS, OptimizerChoice, build_optimizer
from onebit.zero.config.whole import read_config

SHAPES = ((6, 4), (3, 9), (4, 2, 3), (1, 5))
STEPS = 12


def gradient(step: int, k: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([step, k]).normal(size=shape).astype(np.float32).astype(np.float64)


def start(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Matrices of all kinds, and a vector at the end."""
    return [nn.Parameter(torch.from_numpy(gradient(99, k, s)).to(dtype)) for k, s in enumerate((*SHAPES, (7,)))]


def groups(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:-1], "use_muon": True}, {"params": params[-1:], "use_muon": False}]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        for k, p in enumerate(params):
            p.grad = torch.from_numpy(gradient(step, k, tuple(p.shape))).to(p.dtype)
        optimizer.step()


def quintic(x: np.ndarray, steps: int) -> np.ndarray:
    """Jordan's iteration on the singular values alone, which is all that it changes."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt(np.sum(s**2))
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt


def loop(nesterov: bool, how: str, steps: int, lr: float, decay: float, beta: float) -> list[np.ndarray]:
    found = []
    for k, shape in enumerate(SHAPES):
        p, m = gradient(99, k, shape), np.zeros(shape)
        rows, columns = shape[0], int(np.prod(shape[1:]))
        factor = 0.2 * max(rows, columns) ** 0.5 if how == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5
        for step in range(STEPS):
            g = gradient(step, k, shape)
            m = beta * m + (1 - beta) * g
            update = beta * m + (1 - beta) * g if nesterov else m
            p = p - lr * (factor * quintic(update.reshape(rows, columns), steps).reshape(shape) + decay * p)
        found.append(p)
    return found


@pytest.mark.parametrize(
    ("nesterov", "how", "steps"), [(True, "match_rms_adamw", 5), (False, "original", 5), (True, "original", 1)]
)
def test_it_equals_a_textbook_loop(nesterov: bool, how: str, steps: int) -> None:
    """Matrices as a loop in float64 has them, the rest as torch's AdamW."""
    params = start()
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    train(params, onebit.Muon(groups(params), nesterov=nesterov, adjust_lr=how, ns_steps=steps, **options))
    for p, expected in zip(params, loop(nesterov, how, steps, 0.02, 0.1, 0.9), strict=False):
        np.testing.assert_allclose(p.detach().numpy(), expected, atol=2e-5, rtol=0)
    theirs = start(torch.float64)
    train(theirs, torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.1))
    np.testing.assert_allclose(params[-1].detach().numpy(), theirs[-1].detach().numpy(), atol=2e-6, rtol=0)


def test_it_steps_as_torchs_muon_does() -> None:
    torch_versions.require("torch.optim.Muon", at_least=(2, 9))
    ours, theirs = start()[:2], start()[:2]
    train(ours, onebit.Muon([{"params": ours, "use_muon": True}], lr=0.02, weight_decay=0.1))
    train(theirs, torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=0.02 * STEPS * 0.02, rtol=0)  # theirs iterates in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_to_the_bit(dtype: torch.dtype) -> None:
    params = start(dtype)
    optimizer = onebit.Muon(groups(params))
    train(params, optimizer, range(5))
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(params)
    resumed = onebit.Muon(groups(values))
    resumed.load_state_dict(state)
    train(params, optimizer, range(5, 9))
    train(values, resumed, range(5, 9))
    assert all(torch.equal(p, q) for p, q in zip(params, values, strict=True))
    assert {x.dtype for p in values for x in resumed.state[p].values()} == {torch.float32}


def test_other_states_and_groups_are_refused_before_anything_changes() -> None:
    params = start()
    theirs = torch.optim.AdamW(groups(params))
    train(params, theirs, range(2))
    optimizer = onebit.Muon(groups(params))
    with pytest.raises(ValueError, match="parameter 0 has no momentum_buffer there, so it is not Muon's"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state
    for given, words in (
        (params, "group 0 has no use_muon"),
        ([{"params": params, "use_muon": True}], r"has use_muon and a parameter of shape \(7,\)"),
        ([{**groups(params)[0], "momentum": 1.0}], r"momentum must be in \[0, 1\), got 1.0"),
        ([{**groups(params)[0], "adjust_lr": "mine"}], "adjust_lr must be one of match_rms_adamw, original"),
    ):
        with pytest.raises(ValueError, match=words):
            onebit.Muon(given)


class Named(nn.Module):
    """Names by which DeepSpeed leaves a matrix to AdamW, a head that only its model knows, and one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.lm_head = nn.Linear(4, 3), nn.Linear(3, 5)
        self.middle, self.score = nn.Linear(3, 3), nn.Linear(3, 2)


class Headed(Named):
    def get_output_embeddings(self) -> nn.Module:
        return self.score


@pytest.mark.parametrize(
    ("model", "keys", "matrices"),
    [
        (Named(), {}, {"middle.weight", "score.weight"}),
        (Headed(), {}, {"middle.weight"}),
        (Headed(), {"head": ""}, {"middle.weight", "score.weight"}),
        (Named(), {"head": "middle"}, {"score.weight"}),
    ],
)
def test_the_json_divides_a_model_by_names_and_its_head(model: nn.Module, keys: dict, matrices: set[str]) -> None:
    params = OPTIMIZERS["Muon"].params(lr=0.1, muon_lr=0.02, **keys)
    made = build_optimizer(OptimizerChoice("Muon", params), model.parameters(), model=model)
    names = {p: name for name, p in model.named_parameters()}
    found = {g["use_muon"]: {names[p] for p in g["params"]} for g in made.param_groups}
    assert found[True] == matrices and found[True] | found[False] == set(names.values())
    assert {g["use_muon"]: g["lr"] for g in made.param_groups} == {True: 0.02, False: 0.1}
    assert {g["adjust_lr"] for g in made.param_groups} == {"original"}


def test_groups_with_a_rate_of_their_own_keep_it() -> None:
    model = Named()
    params = OPTIMIZERS["Muon"].params(muon_lr=0.02, adam_lr=0.03)
    given = [{"params": model.middle.parameters(), "lr": 0.5}, {"params": model.score.parameters()}]
    made = build_optimizer(OptimizerChoice("Muon", params), given, model=model)
    assert [(g["use_muon"], g["lr"]) for g in made.param_groups] == [
        (True, 0.5),
        (False, 0.5),
        (True, 0.02),
        (False, 0.03),
    ]


def test_without_a_model_groups_say_what_they_are() -> None:
    params = OPTIMIZERS["Muon"].params(muon_lr=0.02)
    made = build_optimizer(OptimizerChoice("Muon", params), groups(start()))
    assert [g["lr"] for g in made.param_groups] == [0.02, 1e-3]
    with pytest.raises(ValueError, match="group 0 has no use_muon"):
        build_optimizer(OptimizerChoice("Muon", params), start())


def test_deepspeeds_keys_are_read() -> None:
    block = {"type": "muon", "params": {"lr": 0.02, "momentum": 0.9, "muon_lr": 0.01, "ns_method": "gram"}}
    config = read_config({"train_batch_size": 2, "optimizer": block}, world_size=2)
    assert config.optimizer is not None and config.optimizer.params.muon_lr == 0.01
    with pytest.raises(ValueError, match=r"head: .*no attribute|head: .*nothing"):
        build_optimizer(OptimizerChoice("Muon", OPTIMIZERS["Muon"].params(head="nothing")), [], model=Named())
    with pytest.raises(ValueError, match="Muon has no form without bias_correction"):
        OptimizerChoice("Muon", OPTIMIZERS["Muon"].params(bias_correction=False))
