"""`octavo bench startup` measures the time from the start of a process until it is imported, ready, and has a first token."""

import argparse
from dataclasses import replace

from octavo.bench.figures import by_statistic, number, words
from octavo.bench.picture import Panel, bar
from octavo.bench.startup import measure_startup
from octavo.cli.args import add_engine_flags, engine_config
from octavo.cli.bench.output import Shown, add_common_flags, check_targets, publish

DEFAULT_ROUNDS = 5
STATISTICS = ("median", "min", "max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "examples:\n  octavo bench startup\n  octavo bench startup Qwen/Qwen3-0.6B --rounds 3"
    add_common_flags(parser, DEFAULT_ROUNDS)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_targets(args)
    from octavo.bench.machine import describe
    from octavo.loading.resolve import load_model_config, source_of

    config = engine_config(args, args.words)
    if config.load_format == "dummy":
        config = replace(config, skip_tokenizer_init=True)  # shapes alone need no tokenizer
    source = source_of(config)
    machine = describe(config, source.name, load_model_config(source))
    result = measure_startup(config, source.name, args.rounds)
    bars = [bar(words(name), figure) for name, figure in result.figures.items() if figure.unit == "s"]
    head = f"rounds: {args.rounds}, a fresh process each; import, ready and first token count from its start, others are parts of these"
    verdict = f"{number(result.figures['first_token'].statistic('median'))} s from its start to the first token, median"
    publish(args, "startup", machine, [result], Shown(verdict, head, by_statistic(result.figures, STATISTICS), [Panel("seconds", bars)]))
    return 0
