"""Kernels; every fast one has a plain torch reference in reference/."""
