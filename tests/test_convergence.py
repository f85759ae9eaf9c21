"""Loss against AdamW on the byte LM: a small form of scripts/bench_loss.py, which can fail."""

from __future__ import annotations

from dataclasses import replace

import bench_loss
import pytest
from bench_loss import Job, run_job

import onebit

JOB = Job(method="adamw", lr=2e-3, seed=1, steps=200, ranks=4, size="tiny", batch_size=2)


@pytest.fixture(scope="module")
def adamw() -> float:
    return run_job(JOB)


@pytest.mark.slow
def test_onebit_adam_reaches_the_loss_of_adamw(adamw: float) -> None:
    """Within 5 % after 200 steps, 30 of them warm-up (measured: 2 to 4 %); with 1,000 steps 1 % (scripts/records)."""
    assert run_job(replace(JOB, method="onebit-adam")) == pytest.approx(adamw, rel=0.05)


@pytest.mark.slow
def test_without_error_feedback_it_does_not(adamw: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other test would say of a collective that forgets what it has not sent."""

    class Forgetful(onebit.OnebitAdam):
        def _commit(self, bucket: object, group: dict, step: int) -> None:
            super()._commit(bucket, group, step)
            if bucket.ef is not None:
                bucket.ef.worker.zero_()
                bucket.ef.server.zero_()

    monkeypatch.setattr(bench_loss.onebit, "OnebitAdam", Forgetful)
    assert run_job(replace(JOB, method="onebit-adam")) > 1.05 * adamw  # measured: 1.15 to 1.46
