"""Kernels; every fast one has a plain torch twin in reference/."""
