"""What entries of a step read together: found in the plan and the block tables, and put down for a device when it changes."""

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.messages import NoiseKey, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.sizing.gpu_size import gpu_row_bytes
from octavo.step.shared_keys import FREE, NOTHING
from octavo.step.step_tensors import ALIGNED, ENTRY_PARTS, RowLayout, StepMemory
from octavo.step.team_words import LINE, team_words
from octavo.worker.request_table import RequestTable
from octavo.worker.step_sharing import StepSharing, StepTeams

CPU, SPAN, ROWS = torch.device("cpu"), 16, 8
TABLES = {0: [1, 2, 3], 1: [1, 2, 4], 3: [5], 6: [1, 2, 6]}


def sharing() -> StepSharing:
    table = RequestTable(ROWS, RowLayout(4, 64), CPU)
    found = StepSharing(table, [SPAN], FREE)
    noise, ids = NoiseKey((0, 0), 0, 0), array("q", [7] * 40)
    writes = [RowWrite(row, row, ids, 40, 0, [blocks], SamplingParams(), (), [], noise, b"") for row, blocks in TABLES.items()]
    table.apply(StepPlan(1, row_writes=writes))
    return found


def test_nodes_name_the_entries_of_the_plan() -> None:
    found = sharing()
    (alone,) = found.of(StepPlan(1, [0, 1, 3, 6], [0, 1, 3, 6], [33, 34, 3, 40], [1] * 4, [True] * 4))
    assert alone.nodes.tolist() == [[0, 3, 0, 32]] and sorted(alone.rows.tolist()) == [0, 1, 3]
    (beside,) = found.of(StepPlan(1, [6, 3, 0, 1], [6, 3, 0, 1], [40, 0, 33, 34], [1, 3, 1, 1], [True] * 4))  # a prompt of three tokens
    assert beside.nodes.tolist() == [[0, 3, 0, 32]] and sorted(beside.rows.tolist()) == [0, 2, 3]
    assert found.of(StepPlan(1, [0, 3], [0, 3], [33, 0], [1, 3], [True] * 2)) == [NOTHING]
    (shorter,) = sharing().of(StepPlan(1, [0, 3, 1], [0, 3, 1], [33, 0, 34], [1, 3, 1], [True] * 3, group_lengths={0: [17, 1, 18]}))
    assert shorter.nodes.tolist() == [[0, 2, 0, 16]] and sorted(shorter.rows.tolist()) == [0, 2]


def test_teams_are_sent_when_they_change_and_stay_where_they_are() -> None:
    (keys,) = sharing().of(StepPlan(1, [0, 1, 6], [0, 1, 6], [33, 34, 40], [1] * 3, [True] * 3))
    teams = StepTeams(1, ROWS, 2, 1, CPU)
    of_entries, lines = teams.of_group[0]

    def there() -> bool:
        expected = team_words(keys, 3, 2)
        found = of_entries[:3].numpy(), lines[: len(expected[1])].numpy()
        return all(map(np.array_equal, found, expected))

    teams.send([keys], 3)
    assert there() and lines[0, 0] == 2
    teams.words.zero_()
    teams.send([keys], 3)
    assert not teams.words.any(), "the same is not sent again"
    teams.send([keys], 4)
    assert there() and not of_entries[3:].any()
    teams.send([NOTHING], 4)
    assert lines[0, 0] == 0


@pytest.mark.parametrize("groups", [1, 3])
def test_the_plan_of_a_gpu_counts_all_words_of_rows_steps_and_groups(groups: int) -> None:
    rows, tokens, blocks, max_len = 512, 256, 10, 150
    layout = RowLayout(blocks, max_len, (1,) * groups)
    words = [value for value in vars(StepMemory(layout, rows, tokens, CPU)).values() if isinstance(value, torch.Tensor)]
    words += [RequestTable(rows, layout, CPU).words, StepTeams(groups, rows, 4, 1, CPU).words]
    model: Any = SimpleNamespace(position_numbers=0)
    planned = gpu_row_bytes(model, rows, tokens, max_len, groups, blocks)
    more = (ENTRY_PARTS + groups) * ALIGNED + groups * LINE  # the ends of the parts of the entries, the headers of the groups
    assert sum(each.nbytes for each in words) == planned + 4 * more
