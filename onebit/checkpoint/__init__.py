"""Checkpoints.

`files.py` handles files on one rank, `folder.py` the agreement of all ranks, `portable.py` states by parameter.
"""
