"""Edits of the logits, sampling, and ranks for logprobs."""
