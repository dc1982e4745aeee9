"""Asking a server over HTTP, this one or any that speaks OpenAI's API: what `octavo bench serve` and `octavo chat --url` share."""
