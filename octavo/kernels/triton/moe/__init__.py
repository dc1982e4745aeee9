"""Mixture of experts (MoE): a router, products with the chosen matrices of a stack, and their weighted sum."""
