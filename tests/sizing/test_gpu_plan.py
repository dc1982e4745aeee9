"""The plan of a GPU's memory: its share of the whole, the parts, and refusals whose advice works when it is followed."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.attention.mixer import StepLoad
from octavo.config import EngineConfig, ResolvedConfig
from octavo.loading.shape import ModelShape
from octavo.models.description import ModelDescription
from octavo.models.registry import cache_specs, describe, read_config
from octavo.sizing.auto import resolved
from octavo.sizing.gpu_size import CONTEXT, GPU_LIBRARIES, captured_tokens, gpu_slab_bytes, gpu_step_bytes, gpu_weight_bytes
from octavo.sizing.memory_plan import BYTES_PER_BLOCK, BYTES_PER_WORD, GIB, MIB, Memory, MemoryPlan, ModelNeeds, plan_memory
from octavo.sizing.memory_plan import LIBRARIES as LIBRARIES_OF_PYTHON
from octavo.sizing.model_size import Codes
from tests.sizing.test_memory_plan import follow

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = read_config(SHAPE, "a test")  # Qwen3-0.6B's
SMALL = describe(CONFIG)
H200 = 140 * GIB


def needs(model: ModelDescription = SMALL, dtype: str = "bfloat16", **more: Any) -> ModelNeeds:
    weights = gpu_weight_bytes(model, 4 if dtype == "float32" else 2, {})
    return ModelNeeds(model, dtype, weights, cache_specs(CONFIG, dtype), dtype, device="cuda", **more)


def settings(**asked: Any) -> ResolvedConfig:
    return resolved(EngineConfig(**asked), "cuda")


def plan(total: int = H200, others: int = 0, model: ModelNeeds | None = None, unified: bool = False, **asked: Any) -> MemoryPlan:
    config = settings(**asked)
    return plan_memory(model or needs(), config, Memory.of_gpu(total, total - others, config.gpu_memory_utilization, unified))


# promise: gpu-memory-utilization, llm-gpu-memory
def test_the_pool_takes_what_the_share_leaves_to_the_last_block() -> None:
    for share, others in ((0.9, 0), (0.5, 0), (0.9, 30 * GIB), (1.0, 0)):
        made = plan(others=others, gpu_memory_utilization=share)
        block = made.geometry.bytes_per_token * 16
        spare = int(H200 * share) - others - made.use.total
        assert made.refusal is None and 0 <= spare < block
    assert plan(kv_cache_memory_bytes=GIB).use.kv_cache == pytest.approx(GIB, rel=0.01)
    assert plan(num_gpu_blocks_override=1000).geometry.num_blocks == 1000
    assert plan().geometry.max_model_len == 40_960


def test_steps_that_compute_for_longer_than_they_take_to_launch_are_not_padded() -> None:
    shape = SHAPE | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    large = describe(read_config(shape | {"tie_word_embeddings": False}, "a test"))  # Qwen3-8B's
    assert captured_tokens(SMALL) == 8192 and 1024 < captured_tokens(large) < 1280


# promise: llm-gpu-memory
def test_graphs_are_counted_and_eager_steps_have_none() -> None:
    """508 MiB were measured on an H200."""
    captured, eager = plan(), plan(enforce_eager=True)
    assert captured.use.graphs == pytest.approx(529 * MIB, rel=0.05) and eager.use.graphs == 0
    assert captured.geometry.num_blocks < eager.geometry.num_blocks


def test_regions_have_one_for_padding_and_flashinfer_has_its_workspaces() -> None:
    regions = plan(attention_backend="contiguous", max_num_seqs=8, max_model_len=160, num_gpu_blocks_override=1000)
    assert regions.use.kv_cache == (8 + 1) * 160 * regions.geometry.bytes_per_token
    assert plan(attention_backend="flashinfer").use.other - plan().use.other == (128 + 2 * 8) * MIB


def test_weights_are_counted_as_they_lie_on_the_device() -> None:
    assert gpu_weight_bytes(SMALL, 2, {}) == 2 * SMALL.num_parameters
    codes = {part: Codes(4, 32) for matrix in SMALL.matrices if matrix.name != "head" for part in matrix.parts}
    numbers = sum(matrix.rows * matrix.columns for matrix in SMALL.matrices if matrix.name != "head")
    assert gpu_weight_bytes(SMALL, 2, codes) == 2 * (SMALL.num_parameters - numbers) + numbers * 5 // 8  # 4 bits, and 32 for 32 of them
    narrow = describe(read_config(SHAPE | {"hidden_size": 64}, "a test"))  # rows of 64 codes of 4 bits fill half a block of 128
    floats, packed = (gpu_weight_bytes(narrow, 2, stored) for stored in ({}, dict.fromkeys(narrow.matrices[0].parts, Codes(4, 32))))
    assert floats - packed == (16 + 2 * 8) * 128 * (64 * 2 - (64 + 4 * 4))
    parted = {**codes, "model.layers.0.self_attn.k_proj.weight": None}  # a part that is no code: all of qkv are floats
    qkv = SMALL.matrices[0]
    assert gpu_weight_bytes(SMALL, 2, parted) - gpu_weight_bytes(SMALL, 2, codes) == qkv.rows * qkv.columns * (16 - 5) // 8


def test_floats_made_of_codes_are_counted_in_steps_and_graphs_and_codes_made_of_floats_until_there_is_a_pool() -> None:
    codes = {part: Codes(4, 32) for matrix in SMALL.matrices for part in matrix.parts}
    assert gpu_slab_bytes(SMALL, 2, {}) == 0 and gpu_slab_bytes(SMALL, 2, codes) == 2 * 2**24  # the head is larger
    assert gpu_slab_bytes(SMALL, 2, {part: Codes(4, 32) for part in SMALL.matrices[1].parts}) == 2 * 1024 * 2048
    plain, packed = plan(), plan(model=needs(slab=MIB))
    assert (packed.use.activations - plain.use.activations, packed.use.graphs - plain.use.graphs) == (MIB, MIB)
    weights = needs().weights
    assert plan(model=needs(loading=weights + 50 * GIB)).use == plain.use, "the pool, which comes later, is larger"
    small = plan(model=needs(loading=weights + 50 * GIB), kv_cache_memory_bytes=GIB)
    assert small.use.activations + small.use.kv_cache == 50 * GIB
    shape = ModelShape("a test", CONFIG)
    loading = shape.needs("bfloat16", "int4", device="cuda").loading - shape.needs("bfloat16", "int4", device="cuda").weights
    assert loading == 6 * 151_936 * 1024 and shape.needs("bfloat16", "none", device="cuda").loading == weights


def test_a_step_is_as_large_as_its_layers_or_its_logits() -> None:
    """By hand: the stream and the MLP of 8,192 tokens; the logits of 512 rows, twice where some of them are filtered; of 64 rows, and
    their scores and marks."""
    layers = gpu_step_bytes(SMALL, 2, StepLoad(8192, 1, 1, 0))
    assert layers == pytest.approx(8192 * (2 * 1024 + 3 * 3072) * 2, rel=0.04)
    assert gpu_step_bytes(SMALL, 2, StepLoad(512, 512, 1, 0)) == 512 * 151_936 * (2 + 2)
    assert gpu_step_bytes(SMALL, 2, StepLoad(64, 64, 1, 0)) == 64 * 151_936 * (2 + 8)
    assert gpu_step_bytes(SMALL, 4, StepLoad(8192, 1, 1, 0)) > 1.9 * layers


# promise: enough-memory-one
@given(
    total=st.integers(GIB, 12 * GIB),
    others=st.integers(0, 4 * GIB),
    unified=st.booleans(),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    asked=st.fixed_dictionaries(
        {"gpu_memory_utilization": st.sampled_from([0.3, 0.9, 1.0])},
        optional={
            "max_num_seqs": st.sampled_from([1, 100, 5000]),
            "max_model_len": st.integers(2, 40_000),
            "kv_cache_memory_bytes": st.integers(200 * MIB, 20 * GIB),
            "num_gpu_blocks_override": st.integers(2, 10**4),
            "enforce_eager": st.just(True),
            "attention_backend": st.sampled_from(["triton", "contiguous"]),
        },
    ),
)
@example(  # with the share that was once advised, the pool was too short, and what it lacked did not fit
    total=5_203_360_721, others=0, unified=False, dtype="float32",
    asked={"gpu_memory_utilization": 0.3, "max_model_len": 6786, "kv_cache_memory_bytes": 200 * MIB, "enforce_eager": True},
)  # fmt: skip
def test_what_is_planned_fits_and_what_is_advised_works(
    total: int, others: int, unified: bool, dtype: str, asked: dict[str, Any]
) -> None:
    model = needs(dtype=dtype)
    made = plan(total, min(others, total), model, unified, **asked)
    if made.refusal is None:
        assert made.use.total <= made.memory.free
        return
    assert ("GPU and CPU share" if unified else "of the GPU's") in made.refusal or "--max-model-len is" in made.refusal
    if found := re.search(r"raise --gpu-memory-utilization to ([\d.]+) or more$", made.refusal):
        enough = plan(total, min(others, total), model, unified, **asked | {"gpu_memory_utilization": float(found[1])})
        assert enough.refusal is None or "but the KV pool" in enough.refusal
    if "no --max-model-len fits" in made.refusal:
        least: dict[str, Any] = {"max_model_len": 2, "num_gpu_blocks_override": 2}
        assert plan(total, min(others, total), model, unified, **asked | least).refusal is not None, "something would have helped"
        return
    turned, _, longest = follow(settings(**asked), re.sub(r"; or raise gpu.*", "", made.refusal))
    assert plan_memory(model, turned, made.memory).refusal is None
    assert plan_memory(model, replace(turned, max_model_len=longest), made.memory).refusal is None


# promise: memory-gpu-cpu
@given(
    total=st.integers(4 * GIB, 128 * GIB),
    others=st.integers(0, 64 * GIB),
    share=st.sampled_from([0.3, 0.9, 1.0]),
    rows=st.sampled_from([1, 100]),
    pool=st.sampled_from([None, 200 * MIB]),
)
def test_on_unified_memory_both_processors_parts_come_out_of_what_is_there_once(
    total: int, others: int, share: float, rows: int, pool: int | None
) -> None:
    asked: dict[str, Any] = {"gpu_memory_utilization": share, "max_num_seqs": rows, "max_model_len": 1000}
    asked |= {} if pool is None else {"kv_cache_memory_bytes": pool}
    available, model = max(total - others, 0), needs(loading=needs().weights)
    made, apart = (plan(total, total - available, model, unified, **asked) for unified in (True, False))
    if made.refusal is None:
        on_host = LIBRARIES_OF_PYTHON + BYTES_PER_WORD * SMALL.vocab_size + BYTES_PER_BLOCK * made.geometry.num_blocks
        assert made.use.other == apart.use.other + on_host and made.use.total <= available
        loading = made.use.weights + SMALL.vocab_size * SMALL.hidden_size * 4  # and the largest matrix, read by the host
        assert made.use.total >= loading + made.use.other + made.use.rows
        assert apart.refusal is None and apart.geometry.num_blocks >= made.geometry.num_blocks


# promise: memory-gpu-cpu
def test_an_orin_of_64_gb_with_a_desktop_on_it() -> None:
    """By hand: 61.2 GiB in all, 8 of them held, nine tenths may be in use: 47.08 GiB, to the last block."""
    board = int(61.2 * GIB)
    made = plan(board, 8 * GIB, unified=True)
    assert made.refusal is None and made.memory.free == pytest.approx(47.08 * GIB, rel=0.001)
    assert 0 <= made.memory.free - made.use.total < 2 * made.geometry.bytes_per_token * 16
    assert made.use.kv_cache == pytest.approx(made.memory.free - 2.7 * GIB, abs=0.6 * GIB), "weights, steps, CUDA, Python"
    assert plan(board, 8 * GIB, unified=True, gpu_memory_utilization=1.0).use.total <= board - 8 * GIB


def test_a_refusal_names_the_parts_the_share_and_the_knobs() -> None:
    said = plan(total=2 * GIB, others=100 * MIB).refusal or ""
    numbers = r"weights 1\.11 GiB, KV cache [\d.]+ MiB, activations [\d.]+ MiB, graphs [\d.]+ MiB, rows [\d.]+ MiB, other 680\.0 MiB"
    share = r"this process may use 1\.80 GiB of the GPU's 2\.00 GiB \(--gpu-memory-utilization\), of which other processes hold 100\.0 MiB"
    assert re.match(rf"this needs [\d.]+ GiB: {numbers}; {share}: ", said), said
    assert CONTEXT + GPU_LIBRARIES == 680 * MIB
    gone = plan(total=2 * GIB, others=2 * GIB).refusal or ""
    assert "of which other processes hold 2.00 GiB: take a smaller model or free memory; no --max-model-len fits" in gone
