"""`octavo bench throughput`: tokens a second over a workload, and what its requests waited for.

    octavo bench throughput                                              the four loads that are cut from a text
    octavo bench throughput --load batch32,shared32                      some of them
    octavo bench throughput --input-len 64-512 --output-len 64 --num-prompts 32
    octavo bench throughput --trace conversations.jsonl --num-prompts 100
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.bench.figures import Result
from octavo.bench.picture import Panel, bar, heading
from octavo.bench.table import by_result
from octavo.bench.traces import read_trace, traced
from octavo.bench.workload import RANDOM_LOADS, TEXT_LOADS, Lengths, Workload, check_fits, drawn, random_load, text_loads
from octavo.cli.args import SETTINGS, add_engine_flags, engine_config, nearest
from octavo.cli.bench.output import add_common_flags, check_targets, count, publish
from octavo.cli.opening import opened
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

Maker = Callable[["LLM"], list[Workload]]

DEFAULT_INPUT, DEFAULT_OUTPUT, DEFAULT_PROMPTS, DEFAULT_ROUNDS = Lengths(128, 128), Lengths(64, 64), 32, 3
FACTS = ("requests", "input_tokens", "output_tokens")
PER_ROUND = ("output_throughput", "input_throughput", "decode_throughput", "request_throughput", "wall", "running_at_once")
TIMES = ("queue", "first_token", "per_output_token", "end_to_end")
ROWS = [(name, "median") for name in (*PER_ROUND, "cache_hit_rate", "preemptions", "peak_memory")]
ROWS += [(name, statistic) for name in TIMES for statistic in ("median", "p90", "p99")]
PICTURED = ("output_throughput", "input_throughput", "first_token", "per_output_token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_flags(parser, DEFAULT_ROUNDS)
    group = parser.add_argument_group("workload, one of")
    text = f"published loads, joined by commas: {', '.join(TEXT_LOADS)} (text; the default), {', '.join(RANDOM_LOADS)} (random ids)"
    group.add_argument("--load", type=_loads, metavar="NAME", help=text)
    text = "what a service recorded, Azure CSV or Mooncake JSONL: lengths and shared beginnings; all requests arrive at once"
    group.add_argument("--trace", metavar="FILE", help=text)
    text = f"tokens of a prompt, ids drawn at random: 128, or a range, 64-512 (default: {DEFAULT_INPUT})"
    group.add_argument("--input-len", type=_lengths, metavar="N", help=text)
    group.add_argument("--output-len", type=_lengths, metavar="N", help=f"tokens generated after it (default: {DEFAULT_OUTPUT})")
    text = f"requests of chosen lengths (default: {DEFAULT_PROMPTS}), or the first of a trace (default: all)"
    group.add_argument("--num-prompts", type=count, metavar="N", help=text)
    parser.add_argument("--temperature", type=float, metavar="X", default=0.0, help="0 takes the likeliest token (default: 0)")
    add_engine_flags(parser, only=[name for name in SETTINGS if name != "trace"])  # which is a load here, and no picture of steps


def run(args: argparse.Namespace) -> int:
    _check_choice(args)
    check_targets(args)
    SamplingParams(temperature=args.temperature)  # refused now, not when the model is loaded
    from octavo.bench.machine import describe
    from octavo.bench.measure import measure, say
    from octavo.loading.resolve import load_model_config, source_of

    config = engine_config(args, args.words)
    source = source_of(config)
    model = load_model_config(source)
    make = _maker(args, model.vocab_size, config.seed)
    if not _needs_text(args):
        config = replace(config, skip_tokenizer_init=True)  # shapes alone can be measured, with --load-format dummy
    with opened(config) as llm:
        workloads = make(llm)
        for workload in workloads:
            if workload.clipped:
                total = len(workload.requests)
                say(f"{workload.name}: {workload.clipped} of {total} requests were cut to the context of {llm.max_model_len:,} tokens")
            check_fits(workload.name, workload.longest, llm.max_model_len)
        results = [measure(llm, workload, args.rounds, args.temperature) for workload in workloads]
    facts = (*FACTS, "clipped") if any(workload.clipped for workload in workloads) else FACTS
    head = "medians over rounds; times are over all requests of all rounds; memory is that of the process so far"
    table = f"rounds: {args.rounds}; {head}\n\n{by_result(results, facts, ROWS)}"
    panels = [_panel(name, results) for name in PICTURED if any(name in result.figures for result in results)]
    publish(args, "throughput", describe(config, source.name, model), results, table, panels)
    return 0


def _panel(name: str, results: list[Result]) -> Panel:
    """One figure, a bar for each workload that has it."""
    found = [(result.name, result.figures[name]) for result in results if name in result.figures]
    return Panel(heading(name, found[0][1]), [bar(label, figure) for label, figure in found])


def _check_choice(args: argparse.Namespace) -> None:
    by_length = args.input_len is not None or args.output_len is not None
    if (args.load is not None) + (args.trace is not None) + by_length > 1:
        args.fail("a workload comes from --load, from --trace, or from --input-len and --output-len: one of the three")
    if args.num_prompts is not None and args.load is not None:
        args.fail("--num-prompts goes with --trace or chosen lengths: a published load has its own number of requests")


def _chose_lengths(args: argparse.Namespace) -> bool:
    return args.trace is None and any(given is not None for given in (args.input_len, args.output_len, args.num_prompts))


def _needs_text(args: argparse.Namespace) -> bool:
    return args.trace is None and not _chose_lengths(args) and any(name in TEXT_LOADS for name in args.load or TEXT_LOADS)


def _maker(args: argparse.Namespace, vocab_size: int, seed: int) -> Maker:
    """What can be refused without the model is refused here; what needs it is made when it is open."""
    from octavo.bench.text import text_ids

    if args.trace is not None:
        requests = read_trace(args.trace, args.num_prompts)
        return lambda llm: [traced(args.trace, requests, vocab_size, llm.max_model_len, seed)]
    if _chose_lengths(args):
        inputs, outputs = args.input_len or DEFAULT_INPUT, args.output_len or DEFAULT_OUTPUT
        prompts = args.num_prompts or DEFAULT_PROMPTS
        return lambda llm: [drawn(inputs, outputs, prompts, vocab_size, llm.max_model_len, seed)]
    names = args.load or TEXT_LOADS
    known = {name: random_load(name, vocab_size) for name in names if name in RANDOM_LOADS}

    def make(llm: "LLM") -> list[Workload]:
        texts = text_loads(text_ids(llm.get_tokenizer())) if len(known) < len(names) else {}
        return [(known | texts)[name] for name in names]

    return make


def _lengths(text: str) -> Lengths:
    """128, or 64-512."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"wanted a length of at least 1, like 128, or a range like 64-512, got {text!r:.40}")
    return Lengths(low, high)


def _loads(text: str) -> list[str]:
    names, known = text.split(","), [*TEXT_LOADS, *RANDOM_LOADS]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"there is no load {unknown!r:.40}, only {', '.join(known)}{nearest(unknown, known)}")
    return list(dict.fromkeys(names))
