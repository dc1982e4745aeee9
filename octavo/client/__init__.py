"""The client of `octavo bench serve`, `octavo chat URL` and `octavo top`. It asks any server with OpenAI's API over HTTP."""
