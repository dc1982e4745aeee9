"""Mixtures of experts: a router, products with the chosen matrices of a stack, and their weighted sum."""
