"""What each stage of a pipeline has."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.models.stages import deal_layers


def read_by(layers: list[int], head: int, cuts: list[int]) -> int:
    """What the stage reads that reads most."""
    edges = [0, *cuts, len(layers)]
    return max(sum(layers[start:end]) + (head if end == len(layers) else 0) for start, end in pairwise(edges))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 120), st.data())
def test_no_other_way_to_deal_layers_is_better(layers: list[int], head: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    dealt = deal_layers(layers, head, stages)
    assert len(dealt) == stages and [layer for part in dealt for layer in part] == list(range(len(layers))) and all(dealt)
    ways = combinations(range(1, len(layers)), stages - 1)
    assert read_by(layers, head, [part.start for part in dealt[1:]]) == min(read_by(layers, head, list(cuts)) for cuts in ways)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 layers cannot be divided among pipeline_parallel_size 5: set it to 4 or less"):
        deal_layers([1] * 4, 1, 5)
