"""Triton kernels for one NVIDIA GPU; each has a reference in `kernels/reference/`."""
