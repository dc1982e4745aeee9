"""The native step layer by layer is the step in one call, bit for bit; and over blocks it is what it is over a contiguous cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.attention.cpu import CpuBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.policy.cache_group import FULL
from octavo.step.step_tensors import StepTensors
from octavo.worker.native_layers import NativeAttention, NativeLayers
from octavo.worker.native_program import NativeProgram
from octavo.worker.shadow import Shadow
from octavo.worker.twice import same_bits
from tests.support.batches import Pool
from tests.support.models import tiny_model, to_gguf
from tests.support.native import levels_here, running

LONG = 640
# Prompts, chunks and single tokens beside each other; few rows and many; contexts that are split among tasks.
STEPS = ({0: 7, 2: 40}, {0: 1, 2: 1, 3: 70}, {1: 540, 0: 1}, {1: 1}, {0: 3, 1: 1, 2: 1, 3: 9})
CACHES = (torch.float32, torch.bfloat16, torch.int8)
# family, options, kind of GGUF file: embeddings of their own or the head's rows, biases, norms on heads, windows, floats and codes
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "float32": ("Qwen3ForCausalLM", {"window": 300}, ""),
    "bfloat16, tied": ("Qwen2ForCausalLM", {"tie": True}, ""),
    "8 bits, tied": ("Qwen3ForCausalLM", {"tie": True}, "Q8_0"),
    "4 bits, tied": ("LlamaForCausalLM", {"tie": True}, "Q4_0"),
}


@pytest.fixture(scope="module", params=MODELS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeProgram]:
    architecture, options, kind = MODELS[request.param]
    path = tiny_model(tmp_path_factory.mktemp("tiny") / "model", architecture, seed=5, context=LONG, **options)
    path = to_gguf(path, path.parent / "model.gguf", kind) if kind else path
    dtype: Any = "float32" if request.param == "float32" else "bfloat16"
    with LLM(str(path), dtype=dtype, skip_tokenizer_init=True, num_gpu_blocks_override=80, max_model_len=LONG, max_num_seqs=4) as llm:
        found = llm._core.executor.program  # type: ignore[attr-defined]
        assert isinstance(found, NativeProgram)
        yield found


def new_pool(program: NativeProgram, cache: torch.dtype) -> Pool:
    model = program.model
    return Pool(model.num_layers, model.layers[0].kv_heads, model.layers[0].head_dim, max_len=LONG, cache_dtype=cache)


def steps(pool: Pool, program: NativeProgram) -> Iterator[StepTensors]:
    for number, counts in enumerate(STEPS):
        tokens = {row: [(7 * row + 3 * number + place) % program.vocab_size for place in range(count)] for row, count in counts.items()}
        yield step_of(pool.batch(CpuBackend, tokens), len(set(program.groups)))
        pool.advance(tokens)


def step_of(batch: ForwardBatch, groups: int) -> StepTensors:
    """As much of a step as layers read. All cache groups have the same table."""
    words = [tensor.int() for tensor in (batch.query_start, batch.rows, batch.context_len)]
    query_start, row, context_len = words
    return StepTensors(
        entries=row, query_start=query_start, row=row, start=row, outputs=row, first_output=query_start, token_ids=batch.token_ids,
        cache_index=batch.cache_index, positions=batch.positions, slots=batch.slots.repeat(groups, 1),
        context_len=context_len.repeat(groups, 1),
        tables=batch.tables.int().repeat(groups, 1, 1), sample_index=batch.sample_index, temperature=row, noise=row, draw_positions=row,
    )  # fmt: skip


@pytest.mark.parametrize("level", levels_here())
def test_one_call_layers_over_blocks_and_layers_over_a_contiguous_cache_give_the_same_bits(program: NativeProgram, level: str) -> None:
    for threads, cache in zip((1, 3, 2), CACHES, strict=True):
        pool, other = new_pool(program, cache), new_pool(program, cache)
        shadow = Shadow([], pool.num_rows, LONG, pool.block_size, groups=(FULL,) * len(set(program.groups)))
        shadow.regions.caches = pool.contiguous
        paged = NativeLayers(program, NativeAttention(program, pool.paged))
        plain = NativeLayers(program, NativeAttention(program, pool.contiguous))
        with running(level, threads), torch.inference_mode():
            program.model = program.over(other.paged)
            for step, twin in zip(steps(pool, program), steps(other, program), strict=True):
                hidden, logits = paged.compute(step)
                assert hidden.isfinite().all() and len(logits) == len(step.row)
                for way in (plain.compute(shadow.contiguous(step)), program.compute(twin)):
                    assert same_bits(hidden, way[0]) and same_bits(logits, way[1])
            for mine, theirs in zip(pool.paged, other.paged, strict=True):
                assert all(same_bits(mine[name], theirs[name]) for name in mine)


def test_a_tied_head_is_unpacked_exactly(tmp_path: Path) -> None:
    """In float32 an embedding is the number in the file."""
    from safetensors.torch import load_file

    folder = tiny_model(tmp_path / "model", "Qwen2ForCausalLM", seed=5, tie=True)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=20) as llm:
        program = llm._core.executor.program  # type: ignore[attr-defined]
        ids = torch.tensor([0, 319, 17, 17, 16])
        embedded = NativeLayers(program, NativeAttention(program, new_pool(program, torch.float32).paged))._embed(ids)
    assert torch.equal(embedded, load_file(folder / "model.safetensors")["model.embed_tokens.weight"][ids])
