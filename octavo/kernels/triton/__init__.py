"""Kernels for one NVIDIA GPU, in Triton; each has its twin in `kernels/reference/`."""
