"""Checkpoints.

`files.py` is one rank on disk, `folder.py` what all ranks agree on, `portable.py` states by parameter.
"""
