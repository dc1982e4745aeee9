"""Attention over a paged KV cache: prefill, decode, and decode fused with the steps before it."""
