"""`octavo verify` runs a model with a contiguous cache beside the paged one, and compares them bit for bit in every step.

With --schedules it compares the answers of the model under random schedules instead.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from octavo.cli.args import MODEL_HELP, add_engine_flags, engine_config
from octavo.cli.in_out import add_report_flag, check_target, write_report
from octavo.config import EngineConfig
from octavo.report.charts import strip
from octavo.report.document import Report, Section, paragraph, pictured, table
from octavo.worker.machine import this_machine

if TYPE_CHECKING:
    from octavo.engine.schedule_runs import Counts
    from octavo.engine.schedules import Schedule
    from octavo.engine.verify import Invariance, Verified

DEFAULT_REQUESTS, DEFAULT_SCHEDULED = 40, 12  # the second: with --schedules, which runs them many times
LEAST_REQUESTS = 12  # with fewer, a case such as an eviction may not happen (tried with block sizes 1 to 256, both depths, many seeds)
MOST_REQUESTS = MOST_SCHEDULES = 100_000
CASES = "a prefix hit, a fork, a copy on write, a preemption, an eviction and a beam search"
EXAMPLES = """examples:
  octavo verify                              the default model
  octavo verify Qwen/Qwen3-0.6B              a model of the hub
  octavo verify -tp 2                        split over two processes, each with a proof of its own
  octavo verify --report proof.html          the result as a page with pictures
  octavo verify --schedules 10               the same answers alone and under 10 random schedules, with --seed 1 under others

Exit code 0: all values are equal. 1: the first difference is shown."""
# The flags of the engine that a user may set. The schedule sets the others.
SETTINGS = (
    "revision", "dtype", "quantization", "device", "load_format", "block_size", "kv_cache_dtype", "tensor_parallel_size",
    "pipeline_parallel_size", "decode_context_parallel_size", "enable_expert_parallel", "native", "cpu_isa", "seed",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL]"
    parser.epilog = EXAMPLES
    parser.add_argument("words", metavar="MODEL", nargs="?", help=MODEL_HELP)
    text = f"number of requests, at least {LEAST_REQUESTS} (default: {DEFAULT_REQUESTS}, with --schedules {DEFAULT_SCHEDULED})"
    parser.add_argument("--requests", type=_count, metavar="N", help=text)
    text = "run the requests alone and under N random schedules, and compare ids and logprobs bit for bit, instead of the caches"
    parser.add_argument("--schedules", type=_schedules, metavar="N", help=text)
    add_report_flag(parser)
    add_engine_flags(parser, only=SETTINGS)


def _count(text: str) -> int:
    if not text.isdigit() or not LEAST_REQUESTS <= int(text) <= MOST_REQUESTS:
        why = f"fewer than {LEAST_REQUESTS} may not cause {CASES}, and then nothing is proven"
        raise argparse.ArgumentTypeError(f"must be a number from {LEAST_REQUESTS} to {MOST_REQUESTS}, got {text[:40]!r}: {why}")
    return int(text)


def _schedules(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_SCHEDULES:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {MOST_SCHEDULES}, got {text[:40]!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args, args.words)  # before torch loads: --show-config ends here
    check_target("--report", args.report)
    if args.schedules is not None:
        return run_schedules(config, args.schedules, args.requests or DEFAULT_SCHEDULED, args.report, args.typed)
    from octavo.engine.verify import verify
    from octavo.errors import VerifyError
    from octavo.loading.resolve import load_model_config, source_of

    source = source_of(config)
    model = load_model_config(source)
    num_requests = args.requests or DEFAULT_REQUESTS
    facts = {"command": args.typed, "model": source.name, "block size": str(config.block_size)}
    results: list[Verified] = []
    failure: str | None = None
    for depth in (1, 2):
        print(f"verifying {source.name}, pipeline depth {depth} ...", file=sys.stderr)
        try:
            results.append(verify(config, source, model, depth, num_requests))
        except VerifyError as error:
            failure = f"NOT VERIFIED at pipeline depth {depth}: {error}"
            break
    print(failure or verified_text(source.name, config.block_size, results))
    if args.report is not None:
        write_report(args.report, verify_report(source.name, facts, results, failure))
    return 0 if failure is None else 1


# -- the result, as text and as a report

LABEL, COLUMN = 32, 16  # widths in characters
COMPARED = (
    "In every layer of every step each sequence is gathered through its block table, and must be, bit for bit, what a contiguous cache "
    "kept beside it holds; the same attention over both must give the same bits. So must the states of recurrent layers."
)
SCHEDULE = "What paging was put through: a mark for each step in which it happened, taller where it happened more often, and the sum."


def verified_lines(results: "Sequence[Verified]") -> list[list[str]]:
    """Returns the lines of the table, with a column for each pipeline depth."""
    rows = [
        ("requests", [r.requests for r in results]),
        ("beam searches among them", [r.searches for r in results]),
        ("steps compared", [r.compared.steps for r in results]),
        ("rows compared (all layers)", [r.compared.rows for r in results]),
        ("cache values, bit for bit", [r.compared.cache_values for r in results]),
        ("attention outputs, bit for bit", [r.compared.output_values for r in results]),
        ("rows that read keys together", [r.compared.together for r in results]),
        ("prompt tokens from the cache", [r.cached_tokens for r in results]),
        ("preemptions", [r.preemptions for r in results]),
        ("sequences forked", [r.compared.forks for r in results]),
        ("slots of rejected drafts", [r.compared.rejected for r in results]),
        ("blocks allocated", [r.pool.taken for r in results]),
        ("blocks shared", [r.pool.shared for r in results]),
        ("blocks copied on write", [r.compared.copies for r in results]),
        ("blocks evicted", [r.pool.evicted for r in results]),
        *(_states(results) if results[0].states is not None else []),
        *((f"values compared by rank {rank}", [r.other_ranks[rank] for r in results]) for rank in results[0].other_ranks),
    ]
    head = ["", *(f"depth {r.depth}" for r in results)]
    return [head, *([label, *(f"{value:,}" for value in values)] for label, values in rows)]


def _states(results: "Sequence[Verified]") -> list[tuple[str, list[int]]]:
    """Returns what was compared of a recurrent model."""
    counts = [(r.compared, r.states) for r in results if r.states is not None]
    return [
        ("state values, bit for bit", [compared.state_values for compared, _ in counts]),
        ("states kept", [states.kept for _, states in counts]),
        ("rows begun with a kept state", [compared.restored for compared, _ in counts]),
        ("kept states evicted", [states.evicted for _, states in counts]),
    ]


def verified_text(name: str, block_size: int, results: "Sequence[Verified]") -> str:
    first = results[0]
    what = f"{name}, {first.dtype}, {first.kernels} kernels, blocks of {block_size} in {first.kv_cache_dtype}"
    lines = [line[0].ljust(LABEL) + "".join(cell.rjust(COLUMN) for cell in line[1:]) for line in verified_lines(results)]
    return "\n".join([f"{what}: paged and contiguous caches agree bit for bit", *lines])


def verify_report(name: str, facts: Mapping[str, str], results: "Sequence[Verified]", failure: str | None) -> Report:
    """Returns the report. `results` has the depths that were verified, `failure` the first difference, if there is one."""
    sections = []
    if results:
        first = results[0]
        facts = {**facts, "dtype": first.dtype, "KV cache dtype": first.kv_cache_dtype, "kernels": first.kernels}
        sections.append(Section("What was compared", [paragraph(COMPARED), table(verified_lines(results), "what was compared")]))
    for result in results:
        drawing = strip(list(result.schedule.items()), "steps")
        sections.append(Section(f"The schedule at pipeline depth {result.depth}", [pictured(drawing, SCHEDULE)]))
    verdict = failure or "Verified: paged and contiguous caches agree bit for bit."
    return Report("octavo verify", name, verdict, failure is None, sections, {**facts, "machine": this_machine()})


# -- random schedules

EQUAL = "the answers under every schedule have the same bits as alone"
SCHEDULES_COMPARED = (
    "Each sample and each beam search ran alone first, with its whole prompt in one step and nothing cached. Then all requests ran under "
    "random schedules. Every id and every logprob must be the same number."
)
LABELS = {
    "hits": "prompt tokens from the cache", "forks": "sequences forked", "chunks": "parts of prompts", "preemptions": "preemptions",
    "evictions": "blocks evicted", "together": "rows that read keys together", "moved": "requests moved to another engine",
    "searches": "beam searches", "steps": "steps",
}  # fmt: skip


def run_schedules(config: EngineConfig, num_schedules: int, num_requests: int, report: str | None, typed: str) -> int:
    """Returns the exit code: 0 if no value differs, otherwise 1."""
    from octavo.engine.verify import Proof
    from octavo.errors import VerifyError
    from octavo.loading.resolve import load_model_config, source_of

    source = source_of(config)
    proof = Proof(config, source, load_model_config(source))
    print(f"{source.name}: {num_requests} requests and their second turns, each alone ...", file=sys.stderr)
    proven: Invariance | None = None
    try:
        proven = proof.run(num_schedules, num_requests, lambda number, schedule, counts: print(passed_line(number, schedule), flush=True))
        verdict = proven_text(source.name, proven)
    except VerifyError as error:
        verdict = f"NOT VERIFIED: {error}"
    print(verdict)
    if report is not None:
        facts = {"command": typed, "model": source.name, "seed": str(config.seed), "machine": this_machine()}
        write_report(report, schedules_report(source.name, facts, verdict, proven))
    return 0 if proven is not None else 1


def passed_line(number: int, schedule: "Schedule") -> str:
    return f"schedule {number}: equal ({schedule})"


def proven_text(name: str, proven: "Invariance") -> str:
    what = f"{name}, {proven.dtype}, {proven.kernels} kernels, cache in {proven.kv_cache_dtype}"
    compared = f"{proven.requests} requests, {proven.samples} samples, {proven.tokens:,} tokens, {len(proven.schedules)} schedules"
    counts = [f"{LABELS[name]}: {value:,}" for name, value in _named(proven.total).items()]
    return f"{what}: {EQUAL}\n{compared}; {', '.join(counts)}"


def schedules_report(name: str, facts: dict[str, str], verdict: str, proven: "Invariance | None") -> Report:
    sections = []
    if proven is not None:
        columns = [_named(proven.total), *(_named(counts) for _, counts in proven.schedules)]
        head = ["", "in all", *(f"schedule {number}" for number in range(1, len(columns)))]
        lines = [head, *([label, *(f"{column[key]:,}" for column in columns)] for key, label in LABELS.items())]
        schedules = [paragraph(passed_line(number, schedule)) for number, (schedule, _) in enumerate(proven.schedules, 1)]
        compared = Section("What was compared", [paragraph(SCHEDULES_COMPARED), table(lines, "what happened")])
        sections = [compared, Section("Schedules", schedules)]
    return Report("octavo verify", name, verdict, proven is not None, sections, facts)


def _named(counts: "Counts") -> dict[str, int]:
    return {each.name: getattr(counts, each.name) for each in fields(counts)}
