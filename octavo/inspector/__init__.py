"""The inspector: what the pool and the scheduler do, from the hooks in an engine to the state that a reader has (docs/view.md)."""
