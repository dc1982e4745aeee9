"""Everything at once on FakeKV, for long: no token lost, doubled or wrong. `make soak` runs a million sequence-steps."""

from collections import Counter
from collections.abc import Callable

import pytest

from octavo.log import logger
from tests.support.storm import Episode

MUST_HAPPEN = {
    "forks", "copies", "aborts", "rows not finite", "failed forwards", "resets", "preemptions", "evictions", "tokens found in the cache",
}  # fmt: skip


def _storm(sequence_steps: int, first_seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    monkeypatch.setattr(logger, "disabled", True)  # failed forwards log their traceback, and there are many
    happened, seed = Counter[str](), first_seed
    while happened["sequence-steps"] < sequence_steps:
        try:
            happened += Episode(seed).run(requests=40)
        except AssertionError as error:
            raise AssertionError(f"episode of seed {seed}: {error}") from error
        seed += 1
    return happened


def test_a_storm_leaves_every_text_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = _storm(4_000, 0, monkeypatch)
    assert happened.keys() >= MUST_HAPPEN, f"it was no storm: {happened}"


@pytest.mark.soak
def test_a_storm_of_a_million_sequence_steps_leaves_every_text_exact(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    happened = _storm(1_000_000, 1_000, monkeypatch)
    record_property("happened", ", ".join(f"{count:,} {what}" for what, count in happened.items()))
