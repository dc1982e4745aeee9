"""`octavo bench`: what can be measured. Each is a sub-command, and a module here."""

SUBCOMMANDS = {
    "throughput": "tokens a second of a workload: a published load, chosen lengths, or a trace",
    "latency": "how long one batch takes: to the first token, per token, to the end",
    "serve": "a running server from outside: rates, waits and goodput as its clients see them",
    "startup": "from starting a process to its first token",
}
