"""Codecs: rows of floats to byte frames and back. Byte layouts: `kernels/reference.py`."""
