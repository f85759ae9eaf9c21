"""Training a small GPT on Python's standard library: the run, its model, its optimizers, its text, its outputs.

`run.py` is the loop and the command line. `methods.py`, `zero_method.py` and `layout_method.py` are the optimizers with
their traffic: plain, sharded, in stages and slices. `model.py`, `model_layers.py` and `layouts.py` are the GPT, whole
and in pieces; `corpus.py` the text; `checkpoint.py`, `report.py` and `plot.py` what a run leaves.
"""
