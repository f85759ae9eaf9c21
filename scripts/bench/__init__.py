"""The benchmarks, each a module with a `main` that `scripts/bench.py NAME` runs, and what they share.

`suite.py` measures every contender on every network; the parts of its ranks are in `collective.py`, `step.py` and
`peer_deepspeed.py`. `timing.py`, `record.py` and `command.py` serve all of them; `suite_report.py`, `growth_report.py`
and `growth_fit.py` turn recorded lines into tables.
"""
