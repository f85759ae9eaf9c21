"""The benchmarks, each a module with a `main` that `scripts/bench.py NAME` runs, and what they share.

`timing.py`, `record.py` and `command.py` serve all of them. Those that turn lines into reports have rooms of their own:
`scripts/suite/`, `scripts/time_to_loss/`.
"""
