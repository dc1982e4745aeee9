"""From memory to blocks: the geometry, and refusals whose advice works when it is followed."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.config_file import size
from octavo.config import EngineConfig, ResolvedConfig
from octavo.errors import ConfigError
from octavo.models.registry import describe, read_config
from octavo.policy.cache_spec import Buffer, LayerCacheSpec
from octavo.sizing.auto import resolved
from octavo.sizing.cache_size import default_pool_bytes
from octavo.sizing.memory_plan import GIB, MIB, MOST_BLOCKS, Memory, MemoryPlan, ModelNeeds, plan_memory, plan_stages

MUCH = Memory(2**60)  # more than anything asked for here
SPECS = [LayerCacheSpec(layer, {"k": Buffer((2, 8), "bfloat16"), "v": Buffer((2, 8), "float32")}) for layer in range(3)]
PER_TOKEN = 3 * (16 * 2 + 16 * 4)
MODEL = describe(read_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 10_000,
    },
    "a test",
))  # fmt: skip


def settings(**asked: Any) -> ResolvedConfig:
    return resolved(EngineConfig(**asked), "cpu")


def needs(most: int = 10_000, weights: int = 0, dtype: str = "bfloat16") -> ModelNeeds:
    return ModelNeeds(replace(MODEL, max_position=most), dtype, weights, SPECS, dtype)


def refused(model: ModelNeeds, config: ResolvedConfig, memory: Memory) -> str:
    refusal = plan_memory(model, config, memory).refusal
    assert refusal is not None
    return refusal


# promise: cpu-pool-quarter
def test_default_pool_is_a_quarter_of_memory_up_to_four_gib() -> None:
    assert [default_pool_bytes(gib * GIB) for gib in (1, 8, 16, 64)] == [GIB // 4, 2 * GIB, 4 * GIB, 4 * GIB]
    for gib, pool in ((1, GIB // 4), (8, 2 * GIB), (64, 4 * GIB)):
        plan = plan_memory(needs(), settings(), Memory(gib * GIB))
        assert (plan.refusal, plan.geometry.num_blocks) == (None, pool // (16 * PER_TOKEN))


def test_states_take_two_slots_of_each_row_and_a_share_of_the_cache() -> None:
    specs, size = [replace(spec, state={"sum": Buffer((64, 64), "float32")}) for spec in SPECS], 3 * 64 * 64 * 4
    asked: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 256, "kv_cache_memory_bytes": 100 * size}
    for device in ("cpu", "cuda"):
        plain = replace(needs(), device=device)
        for share, kept in ((0.2, 20), (0.5, 50), (0.0, 0)):
            config = resolved(EngineConfig(**asked, state_cache_share=share), device)
            before, after = (plan_memory(one, config, MUCH) for one in (plain, replace(plain, specs=specs)))
            assert after.use.rows - before.use.rows == 2 * 256 * size and after.geometry.state_bytes == size
            states = after.geometry.num_states - 1 - 2 * 256
            assert states in (kept, kept - 1) and after.use.kv_cache <= 100 * size
            assert after.geometry.num_blocks == int((1 - share) * 100 * size) // (16 * PER_TOKEN)
        config = resolved(EngineConfig(**asked, enable_prefix_caching=False), device)
        geometry = plan_memory(replace(plain, specs=specs), config, MUCH).geometry
        assert geometry.num_states == 513 and geometry.num_blocks == before.geometry.num_blocks


def test_stages_of_a_pipeline_have_equally_many_blocks_and_states() -> None:
    """The first has no recurrent layer, and the last no attention: the numbers are those of one process."""
    tokens, state = SPECS[0], LayerCacheSpec(1, {}, state={"sum": Buffer((16, 16), "float32")})
    every, rows = [tokens, tokens, state, state, state], 4
    asked: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": rows}
    stages = [replace(needs(), specs=specs, all_specs=every, one_table="a pipeline") for specs in (every[:1], every[1:3], every[3:])]
    alone = plan_memory(replace(needs(), specs=every), settings(num_gpu_blocks_override=40, **asked), MUCH).geometry
    together = [plan.geometry for plan in plan_stages(stages, settings(num_gpu_blocks_override=40, **asked), MUCH)]
    assert {geometry.num_states for geometry in together} == {alone.num_states} and alone.num_states > 1 + 2 * rows
    for share in (0.2, 0.0):
        config = settings(kv_cache_memory_bytes=100_000, state_cache_share=share, **asked)
        plans = plan_stages(stages, config, MUCH)
        assert len({(plan.geometry.num_blocks, plan.geometry.num_states) for plan in plans}) == 1
        fullest = max(plan.use.kv_cache for plan in plans)
        assert 95_000 < fullest <= 100_000, "the stage that needs the most fills its cache"


# promise: kv-cache-memory
def test_geometry_fills_the_pool_and_caps_the_length_at_the_models_own() -> None:
    config = settings(kv_cache_memory_bytes=100 * 16 * PER_TOKEN + 17)
    geometry = plan_memory(needs(), config, MUCH).geometry
    assert (geometry.num_blocks, geometry.block_size, geometry.bytes_per_token) == (100, 16, PER_TOKEN)
    assert geometry.max_model_len == 99 * 16 + 1  # block 0 is the null block; the last token is never computed
    assert plan_memory(needs(512), config, MUCH).geometry.max_model_len == 512
    toy = replace(needs(512), specs=[LayerCacheSpec(0, {"k": Buffer((1, 2), "bfloat16")})])
    assert plan_memory(toy, settings(), MUCH).geometry.num_blocks == MOST_BLOCKS  # four GiB would be 67 million


# promise: explicit-max-model, out-memory-messages
@given(blocks=st.integers(2, 400), block=st.sampled_from([1, 2, 16, 256]), spare=st.integers(0, 1000), more=st.integers(1, 5000),
       context=st.sampled_from([1, 3]))  # fmt: skip
def test_the_suggested_length_is_accepted_and_one_more_is_refused(blocks: int, block: int, spare: int, more: int, context: int) -> None:
    pool = blocks * block * PER_TOKEN + spare % (block * PER_TOKEN)

    def plan(max_model_len: int, pool_bytes: int) -> MemoryPlan:
        ranks = {"tensor_parallel_size": context, "decode_context_parallel_size": context}
        config = settings(block_size=block, kv_cache_memory_bytes=pool_bytes, max_model_len=max_model_len, **ranks)
        return plan_memory(needs(10**9), config, MUCH)

    wanted = blocks * block * context + more
    message = plan(wanted, pool).refusal or ""
    assert message.startswith(f"--max-model-len is {wanted}, but the KV cache")
    longest = int(re.findall(r"largest --max-model-len that fits is (\d+)", message)[0])
    enough = size(re.findall(r"raise --kv-cache-memory-bytes to (\w+) ", message)[0]) or 0
    assert plan(longest, pool).refusal is None and plan(longest, pool).geometry.max_model_len == longest
    assert plan(longest + 1, pool).refusal is not None
    assert plan(wanted, enough).refusal is None and plan(wanted, enough - 2 * block * PER_TOKEN).refusal is not None


# promise: out-memory-messages
def test_a_pool_below_two_blocks_is_refused_with_a_size_that_works() -> None:
    with pytest.raises(ConfigError, match=r"has room for 1 blocks of 16 tokens.*lower --block-size") as refusal:
        plan_memory(needs(100), settings(kv_cache_memory_bytes=2 * 16 * PER_TOKEN - 1), MUCH)
    enough = size(re.findall(r"--kv-cache-memory-bytes to (\w+) ", str(refusal.value))[0])
    assert plan_memory(needs(100), settings(kv_cache_memory_bytes=enough), MUCH).geometry.num_blocks == 2


def test_a_length_above_the_models_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 513, but the model's own maximum is 512: lower it to 512 or less"):
        plan_memory(needs(512), settings(kv_cache_memory_bytes=GIB, max_model_len=513), MUCH)


# promise: num-gpu-blocks, explicit-max-model
def test_an_exact_number_of_blocks_wins_over_memory_and_leaves_long_requests_to_the_door() -> None:
    plan = plan_memory(needs(512), settings(num_gpu_blocks_override=5, max_model_len=400), MUCH)
    assert (plan.refusal, plan.geometry.num_blocks, plan.geometry.max_model_len) == (None, 5, 400)
    assert plan_memory(needs(512), settings(num_gpu_blocks_override=5), MUCH).geometry.max_model_len == 65


# promise: enough-memory-one, out-memory-messages-point
@pytest.mark.parametrize("setting", [{"kv_cache_memory_bytes": 2**40}, {"num_gpu_blocks_override": 2**30}])
def test_a_pool_larger_than_memory_is_refused_with_the_numbers(setting: dict[str, int]) -> None:
    message = refused(needs(weights=GIB), settings(**setting), Memory(8 * GIB, others=GIB))
    numbers = r"weights 1\.00 GiB, KV cache [\d,.]+ GiB, activations [\d.]+ MiB, rows [\d.]+ MiB, other [\d.]+ [MG]iB"
    held = r"this process may use 8\.00 GiB, of which other processes hold 1\.00 GiB"
    whole = rf"this needs [\d,.]+ GiB: {numbers}; {held}: lower --([\w-]+) to"
    found = re.match(whole, message)
    assert found and found[1].replace("-", "_") == next(iter(setting)), message


def follow(config: ResolvedConfig, message: str) -> tuple[ResolvedConfig, ResolvedConfig | None, int]:
    """The settings as advised, those with one more than that (None where nothing was to be lowered), the length promised."""
    longest = int(re.findall(r"largest --max-model-len that fits is (?:then )?(\d+)", message)[0])
    found = re.search(r"lower (--max-model-len and )?--([\w-]+) to (\w+)(?: \(.*\))? or less; the largest", message)
    if found is None:
        return replace(config, max_model_len=longest), replace(config, max_model_len=longest + 1), longest
    name, number = found[2].replace("-", "_"), size(found[3]) or 0
    value: dict[str, Any] = {name: number}
    more: dict[str, Any] = {name: number + 1}
    base = replace(config, max_model_len=longest) if found[1] else config
    rows_or_tokens = name in ("max_num_seqs", "max_num_batched_tokens")
    return replace(base, **value), replace(base, **more) if rows_or_tokens else None, longest


# promise: out-memory-messages-point
@given(
    weights=st.integers(0, 600 * MIB),
    memory=st.integers(100 * MIB, 900 * MIB),
    others=st.integers(0, 300 * MIB),
    most=st.sampled_from([600, 40_000]),
    asked=st.fixed_dictionaries(
        {"max_num_seqs": st.sampled_from([1, 100, 5000])},
        optional={
            "max_model_len": st.integers(2, 600),
            "kv_cache_memory_bytes": st.integers(32 * PER_TOKEN, 800 * MIB),
            "num_gpu_blocks_override": st.integers(2, 10**5),
            "block_size": st.sampled_from([1, 16]),
            "attention_backend": st.sampled_from(["cpu", "contiguous"]),
        },
    ),
)
def test_what_is_planned_fits_and_what_is_advised_works(weights: int, memory: int, others: int, most: int, asked: dict[str, Any]) -> None:
    model, here = needs(most, weights), Memory(memory, min(others, memory))
    config = settings(max_num_batched_tokens=6000, **asked)
    plan = plan_memory(model, config, here)
    if plan.refusal is None:
        assert plan.use.total <= here.free
        assert plan.geometry.max_model_len <= (plan.geometry.num_blocks - 1) * config.block_size + 1 or config.num_gpu_blocks_override
        return
    if "no --max-model-len fits" in plan.refusal:
        least: dict[str, Any] = {"max_model_len": 2, "num_gpu_blocks_override": 2, "kv_cache_memory_bytes": None}
        assert plan_memory(model, replace(config, **least), here).use.total > here.free, "something would have helped"
        return
    turned, more, longest = follow(config, plan.refusal)
    assert plan_memory(model, turned, here).refusal is None
    assert more is None or plan_memory(model, more, here).refusal is not None
    assert plan_memory(model, replace(turned, max_model_len=longest), here).refusal is None
    if longest < most:
        assert plan_memory(model, replace(turned, max_model_len=longest + 1), here).refusal is not None


def test_the_pool_nobody_asked_for_shrinks_before_anything_is_refused() -> None:
    model = needs(weights=700 * MIB)
    pools = [plan_memory(model, settings(), Memory(2 * GIB, others)).use.kv_cache for others in (0, 900 * MIB, 1050 * MIB, 1100 * MIB)]
    assert pools[0] > 500 * MIB and pools == sorted(pools, reverse=True) and pools[-1] < 100 * MIB
    assert "take a smaller model or free memory" in refused(model, settings(), Memory(2 * GIB, 1300 * MIB))
    assert "set --dtype to bfloat16" in refused(needs(weights=GIB, dtype="float32"), settings(), Memory(GIB))


def test_rows_cost_memory_and_are_named_when_they_are_too_many() -> None:
    config = settings(max_num_seqs=10**8, max_num_batched_tokens=10**8)
    message = refused(needs(), config, Memory(8 * GIB))
    most = int(re.findall(r"lower --max-num-seqs to (\d+) or less", message)[0])
    assert plan_memory(needs(), replace(config, max_num_seqs=most), Memory(8 * GIB)).refusal is None
