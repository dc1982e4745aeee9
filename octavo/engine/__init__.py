"""The engine: the step loop, its clients, and the text side of outputs."""
