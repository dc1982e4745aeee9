"""Gated DeltaNet: rows of few tokens token by token, prompts in chunks, and the norm behind both."""
