"""Asking a server over HTTP, this one or any that speaks OpenAI's API: for `octavo bench serve`, `octavo chat --url`, `octavo top`."""
