"""The one-bit algorithms with state sharded across the slow network.

Start at `adam.py`, then `exchange.py` and `optimizer.py`.
"""
