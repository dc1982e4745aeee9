"""The native CPU kernels: the library, its levels, and the data passed to it."""
