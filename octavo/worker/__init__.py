"""The worker: it owns the device state and applies plans. It never chooses an id."""
