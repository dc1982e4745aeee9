"""Octavo's version: the one place that says it, for the package's metadata too."""

__version__ = "0.1.0"
