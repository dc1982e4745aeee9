"""A memory plan as a report: where the memory goes, how many sequences fit at which lengths, and the table the terminal prints."""

from typing import TYPE_CHECKING

from octavo.cli.plan_text import plan_rows, plan_sentence, plan_sizes
from octavo.config import ResolvedConfig
from octavo.policy.memory_plan import MemoryPlan, ModelNeeds, shown
from octavo.report.charts import Curve, Part, curves, parts_bar
from octavo.report.document import Html, Report, Section, pictured, said, table
from octavo.worker.machine import this_machine

if TYPE_CHECKING:
    from octavo.loading.shape import ModelShape


def plan_report(command: str, head: str, shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan) -> Report:
    parts = [Part(name, size, shown(size)) for name, size in plan_sizes(plan).items()]
    caption = f"The whole bar is {shown(max(plan.memory.total, plan.use.total + plan.memory.others))}."
    rows = [("", "", ""), *plan_rows(shape, needs, config, plan)]
    sections = [
        Section("Where the memory goes", [pictured(parts_bar(parts), caption), table(rows, "memory", words=[2])]),
        Section("How many sequences fit", _fits(plan, config.max_num_seqs)),
    ]
    facts = {"command": command, "model": head, "machine": this_machine()}
    return Report("octavo plan", shape.name, plan_sentence(plan), plan.refusal is None, sections, facts)


def sequences_at(plan: MemoryPlan) -> list[tuple[int, int]]:
    """Lengths from one block to the longest sequence, doubled each time, and how many of that length the pool holds."""
    geometry = plan.geometry
    lengths = [geometry.block_size]
    while 2 * lengths[-1] < geometry.max_model_len:
        lengths.append(2 * lengths[-1])
    lengths = [length for length in lengths if length < geometry.max_model_len] + [geometry.max_model_len]
    return [(length, (geometry.num_blocks - 1) // -(-length // geometry.block_size)) for length in lengths]


def _fits(plan: MemoryPlan, rows: int) -> list[Html]:
    found = sequences_at(plan)
    drawing = curves([Curve("sequences the pool holds", found)], "tokens of each, prompt and answer", "sequences", logarithmic=True)
    cells = ([f"{length:,}", f"{count:,}", f"{min(count, rows):,}"] for length, count in found)
    lines = [["tokens of each", "sequences", "at once"], *cells]
    text = f"Sequences that share a prefix share its blocks, so more may fit. At most {rows:,} run at the same time (--max-num-seqs)."
    return [said(text), pictured(drawing), table(lines, "sequences that fit")]
