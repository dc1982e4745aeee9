"""Products with weights of 8-bit floats."""
