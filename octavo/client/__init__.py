"""The client of `octavo bench serve`, `octavo chat --url` and `octavo top`. It asks any server with OpenAI's API over HTTP."""
