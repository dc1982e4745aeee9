"""Shapes that steps are padded to, and the words a plan becomes: what does not need a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import StepPlan
from octavo.step.step_tensors import ENTRY_PARTS, PADDING, Shape, packed_entries, part_words
from octavo.worker.graph_program import Graph, shapes

CAPTURED = 2048  # tokens


class NoProgram:
    """Shapes are chosen without a program."""

    vocab_size, teams, logits = 0, object(), None

    def __init__(self, has_states: bool) -> None:
        self.has_states = has_states


def graph(rows: int, tokens: int, has_states: bool = False) -> Graph:
    return Graph(NoProgram(has_states), rows, tokens, CAPTURED)  # type: ignore[arg-type]


def test_decode_shapes_are_fine_where_steps_are_small() -> None:
    sizes = [shape.entries for shape in shapes(512, 8192, 2048) if shape.decodes]
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-3:] == [480, 496, 512] and len(sizes) == 51
    in_teams = [shape.entries for shape in shapes(300, 8192, 2048, True) if shape.decodes and shape.in_teams]
    assert in_teams == [16, 32, 48, 64, 96, 128, 192, 256, 300] and not any(shape.in_teams for shape in shapes(8, 8, 8, True)[:4])


def test_mixed_shapes_have_rows_for_many_decodes_beside_a_prompt() -> None:
    mixed = [(shape.entries, shape.tokens) for shape in shapes(300, 8192, 2048) if not shape.decodes]
    assert mixed == [(128, 256), (256, 512), *((300, tokens) for tokens in range(768, 2049, 256))]
    assert shapes(6, 32, 2048)[-1] == Shape(6, 32, 6)
    assert [shape.tokens for shape in shapes(4, 500, 2048)[-2:]] == [256, 500]
    assert shapes(4, 8192, 8192)[-1] == Shape(4, 8192, 4) and shapes(4, 8192, 2048)[-1] == Shape(4, 2048, 4)


@given(st.integers(1, 600), st.integers(1, 3000), st.booleans(), st.data())
def test_every_step_fits_into_its_shape_and_decode_stays_decode(rows: int, budget: int, in_teams: bool, data: st.DataObject) -> None:
    budget = max(rows, budget)
    count = data.draw(st.integers(1, rows))
    tokens = data.draw(st.integers(count, budget))
    outputs = data.draw(st.integers(count, min(tokens, rows)))  # more than entries: some have drafts
    shape = graph(rows, budget).shape_of(count, tokens, outputs, in_teams)
    assert shape.entries >= count and shape.tokens >= tokens and shape.outputs >= outputs and max(shape.entries, shape.outputs) <= rows
    assert shape.decodes == (count == tokens)
    if shape not in shapes(rows, budget, CAPTURED, True):
        assert shape == Shape(count, tokens, outputs, in_teams)
        assert not any(one.tokens >= tokens and one.outputs >= outputs for one in shapes(rows, budget, CAPTURED, True) if not one.decodes)
    elif shape.decodes:
        assert shape.in_teams == (in_teams and count > 8)


def test_a_mixed_step_of_a_recurrent_model_has_room_for_a_checkpoint_after_each_token() -> None:
    """However many there are, a step has the shape of one that was captured."""
    one = graph(8, 3000, has_states=True)
    assert one.shape_of(3, 200, 3, False) == Shape(8, 256, 8, True, checkpoints=256) and not one.shape_of(3, 3, 3, False).checkpoints
    assert one.shape_of(3, 2500, 3, False) == Shape(3, 2500, 3, checkpoints=2500)
    assert all(shape.checkpoints == (0 if shape.decodes else shape.tokens) for shape in shapes(8, 3000, CAPTURED, True, True))


@pytest.mark.parametrize("shape", [Shape(4, 4, 4), Shape(5, 64, 5)])
def test_a_plan_becomes_words_and_padding_has_no_row(shape: Shape) -> None:
    counts = [1, 1] if shape.decodes else [20, 1]
    plan = StepPlan(1, row=[7, 3], seq_id=[0, 1], start=[40, 9], num_query=counts, outputs=[0, 1], group_lengths={1: [5, 6]})
    parts = packed_entries(plan, shape, 2).reshape(ENTRY_PARTS + 2, part_words(shape.entries)).tolist()
    query_start, row, start, outputs, first_output, *lengths = parts
    idle = shape.entries - 2
    ends = [3, 4] if shape.decodes else [21] * idle  # a token each, or none
    assert query_start[: shape.entries + 1] == [0, counts[0], sum(counts), *ends]
    assert row[: shape.entries] == [7, 3] + [PADDING] * idle
    assert start[:2] == [40, 9] and outputs[: shape.entries] == [0, 1] + [0] * idle
    assert first_output[: shape.entries + 1] == list(range(shape.entries + 1))
    assert [each[: shape.entries] for each in lengths] == [[40 + counts[0], 10] + [0] * idle, [5, 6] + [0] * idle]


def test_rows_with_drafts_take_the_outputs_of_padding_rows() -> None:
    plan, shape = StepPlan(1, row=[7, 3], start=[40, 9], num_query=[20, 3], outputs=[0, 3], drafts={1: [5, 6]}), Shape(6, 64, 6)
    *_, outputs, first_output, _ = packed_entries(plan, shape, 1).reshape(ENTRY_PARTS + 1, part_words(6)).tolist()
    assert outputs[:6] == [0, 3, 0, 0, 0, 0] and first_output[:7] == [0, 1, 4, 5, 6, 6, 6]
