"""The HTTP server: what `octavo serve` answers with. Text work happens here, never in the engine; torch is never imported here."""
