"""Pipeline stages.

`layers.py` describes a model, `huggingface.py` cuts a decoder of transformers, `split.py` another module; `run.py` runs
the stages, `wire.py` compresses what they send each other.
"""
