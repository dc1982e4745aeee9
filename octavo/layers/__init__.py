"""The layers that models are built from. Each takes the batch as an argument."""
