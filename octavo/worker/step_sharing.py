"""Finds which rows of a step share keys, in every cache group, for the attention of all programs."""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.messages import StepPlan
from octavo.step.shared_keys import FREE, NOTHING, ReadCost, SharedKeys, SharedReads
from octavo.step.step_tensors import send
from octavo.step.team_words import ENTRY, LINE, Teams, most_teams, team_words
from octavo.worker.request_table import RequestTable

Keys = list[SharedKeys]  # one per cache group


class StepSharing:
    def __init__(self, table: RequestTable, spans: Sequence[int], cost: ReadCost, alone: Sequence[int] = ()) -> None:
        """`spans`: tokens in a block of each cache group. `alone`: groups in which every row reads its own keys"""
        self._changes, self._cost = table.watched_tables(), cost
        self._reads = {
            number: SharedReads(tables, span, cost)
            for number, (tables, span) in enumerate(zip(self._changes.tables, spans, strict=True))
            if number not in alone
        }

    def share_all(self, wanted: bool = True) -> None:
        """Shares every possible key between rows, even if it does not pay off: for verification, which has short contexts."""
        for reads in self._reads.values():
            reads.cost = FREE if wanted else self._cost

    def of(self, plan: StepPlan) -> Keys:
        """Returns the shared-prefix nodes of each cache group, among scheduled rows that have one token. There must be some."""
        found = [NOTHING] * len(self._changes.tables)
        rows, counts = np.array(plan.row, np.int32), np.array(plan.num_query, np.int32)
        (single,) = (counts == 1).nonzero()
        rows, context = rows[single], np.array(plan.start, np.int32)[single] + 1
        for group, reads in self._reads.items():
            lengths = plan.group_lengths.get(group)
            own = context if lengths is None else np.array(lengths, np.int32)[single]
            found[group] = reads.nodes(rows, own, self._changes.count[group])
        if len(single) == len(counts):
            return found
        return [SharedKeys(keys.nodes, single[keys.rows].astype(np.int32)) if len(keys.nodes) else NOTHING for keys in found]


def rows_together(keys: Keys) -> int:
    """Returns how many scheduled rows of a step share keys with others."""
    return len(np.unique(np.concatenate([shared.rows for shared in keys])))


class StepTeams:
    """The shared-prefix groups in device memory, for each cache group, at fixed addresses (`step/team_words.py`)."""

    def __init__(self, groups: int, most_rows: int, rows: int, wanted: int, device: torch.device, piece: int = 0) -> None:
        """`most_rows`: of a step. `rows`: of a group. `wanted`: groups that fill the device. `piece`: as in `team_words`"""
        self._cut = rows, wanted, piece
        self._first_line = -(-most_rows * ENTRY // LINE) * LINE
        self.words = torch.zeros(groups, self._first_line + (1 + most_teams(most_rows)) * LINE, dtype=torch.int32, device=device)
        self._sent: list[tuple[SharedKeys, int]] = [(NOTHING, 0)] * groups
        halves = [words.split([self._first_line, len(words) - self._first_line]) for words in self.words]
        self.of_group = [Teams(entries.view(-1, ENTRY), lines.view(-1, LINE)) for entries, lines in halves]

    def send(self, keys: Keys, entries: int) -> None:
        """Sends the shared-prefix groups of a step with `entries` rows. Unchanged groups are not sent again."""
        for group, shared in enumerate(keys):
            kept, size = self._sent[group]
            if shared is not kept or (size != entries and shared is not NOTHING):
                self._sent[group] = shared, entries
                of_entries, lines = team_words(shared, entries, *self._cut)
                words = np.zeros(self._first_line + lines.size, np.int32)
                words[: of_entries.size], words[self._first_line :] = of_entries.ravel(), lines.ravel()
                send(words, self.words[group])
