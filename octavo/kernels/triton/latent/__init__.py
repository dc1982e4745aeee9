"""Latent attention (MLA) in its absorbed form: all heads read one key per token, whose first numbers are the value."""
