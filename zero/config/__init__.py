"""The DeepSpeed JSON.

`whole.py` reads it, `sections.py` and `optimizers.py` hold its blocks, `schema.py` says what a key may hold.
"""
