"""The other kernels of a step: rows, copies, cache writes, norms and activations."""
