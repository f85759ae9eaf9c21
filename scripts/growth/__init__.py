"""What a step costs on networks and worlds of many sizes: `main.py` measures, `fit.py` fits costs, `report.py` says.

The command is `python scripts/bench.py growth`.
"""
