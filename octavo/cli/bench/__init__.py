"""`octavo bench` has a sub-command for each thing that can be measured. Each is a module in this folder."""

SUBCOMMANDS = {
    "throughput": "measure tokens per second: published loads, chosen lengths, or a trace",
    "latency": "measure the time of one batch: to the first token, per token, to the end",
    "serve": "measure a running server as its clients see it: throughput, latency, goodput",
    "startup": "measure the time from the start of a process to its first token",
}
