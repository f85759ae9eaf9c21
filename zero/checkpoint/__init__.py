"""Checkpoints of the engine.

`files.py` writes and finds them, `engine_state.py` fills them, `reshard.py` changes layouts.
"""
