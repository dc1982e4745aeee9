"""What is left open gets its value from the device; what was asked for stays, or is refused where it cannot be had."""

from dataclasses import asdict
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.policy.auto import check_cache_dtype, resolved
from octavo.worker.machine import resolve_dtype

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


@pytest.mark.parametrize(
    ("device", "asked", "said"),
    [
        ("cuda", {"attention_backend": "cpu"}, "attention_backend is cpu, and this runs on a GPU: set it to auto, or device to cpu"),
    ],
)
def test_what_the_device_cannot_do_is_refused_with_the_knob(device: Place, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        resolved(EngineConfig(**asked), device)


@pytest.mark.parametrize(
    ("asked", "stored", "said"),
    [
        ({"kv_cache_dtype": "int8"}, "bfloat16", "kv_cache_dtype is int8, dtype is bfloat16: .* leave kv_cache_dtype at auto"),
        ({"kv_cache_dtype": "bfloat16", "dtype": "float16"}, "bfloat16", "kv_cache_dtype is bfloat16, dtype is float16"),
        ({"kv_cache_dtype": "bfloat16"}, "float32", "kv_cache_dtype is bfloat16, dtype is float32"),
        ({"kv_cache_dtype": "bfloat16"}, "bfloat16", None),
        ({"kv_cache_dtype": "bfloat16"}, None, None),
        ({"kv_cache_dtype": "float16"}, "float16", None),
        ({"kv_cache_dtype": "float32"}, "float32", None),
    ],
)
def test_on_a_gpu_the_cache_has_the_dtype_of_the_run_also_where_the_model_decides_it(
    asked: dict[str, Any], stored: str | None, said: str | None
) -> None:
    config = resolved(EngineConfig(**asked), "cuda")
    dtype = resolve_dtype(config.dtype, stored, "cuda", None)
    if said is None:
        check_cache_dtype(config, "cuda", dtype)
        return
    with pytest.raises(ConfigError, match=f"^{said}"):
        check_cache_dtype(config, "cuda", dtype)
    check_cache_dtype(config, "cpu", dtype)


def test_what_a_device_can_do_is_let_through_and_native_kernels_are_the_cpus() -> None:
    allowed: list[tuple[Place, dict[str, Any]]] = [
        ("cuda", {"dtype": "float16"}), ("cuda", {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}), ("cpu", {"kv_cache_dtype": "int8"}),
        ("cpu", {"dtype": "float16", "kv_cache_dtype": "float16"}),
        ("cpu", {"attention_backend": "triton"}), ("cuda", {"attention_backend": "triton"}),
    ]  # fmt: skip
    for device, asked in allowed:
        resolved(EngineConfig(**asked), device)
    assert resolved(EngineConfig(), "cpu").wants_native and not resolved(EngineConfig(), "cuda").wants_native
