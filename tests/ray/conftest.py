"""One Ray cluster for the tests of a file: they kill processes and nodes, and put back what others need."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ray_nodes import three_nodes


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    with three_nodes(request.module.CPUS) as made:
        yield made
