"""The step as the host describes it to a device: rows, tensors, and the keys that rows share, as packed numbers."""
