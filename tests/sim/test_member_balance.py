"""Balanced members: a step of unequal shares is that of the mean over all its samples, in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults.member_runs import Hub, founded
from test_member_data import Numbers
from test_onebit_adam import SIZES, gradient, parameters, split, start
from torch import nn
from torch.utils.data import DataLoader

import onebit
from onebit.comm import IdentityCodec
from onebit.membership import Members, MemberSampler, begin
from onebit.reference.onebit_adam import OnebitAdam as OnebitAdamOracle

CLOCK = threading.local()  # each member's clock goes by its micro-batches
FREEZE, STEPS, MEAN, LR = 10, 24, 2, 0.03


def train(
    make: Callable[[list[nn.Parameter], Members], Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[list[list[int]], list[np.ndarray]]]:
    """For members of speed 1 and 3: the samples that each has in each step, and the parameters after it."""
    monkeypatch.setattr("onebit.membership.sampler.time", SimpleNamespace(monotonic=lambda: CLOCK.now))

    def work(members: Members) -> tuple[list[list[int]], list[np.ndarray]]:
        CLOCK.now, params = 0.0, parameters()
        optimizer = make(params, members)
        sampler = MemberSampler(members, 29, batch_size=1, micro_batches=MEAN, balanced=True)
        begin(optimizer, sampler=sampler)
        batches = sampler.batches(DataLoader(Numbers(29), batch_sampler=sampler))
        samples, found = [], []
        for _ in range(STEPS):
            samples.append([])
            for batch in sampler.step_batches(batches):
                samples[-1] += batch.tolist()
                loss = of_sample(batch.item())
                for p, g in zip(params, split(torch.from_numpy(loss).float()), strict=True):
                    ((p * g).sum() / MEAN).backward()
                CLOCK.now += 1.0 / {"a": 1.0, "b": 3.0}[members.rendezvous.name]
            optimizer.step()
            optimizer.zero_grad()
            found.append(torch.cat([p.detach() for p in params]).double().numpy())
        return samples, found

    results = founded(Hub(2), work).join().results
    shares = [[len(results[name][0][step]) for name in "ab"] for step in range(STEPS)]
    assert shares[:5] == [[2, 2]] * 5 and shares[5:] == [[1, 3]] * (STEPS - 5)
    return results


def of_sample(index: int) -> np.ndarray:
    return gradient(start(), *divmod(index, 3))


def test_averaged_steps_equal_a_loop_over_the_mean_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(params: list[nn.Parameter], members: Members) -> onebit.AveragedSteps:
        return onebit.AveragedSteps(torch.optim.AdamW(params, lr=LR), transport=members, max_grad_norm=1.0)

    results = train(make, monkeypatch)
    x = nn.Parameter(torch.from_numpy(start()))
    loop = torch.optim.AdamW([x], lr=LR)
    for step in range(STEPS):
        mean = np.mean([of_sample(k) for name in "ab" for k in results[name][0][step]], axis=0)
        x.grad = torch.from_numpy(mean * min(1.0, 1.0 / (np.linalg.norm(mean) + 1e-6)))
        loop.step()
        for name in "ab":
            np.testing.assert_allclose(results[name][1][step], x.detach().numpy(), atol=1e-5)


def test_onebit_adam_equals_the_textbook_loop_over_weighted_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's gradient counts by its share: n_r·W / Σ n. A flipped sign would move an element by 1e-2 at once."""

    def make(params: list[nn.Parameter], members: Members) -> onebit.OnebitAdam:
        return onebit.OnebitAdam(
            params, lr=LR, transport=members, freeze_step=FREEZE, warmup_codec=IdentityCodec(), compression="always"
        )

    results = train(make, monkeypatch)
    oracle = OnebitAdamOracle(start(), 2, SIZES, dense=lambda step: step < FREEZE)
    for step in range(STEPS):
        samples = [results[name][0][step] for name in "ab"]
        total = sum(map(len, samples))
        means = [np.mean([of_sample(k) for k in own], axis=0) * len(own) for own in samples]
        oracle.step(2 * np.stack(means) / total, LR)
        for name in "ab":
            np.testing.assert_allclose(results[name][1][step], oracle.x, atol=1e-4)
