"""Attention backends behind one registry."""
