"""The log of messages: their bytes are those of the gradients, every steps_per_print steps, and no bit changes."""

from __future__ import annotations

import re

import pytest
from comms_logger_ranks import logs_messages
from ranks import run_torchrun

NUMEL = 200 * 150


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, {"send": 2 * 2 * NUMEL}),  # an all_reduce is two exchanges of half of the float32 elements
        (1, {"send": 2 * 2 * NUMEL}),
        (3, {"all_gather": 2 * NUMEL, "all_reduce": 4 * NUMEL}),  # a rank's half; Gloo has no reduce_scatter
    ],
)
def test_messages_are_logged_with_their_bytes(stage: int, expected: dict[str, int]) -> None:
    ranks = run_torchrun(2, logs_messages, stage, False).check().results
    assert all(rank["same"] for rank in ranks) and ranks[1]["texts"] == []
    assert [re.search(r"in step (\d+)", text)[1] for text in ranks[0]["texts"]] == ["2", "4"]
    for text in ranks[0]["texts"]:
        totals: dict[str, int] = {}
        for name, total in re.findall(r"  (\w+): \d+ of [\d,]+ bytes, ([\d,]+) in all", text):
            totals[name] = totals.get(name, 0) + int(total.replace(",", ""))
        for name, nbytes in expected.items():
            assert nbytes <= totals[name] <= 1.02 * nbytes + 200, text


def test_each_message_has_a_line_if_asked_for() -> None:
    texts = run_torchrun(2, logs_messages, 0, True).check().results[0]["texts"]
    for text in texts:
        count = int(re.match(r"(\d+) messages", text)[1])
        assert count == text.count("\n") > 4 and " in all" not in text
