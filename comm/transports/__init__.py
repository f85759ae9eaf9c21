"""Transports: move bytes between ranks, know nothing of codecs. `base.py` is the contract; `launch.py` picks one."""
