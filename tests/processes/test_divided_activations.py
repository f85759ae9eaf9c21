"""Two ranks that compute on the same inputs keep half of them each, and lose no bit."""

from __future__ import annotations

from pathlib import Path

from divided_activations_ranks import divided, engine
from ranks import run_torchrun


def test_ranks_keep_shares_and_gather_them(tmp_path: Path) -> None:
    for facts in run_torchrun(2, divided, str(tmp_path), timeout_s=60).check().results:
        assert facts["device"] and facts["host"] and facts["folder"]
        assert facts["bytes"] == [4 * 8 + 8] * 3  # half of 15 elements, rounded up, and the sum
        assert "DesyncError: [rank " in facts["unlike"] and "has other inputs on other ranks" in facts["unlike"]


def test_the_engine_divides_checkpoints_of_a_hugging_face_model(tmp_path: Path) -> None:
    for facts in run_torchrun(2, engine, str(tmp_path), timeout_s=110).check().results:
        plain, features = facts.pop("plain")
        assert features == [] and len(facts) == 3
        assert all(losses == plain for losses, _ in facts.values())
        assert all(features == ["ActivationCheckpointing"] for _, features in facts.values())
