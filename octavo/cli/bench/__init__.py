"""`octavo bench` has a sub-command for each thing that can be measured. Each is a module in this folder."""

SUBCOMMANDS = {
    "throughput": "tokens per second: published loads, lengths you choose, or a trace",
    "latency": "time of one batch: to the first token, per token, to the end",
    "serve": "a running server, as its clients see it: throughput, latency, goodput",
    "startup": "time from the start of a process to its first token",
}
