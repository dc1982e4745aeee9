"""The layers models are built from; each takes the batch as an argument."""
