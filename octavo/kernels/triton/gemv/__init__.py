"""Products of at most four rows with float weights, bound by reading the weights once."""
