"""Reference kernels in plain torch: they define the expected results, and are the fallback."""
