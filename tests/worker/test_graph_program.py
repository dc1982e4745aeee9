"""Shapes that steps are padded to, and the words a plan becomes: what does not need a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.step_tensors import ENTRY_PARTS, part_words
from octavo.messages import StepPlan
from octavo.worker.graph_program import Graph, shapes
from octavo.worker.program import PADDING, Shape, entries

CAPTURED = 2048  # tokens


class NoProgram:
    """Shapes are chosen without a program."""

    vocab_size, teams, logits = 0, object(), None


def graph(rows: int, tokens: int) -> Graph:
    return Graph(NoProgram(), rows, tokens, CAPTURED)  # type: ignore[arg-type]


def test_decode_shapes_are_fine_where_steps_are_small() -> None:
    sizes = [shape.entries for shape in shapes(512, 8192, 2048) if shape.decodes]
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-3:] == [480, 496, 512] and len(sizes) == 51
    in_teams = [shape.entries for shape in shapes(300, 8192, 2048, True) if shape.decodes and shape.in_teams]
    assert in_teams == [16, 32, 48, 64, 96, 128, 192, 256, 300] and not any(shape.in_teams for shape in shapes(8, 8, 8, True)[:4])


def test_mixed_shapes_have_rows_for_many_decodes_beside_a_prompt() -> None:
    mixed = [(shape.entries, shape.tokens) for shape in shapes(300, 8192, 2048) if not shape.decodes]
    assert mixed == [(128, 256), (256, 512), *((300, tokens) for tokens in range(768, 2049, 256))]
    assert shapes(6, 32, 2048)[-1] == Shape(6, 32)
    assert [shape.tokens for shape in shapes(4, 500, 2048)[-2:]] == [256, 500]
    assert shapes(4, 8192, 8192)[-1] == Shape(4, 8192) and shapes(4, 8192, 2048)[-1] == Shape(4, 2048)


@given(st.integers(1, 600), st.integers(1, 3000), st.booleans(), st.data())
def test_every_step_fits_into_its_shape_and_decode_stays_decode(rows: int, budget: int, in_teams: bool, data: st.DataObject) -> None:
    budget = max(rows, budget)
    count = data.draw(st.integers(1, rows))
    tokens = data.draw(st.integers(count, budget))
    shape = graph(rows, budget).shape_of(count, tokens, in_teams)
    assert shape.entries >= count and shape.tokens >= tokens and shape.entries <= rows
    assert shape.decodes == (count == tokens)
    if shape not in shapes(rows, budget, CAPTURED, True):
        assert shape == Shape(count, tokens, in_teams) and tokens > CAPTURED
    assert shape.in_teams == (in_teams and count > 8 if shape.decodes else in_teams or tokens <= CAPTURED)


@pytest.mark.parametrize("shape", [Shape(4, 4), Shape(5, 64)])
def test_a_plan_becomes_words_and_padding_has_no_row(shape: Shape) -> None:
    counts = [1, 1] if shape.decodes else [20, 1]
    plan = StepPlan(1, row=[7, 3], seq_id=[0, 1], start=[40, 9], num_query=counts, samples=[False, True], group_lengths={1: [5, 6]})
    parts = entries(plan, shape, 2).reshape(ENTRY_PARTS + 2, part_words(shape.entries)).tolist()
    query_start, row, start, samples, *lengths = parts
    idle = shape.entries - 2
    ends = [3, 4] if shape.decodes else [21] * idle  # a token each, or none
    assert query_start[: shape.entries + 1] == [0, counts[0], sum(counts), *ends]
    assert row[: shape.entries] == [7, 3] + [PADDING] * idle
    assert start[:2] == [40, 9] and samples[: shape.entries] == [0, 1] + [0] * idle
    assert [each[: shape.entries] for each in lengths] == [[40 + counts[0], 10] + [0] * idle, [5, 6] + [0] * idle]
