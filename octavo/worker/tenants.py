"""Tracks row owners for tokens from the last stage of a pipeline, since a row may have a new owner when its token arrives."""

from octavo.messages import StepPlan, StepResult
from octavo.worker.request_table import SampledToken


class Tenants:
    """Maps sequences to rows. A late token may belong to a row that another sequence has by now."""

    def __init__(self) -> None:
        self._row: dict[int, int] = {}  # sequence -> row
        self._sequence: dict[int, int] = {}  # row -> sequence

    def apply(self, plan: StepPlan) -> None:
        changes = [(fork.row, fork.seq_id) for fork in plan.row_forks] + [(write.row, write.seq_id) for write in plan.row_writes]
        for row, sequence in changes:
            before = self._sequence.get(row)
            if before is not None and self._row.get(before) == row:
                del self._row[before]
            self._row[sequence], self._sequence[row] = row, sequence

    def sampled_tokens(self, plan: StepPlan, result: StepResult) -> list[SampledToken]:
        """Returns the row and position of the last token of each sequence in a step. Accepted drafts before it are in the row already."""
        rows = [self._row.get(sequence) for sequence in plan.seq_id]
        sampled = [(entry, row, tokens) for entry, (row, tokens) in enumerate(zip(rows, result.tokens)) if tokens and row is not None]
        return [(row, plan.sampled_position(entry) + len(tokens) - 1, tokens[-1]) for entry, row, tokens in sampled]
