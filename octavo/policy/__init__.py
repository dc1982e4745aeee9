"""Scheduling policy: which sequence holds which block, and what each step computes. Nothing here imports torch."""
