"""Attention backends, with a registry."""
