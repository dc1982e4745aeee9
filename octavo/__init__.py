"""Octavo: a paged LLM inference engine that shows and proves what its pages do."""

__version__ = "0.1.0"
