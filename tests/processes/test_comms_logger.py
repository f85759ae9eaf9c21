"""The log of messages: their bytes are those of the gradients, every steps_per_print steps, and no bit changes."""

from __future__ import annotations

import re

from comms_logger_ranks import logs_messages
from ranks import run_torchrun

NUMEL = 200 * 150


EXPECTED: dict[int, dict[str, int]] = {
    0: {"send": 2 * 2 * NUMEL},  # an all_reduce is two exchanges of half of the float32 elements
    1: {"send": 2 * 2 * NUMEL},
    3: {"all_gather": 2 * NUMEL, "all_reduce": 4 * NUMEL},  # a rank's half; Gloo has no reduce_scatter
}


def test_messages_are_logged_with_their_bytes_or_a_line_each_if_asked_for() -> None:
    cases = [*((stage, False) for stage in EXPECTED), (0, True)]
    first, second = run_torchrun(2, logs_messages, cases).check().results
    for (stage, verbose), facts, others in zip(cases, first, second, strict=True):
        assert facts["same"] and others["same"] and others["texts"] == []
        assert [re.search(r"in step (\d+)", text)[1] for text in facts["texts"]] == ["2", "4"]
        for text in facts["texts"]:
            if verbose:
                count = int(re.match(r"(\d+) messages", text)[1])
                assert count == text.count("\n") > 4 and " in all" not in text
                continue
            totals: dict[str, int] = {}
            for name, total in re.findall(r"  (\w+): \d+ of [\d,]+ bytes, ([\d,]+) in all", text):
                totals[name] = totals.get(name, 0) + int(total.replace(",", ""))
            for name, nbytes in EXPECTED[stage].items():
                assert nbytes <= totals[name] <= 1.02 * nbytes + 200, text
