"""`octavo bench throughput` measures tokens per second over a workload, and the latency of its requests."""

import argparse
from dataclasses import replace

from octavo.bench.figures import Result, by_result, number
from octavo.bench.picture import Panel, bar, heading
from octavo.bench.workload import check_fits
from octavo.cli.args import add_engine_flags, engine_config
from octavo.cli.bench.output import Shown, add_common_flags, check_targets, publish
from octavo.cli.bench.workloads import add_workload_flags, check_choice, maker, needs_text
from octavo.cli.config_file import SETTINGS
from octavo.cli.opening import opened
from octavo.sampling_params import SamplingParams

DEFAULT_ROUNDS = 3
FACTS = ("requests", "input_tokens", "output_tokens")
PER_ROUND = ("output_throughput", "input_throughput", "decode_throughput", "request_throughput", "wall", "running_at_once")
TIMES = ("queue", "first_token", "per_output_token", "end_to_end")
ROWS = [(name, "median") for name in (*PER_ROUND, "cache_hit_rate", "preemptions", "peak_memory")]
ROWS += [(name, statistic) for name in TIMES for statistic in ("median", "p90", "p99")]
PICTURED = ("output_throughput", "input_throughput", "first_token", "per_output_token")


EXAMPLES = """examples:
  octavo bench throughput                               the four published loads of text
  octavo bench throughput --load batch32,shared32       two of them
  octavo bench throughput --input-len 64-512 --output-len 64 --num-prompts 32
  octavo bench throughput --trace conversations.jsonl --num-prompts 100"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_common_flags(parser, DEFAULT_ROUNDS)
    add_workload_flags(parser, "the loads of text", "all requests arrive at once")
    add_engine_flags(parser, only=[name for name in SETTINGS if name != "trace"])  # here --trace is a load


def run(args: argparse.Namespace) -> int:
    check_choice(args)
    check_targets(args)
    SamplingParams(temperature=args.temperature)  # checked before the model is loaded
    from octavo.bench.machine import describe
    from octavo.bench.measure import measure, say
    from octavo.loading.resolve import load_model_config, source_of

    config = engine_config(args, args.words)
    source = source_of(config)
    model = load_model_config(source)
    make = maker(args, model.vocab_size, config.seed)
    if not needs_text(args):
        config = replace(config, skip_tokenizer_init=True)  # so that --load-format dummy needs no tokenizer
    with opened(config) as llm:
        workloads = make(llm.max_model_len, llm.get_tokenizer)
        for workload in workloads:
            if workload.clipped:
                total = len(workload.requests)
                say(f"{workload.name}: {workload.clipped} of {total} requests were cut to the context of {llm.max_model_len:,} tokens")
            check_fits(workload.name, workload.longest, llm.max_model_len)
        results = [measure(llm, workload, args.rounds, args.temperature) for workload in workloads]
    facts = (*FACTS, "clipped") if any(workload.clipped for workload in workloads) else FACTS
    head = "medians over rounds; times are over all requests of all rounds; memory is that of the process so far"
    panels = [_panel(name, results) for name in PICTURED if any(name in result.figures for result in results)]
    rates = [f"{result.name}: {number(result.figures['output_throughput'].statistic('median'))} tokens/s" for result in results]
    shown = Shown("; ".join(rates), f"rounds: {args.rounds}; {head}", by_result(results, facts, ROWS), panels)
    publish(args, "throughput", describe(config, source.name, model), results, shown)
    return 0


def _panel(name: str, results: list[Result]) -> Panel:
    """Returns a panel of one figure, with a bar for each workload that has it."""
    found = [(result.name, result.figures[name]) for result in results if name in result.figures]
    return Panel(heading(name, found[0][1]), [bar(label, figure) for label, figure in found])
