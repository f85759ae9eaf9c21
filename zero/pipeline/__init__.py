"""Pipeline stages.

`layers.py` describes a model, `split.py` cuts a plain module, `run.py` runs the stages, `wire.py` compresses what they
send each other.
"""
