"""The benchmarks, each a module with a `main` that `scripts/bench.py NAME` runs, and what they share.

`timing.py`, `record.py` and `command.py` serve all of them. `scripts/time_to_loss/` is a benchmark with a room.
"""
