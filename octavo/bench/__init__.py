"""The benchmarks of `octavo bench`: workloads, how they are measured, and how the figures are shown."""
