"""Every contender on every network: `main.py` measures, `report.py` turns what it has written into tables.

The command is `python scripts/bench.py suite`.
"""
