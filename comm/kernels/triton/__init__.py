"""Kernels in Triton, for CUDA tensors: `backend.py` is the kernel module, the other files hold its parts."""
