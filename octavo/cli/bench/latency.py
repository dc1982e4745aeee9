"""`octavo bench latency` measures the time of one batch: to the first token, per token, to the end."""

import argparse
from dataclasses import replace

from octavo.bench.figures import by_statistic, number, words
from octavo.bench.picture import Bar, Panel, heading
from octavo.bench.workload import Lengths, drawn
from octavo.cli.args import add_engine_flags, engine_config
from octavo.cli.bench.output import Shown, add_common_flags, check_targets, count, publish
from octavo.cli.opening import opened

DEFAULT_BATCH, DEFAULT_INPUT, DEFAULT_OUTPUT, DEFAULT_ROUNDS = 1, 128, 64, 10
SHOWN = ("first_token", "per_output_token", "end_to_end")
STATISTICS = ("p10", "median", "p90", "p99")


EXAMPLES = """examples:
  octavo bench latency
  octavo bench latency Qwen/Qwen3-0.6B --batch-size 8 --input-len 512 --output-len 128"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_common_flags(parser, DEFAULT_ROUNDS)
    group = parser.add_argument_group("batch")
    text = f"requests in a batch (default: {DEFAULT_BATCH})"
    group.add_argument("--batch-size", type=count, metavar="N", default=DEFAULT_BATCH, help=text)
    text = f"tokens in a prompt, chosen at random (default: {DEFAULT_INPUT})"
    group.add_argument("--input-len", type=count, metavar="N", default=DEFAULT_INPUT, help=text)
    text = f"tokens in an answer (default: {DEFAULT_OUTPUT})"
    group.add_argument("--output-len", type=count, metavar="N", default=DEFAULT_OUTPUT, help=text)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_targets(args)
    from octavo.bench.machine import describe
    from octavo.bench.measure import measure
    from octavo.loading.resolve import load_model_config, source_of

    config = replace(engine_config(args, args.words), skip_tokenizer_init=True)
    source = source_of(config)
    model = load_model_config(source)
    inputs, outputs = Lengths(args.input_len, args.input_len), Lengths(args.output_len, args.output_len)
    with opened(config) as llm:
        workload = drawn(inputs, outputs, args.batch_size, model.vocab_size, llm.max_model_len, config.seed)
        result = measure(llm, replace(workload, name=f"batch of {args.batch_size}, {workload.name}"), args.rounds)
    figures = {name: result.figures[name] for name in SHOWN if name in result.figures}
    panels = []
    for name, figure in figures.items():
        values = [(statistic, figure.statistic(statistic)) for statistic in STATISTICS]
        panels.append(Panel(heading(name, figure), [Bar(statistic, value, value, value) for statistic, value in values]))
    medians = [f"{words(name)} {number(figure.statistic('median'))} {figure.unit}" for name, figure in figures.items()]
    head = f"{result.name}; rounds: {args.rounds}"
    shown = Shown(f"medians: {', '.join(medians)}", head, by_statistic(figures, STATISTICS), panels)
    publish(args, "latency", describe(config, source.name, model), [result], shown)
    return 0
