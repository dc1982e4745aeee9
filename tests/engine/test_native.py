"""The native program says what the torch program says: the same tokens in float32, and nearly the same numbers from packed weights."""

import math
import re
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.kernels.cpu.library import NativeLibrary, find_library
from octavo.kernels.cpu.packing import PackedMatrix
from octavo.loading.shape import model_shape
from octavo.outputs import RequestOutput
from octavo.worker.machine import num_threads
from octavo.worker.native_program import NativeProgram
from octavo.worker.program import Eager
from tests.cli.processes import octavo
from tests.support.closing import assert_closing_frees
from tests.support.models import tiny_model
from tests.support.soaked import rarely

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. "
PROMPTS = [TEXT * 3, "The cat", TEXT + "One day", "x", TEXT + "It was a sunny day and"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(seed=1, n=3, max_tokens=25, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=12),
    SamplingParams(temperature=0, max_tokens=30, stop=("She",), bad_words=["park"]),
    SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1),
]


def library() -> NativeLibrary:
    found = find_library()
    assert not isinstance(found, str), found
    return found


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str, object]]:
    return [(sample.token_ids, sample.text, sample.stop_reason) for output in outputs for sample in output.outputs]


SMALL_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 300}


# promise: native
@pytest.mark.parametrize(
    "settings",
    [{"pipeline_depth": 2}, SMALL_BLOCKS, *rarely({}, {"max_num_batched_tokens": 24}, {"enable_prefix_caching": False})],
    ids=str,
)
def test_the_same_tokens_and_logprobs_in_float32_whatever_the_schedule(stories: str, settings: dict[str, object]) -> None:
    engine = {"num_gpu_blocks_override": 120, "max_num_seqs": 8, **settings}
    with LLM(stories, native=False, **engine) as torch_llm, LLM(stories, **engine) as native_llm:  # type: ignore[arg-type]
        assert isinstance(native_llm._core.executor.program, NativeProgram)  # type: ignore[attr-defined]
        for _ in range(2):  # the second time out of the cache
            expected = torch_llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            found = native_llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert answers(found) == answers(expected)
            assert [output.num_cached_tokens for output in found] == [output.num_cached_tokens for output in expected]
            pairs = zip(found[0].outputs[0].logprobs or [], expected[0].outputs[0].logprobs or [], strict=True)
            assert all(abs(mine[token].logprob - choice.logprob) < 1e-3 for mine, theirs in pairs for token, choice in theirs.items())
            scored = zip((found[4].prompt_logprobs or [])[1:], (expected[4].prompt_logprobs or [])[1:], strict=True)
            assert all(mine and theirs and set(mine) == set(theirs) for mine, theirs in scored)


# promise: cpu-isa
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_every_family_at_every_level(tmp_path: Path, architecture: str) -> None:
    """Biases, norms on heads, head sizes and widths that fill no panel."""
    window = None if architecture == "LlamaForCausalLM" else 20
    folder = tiny_model(tmp_path, architecture, seed=5, tie=architecture == "Qwen2ForCausalLM", window=window)
    prompts = [[(7 * i + j) % 100 for j in range(3 + 20 * i)] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"num_gpu_blocks_override": 60, "max_num_seqs": 4, "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(str(folder), native=False, **settings) as llm:  # type: ignore[arg-type]
        expected = answers(llm.generate(prompts, params, use_tqdm=False))
    for level in library().levels:
        with LLM(str(folder), cpu_isa=level, **settings) as llm:  # type: ignore[arg-type]
            assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected


def test_the_default_model_stays_packed_and_is_about_as_sure_of_a_text_as_its_float32_self() -> None:
    text = (Path(__file__).parents[1] / "data/prompts/questions.txt").read_text()[:1500]
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0)

    def loss(native: bool, dtype: str) -> tuple[float, int]:
        with LLM(native=native, dtype=dtype, num_gpu_blocks_override=80, max_num_seqs=2) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate(text, params, use_tqdm=False)
            nbytes = llm._core.executor.program.nbytes  # type: ignore[attr-defined]
        found = [choices[token].logprob for token, choices in zip(output.prompt_token_ids, output.prompt_logprobs or []) if choices]
        return -sum(found) / len(found), nbytes

    (plain, _), (packed, nbytes) = loss(False, "float32"), loss(True, "bfloat16")
    # Activations of 8 bits move the logprob of a token by 0.2 in the root mean square (docs/reproducible.md): three standard errors.
    assert packed - plain == pytest.approx(0, abs=3 * 0.2 / math.sqrt(350)), "over 350 tokens; the long run compares 20,000"
    assert nbytes < 110 * 2**20, "bfloat16 would take 257 MiB"
    assert nbytes == pytest.approx(model_shape(None).needs("bfloat16", native_threads=1).weights, rel=0.01)


def test_memory_that_is_poisoned_until_written_is_never_read(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1,preempt.every=3")
    with LLM(stories, num_gpu_blocks_override=60, max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, n=2), use_tqdm=False)
    assert all(sample.finish_reason in ("length", "stop") for output in outputs for sample in output.outputs)
    assert sum(output.metrics.preemptions for output in outputs) > 3


def test_closing_frees_panels_and_cache_at_once(stories: str) -> None:
    llm = LLM(stories, num_gpu_blocks_override=20)
    llm.generate("Once", use_tqdm=False)
    runner = llm._core.executor  # type: ignore[attr-defined]
    panels = [array for kept in runner.program._kept if isinstance(kept, PackedMatrix) for array in kept.arrays]
    kept = [weakref.ref(runner.program), weakref.ref(runner.store.caches[0]["k"]), *map(weakref.ref, panels)]
    assert len(kept) == 2 + 5 * 4 + 1
    del runner, panels
    assert_closing_frees(llm, kept)


def test_dummy_weights_run_too(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "LlamaForCausalLM", seed=5)
    (folder / "model.safetensors").unlink()
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, num_gpu_blocks_override=20) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_level_the_cpu_does_not_have_is_refused(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library(), "levels", ("portable",))
    for level in ("amx", "i8mm"):
        with pytest.raises(ConfigError, match=f"cpu_isa is {level}, this machine offers portable "):
            LLM(stories, cpu_isa=level)  # type: ignore[arg-type]


# promise: environment-octavo-debug
def test_a_switch_for_tests_overrules_which_kernels_run(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "isa=portable")
    with LLM(stories, num_gpu_blocks_override=20):
        assert library().level == "portable"
    monkeypatch.setenv("OCTAVO_DEBUG", "native=off")
    with LLM(stories, num_gpu_blocks_override=20) as llm:
        assert isinstance(llm._core.executor.program, Eager)  # type: ignore[attr-defined]


def test_torch_gets_its_threads_back(stories: str) -> None:
    before = num_threads()
    with LLM(stories, num_gpu_blocks_override=20):
        assert torch.get_num_threads() == 1
    with LLM(stories, native=False, num_gpu_blocks_override=20):
        assert torch.get_num_threads() == before


# promise: cpu-isa, native
def test_the_command_line_says_which_kernels_run(stories: str) -> None:
    words = ("generate", "--model", stories, "Hello", "--max-tokens", "2", "--num-gpu-blocks-override", "20")
    run = octavo(*words, "--cpu-isa", "portable", env={"OCTAVO_LOG_LEVEL": "INFO"})
    assert run.returncode == 0 and re.search(r"INFO Checking the native kernels took \d\.\d\d seconds \(portable, threads: 1\)", run.stderr)
    plain = octavo(*words, "--no-native", env={"OCTAVO_LOG_LEVEL": "INFO"})
    assert plain.returncode == 0 and "init engine took" in plain.stderr and "native" not in plain.stderr.replace(stories, "")
