"""The model families, which are imported by name when they are needed."""
