"""What a model and its steps need in memory, and what `auto` settings resolve to. Nothing here imports torch."""
