"""The KV cache in every dtype: what is kept, how far it is from the run's own, and that hits, copies and preemption do not show."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.errors import ConfigError
from tests.support.soaked import pairs

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. "
BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


def engine(model: str | None, **settings: Any) -> LLM:
    return LLM(model, **{"num_gpu_blocks_override": 120, "max_num_seqs": 8, **settings})


def caches(llm: LLM) -> list[dict[str, torch.Tensor]]:
    return llm._core.executor.store.caches  # type: ignore[attr-defined, no-any-return]


def loss(output: RequestOutput) -> float:
    found = [choices[token].logprob for token, choices in zip(output.prompt_token_ids, output.prompt_logprobs or []) if choices]
    return -sum(found) / len(found)


# promise: kv-cache-dtype
@BOTH
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16", "int8"])
def test_the_pool_keeps_what_was_asked_for(stories: str, native: bool, asked: str) -> None:
    kept = "bfloat16" if asked == "auto" else asked
    if asked == "float16" and not native:
        with pytest.raises(ConfigError, match="kv_cache_dtype is float16, which on a CPU only the native kernels support"):
            engine(stories, native=False, kv_cache_dtype=asked)
        return
    with engine(stories, native=native, dtype="bfloat16", kv_cache_dtype=asked) as llm:
        dtypes = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in caches(llm)[0].items()}
        assert dtypes == {"k": kept, "v": kept} | ({"k_scale": "float32", "v_scale": "float32"} if kept == "int8" else {})
        assert llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype must be one of auto, float32, bfloat16, float16, int8, got 'float8'$"):
        LLM(kv_cache_dtype="float8")  # type: ignore[arg-type]


# promise: kv-cache-dtype
def test_native_and_torch_keep_the_same_codes_and_are_as_sure(stories: str) -> None:
    found: list[tuple[list[dict[str, torch.Tensor]], float]] = []
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for native in (True, False):
        with engine(stories, native=native, dtype="float32", kv_cache_dtype="int8") as llm:
            (output,) = llm.generate(TEXT * 3, params, use_tqdm=False)
            blocks = slice(1, 1 + len(output.prompt_token_ids) // 16)
            found.append(([{name: buffer[blocks].float() for name, buffer in cache.items()} for cache in caches(llm)], loss(output)))
    (ours, our_loss), (theirs, their_loss) = found
    assert our_loss == pytest.approx(their_loss, rel=1e-3)
    compared = 0
    for mine, twin in zip(ours, theirs, strict=True):
        compared += 1
        for name in ("k", "v"):  # sums are rounded in another order: a number between two codes may get the other one
            assert (mine[name] - twin[name]).abs().max() <= 1 and (mine[name] != twin[name]).float().mean() < 0.01
            torch.testing.assert_close(mine[f"{name}_scale"], twin[f"{name}_scale"], rtol=1e-5, atol=0)
        if not all(torch.equal(mine[name], twin[name]) for name in ("k", "v")):
            break  # from here on the two compute from different numbers
    assert compared > 1


# promise: kv-cache-dtype
@pytest.mark.parametrize(("native", "dtype"), pairs([True, False], ["float32", "int8"], shift=1))
def test_hits_copies_and_preemption_do_not_show(stories: str, native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [TEXT * 2, TEXT * 2 + "One day", "The cat", TEXT]
    params = SamplingParams(n=3, seed=3, max_tokens=30, ignore_eos=True)
    settings = {"native": native, "dtype": "float32", "kv_cache_dtype": dtype, "block_size": 8}

    def texts(llm: LLM) -> list[str]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [sample.text for output in outputs for sample in output.outputs]

    with engine(stories, enable_prefix_caching=False, num_gpu_blocks_override=1000, **settings) as llm:
        expected = texts(llm)
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1,preempt.every=3")  # and blocks are full of NaN until they are written
    with engine(stories, num_gpu_blocks_override=60, **settings) as llm:
        assert texts(llm) == texts(llm) == expected
        assert llm.stats().preemptions > 10


@pytest.mark.soak
def test_the_default_model_is_about_as_sure_of_a_text_with_codes_as_with_float32() -> None:
    text = (Path(__file__).parents[1] / "data/prompts/questions.txt").read_text()[:1500]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    losses = {}
    for dtype in ("float32", "int8"):
        with engine(None, quantization="none", kv_cache_dtype=dtype, num_gpu_blocks_override=80) as llm:  # activations are not rounded
            losses[dtype] = loss(llm.generate(text, params, use_tqdm=False)[0])
    assert losses["int8"] != losses["float32"]
    assert math.exp(losses["int8"] - losses["float32"]) == pytest.approx(1, abs=0.02), "perplexities over 300 tokens"
