"""Pipeline stages.

`layers.py` describes a model, `run.py` runs it, `wire.py` says what stages send each other.
"""
