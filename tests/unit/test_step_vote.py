"""A rank's vote as bytes."""

import pytest

from onebit.agreement.step_vote import Header, StepVote


@pytest.mark.parametrize("parameters", [0, 1, 7, 8, 9, 64])
@pytest.mark.parametrize("note", [b"", b"\0" * 32, bytes(range(32))])
def test_what_is_read_is_what_was_said(parameters: int, note: bytes) -> None:
    """A note stands behind the presence bits, however many bytes these take, and costs its own length."""
    summary = Header(3, "a step", (0.1, 0.9)).summary(repeats=True, gradients=b"digested")
    vote = StepVote(summary, [k % 3 == 0 for k in range(parameters)], 1.5, -2.25, note)
    data = vote.to_bytes()
    assert len(data) == 42 + -(-parameters // 8) + len(note)
    assert StepVote.from_bytes(data, parameters) == vote
