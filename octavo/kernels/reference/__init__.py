"""Plain torch twins: the oracles and the fallback."""
