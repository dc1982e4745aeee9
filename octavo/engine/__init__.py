"""The engine room: the step loop, its clients, and the text side of outputs."""
