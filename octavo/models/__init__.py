"""The model families, each by lazy name."""
