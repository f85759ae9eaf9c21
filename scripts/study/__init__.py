"""Loss against the dense twins: runs of simulated ranks, their results in JSON lines, tables and figures of them.

`main.py` is the study of the optimizers, of `tasks.py`, by `run.py`, told by `report.py`. `activations.py` is a study
of its own, of what pipeline stages send each other.
"""
