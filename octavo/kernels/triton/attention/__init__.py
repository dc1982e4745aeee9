"""Attention over a paged KV cache: prefill, decode, and decode fused with what comes before it."""
