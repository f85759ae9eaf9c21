"""Checkpoints of the engine.

`files.py` writes and finds them, `engine_state.py` defines their content, `reshard.py` changes layouts.
"""
