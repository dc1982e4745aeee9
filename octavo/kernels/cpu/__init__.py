"""The native CPU kernels: the library, its levels, and what Python hands to it."""
