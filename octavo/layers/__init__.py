"""The layers that models are built from. Each receives the batch as an argument."""
