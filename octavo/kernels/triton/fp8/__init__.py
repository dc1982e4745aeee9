"""Products with 8-bit float weights."""
