"""Kernels whose results for a row do not depend on the other rows of a step."""
