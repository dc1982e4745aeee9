"""The worker room: bytes only. It applies plans; it never chooses an id."""
