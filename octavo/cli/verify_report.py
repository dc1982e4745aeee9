"""A verification as text and as a report: the verdict, what was compared, and what the schedule put paging through, step by step."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.report.charts import strip
from octavo.report.document import Report, Section, pictured, said, table
from octavo.worker.machine import this_machine

if TYPE_CHECKING:
    from octavo.engine.verify import Verified

LABEL, COLUMN = 32, 16  # widths at the terminal
COMPARED = (
    "In every layer of every step each sequence is gathered through its block table, and must be, bit for bit, what a contiguous cache "
    "kept beside it holds; the same attention over both must give the same bits."
)
SCHEDULE = "What paging was put through: a mark for each step in which it happened, taller where it happened more often, and the sum."


def verified_lines(results: "Sequence[Verified]") -> list[list[str]]:
    """A column for each pipeline depth."""
    rows = [
        ("requests", [r.requests for r in results]),
        ("steps compared", [r.compared.steps for r in results]),
        ("rows compared (all layers)", [r.compared.rows for r in results]),
        ("cache values, bit for bit", [r.compared.cache_values for r in results]),
        ("attention outputs, bit for bit", [r.compared.output_values for r in results]),
        ("prompt tokens from the cache", [r.cached_tokens for r in results]),
        ("preemptions", [r.preemptions for r in results]),
        ("samples forked", [r.compared.forks for r in results]),
        ("blocks allocated", [r.pool.taken for r in results]),
        ("blocks shared", [r.pool.shared for r in results]),
        ("blocks copied on write", [r.compared.copies for r in results]),
        ("blocks evicted", [r.pool.evicted for r in results]),
    ]
    head = ["", *(f"depth {r.depth}" for r in results)]
    return [head, *([label, *(f"{value:,}" for value in values)] for label, values in rows)]


def verified_text(name: str, block_size: int, results: "Sequence[Verified]") -> str:
    first = results[0]
    what = f"{name}, {first.dtype}, {first.kernels} kernels, blocks of {block_size} in {first.kv_cache_dtype}"
    lines = [line[0].ljust(LABEL) + "".join(cell.rjust(COLUMN) for cell in line[1:]) for line in verified_lines(results)]
    return "\n".join([f"{what}: paged and contiguous caches agree bit for bit", *lines])


def verify_report(name: str, facts: Mapping[str, str], results: "Sequence[Verified]", failure: str | None) -> Report:
    """`failure`: what ended it, after the depths in `results`."""
    sections = []
    if results:
        first = results[0]
        facts = {**facts, "dtype": first.dtype, "KV cache dtype": first.kv_cache_dtype, "kernels": first.kernels}
        sections.append(Section("What was compared", [said(COMPARED), table(verified_lines(results), "what was compared")]))
    for result in results:
        drawing = strip(list(result.schedule.items()), "steps")
        sections.append(Section(f"The schedule at pipeline depth {result.depth}", [pictured(drawing, SCHEDULE)]))
    verdict = failure or "Verified: paged and contiguous caches agree bit for bit."
    return Report("octavo verify", name, verdict, failure is None, sections, {**facts, "machine": this_machine()})
