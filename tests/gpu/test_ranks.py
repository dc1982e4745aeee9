"""Ranks on a GPU: two that share one say what one says, and one that calls NCCL in its graphs says the same."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.worker.graph_program import Graph
from tests.support.models import tiny_model

pytestmark = pytest.mark.gpu
pytest.importorskip("msgspec", reason="ranks are told what to do in its format")
ASKS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "seed": 7, "n": 2},
    {"temperature": 0.9, "top_k": 5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 3},
]
TWO = {"enforce_eager": True, "gpu_memory_utilization": 0.3}


def opened(folder: Path, **settings: Any) -> LLM:
    limits = {"num_gpu_blocks_override": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 320, "dtype": "float32"}
    return LLM(str(folder), skip_tokenizer_init=True, **(limits | settings))


def said(llm: LLM) -> list[list[int]]:
    rng = Random(11)
    prompts = [[rng.randrange(320) for _ in range(rng.choice([1, 15, 40, 90]))] for _ in range(8)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **ASKS[number % 4]) for number in range(8)]
    return [list(sample.token_ids) for output in llm.generate(prompts, params, use_tqdm=False) for sample in output.outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", seed=3)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 8},
    ],
    ids=["tp", "pp", "dcp"],
)
def test_two_ranks_on_one_gpu_say_what_one_says(sizes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder, **TWO) as llm:
        alone = said(llm)
    monkeypatch.setenv("OCTAVO_DEBUG", "comm=gloo")
    with opened(folder, **TWO, **sizes) as llm:
        assert said(llm) == alone


def test_one_rank_with_nccl_in_its_graphs_says_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as llm:
        alone = said(llm)
    monkeypatch.setenv("OCTAVO_DEBUG", "comm=nccl")
    with opened(folder) as llm:
        runner: Any = llm._core.executor
        assert isinstance(runner.program, Graph) and runner.program._graphs
        assert said(llm) == alone


def test_more_ranks_than_gpus_are_refused_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"need 64 GPUs, and CUDA shows \d+: lower them, or set device to cpu"):
        opened(folder, tensor_parallel_size=2, pipeline_parallel_size=32)
