"""The flags that choose a workload, and the workloads that they choose."""

import argparse
import re
from collections.abc import Callable

from octavo.bench.traces import read_trace, traced
from octavo.bench.workload import RANDOM_LOADS, TEXT_LOADS, Encoder, Lengths, Workload, drawn, random_load, text_ids, text_loads
from octavo.cli.bench.output import count
from octavo.errors import nearest

# Makes workloads. It gets the longest sequence of a model, and a function that returns the model's tokenizer.
Maker = Callable[[int, Callable[[], Encoder]], list[Workload]]

DEFAULT_INPUT, DEFAULT_OUTPUT, DEFAULT_PROMPTS = Lengths(128, 128), Lengths(64, 64), 32


def add_workload_flags(parser: argparse.ArgumentParser, default: str, arrivals: str) -> None:
    """Adds the flags. `default`: the words for what is used if none is given. `arrivals`: when the requests of a trace arrive."""
    group = parser.add_argument_group(f"workload, one of (default: {default})")
    text = f"published loads, joined by commas: {', '.join(TEXT_LOADS)} (text), {', '.join(RANDOM_LOADS)} (random ids)"
    group.add_argument("--load", type=_loads, metavar="NAME", help=text)
    text = f"a recorded trace, Azure CSV or Mooncake JSONL: lengths and shared prefixes; {arrivals}"
    group.add_argument("--trace", metavar="FILE", help=text)
    text = f"tokens in a prompt, chosen at random: 128, or a range such as 64-512 (default: {DEFAULT_INPUT})"
    group.add_argument("--input-len", type=_lengths, metavar="N", help=text)
    group.add_argument("--output-len", type=_lengths, metavar="N", help=f"tokens in an answer (default: {DEFAULT_OUTPUT})")
    text = f"number of requests (default: {DEFAULT_PROMPTS}; of a trace: all)"
    group.add_argument("--num-prompts", type=count, metavar="N", help=text)
    parser.add_argument("--temperature", type=float, metavar="X", default=0.0, help="0: always the most likely token (default: 0)")


def check_choice(args: argparse.Namespace) -> None:
    by_length = args.input_len is not None or args.output_len is not None
    if (args.load is not None) + (args.trace is not None) + by_length > 1:
        args.fail("give one of --load, --trace, or --input-len with --output-len")
    if args.num_prompts is not None and args.load is not None:
        args.fail("--num-prompts does not go with --load: a published load has its own number of requests")


def needs_text(args: argparse.Namespace) -> bool:
    return args.trace is None and not _chose_lengths(args) and any(name in TEXT_LOADS for name in args.load or TEXT_LOADS)


def maker(args: argparse.Namespace, vocab_size: int, seed: int) -> Maker:
    """Returns a function that makes the workloads when the model is open. Errors that need no model are raised at once."""
    if args.trace is not None:
        requests = read_trace(args.trace, args.num_prompts)
        return lambda longest, _: [traced(args.trace, requests, vocab_size, longest, seed)]
    if _chose_lengths(args):
        inputs, outputs = args.input_len or DEFAULT_INPUT, args.output_len or DEFAULT_OUTPUT
        prompts = args.num_prompts or DEFAULT_PROMPTS
        return lambda longest, _: [drawn(inputs, outputs, prompts, vocab_size, longest, seed)]
    names = args.load or TEXT_LOADS
    known = {name: random_load(name, vocab_size) for name in names if name in RANDOM_LOADS}

    def make(_: int, tokenizer: Callable[[], Encoder]) -> list[Workload]:
        texts = text_loads(text_ids(tokenizer())) if len(known) < len(names) else {}
        return [(known | texts)[name] for name in names]

    return make


def _chose_lengths(args: argparse.Namespace) -> bool:
    return args.trace is None and any(given is not None for given in (args.input_len, args.output_len, args.num_prompts))


def _lengths(text: str) -> Lengths:
    """Reads 128, or 64-512."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"must be a length of at least 1, like 128, or a range like 64-512, got {text!r:.40}")
    return Lengths(low, high)


def _loads(text: str) -> list[str]:
    names, known = text.split(","), [*TEXT_LOADS, *RANDOM_LOADS]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"unknown load {unknown!r:.40}; choose from {', '.join(known)}{nearest(unknown, known)}")
    return list(dict.fromkeys(names))
