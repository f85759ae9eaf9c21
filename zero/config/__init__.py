"""The DeepSpeed JSON.

`whole.py` reads it, `sections.py` and `optimizers.py` define its blocks, `schema.py` the rules of a key.
"""
