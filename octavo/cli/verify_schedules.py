"""`octavo verify --schedules N` proves on a model that the schedule never changes an answer."""

import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from octavo.cli.in_out import write_report
from octavo.config import EngineConfig
from octavo.report.document import Report, Section, paragraph, table
from octavo.worker.machine import this_machine

if TYPE_CHECKING:
    from octavo.engine.invariance import Invariance
    from octavo.engine.schedule_runs import Counts
    from octavo.engine.schedules import Schedule

MOST_SCHEDULES = 100_000
EQUAL = "the answers under every schedule have the same bits as alone"
COMPARED = (
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
    from octavo.engine.invariance import Proof
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
        sections = [Section("What was compared", [paragraph(COMPARED), table(lines, "what happened")]), Section("Schedules", schedules)]
    return Report("octavo verify", name, verdict, proven is not None, sections, facts)


def _named(counts: "Counts") -> dict[str, int]:
    return {each.name: getattr(counts, each.name) for each in fields(counts)}
