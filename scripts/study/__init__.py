"""Loss against the dense twins: runs of simulated ranks, their results in JSON lines, tables and figures of them.

`main.py` is the study of the optimizers, of `tasks.py`, by `run.py`, told by `report.py`. `models.py` and
`inference_models.py` are studies of their own: which models of transformers train in which form, and which are served.
"""
