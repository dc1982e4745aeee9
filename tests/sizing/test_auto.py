"""What is left open gets its value from the device; what was asked for stays."""

from dataclasses import asdict
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.sizing.auto import resolved

Place = Literal["cpu", "cuda"]


# promise: max-num-seqs, max-num-batched
@pytest.mark.parametrize(("device", "expected"), [("cpu", (256, 2048, 1)), ("cuda", (512, 8192, 2))])
def test_defaults_are_those_of_the_device(device: Place, expected: tuple[int, int, int]) -> None:
    config = resolved(EngineConfig(), device)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.pipeline_depth) == expected and config.device == device
    assert (config.kv_cache_layout, resolved(EngineConfig(kv_cache_layout="hnd"), device).kv_cache_layout) == ("nhd", "hnd")


NUMBER = st.none() | st.integers(1, 20_000)


@given(st.sampled_from(["cpu", "cuda"]), NUMBER, NUMBER, st.sampled_from([None, 1, 2]))
def test_what_was_asked_for_stays_and_the_rest_gives_way(device: Place, seqs: int | None, tokens: int | None, depth: int | None) -> None:
    if seqs is not None and tokens is not None and tokens < seqs:
        return
    asked = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, pipeline_depth=depth, seed=7, dtype="float32")  # type: ignore[arg-type]
    config = resolved(asked, device)
    open_fields = [name for name, value in asdict(asked).items() if value is None] + ["device", "kv_cache_layout"]
    assert {name: value for name, value in asdict(config).items() if name not in open_fields}.items() <= asdict(asked).items()
    assert 1 <= config.max_num_seqs <= config.max_num_batched_tokens and config.pipeline_depth in (1, 2)
    assert resolved(config, device) == config  # nothing is left to be decided


def test_native_kernels_are_those_of_a_cpu_without_a_named_backend() -> None:
    assert resolved(EngineConfig(), "cpu").wants_native and not resolved(EngineConfig(), "cuda").wants_native
    assert not resolved(EngineConfig(attention_backend="cpu"), "cpu").wants_native
