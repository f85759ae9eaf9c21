"""The study of clipped steps, for a few steps: exact factors are never sent twice, and all cases have a line."""

from __future__ import annotations

from study.clip import CASES, EXACT, rows_of, run


def test_a_run_counts_what_it_sends_twice() -> None:
    steps = 130
    exact, eager, late = (run(("digits", 0.1), most, 0, steps) for most in (EXACT, 1.01, 1e9))
    assert exact.twice == late.twice == 0.0 < eager.twice < 1.0
    assert exact.clipped > 0.9 and abs(late.loss / exact.loss - 1) < 0.5
    rows = list(rows_of([exact, eager, late], [EXACT, 1.01, 1e9]))
    assert len(rows) == 3 and "exact" in rows[0] and "%" in rows[1][-1]
    assert all(len(case) == 2 for case in CASES)
