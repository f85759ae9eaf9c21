"""What only a machine with a GPU can show, and the record of it.

`checks.py`: bits; `speed.py`: GB/s, and a whole model; `waits.py`: the host's waits; `main.py`: the record.
"""
