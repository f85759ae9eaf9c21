"""Loss against seconds: `ways.py` what is compared, `losses.py` runs it, `seconds.py` times it, `report.py` joins both.

The command is `python scripts/bench.py time_to_loss`.
"""
