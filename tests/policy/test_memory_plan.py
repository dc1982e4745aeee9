"""From memory to blocks: the geometry, and errors whose advice works when followed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.policy.cache_spec import Buffer, LayerCacheSpec
from octavo.policy.memory_plan import GIB, MOST_BLOCKS, default_pool_bytes, plan_cache

MEMORY = 2**60  # more than any pool asked for here
SPECS = [LayerCacheSpec(layer, {"k": Buffer((2, 8), "bfloat16"), "v": Buffer((2, 8), "float32")}) for layer in range(3)]
PER_TOKEN = 3 * (16 * 2 + 16 * 4)


def test_default_pool_is_a_quarter_of_memory_up_to_four_gib() -> None:
    assert [default_pool_bytes(size * GIB) for size in (1, 8, 16, 64)] == [GIB // 4, 2 * GIB, 4 * GIB, 4 * GIB]


def test_geometry_fills_the_pool_and_caps_the_length_at_the_models_own() -> None:
    config = EngineConfig(kv_cache_memory_bytes=100 * 16 * PER_TOKEN + 17)
    geometry = plan_cache(SPECS, config, MEMORY, 10_000)
    assert (geometry.num_blocks, geometry.block_size, geometry.bytes_per_token) == (100, 16, PER_TOKEN)
    assert geometry.max_model_len == 99 * 16 + 1  # block 0 is the null block; the last token is never computed
    assert plan_cache(SPECS, config, MEMORY, 512).max_model_len == 512
    toy = [LayerCacheSpec(0, {"k": Buffer((1, 2), "bfloat16")})]
    assert plan_cache(toy, EngineConfig(), MEMORY, 512).num_blocks == MOST_BLOCKS  # four GiB would be 67 million
    assert plan_cache(SPECS, EngineConfig(), 64 * 16 * PER_TOKEN, 10_000).num_blocks == 16


@given(blocks=st.integers(2, 400), size=st.sampled_from([1, 2, 16, 256]), spare=st.integers(0, 1000), more=st.integers(1, 5000))
def test_the_suggested_length_is_accepted_and_one_more_is_refused(blocks: int, size: int, spare: int, more: int) -> None:
    pool = blocks * size * PER_TOKEN + spare % (size * PER_TOKEN)

    def plan(max_model_len: int, pool_bytes: int) -> int:
        config = EngineConfig(block_size=size, kv_cache_memory_bytes=pool_bytes, max_model_len=max_model_len)
        return plan_cache(SPECS, config, MEMORY, 10**9).max_model_len

    wanted = blocks * size + more
    with pytest.raises(ConfigError, match=f"max_model_len is {wanted}, but the KV pool") as refusal:
        plan(wanted, pool)
    message = str(refusal.value)
    longest = int(re.findall(r"largest max_model_len that fits is (\d+)", message)[0])
    enough = int(re.findall(r"raise kv_cache_memory_bytes to (\d+)", message)[0])
    assert plan(longest, pool) == longest
    with pytest.raises(ConfigError):
        plan(longest + 1, pool)
    assert plan(wanted, enough) == wanted


def test_a_pool_below_two_blocks_is_refused_with_a_size_that_works() -> None:
    with pytest.raises(ConfigError, match=r"holds 1 blocks of 16.*lower block_size") as refusal:
        plan_cache(SPECS, EngineConfig(kv_cache_memory_bytes=2 * 16 * PER_TOKEN - 1), MEMORY, 100)
    enough = int(re.findall(r"kv_cache_memory_bytes to (\d+)", str(refusal.value))[0])
    assert plan_cache(SPECS, EngineConfig(kv_cache_memory_bytes=enough), MEMORY, 100).num_blocks == 2


def test_a_length_above_the_models_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513, the model's own maximum is 512"):
        plan_cache(SPECS, EngineConfig(kv_cache_memory_bytes=GIB, max_model_len=513), MEMORY, 512)


def test_an_exact_number_of_blocks_wins_over_memory_and_leaves_long_requests_to_the_door() -> None:
    geometry = plan_cache(SPECS, EngineConfig(num_gpu_blocks_override=5, max_model_len=400), MEMORY, 512)
    assert (geometry.num_blocks, geometry.max_model_len) == (5, 400)
    assert plan_cache(SPECS, EngineConfig(num_gpu_blocks_override=5), MEMORY, 512).max_model_len == 65


@pytest.mark.parametrize("setting", [{"kv_cache_memory_bytes": 2**40}, {"num_gpu_blocks_override": 2**30}])
def test_a_pool_larger_than_memory_is_refused_with_both_numbers(setting: dict[str, int]) -> None:
    specs = [LayerCacheSpec(0, {"k": Buffer((2, 64), "float32")})]
    with pytest.raises(ConfigError, match=r"takes [\d.]+ GiB, this process may use 8.0 GiB in all; lower kv_cache_memory_bytes"):
        plan_cache(specs, EngineConfig(**setting), 2**33, 4096)  # type: ignore[arg-type]
