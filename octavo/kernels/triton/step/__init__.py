"""The rest of a step: rows, copies, cache writes, norms and activations."""
