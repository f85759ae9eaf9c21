"""Inference by layers over Gloo: the tokens of one rank, and the error if a rank is killed."""

from __future__ import annotations

import re

import pytest
import torch
from ranks import run_torchrun

from onebit import zero

pytest.importorskip("transformers", reason="pip install onebit[transformers]")
from inference_pipeline_ranks import PROMPTS, llama, lose_one, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_answer_as_one_rank(ranks: int) -> None:
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    alone = zero.init_inference(llama(), max_out_tokens=64).generate(prompts, max_new_tokens=8)
    found = run_torchrun(ranks, serve, timeout_s=240).check().results
    assert found == ([tokens.tolist() for tokens in alone],) * ranks


def test_a_killed_rank_ends_the_others_with_its_number_or_a_neighbours() -> None:
    """Rank 0 waits for the killed one. The first stage waits for rank 0, which ends in its turn."""
    ended = run_torchrun(3, lose_one, timeout_s=240)
    assert ended.returncodes == (0, 0, -9), ended.output
    first, second, _ = ended.results
    assert "Missing: rank 2" in str(first) and re.search("Missing: rank [02]", str(second)), ended.results
